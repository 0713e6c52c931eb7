from types import SimpleNamespace

import pytest

import arriero

TINY = {
    "run.name": "tiny",
    "model.preset": "llama-test",
    "model.vocab_size": 4096,
    "data.seq_len": 64,
    "train.batch": "1024 tok",
    "train.horizon": "12 steps",
    "optim.lr": 3e-3,
    "schedule.warmup": "2 steps",
    "checkpoint.every": "6 steps",
    "eval.heldout": "4k tok",
    "observe.tensorboard": False,
    "observe.sample": False,
    "run.device": "cpu",
}


@pytest.fixture(scope="session")
def trained(corpus_cache, tmp_path_factory):
    """Train a tiny model once: `run` is its directory, with checkpoints at steps 6 and 12 and a model."""
    folder = tmp_path_factory.mktemp("trained")
    own = {"run.dir": str(folder / "runs"), "data.cache": str(corpus_cache)}
    result = arriero.run(arriero.load_config(None, TINY | own), nproc=1)
    return SimpleNamespace(run=result.run_dir, settings=TINY, eval_loss=result.last_eval_loss)
