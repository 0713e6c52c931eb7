"""A step of one rank of a large world is simulated in one process."""

import pytest

from arriero.config.load import load_run
from arriero.model.presets import expand
from arriero.plan.hardware import machine_named
from arriero.plan.resolve import resolve
from arriero.train.build import simulate

BASE = ["model.preset=llama3.2-1b", "model.layers=3", "model.vocab_size=32000", "data.seq_len=2048"]


def simulated(ranks, sequences, *sets):
    keys = [*BASE, f"train.batch={2048 * sequences} tok", "memory.activation_checkpointing=none", *sets]
    run = resolve(load_run(None, keys, expand).config, machine_named("h100"), ranks)
    found = simulate(run)
    return found, {(each.kind, each.group): each for each in found.collectives}


@pytest.mark.parametrize(
    ("ranks", "sets"),
    [
        (8, ["model.tied=false"]),
        (5120, ["model.tied=false", "parallel.dp_replicate=64", "parallel.cp=2"]),
    ],
)
def test_peak_of_sharded_data_parallelism_is_the_predicted_one(ranks, sets):
    found, collectives = simulated(ranks, 5120, "train.micro_batch=1", "parallel.sync=each", *sets)
    assert found.ranks == ranks
    assert found.predicted == pytest.approx(found.peak, rel=0.15)
    assert found.predicted >= 0.95 * found.peak
    shards = ranks // (64 if ranks > 8 else 1)
    steps = 5120 // (ranks // (2 if ranks > 8 else 1))
    # the embedding, each block, and the norm with the head, after each micro-batch
    assert collectives["reduce-scatter", shards].count == (3 + 2) * steps


@pytest.mark.parametrize("sync", ["last", "each"])
def test_weights_that_are_not_resharded_are_gathered_once_per_step(sync):
    sets = ["train.micro_batch=1", f"parallel.sync={sync}", "model.tied=false"]
    (_, often), (_, once) = (
        simulated(8, 32, *sets, f"parallel.reshard={policy}") for policy in ("always", "never")
    )
    _, single = simulated(8, 8, *sets, "parallel.reshard=never")
    # only the embedding is gathered again
    assert once["all-gather", 8].count <= single["all-gather", 8].count + 1
    assert often["all-gather", 8].count > 4 * once["all-gather", 8].count
    assert once["reduce-scatter", 8].count == 5 * (4 if sync == "each" else 1)


@pytest.mark.parametrize("kind", ["none", "full", "selective", "attention"])
def test_peak_of_tensor_parallelism_is_the_predicted_one(kind):
    sets = ["train.micro_batch=4", f"memory.activation_checkpointing={kind}", "parallel.tp=4"]
    found, _ = simulated(8, 8, *sets, "parallel.dp_shard=2", "model.tied=false")
    assert 0.98 * found.peak <= found.predicted <= 1.15 * found.peak


def test_tensor_parallel_layers_communicate_inside_their_group():
    found, collectives = simulated(4, 4, "parallel.tp=4", "parallel.dp_shard=1")
    assert found.parameters < 0.3 * 1.3e9
    assert collectives["all-gather", 4].count >= 2 * 3


def test_a_pipeline_stage_is_simulated():
    found, _ = simulated(4, 16, "parallel.pp=2", "parallel.dp_shard=2")
    assert found.predicted is None and found.peak > 0
