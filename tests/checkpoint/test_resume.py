"""A stopped run resumes with the losses of an uninterrupted one, in any layout."""

import random
from pathlib import Path

import pytest
import torch

from arriero.checkpoint import directory, state
from arriero.checkpoint.convert import open_model
from arriero.checkpoint.formats.hf_directory import write_hf
from arriero.checkpoint.formats.model_reader import DEFAULT_OPTIONS
from arriero.checkpoint.ranks import Ranks
from arriero.errors import UserError
from arriero.files import sha256_of_file
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import process_group, world_from
from arriero.train.resume import open_checkpoint
from checkpoint.convert.models import in_memory, spec_of
from checkpoint.test_saving import save

HALF = "train.horizon=3 steps"


@pytest.mark.parametrize(
    "sets",
    [
        [],
        ["optim.name=muon", "optim.state=int8"],
        ["precision.compute=bf16"],
        ["precision.compute=bf16", "precision.master=bf16", "optim.state=bf16"],
        ["precision.compute=fp16", "checkpoint.background=false"],
    ],
    ids=["fp32", "muon-int8", "bf16", "bf16-masters", "fp16-waiting"],
)
def test_the_same_layout_resumes_bit_identically(runs, sets):
    whole = runs.train("whole", *sets)
    runs.train("halves", *sets, HALF)
    assert runs.saved("halves") == ["step-00000003"]
    outcome = runs.train("halves", *sets)
    assert runs.losses("halves") == runs.losses("whole")
    assert outcome["first_loss"] == whole["first_loss"]
    assert (outcome["steps"], outcome["tokens"]) == (6, 1536)


LAYOUTS = {
    "dp_shard 2": (2, ["parallel.dp_shard=2"]),
    "tp 2 x pp 2": (4, ["parallel.dp_shard=1", "parallel.tp=2", "parallel.pp=2"]),
    "one": (1, ["parallel.dp_shard=1"]),
    "2 copies of 2": (4, ["parallel.dp_replicate=2", "parallel.dp_shard=2"]),
    "cp 2 x tp 2": (4, ["parallel.dp_shard=1", "parallel.cp=2", "parallel.tp=2"]),
}


@pytest.mark.parametrize(
    ("order", "sets"),
    [
        (["one", "dp_shard 2", "tp 2 x pp 2", "one"], ["optim.name=muon"]),
        (["tp 2 x pp 2", "2 copies of 2"], ["model.tied=true"]),
        (["2 copies of 2", "cp 2 x tp 2", "dp_shard 2"], ["optim.state=int8"]),
    ],
    ids=lambda value: " to ".join(value) if "=" not in value[0] else value[0],
)
def test_any_layout_resumes_from_any_other(runs, order, sets):
    """Two steps in each; the losses are those of one process that never stopped. Stages are uneven."""
    sets = [*sets, "model.layers=3"]
    end = 2 * len(order)
    runs.train("whole", *sets, f"train.horizon={end} steps")
    for number, name in enumerate(order, 1):
        ranks, layout = LAYOUTS[name]
        runs.train("moved", *sets, *layout, f"train.horizon={2 * number} steps", ranks=ranks)
    expected = runs.losses("whole")
    # stochastic rounding of 8-bit state differs between the pieces of a tensor
    tolerance = 1e-4 if "optim.state=int8" not in sets else 1e-3
    assert runs.losses("moved") == {step: pytest.approx(v, rel=tolerance) for step, v in expected.items()}


@pytest.mark.parametrize("layout", ["one", "tp 2 x pp 2"])
def test_state_larger_than_memory_is_read_one_tensor_at_a_time(runs, monkeypatch, layout):
    """On all ranks, although those of a pipeline hold different tensors."""
    ranks, sets = LAYOUTS[layout]
    sets = [*sets, "precision.compute=bf16", "train.horizon=2 steps"]
    runs.train("whole", *sets, ranks=ranks)
    runs.train("halves", *sets, "train.horizon=1 step", ranks=ranks)
    read = state.read_parts

    def one(reader, pieces, ranks):
        assert len(pieces) <= 1
        read(reader, pieces, ranks)

    monkeypatch.setattr(state, "_READ_AT_ONCE", 1)
    monkeypatch.setattr(state, "read_parts", one)
    runs.train("halves", *sets, ranks=ranks)
    assert runs.losses("halves") == runs.losses("whole")


