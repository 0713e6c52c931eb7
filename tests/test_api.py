"""The Python API: its page and notebook run, and it works inside other programs."""

import json
import os
import re
import threading
from pathlib import Path

import pytest
import torch

import arriero

DOCS = Path(__file__).parents[1] / "docs"
TINY = {
    "run.name": "tiny",
    "run.device": "cpu",
    "model.preset": "llama-test",
    "model.vocab_size": 4096,
    "data.sources": [{"path": "builtin:synthetic"}],
    "data.seq_len": 64,
    "train.batch": "256 tok",
    "train.horizon": "4 steps",
    "eval.heldout": "1k tok",
    "observe.log_every": 1,
    "observe.tensorboard": False,
}


@pytest.fixture
def config(synthetic_cache):
    def make(**changes):
        return arriero.load_config(overrides=TINY | {"data.cache": str(synthetic_cache)} | changes)

    return make


@pytest.fixture
def corpus(corpus_cache, tmp_path):
    """Let data/ contain the prepared built-in corpus, which the documentation reads."""
    (tmp_path / "data").mkdir()
    for dataset in corpus_cache.iterdir():
        (tmp_path / "data" / dataset.name).symlink_to(dataset)


@pytest.mark.usefixtures("corpus")
def test_the_page_runs_from_top_to_bottom(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "api.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    names = {}
    for block in blocks:
        exec(compile(block, "docs/api.md", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.startswith("20 20480 runs/api runs/api/model\n")
    assert "slowest step" in printed


@pytest.mark.usefixtures("corpus")
def test_the_notebook_runs_and_has_its_outputs(capsys):
    notebook = json.loads((DOCS / "tour.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 6
    names = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), "docs/tour.ipynb", "exec"), names)
        printed = capsys.readouterr().out
        stored = "".join(line for output in cell["outputs"] for line in output["text"])
        assert len(printed.splitlines()) == len(stored.splitlines()), cell["source"]


def test_every_name_is_exported_and_importing_is_fast(python):
    names = f"[getattr(arriero, name) for name in {arriero.__all__}]"
    done = python("-c", f"import sys, arriero; {names}; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'load_modl'"):
        _ = arriero.load_modl


def test_overrides_are_a_mapping_or_a_list_and_files_may_be_strings(tmp_path):
    (tmp_path / "run.toml").write_text(
        "data.sources = ['builtin:stdlib']\nmodel.preset = 'llama3.2-1b'\ntrain.horizon = '7 steps'\n"
    )
    as_list = arriero.load_config("run.toml", ["optim.lr=0.5", "optim.betas=[0.5, 0.6]"])
    as_mapping = arriero.load_config(Path("run.toml"), {"optim.lr": 0.5, "optim.betas": [0.5, 0.6]})
    assert as_list == as_mapping
    assert (as_list.train.horizon.amount, as_list.optim.lr) == (7, 0.5)


def test_a_run_returns_what_it_reached_and_prints_nothing(config, capfd):
    result = arriero.run(config())
    assert (result.steps, result.tokens, result.has_trained) == (4, 1024, True)
    assert list(result.losses) == list(result.grad_norms) == [1, 2, 3, 4]
    assert list(result.eval_losses) == [0, 4]
    assert result.last_loss == result.losses[4]
    assert result.model == result.run_dir / "model"
    assert capfd.readouterr() == ("", "")


def test_a_finished_run_returns_at_once(config):
    first, second = arriero.run(config()), arriero.run(config())
    assert (second.has_trained, second.steps, second.model) == (False, 4, first.model)
    assert second.last_loss == first.last_loss
    assert second.losses == {}


def test_two_runs_in_one_process_give_equal_losses(config):
    first, second = (arriero.run(config(**{"run.name": name})) for name in ("one", "two"))
    assert first.losses == second.losses


def test_local_ranks_give_the_losses_of_one_process(config):
    one = arriero.run(config())
    two = arriero.run(config(**{"run.name": "two", "parallel.dp_shard": 2}), nproc=2)
    assert list(two.losses.values()) == pytest.approx(list(one.losses.values()), rel=1e-5)
    assert two.model is not None


def test_a_run_works_outside_the_main_thread(config):
    results = []
    thread = threading.Thread(target=lambda: results.append(arriero.run(config())))
    thread.start()
    thread.join()
    assert results[0].steps == 4


def test_a_mistake_is_raised_not_exited(config):
    with pytest.raises(arriero.UserError, match=r"optim\.lrr"):
        config(**{"optim.lrr": 1})
    with pytest.raises(
        arriero.UserError, match="torch sees no GPU" if not torch.cuda.is_available() else "tp"
    ):
        arriero.run(config(**{"run.device": "cuda", "parallel.tp": 3}))


def test_a_hook_sees_every_step(config):
    class Steps(arriero.Hook):
        def __init__(self):
            self.seen = []

        def on_step(self, session, step, tokens):
            self.seen.append((step, tokens))

    steps = Steps()
    arriero.run(config(), hooks=[steps])
    assert steps.seen == [(1, 256), (2, 512), (3, 768), (4, 1024)]


@pytest.fixture(scope="module")
def trained(synthetic_cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    places = {"data.cache": str(synthetic_cache), "run.dir": str(folder)}
    return arriero.run(arriero.load_config(overrides=TINY | places))


@pytest.mark.parametrize(
    "what", ["run directory", "checkpoint", "exported model", "meta", "dcp", "torch file"]
)
def test_every_format_gives_the_logits_of_transformers(trained, tmp_path, command, what):
    transformers = pytest.importorskip("transformers")
    checkpoint = next((trained.run_dir / "checkpoints").glob("step-*"))
    paths = {"run directory": trained.run_dir, "checkpoint": checkpoint, "exported model": trained.model}
    if what not in paths:
        to = what.split()[0]
        assert command("ckpt", "convert", trained.model, tmp_path / to, "--to", to).returncode == 0
        paths[what] = tmp_path / to
    model = arriero.load_model(paths[what])
    tokens = torch.randint(0, 4096, (2, 32), generator=torch.Generator().manual_seed(1))
    expected = transformers.AutoModelForCausalLM.from_pretrained(trained.model)(tokens).logits
    assert isinstance(model, torch.nn.Module)
    assert not model.training
    torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-4)


def test_a_model_is_loaded_in_another_precision(trained):
    model = arriero.load_model(str(trained.model), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model(torch.tensor([[1, 2, 3]])).isfinite().all()


def test_a_run_without_checkpoints_stands_for_its_exported_model(config):
    result = arriero.run(config(**{"checkpoint.at_end": False}))
    assert arriero.load_model(result.run_dir)(torch.tensor([[1]])).shape == (1, 1, 4096)


def test_batches_of_all_ranks_are_the_batches_of_one(synthetic_cache):
    dataset = arriero.open_dataset(os.fspath(next(synthetic_cache.glob("synthetic*"))))

    def first(world_size, rank):
        with dataset.batches(4, 32, world_size, rank, seed=3) as batches:
            return next(batches).tokens_BT

    assert torch.equal(first(1, 0), torch.cat([first(2, 0), first(2, 1)]))
