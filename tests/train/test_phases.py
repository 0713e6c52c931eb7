"""Phases of a run: mixture, batch, sequence length and learning rate; and the order a run began with."""

import json
import shutil

import numpy as np
import pytest

from arriero.config.load import load_run
from arriero.data.order.audit import Audit
from arriero.data.order.ledger import order_version, read_ledger
from arriero.data.store.shards import ShardWriter, dtype_for
from arriero.data.store.store import write_manifest
from arriero.model.presets import expand
from arriero.parallel.world import World
from arriero.train.arrange import arrange
from arriero.train.build import build
from arriero.train.loop import train

BASE = [
    "model.preset=llama-test",
    "model.vocab_size=4096",
    "model.layers=1",
    "model.max_seq_len=256",
    "data.seq_len=64",
    "train.batch=256 tok",
    "train.horizon=6 steps",
    "eval.heldout=false",
    "eval.every=false",
    "schedule.kind=constant",
    "observe.log_every=1",
    "observe.tensorboard=false",
    "checkpoint.export=false",
    "run.device=cpu",
    "run.deterministic=true",
]


@pytest.fixture
def session(tmp_path, corpus_cache):
    def make(*sets, name="run"):
        where = [f"run.name={name}", f"run.dir='{tmp_path}'", f"data.cache='{corpus_cache}'"]
        config = load_run(None, [*BASE, *where, *sets], expand).config
        return build(arrange(config, World()), lambda *_: None)

    return make


@pytest.fixture(scope="module")
def sources(tmp_path_factory, corpus_cache):
    """Two small datasets of random tokens, as values of data.sources."""
    folder = tmp_path_factory.mktemp("sources")
    tokenizer = next(corpus_cache.glob("*/tokenizer.json"))
    random = np.random.default_rng(1)
    for name, tokens in (("one", 5000), ("two", 2000)):
        (folder / name).mkdir()
        shutil.copy(tokenizer, folder / name)
        with ShardWriter(folder / name, "00000", 4096) as writer:
            for ids in random.integers(1, 4096, (tokens // 50, 50)):
                writer.add(ids)
            shards = [writer.close()]
        about = {"vocab_size": 4096, "eos_id": 0, "dtype": dtype_for(4096), "about": {}}
        write_manifest(folder / name, shards, tokenizer="tokenizer.json", **about)

    def mixed(one, two):
        named = f"{{path='{folder}/one', weight={one}}}, {{path='{folder}/two', weight={two}}}"
        return f"[{named}]"

    return mixed


def trained(run):
    train(run)
    return {
        line["step"]: line
        for line in map(json.loads, (run.run_dir / "metrics.jsonl").read_text().splitlines())
    }


def audited(run):
    audit = Audit(read_ledger(run.run_dir), run.stream)
    audit.run(lambda *_: None)
    return audit.problems


def test_a_run_keeps_the_order_it_began_with(session, sources, monkeypatch):
    two = f"data.sources={sources(9999, 1)}"
    with monkeypatch.context() as old:
        old.setattr("arriero.data.order.ledger.ORDER_VERSION", 1)
        whole = trained(session(two, name="whole"))
        trained(session(two, "train.horizon=3 steps", "schedule.horizon=6 steps"))
    resumed = session(two, "schedule.horizon=6 steps")
    assert resumed.stream.version == 1 == order_version(resumed.run_dir)
    lines = trained(resumed)
    assert [lines[n]["loss"] for n in range(1, 7)] == [whole[n]["loss"] for n in range(1, 7)]
    assert audited(resumed) == []
    fork = session(two, f"checkpoint.resume_from='{resumed.run_dir}'", "train.horizon=8 steps", name="fork")
    assert fork.stream.version == 1
    fork.loader.close()
    new = session(two, name="new")
    new.loader.close()
    assert new.stream.version == 2
