"""Which rank writes what, and the index of it that torch reads."""

import pickle
import random

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties

from arriero.checkpoint import save_plan as planning
from arriero.checkpoint.directory import CHECKPOINTS, Manifest
from arriero.checkpoint.formats.dcp_directory import SafeDcpReader
from arriero.checkpoint.manager import Checkpoints, SaveRequest
from arriero.checkpoint.ranks import Ranks
from arriero.checkpoint.save_plan import PartTable, WritePlan
from arriero.checkpoint.state import LocalPart, describe_parts, local_parts, read_parts
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import process_group, world_from
from checkpoint.test_saving import unit


def cut(tensor, axis, part, parts):
    """The part of a tensor that one of several ranks holds; some hold nothing of a small one."""
    rows = -(-tensor.shape[axis] // parts)
    begin = min(part * rows, tensor.shape[axis])
    local = tensor.narrow(axis, begin, min(rows, tensor.shape[axis] - begin)).clone()
    offset = [begin if a == axis and local.numel() else 0 for a in range(tensor.ndim)]
    return LocalPart(local, tuple(offset), tensor.shape)


def whole(tensor):
    return LocalPart(tensor, (0,) * tensor.ndim, tensor.shape)


def world_of(chance, ranks):
    """A pipeline of two stages, each sharded, some tensors replicated, of many shapes and types."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int64]
    held = [{} for _ in range(ranks)]
    for number in range(12):
        shape = [chance.randint(1, 9) for _ in range(chance.randint(0, 5))]
        tensor = torch.empty(shape, dtype=chance.choice(dtypes), device="meta")
        axis = chance.randrange(len(shape)) if shape else None
        holders = [rank for rank in range(ranks) if number % 3 == 2 or rank % 2 == number % 2]
        parts = chance.choice([1, len(holders), max(1, len(holders) // 2)])
        for place, rank in enumerate(holders):
            piece = whole(tensor) if axis is None else cut(tensor, axis, place % parts, parts)
            held[rank][f"model.{number}.weight"] = piece
    return held


@pytest.mark.parametrize("seed", range(8))
def test_each_part_is_written_once_and_the_index_says_where(seed, tmp_path):
    chance = random.Random(seed)
    held = world_of(chance, ranks=chance.choice([1, 2, 6, 8]))
    world = WritePlan([PartTable.of(pieces).packed() for pieces in held])
    written = []
    for pieces, mask in zip(held, world.masks(), strict=True):
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(pieces))
        written.append([name for name, bit in zip(pieces, bits, strict=True) if bit])
    lengths = [np.array([chance.randrange(1, 2**33) for _ in names], int) for names in written]
    index = world.index(lengths)
    metadata = pickle.loads(index)
    expected = {}
    for rank, names in enumerate(written):
        begin = 0
        for name, length in zip(names, lengths[rank].tolist(), strict=True):
            key = MetadataIndex(name, torch.Size(held[rank][name].offset))
            assert key not in expected
            expected[key] = _StorageInfo(f"__{rank}_0.distcp", begin, length)
            begin += length
    assert metadata.storage_data == expected
    (tmp_path / ".metadata").write_bytes(index)
    assert SafeDcpReader(tmp_path).read_metadata() == metadata
    for pieces in held:
        for name, piece in pieces.items():
            entry = metadata.state_dict_metadata[name]
            assert entry.size == piece.shape
            assert entry.properties == TensorProperties(dtype=piece.local.dtype)
            if piece.local.numel():
                assert ChunkStorageMetadata(torch.Size(piece.offset), piece.local.shape) in entry.chunks
    assert len(expected) == sum(len(entry.chunks) for entry in metadata.state_dict_metadata.values())


def test_replicas_of_the_same_parts_write_about_as_many_bytes():
    chance = random.Random(1)
    tensors = {f"model.{i}": torch.empty(chance.randint(1, 10**6), device="meta") for i in range(300)}
    held = [{name: whole(tensor) for name, tensor in tensors.items()} for _ in range(8)]
    sizes = np.array([tensor.numel() for tensor in tensors.values()])
    masks = WritePlan([PartTable.of(pieces).packed() for pieces in held]).masks()
    loads = [sizes[np.unpackbits(np.frombuffer(m, np.uint8), count=300).astype(bool)].sum() for m in masks]
    assert sum(loads) == sizes.sum()
    assert max(loads) < 1.02 * sizes.sum() / 8


class OnTwoRanks:
    """Two saves of three tensors: one sharded, one replicated, one that only the second rank holds."""

    def __init__(self, folder):
        self.folder = folder
        self.tensors = {"model.a": torch.arange(35.0).view(7, 5), "model.b": torch.arange(6.0).bfloat16()}
        self.tensors["optim.c"] = torch.arange(8).view(2, 2, 2)

    def __call__(self):
        with process_group(world_from(), torch.device("cpu")), pytest.MonkeyPatch.context() as patch:
            rank = world_from().rank
            many = Checkpoints(self.folder, Ranks(rank, 2), 1000)
            self.save(many, 1, rank)
            patch.setattr(planning, "WritePlan", None)  # a second plan would fail
            self.save(many, 2, rank)
            patch.undo()
            self.tensors["model.b"] = torch.arange(60.0)
            self.save(many, 3, rank)
            return [report.error for report in many.reports()]

    def save(self, many, step, rank):
        tensors = {name: tensor + step for name, tensor in self.tensors.items()}
        pieces = {"model.a": cut(tensors["model.a"], 0, rank, 2), "model.b": whole(tensors["model.b"])}
        if rank == 1:
            pieces["optim.c"] = whole(tensors["optim.c"])

        def about(files):
            return Manifest(step, step, 0.0, {}, {}, "tok", describe_parts(local_parts(tensors)), files)

        many.save(SaveRequest(step, pieces, unit(step).files, about))
        many.wait()


def test_the_plan_is_computed_once_and_torch_reads_every_save(tmp_path):
    work = OnTwoRanks(tmp_path)
    assert run_ranks(work, 2, leader_prints=False) == [None, None, None]
    folders = [tmp_path / CHECKPOINTS / f"step-0000000{step}" for step in (1, 2, 3)]
    first, second, third = ((folder / ".metadata").read_bytes() for folder in folders)
    assert first == second != third
    work.tensors["model.b"] = torch.arange(6.0).bfloat16()
    for step, folder in enumerate(folders, 1):
        if step == 3:
            work.tensors["model.b"] = torch.arange(60.0)
        read = {name: torch.zeros_like(tensor) for name, tensor in work.tensors.items()}
        dcp.load(read, checkpoint_id=folder, no_dist=True)
        for name, tensor in work.tensors.items():
            assert torch.equal(read[name], tensor + step), (step, name)


def test_a_checkpoint_that_torch_wrote_is_read(tmp_path):
    """As those of earlier versions are."""
    tensors = {"model.a": torch.arange(35.0).view(7, 5), "optim.step": torch.tensor(3)}
    dcp.save(tensors, checkpoint_id=tmp_path, no_dist=True)
    part = cut(torch.zeros(7, 5), 0, 1, 2)
    read_parts(SafeDcpReader(tmp_path), {"model.a": part}, Ranks())
    assert torch.equal(part.local, tensors["model.a"][4:])
