"""Tensors spread over ranks, to files and back: through torch's DCP, with checksums of what was written.

DCP knows DTensors by their mesh. A piece knows only where in the whole it lies, so it can wait in host memory
and be written by a thread while training goes on, and be read on any other layout.
"""

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from arriero.checkpoint.formats.dcp import CarefulReader
from arriero.checkpoint.lazily import OneByOne
from arriero.checkpoint.manifest import unreadable
from arriero.checkpoint.ranks import Ranks, cause_of
from arriero.parallel.apply import held_here
from arriero.parallel.precision import ordinary

METADATA = ".metadata"


@dataclass(frozen=True)
class Piece:
    """What this rank holds of a tensor; `local` is empty where that is nothing."""

    local: Tensor
    offset: tuple[int, ...]
    shape: torch.Size

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        if self.local.numel() == 0:
            return []
        return [ChunkStorageMetadata(torch.Size(self.offset), self.local.shape)]


def pieces_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Piece]:
    """They share memory with the tensors: what is read into a piece is in the tensor."""
    return OneByOne({name: partial(_piece, tensors, name) for name in tensors})


def _piece(tensors: Mapping[str, Tensor], name: str) -> Piece:
    tensor = ordinary(tensors[name])
    for local, offset in held_here(tensor):
        return Piece(local, tuple(offset), tensor.shape)
    return Piece(cast(DTensor, tensor).to_local(), (0,) * tensor.ndim, tensor.shape)


class Extremes:
    """The least and greatest value of each tensor added, left on its device until `non_finite` is asked for.

    Both are finite exactly when the whole tensor is: aminmax propagates NaN.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[torch.device, torch.dtype], dict[str, tuple[Tensor, Tensor]]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        if not tensor.is_floating_point() or tensor.numel() == 0:
            return
        wide = tensor if tensor.dtype.itemsize > 1 else tensor.float()
        self._found.setdefault((wide.device, wide.dtype), {})[name] = tuple(torch.aminmax(wide))

    def non_finite(self) -> list[str]:
        """Names of the tensors with a NaN or an infinity; one copy from each device."""
        names = []
        for extremes in self._found.values():
            bounds = torch.stack([bound for pair in extremes.values() for bound in pair])
            good = bounds.isfinite().view(-1, 2).all(dim=1).tolist()
            names += [name for name, finite in zip(extremes, good, strict=True) if not finite]
        return sorted(names)


class Staging:
    """Host memory for one save, used again by the next. What is on its way there need not wait for the rest:
    its memory is free for what the device does after the copy. `non_finite` are names of the last copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self.non_finite: list[str] = []

    def copy(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        staged, from_gpu, extremes = {}, False, Extremes()
        for name, piece in pieces.items():
            extremes.add(name, piece.local)
            from_gpu |= piece.local.is_cuda
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != piece.local.shape or buffer.dtype != piece.local.dtype:
                pinned = piece.local.is_cuda
                buffer = torch.empty_like(piece.local, device="cpu", pin_memory=pinned)
                self._buffers[name] = buffer
            buffer.copy_(piece.local, non_blocking=True)
            staged[name] = Piece(buffer, piece.offset, piece.shape)
        if from_gpu:
            torch.cuda.synchronize()
        self.non_finite = extremes.non_finite()
        return staged


def write_pieces(directory: Path, pieces: Mapping[str, Piece], ranks: Ranks) -> dict[str, str]:
    """Called by all ranks. The sha256 of each file this rank wrote, of the bytes on their way to it."""
    # or DCP would wait on a stream of the first GPU, whichever this rank's is: a new thread knows no other
    writer = dcp.FileSystemWriter(directory, per_thread_copy_ahead=0)
    writer.fs = hashed = _HashedFiles()
    _hush()
    try:
        dcp.save(
            cast(dict[str, Any], dict(pieces)),
            storage_writer=writer,
            planner=_Saving(),
            process_group=ranks.group,
            no_dist=ranks.size == 1,
        )
    except (Exception, CheckpointException):
        # all ranks are here, with what torch's archive writer made of the disk's own words
        ranks.together(hashed.complain)
        raise
    return {name.removesuffix(".tmp"): digest.hexdigest() for name, digest in hashed.digests.items()}


def read_pieces(reader: CarefulReader, pieces: Mapping[str, Piece], ranks: Ranks) -> None:
    """Called by all ranks, each with the pieces it needs. Each reads on its own; all fail together."""
    _hush()
    wanted = cast(dict[str, Any], dict(pieces))

    def load() -> None:
        try:
            # with collectives, rank 0 would gather every rank's plan only to send it back unchanged
            dcp.load(wanted, storage_reader=reader, planner=_Loading(), no_dist=True)
        except CheckpointException as error:
            if isinstance(cause := cause_of(error), OSError):
                raise unreadable(Path(cause.filename or reader.path), cause) from None
            raise

    ranks.together(load)


def _hush() -> None:
    """One process may well save without others."""
    warnings.filterwarnings("ignore", message=".*torch.distributed is (disabled|unavailable)")


class _Saving(DefaultSavePlanner):
    """DCP's own planner leaves a piece that several ranks hold to the one with least to write."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [_item(name, piece, chunk) for name, piece in self.state_dict.items() for chunk in piece.chunks]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].local


def _item(name: str, piece: Piece, chunk: ChunkStorageMetadata) -> WriteItem:
    properties = TensorProperties(dtype=piece.local.dtype)
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=piece.shape),
    )


class _Loading(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, piece in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, piece.chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local


class _HashedFiles(FileSystem):
    def __init__(self) -> None:
        self.digests: dict[str, Any] = {}
        self._trouble: OSError | None = None

    def complain(self) -> None:
        if self._trouble is not None:
            raise self._trouble

    def note(self, trouble: OSError) -> None:
        self._trouble = trouble

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            digest = self.digests[Path(path).name] = hashlib.sha256()
            yield cast(io.IOBase, _HashedStream(stream, digest, self.note))


class _HashedStream:
    def __init__(self, stream: Any, digest: Any, note: Callable[[OSError], None]) -> None:
        self._stream = stream
        self._digest = digest
        self._note = note

    def write(self, data: Any) -> int:
        self._digest.update(data)
        try:
            return self._stream.write(data)
        except OSError as error:
            self._note(error)
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