def test_a_checkpoint_of_other_shape_is_refused_by_name(runs):
    runs.train("first", HALF)
    allowed = "checkpoint.load.allow_model_changes=['layers']"
    other = ["model.layers=3", allowed, f"checkpoint.resume_from={runs.folder / 'first'}"]
    with pytest.raises(UserError, match=r"lacks model\.blocks\.2\..*allow_missing"):
        runs.train("second", *other)
    assert not (runs.folder / "second").exists()
    missing = "checkpoint.load.allow_missing=['*.blocks.2.*']"
    assert runs.train("second", *other, missing)["steps"] == 6


def test_another_run_can_be_continued_or_only_its_weights_taken(runs):
    runs.train("first", HALF)
    source = runs.folder / "first"
    continued = runs.train("continued", f"checkpoint.resume_from={source}")
    runs.train("whole")
    assert runs.losses("continued") == {s: v for s, v in runs.losses("whole").items() if s > 3}
    assert continued["steps"] == 6
    fresh = runs.train("fresh", f"checkpoint.start_from={source}", "train.horizon=1 step", "run.seed=2")
    exported = runs.train(
        "hf", f"checkpoint.start_from={source / 'model'}", "train.horizon=1 step", "run.seed=2"
    )
    assert fresh["steps"] == 1
    assert (
        fresh["first_loss"]
        == exported["first_loss"]
        != runs.train("new", "train.horizon=1 step", "run.seed=2")["first_loss"]
    )
    assert ("start from", str(source / "checkpoints" / "step-00000003")) in fresh["decisions"]
    assert "resume" in dict(continued["decisions"])


def test_ranks_share_the_hashing_of_a_named_checkpoint(checkpoints, tmp_path):
    save(checkpoints(), 1)
    hashed = []

    def recorded(path, progress):
        hashed.append(path.name)
        return sha256_of_file(path, progress)

    def work():
        with pytest.MonkeyPatch.context() as patch, process_group(world_from(), torch.device("cpu")):
            patch.setattr(directory, "sha256_of_file", recorded)
            ranks = Ranks(world_from().rank, 2)
            open_checkpoint(tmp_path, "checkpoint.resume_from", ranks)
            return ranks.on_all_ranks(lambda: hashed)

    first, second = run_ranks(work, 2, leader_prints=False)
    assert len(first) == len(second) == 2
    assert sorted(first + second) == [".metadata", "__0_0.distcp", "run.toml", "state.json"]


@pytest.mark.parametrize("kind", ["llama3, tied", "gpt2"])
def test_a_rank_reads_only_its_part_of_a_hugging_face_model(tmp_path, kind):
    source = in_memory(spec_of(kind))
    write_hf(source, tmp_path, DEFAULT_OPTIONS)
    opened = open_model(tmp_path)
    chance, wanted, before = random.Random(3), 0, bytes_read()
    for name, planned in opened.tensors.items():
        for axis, size in enumerate(planned.shape):
            begin, end = sorted(chance.choices(range(size + 1), k=2))
            cut = tuple(slice(begin, end) if a == axis else slice(0, n) for a, n in enumerate(planned.shape))
            part = opened.read_slice(name, cut)
            assert torch.equal(part, source.load(name)[cut]), (name, cut)
            wanted += part.nbytes
    assert kind == "gpt2" or bytes_read() - before < 1.1 * wanted


def bytes_read():
    """By this process, from the disk or the page cache."""
    return int(Path("/proc/self/io").read_text().split()[1])
