"""The cost of planning a checkpoint against the number of ranks, in a simulated world.

Tables of pieces are made for every rank and handed to the functions that rank 0 and the others run at a save;
no tensor is allocated and nothing is written. Times are CPU seconds. `--torch` also times torch's own planner
on small worlds.

python benchmarks/checkpoint_plan.py --torch
"""

import argparse
import pickle
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan as TorchPlan
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from arriero.checkpoint.directory import File
from arriero.checkpoint.save_plan import PartTable, WritePlan, pack
from arriero.checkpoint.state import LocalPart
from arriero.model.name_maps import own_tensors
from arriero.model.presets import load_preset

TP = 8


def share(tensor: torch.Tensor, rank: int, ranks: int, replicas: int) -> tuple[int, int]:
    """Into how many parts a tensor is cut, and which of them a rank holds: norms are the same on 8
    tensor-parallel ranks."""
    tp = TP if tensor.ndim == 1 else 1
    parts = ranks // replicas
    return max(1, parts // tp), rank % parts // tp


def parts_of_rank(
    tensors: dict[str, torch.Tensor], rank: int, ranks: int, replicas: int
) -> dict[str, LocalPart]:
    """Weights and both moments, cut along their rows."""
    held = {}
    for name, tensor in tensors.items():
        cuts, which = share(tensor, rank, ranks, replicas)
        rows = -(-tensor.shape[0] // cuts)
        begin = min(which * rows, tensor.shape[0])
        local = tensor[begin : begin + rows]
        offset = (begin if local.numel() else 0, *(0,) * (tensor.ndim - 1))
        for prefix, suffix in (("model.", ""), ("optim.", ".exp_avg"), ("optim.", ".exp_avg_sq")):
            held[prefix + name + suffix] = LocalPart(local, offset, tensor.shape)
    held["optim.optimizer.step"] = LocalPart(torch.empty((), device="meta"), (), torch.Size())
    return held


def _table(
    first: PartTable, tensors: dict[str, torch.Tensor], rank: int, ranks: int, replicas: int
) -> PartTable:
    """What `PartTable.of` would return on this rank, without its Python loop over pieces."""
    cuts, which = np.array([share(t, rank, ranks, replicas) for t in tensors.values()]).T
    whole = np.array([t.shape[0] for t in tensors.values()])
    each = -(-whole // cuts)
    begin = np.minimum(which * each, whole)
    size = np.minimum(each, whole - begin)
    rows = first.rows.copy()
    rows[:-1, 0], rows[:-1, 2] = np.repeat(np.where(size > 0, begin, 0), 3), np.repeat(size, 3)
    return PartTable(first.heads, rows)


def ours(tensors: dict[str, torch.Tensor], ranks: int, replicas: int) -> Iterator[tuple[str, float]]:
    pieces = parts_of_rank(tensors, 0, ranks, replicas)
    start = time.process_time()
    table = PartTable.of(pieces)
    table.packed()
    each = time.process_time() - start
    tables = [_table(table, tensors, rank, ranks, replicas) for rank in range(ranks)]
    packed = [each.packed() for each in tables]
    yield "items", len(pieces) * ranks
    start = time.process_time()
    world = WritePlan(packed)
    masks = world.masks()
    planned = time.process_time() - start
    lengths = []
    for each_table, mask in zip(tables, masks, strict=True):
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(pieces)).astype(bool)
        # fp32 numbers, and what torch.save adds
        lengths.append(4 * each_table.rows[bits, 2:].prod(axis=1) + 1200)
    sent = [pack(each[:, None]) for each in lengths]
    start = time.process_time()
    index = world.index(lengths)
    indexed = time.process_time() - start
    yield "each rank, s", each
    yield "rank 0, first save, s", planned + indexed
    gathered = len(pickle.dumps(packed)) + len(pickle.dumps(sent)) + sum(map(len, masks))
    yield "gathered, first save, MB", gathered / 1e6
    yield ".metadata, MB", len(index) / 1e6
    # what is left of planning: each rank compares its table with the one it kept
    start = time.process_time()
    assert table.same_as(PartTable.of(pieces))
    yield "each rank, later saves, s", time.process_time() - start
    told = [({f"__{rank}_0.distcp": File(10**9, f"{rank:064x}")}, None) for rank in range(ranks)]
    yield "gathered, later saves, MB", sum(len(pickle.dumps(each)) for each in told) / 1e6


def torchs(tensors: dict[str, torch.Tensor], ranks: int, replicas: int) -> Iterator[tuple[str, float]]:
    """torch's planner and index as `dcp.save` uses them, without collectives; the same at every save."""
    plans = [TorchPlan(_items(parts_of_rank(tensors, rank, ranks, replicas))) for rank in range(ranks)]
    start = time.process_time()
    sent = [pickle.dumps(plan) for plan in plans]
    plans = [pickle.loads(each) for each in sent]
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    plans, metadata = planner.create_global_plan(plans)
    back = [pickle.dumps(plan) for plan in plans]
    results = []
    for rank, plan in enumerate(plans):
        results.append(
            [WriteResult(i.index, 9, _StorageInfo(f"__{rank}_0.distcp", 9, 9)) for i in plan.items]
        )
    written = [pickle.dumps(each) for each in results]
    results = [pickle.loads(each) for each in written]
    metadata.storage_data = {each.index: each.storage_data for result in results for each in result}
    index = pickle.dumps(metadata)
    yield "rank 0, every save, s", time.process_time() - start
    yield "gathered, every save, MB", sum(map(len, [*sent, *back, *written])) / 1e6
    yield ".metadata, MB", len(index) / 1e6


def _items(pieces: dict[str, LocalPart]) -> list[WriteItem]:
    items = []
    for name, piece in pieces.items():
        if piece.local.numel():
            chunk = ChunkStorageMetadata(torch.Size(piece.offset), piece.local.shape)
            data = TensorWriteData(chunk, TensorProperties(dtype=piece.local.dtype), piece.shape)
            items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    return items


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama3.1-70b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 2048])
    parser.add_argument("--replicas", type=int, default=1, help="copies of the sharded model")
    parser.add_argument("--torch", action="store_true", help="also time torch's planner, up to 64 ranks")
    arguments = parser.parse_args()
    tensors = own_tensors(load_preset(arguments.model))
    for ranks in arguments.ranks:
        ways = [("arriero", ours)] + ([("torch", torchs)] if arguments.torch and ranks <= 64 else [])
        for name, way in ways:
            figures = ", ".join(
                f"{what} {value:,.4g}" for what, value in way(tensors, ranks, arguments.replicas)
            )
            sys.stdout.write(f"{arguments.model}, {ranks} ranks, {name}: {figures}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
