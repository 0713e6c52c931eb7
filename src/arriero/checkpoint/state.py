"""The tensors of a checkpoint: their names, the part of each on this rank, writing and reading.

DCP knows DTensors by their mesh. A LocalPart knows only its place in the whole tensor, so it can be copied
to host memory, be written by a thread, and be read with any other layout. Undocumented torch API, tested
with 2.11 and 2.13: `planner_helpers.create_read_items_for_chunk_list`.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from arriero.checkpoint.directory import Manifest, unreadable
from arriero.checkpoint.formats.dcp_directory import SafeDcpReader, without_warning
from arriero.checkpoint.formats.tensor_files import split_by_size
from arriero.checkpoint.ranks import Ranks, cause_of
from arriero.checkpoint.save_plan import SavePlan, file_of
from arriero.errors import UserError
from arriero.files import Advance, no_progress
from arriero.parallel.dtensor import local_shard

METADATA = ".metadata"
MODEL, OPTIM = "model.", "optim."
_READ_AT_ONCE = 4 << 30
_LISTED = 12

Moments = Mapping[str, Mapping[str, Tensor]]
TensorInfo = Mapping[str, tuple[str, list[int]]]
Value = TypeVar("Value")


class LazyMapping(Mapping[str, Value]):
    """A mapping that computes values when they are read, for tensors that do not fit in memory together."""

    def __init__(self, makers: Mapping[str, Callable[[], Value]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Value:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


@dataclass(frozen=True)
class LocalPart:
    """The part of a tensor on this rank, at `offset` in the whole of `shape`; `local` may be empty."""

    local: Tensor
    offset: tuple[int, ...]
    shape: torch.Size

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        if self.local.numel() == 0:
            return []
        return [ChunkStorageMetadata(torch.Size(self.offset), self.local.shape)]


def local_parts(tensors: Mapping[str, Tensor]) -> Mapping[str, LocalPart]:
    """Return the part of each tensor on this rank; it shares memory with the tensor."""
    return LazyMapping({name: partial(_part, tensors, name) for name in tensors})


def _part(tensors: Mapping[str, Tensor], name: str) -> LocalPart:
    tensor = tensors[name]
    return LocalPart(*local_shard(tensor), tensor.shape)


class FiniteCheck:
    """Finds tensors with NaN or infinity by their minimum and maximum, kept on the device until the end.

    Both are finite exactly when the whole tensor is, because aminmax propagates NaN.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[torch.device, torch.dtype], dict[str, tuple[Tensor, Tensor]]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        if not tensor.is_floating_point() or tensor.numel() == 0:
            return
        wide = tensor.detach() if tensor.dtype.itemsize > 1 else tensor.detach().float()
        self._found.setdefault((wide.device, wide.dtype), {})[name] = tuple(torch.aminmax(wide))

    def non_finite(self) -> list[str]:
        """Return the names of tensors with a NaN or an infinity; copies once from each device."""
        names = []
        for extremes in self._found.values():
            bounds = torch.stack([bound for pair in extremes.values() for bound in pair])
            good = bounds.isfinite().view(-1, 2).all(dim=1).tolist()
            names += [name for name, finite in zip(extremes, good, strict=True) if not finite]
        return sorted(names)


