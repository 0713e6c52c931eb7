"""Export a model whose tensors are spread over ranks: rank 0 writes it, one tensor at a time."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from arriero.checkpoint.formats.hf_directory import write_hf
from arriero.checkpoint.formats.model_reader import DEFAULT_OPTIONS, ModelReader, WriteOptions
from arriero.checkpoint.ranks import Ranks
from arriero.checkpoint.state import LocalPart, local_parts
from arriero.errors import UserError
from arriero.files import check_free_space, replaced_directory
from arriero.model.name_maps import hf_from_own

StopRequested = Callable[[], bool]
Location = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape of a part
_CONTINUE, _STOP, _FAILED = range(3)
_MAX_DIMS = 4


def never() -> bool:
    return False


def export_hf(
    source: ModelReader, gather: "Gather", directory: Path, writing: WriteOptions = DEFAULT_OPTIONS
) -> bool:
    """Write a Hugging Face directory on rank 0 while all ranks send it their parts.

    Called by all ranks; `source.load` must be `gather.tensor`. Returns False if a rank asked to stop.
    """
    todo = "make room; the same command, or `arriero ckpt convert` of a checkpoint, exports again"
    try:
        if gather.ranks.is_leader:
            try:
                with replaced_directory(directory) as making:
                    check_free_space(making, source.nbytes(writing.dtype), "the model", todo)
                    write_hf(source, making, writing)
            except OSError as error:
                raise UserError(f"the model cannot be written to {directory} ({error})", todo) from None
        else:
            for made in hf_from_own(source.spec).values():
                for name in made.parts:
                    source.load(name)
        gather.end()
    except _Stopped:
        return False
    except Exception as error:
        if gather.ranks.is_leader:
            gather.fail(error)
        raise
    return True


class _Stopped(Exception):
    """A rank was asked to stop."""


class Gather:
    """Assembles sharded tensors on rank 0, one at a time. All ranks make the same calls.

    `tensors` has their shapes and dtypes, `local` what this rank holds of them. Messages go from CPU to CPU,
    so that the export needs no device memory. `stop` is asked before each tensor.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        local: Mapping[str, Tensor],
        ranks: Ranks,
        stop: StopRequested = never,
    ) -> None:
        self._tensors, self._parts = tensors, local_parts(local)
        self.ranks, self._stop = ranks, stop

    def tensor(self, name: str) -> Tensor:
        """Return the whole tensor on rank 0, an empty one elsewhere."""
        expected, part = self._tensors[name], self._parts.get(name)
        locations = self._agree(_STOP if self._stop() else _CONTINUE, part)
        # of ranks that hold the same part, the first one sends it
        senders = {place: rank for rank, place in reversed(list(enumerate(locations))) if place is not None}
        sends = self.ranks.rank in senders.values()
        local = part.local.detach().to("cpu", expected.dtype) if part is not None and sends else expected
        if not self.ranks.is_leader:
            if sends:
                dist.send(local.contiguous(), dst=0, group=self.ranks.group)
            return torch.empty(0)
        found = sum(math.prod(shape) for _, shape in senders)
        assert found == expected.numel(), f"parts of {name} are missing"
        if local.shape == expected.shape and sends:
            return local
        whole = torch.empty(expected.shape, dtype=expected.dtype)
        for (offset, shape), rank in sorted(senders.items(), key=lambda item: item[1]):
            part = whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
            if rank == 0:
                part.copy_(local)
            elif part.is_contiguous():
                dist.recv(part, src=rank, group=self.ranks.group)
            else:
                part.copy_(self._receive(shape, expected.dtype, rank))
        return whole

    def end(self) -> None:
        """Wait until rank 0 has published the model."""
        self._agree(_CONTINUE, None)

    def fail(self, error: Exception) -> None:
        """Raise rank 0's error on all ranks: called by rank 0 while the others are in their next call."""
        if self.ranks.size > 1:
            self._exchange(_FAILED, None)
            self.ranks.on_leader(partial(_raise, error))

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
        buffer = torch.empty(shape, dtype=dtype)
        dist.recv(buffer, src=rank, group=self.ranks.group)
        return buffer

    def _agree(self, status: int, part: LocalPart | None) -> list[Location | None]:
        """Return where each rank's part lies; end the export on all ranks if one of them asks for it."""
        statuses, locations = self._exchange(status, part)
        if _FAILED in statuses:
            self.ranks.on_leader(lambda: None)
        if _STOP in statuses:
            raise _Stopped
        return locations

    def _exchange(self, status: int, part: LocalPart | None) -> tuple[list[int], list[Location | None]]:
        location = None
        if part is not None and part.local.numel():
            location = tuple(part.offset), tuple(part.local.shape)
        if self.ranks.size == 1:
            return [status], [location]
        everyones = torch.zeros(self.ranks.size, 2 + 2 * _MAX_DIMS, dtype=torch.int64)
        mine = [status, len(location[0]), *location[0], *location[1]] if location else [status]
        message = torch.tensor(mine + [0] * (everyones.shape[1] - len(mine)))
        dist.all_gather(list(everyones.unbind()), message, group=self.ranks.group)
        locations: list[Location | None] = []
        for _, dims, *numbers in everyones.tolist():
            at = tuple(numbers[:dims]), tuple(numbers[dims : 2 * dims])
            locations.append(at if dims else None)
        return everyones[:, 0].tolist(), locations


def _raise(error: Exception) -> None:
    raise error
