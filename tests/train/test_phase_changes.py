"""Phases of a run: mixture, batch, sequence length and learning rate; and the order a run began with."""

import json
import shutil

import numpy as np
import pytest

from arriero.config.load import load_run
from arriero.data.order.ledger import Audit, order_version, read_ledger
from arriero.data.store.manifest import write_manifest
from arriero.data.store.shards import ShardWriter, dtype_for
from arriero.data.workers import no_progress
from arriero.errors import UserError
from arriero.model.presets import expand
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import World, process_group, world_from
from arriero.train.build import arrange, build
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
    "schedule.warmup=1 steps",
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
    audit = Audit(read_ledger(run.run_dir), run.data.stream)
    audit.run(lambda *_: None)
    return audit.problems


def test_a_run_keeps_the_order_it_began_with(session, sources, monkeypatch):
    two = f"data.sources={sources(9999, 1)}"
    with monkeypatch.context() as old:
        old.setattr("arriero.data.order.ledger.ORDER_VERSION", 1)
        whole = trained(session(two, name="whole"))
        trained(session(two, "train.horizon=3 steps", "schedule.horizon=6 steps"))
    resumed = session(two, "schedule.horizon=6 steps")
    assert resumed.data.stream.version == 1 == order_version(resumed.run_dir)
    lines = trained(resumed)
    assert [lines[n]["loss"] for n in range(1, 7)] == [whole[n]["loss"] for n in range(1, 7)]
    assert audited(resumed) == []
    fork = session(two, f"checkpoint.resume_from='{resumed.run_dir}'", "train.horizon=8 steps", name="fork")
    assert fork.data.stream.version == 1
    fork.data.loader.close()
    new = session(two, name="new")
    new.data.loader.close()
    assert new.data.stream.version == 2


def with_phases(sources, steps=8):
    """A run of `steps` steps; phases that have not begun are appended when they are needed."""
    phases = [
        (2, "batch='448 tok'"),
        (4, "seq_len=128, batch='640 tok', lr=1e-3"),
        (6, f"sources={sources(1, 1)}, seq_len=32"),
    ]
    begun = ", ".join(f"{{at='{at} steps', {changes}}}" for at, changes in phases if at < steps)
    return [f"data.sources={sources(3, 1)}", f"data.phases=[{begun}]", f"train.horizon={steps} steps"]


def test_batch_sequence_length_and_rate_change_at_a_phase(session, sources):
    run = session(*with_phases(sources), "optim.lr=2e-3", "schedule.warmup=3 steps")
    lines = trained(run)
    ends = [256, 512, 960, 1408, 2048, 2688, 3328, 3968]
    assert [lines[n]["tokens"] for n in range(1, 9)] == ends
    warmup = 960
    rates = [2e-3 * min(1, end / warmup) for end in ends[:4]] + [1e-3] * 4
    assert [lines[n]["lr"] for n in range(1, 9)] == pytest.approx(rates)
    assert audited(run) == []
    ledger = read_ledger(run.run_dir)
    assert ledger.samples == 4 * 2 + 7 * 2 + 5 * 2 + 20 * 2
    assert ledger.stretches[-1].real_tokens == ledger.stretches[-1].slots == 3968


def test_a_run_resumes_bit_identically_in_any_phase(session, sources):
    whole = trained(session(*with_phases(sources), name="whole"))
    for steps in (1, 2, 3, 5, 6, 7, 8):
        run = session(*with_phases(sources, steps))
        lines = trained(run)
    for step in range(1, 9):
        assert (lines[step]["loss"], lines[step]["lr"]) == (whole[step]["loss"], whole[step]["lr"])
    assert audited(run) == []


def test_phases_of_steps_that_were_taken_cannot_change(session):
    train(session("train.horizon=3 steps", "data.phases=[{at='2 steps', batch='128 tok'}]"))
    with pytest.raises(UserError, match=r"has taken 3 steps, and data.phases changes the batch"):
        session("train.horizon=9 steps", "data.phases=[{at='1 steps', batch='128 tok'}]")
    run = session(
        "train.horizon=5 steps",
        "data.phases=[{at='2 steps', batch='128 tok'}, {at='3 steps', lr=1e-5}]",
    )
    assert trained(run)[5]["lr"] == 1e-5
    with pytest.raises(
        UserError, match=r"read 896 tokens in 5 steps.*change the batch from there on by a phase"
    ):
        session(f"checkpoint.resume_from='{run.run_dir}'", "train.horizon=9 steps", name="fork")


def test_uneven_batches_and_phases_keep_the_loss_of_one_process(session, sources, tmp_path, corpus_cache):
    """8, then 7, then 5 sequences over 3 ranks; with accumulation."""
    phases = "data.phases=[{at='1 steps', batch='448 tok'}, {at='2 steps', seq_len=128, batch='640 tok'}]"
    sets = [f"data.sources={sources(3, 1)}", phases, "train.batch=512 tok", "train.horizon=4 steps"]
    sets += ["model.layers=2", "train.micro_batch=1", "run.deterministic=false"]
    alone = trained(session(*sets, "train.micro_batch=3", name="alone"))
    for axis, degree in (("dp_shard", 3), ("dp_replicate", 2), ("cp", 2), ("pp", 2)):
        layout = [f"parallel.{name}={n}" for name, n in ({"dp_shard": 1} | {axis: degree}).items()]
        where = [f"run.name={axis}", f"run.dir='{tmp_path}'", f"data.cache='{corpus_cache}'"]
        config = load_run(None, [*BASE, *where, *sets, *layout], expand).config

        def work(config=config):
            world = world_from()
            plan = arrange(config, world)
            with process_group(world, plan.device.torch_device):
                run = build(plan, no_progress)
                train(run)
                return audited(run) if world.is_leader else None

        assert run_ranks(work, degree, leader_prints=False) == []
        lines = [json.loads(line) for line in (tmp_path / axis / "metrics.jsonl").read_text().splitlines()]
        found, expected = [line["loss"] for line in lines], [alone[n]["loss"] for n in range(1, 5)]
        assert found == pytest.approx(expected, abs=2e-5), axis
        ledger = read_ledger(tmp_path / axis)
        assert (ledger.samples, ledger.stretches[-1].slots) == (8 + 7 + 5 + 5, 512 + 448 + 640 + 640)