class Staging:
    """Copies parts to host memory, which the next save reuses. `non_finite` has names of the last copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self.non_finite: list[str] = []

    def copy(self, parts: Mapping[str, LocalPart]) -> dict[str, LocalPart]:
        staged, from_gpu, extremes = {}, False, FiniteCheck()
        for name, part in parts.items():
            extremes.add(name, part.local)
            from_gpu |= part.local.is_cuda
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != part.local.shape or buffer.dtype != part.local.dtype:
                pinned = part.local.is_cuda
                buffer = torch.empty_like(part.local, device="cpu", pin_memory=pinned)
                self._buffers[name] = buffer
            buffer.copy_(part.local, non_blocking=True)
            staged[name] = LocalPart(buffer, part.offset, part.shape)
        if from_gpu:
            torch.cuda.synchronize()
        self.non_finite = extremes.non_finite()
        return staged


def write_parts(
    directory: Path, parts: Mapping[str, LocalPart], ranks: Ranks, plan: SavePlan
) -> dict[str, str]:
    """Write DCP files and return the sha256 of each file of this rank, computed while writing.

    Called by all ranks.
    """
    names = plan.names(parts, ranks)
    path = directory / file_of(ranks.rank)
    written: list[tuple[str, list[int]]] = []
    ranks.gather_to_leader(lambda: written.append(_write_file(path, [parts[name].local for name in names])))
    sha256, lengths = written[0]
    index, of_index = plan.index(lengths, ranks)
    ranks.on_leader(lambda: (directory / METADATA).write_bytes(index))
    own = {path.name: sha256} if names else {}
    return own | ({METADATA: of_index} if ranks.is_leader else {})


def _write_file(path: Path, tensors: Sequence[Tensor]) -> tuple[str, list[int]]:
    """Write tensors with torch.save, as DCP does; return the sha256 of the file and the bytes of each."""
    digest, lengths = hashlib.sha256(), []
    if not tensors:
        return "", []
    with path.open("wb") as file:
        stream = _Hashed(file, digest)
        for tensor in tensors:
            begin = file.tell()
            try:
                torch.save(tensor, cast(IO[bytes], stream))
            except Exception as error:
                # torch's archive writer hides the error of the file system
                raise stream.problem or error from None
            lengths.append(file.tell() - begin)
    return digest.hexdigest(), lengths


class _Hashed:
    """The methods of a file that torch.save needs; hashes what is written."""

    def __init__(self, file: IO[bytes], digest: Any) -> None:
        self._file, self._digest = file, digest
        self.problem: OSError | None = None

    def write(self, data: Any) -> int:
        self._digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.problem = error
            raise

    def flush(self) -> None: ...


def read_parts(reader: SafeDcpReader, parts: Mapping[str, LocalPart], ranks: Ranks) -> None:
    """Fill parts from a checkpoint. Called by all ranks, which read independently and fail together."""
    wanted = cast(dict[str, Any], dict(parts))

    def load() -> None:
        try:
            # with collectives, rank 0 would gather every rank's plan only to send it back unchanged
            with without_warning():
                dcp.load(wanted, storage_reader=reader, planner=_LoadPlanner(), no_dist=True)
        except CheckpointException as error:
            if isinstance(cause := cause_of(error), OSError):
                raise unreadable(Path(cause.filename or reader.path), cause) from None
            raise

    ranks.on_all_ranks(load)


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, part in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, part.chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local


def named_tensors(weights: Mapping[str, Tensor], state: Moments) -> Mapping[str, Tensor]:
    """Return weights and optimizer state by their names in checkpoints; each is computed when it is read."""
    makers = {MODEL + name: partial(weights.__getitem__, name) for name in weights}
    for name, kinds in state.items():
        makers |= {f"{OPTIM}{name}.{kind}": partial(kinds.__getitem__, kind) for kind in kinds}
    return LazyMapping(makers)


def describe_parts(parts: Mapping[str, LocalPart]) -> TensorInfo:
    """Return the dtype and the whole shape of each tensor."""
    return {
        name: (str(part.local.dtype).removeprefix("torch."), list(part.shape)) for name, part in parts.items()
    }


def total_bytes(tensors: TensorInfo) -> int:
    return sum(getattr(torch, dtype).itemsize * prod(shape) for dtype, shape in tensors.values())


@dataclass(frozen=True)
class AllowedDifferences:
    """Patterns of tensor names that a checkpoint may lack, or hold without being used."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def load_tensors(
    directory: Path,
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    keep: Callable[[str, Tensor], None],
    ranks: Ranks,
    everywhere: Callable[[dict[str, Any]], dict[str, Any]],
    tolerated: AllowedDifferences,
    prefix: str = "",
) -> None:
    """Fill tensors in place from a checkpoint of any layout, in batches, and pass each to `keep`.

    Called by all ranks. `everywhere` merges what the pipeline stages hold. Only names with `prefix` are read.
    """
    parts = local_parts(tensors)
    wanted = everywhere({name: list(part.shape) for name, part in parts.items()})
    there = {name: shape for name, (_, shape) in manifest.tensors.items() if name.startswith(prefix)}
    _check_names_and_shapes(directory, wanted, there, tolerated)
    # all ranks read the same batches, because each read is a collective call
    sizes = {name: total_bytes({name: manifest.tensors[name]}) for name in there if name in wanted}
    reader = SafeDcpReader(directory)
    for names in split_by_size(sizes, _READ_AT_ONCE * ranks.size):
        some = {name: tensors[name] for name in names if name in tensors}
        read_parts(reader, local_parts(some), ranks)
        for name, tensor in some.items():
            keep(name, tensor)


def non_finite_tensors(directory: Path, manifest: Manifest, progress: Advance = no_progress) -> list[str]:
    """Return the names of tensors with a NaN or an infinity; reads one tensor at a time."""
    reader, extremes = SafeDcpReader(directory), FiniteCheck()
    for name, (dtype, shape) in manifest.tensors.items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if tensor.is_floating_point():
            read_parts(reader, local_parts({name: tensor}), Ranks())
            extremes.add(name, tensor)
        progress(tensor.nbytes)
    return extremes.non_finite()


def _check_names_and_shapes(
    directory: Path, wanted: Mapping[str, Any], there: Mapping[str, Any], tolerated: AllowedDifferences
) -> None:
    missing = _not_tolerated(wanted.keys() - there.keys(), tolerated.missing)
    unexpected = _not_tolerated(there.keys() - wanted.keys(), tolerated.unexpected)
    changed = sorted(name for name in wanted.keys() & there.keys() if list(wanted[name]) != list(there[name]))
    shapes = [f"{name} {there[name]}, not {wanted[name]}" for name in changed]
    problems = [
        f"{heading} {listed(names)}"
        for heading, names in (("lacks", missing), ("has unexpected", unexpected), ("has", shapes))
        if names
    ]
    if problems:
        raise UserError(
            f"{directory} does not fit this model and optimizer: it {'; it '.join(problems)}",
            "use the run file it was trained with, or name what may differ in checkpoint.load.allow_missing "
            "or checkpoint.load.allow_unexpected",
        )


def _not_tolerated(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns))


def listed(names: list[str]) -> str:
    """Join names, the first 12 of them, with the number of the rest."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
