"""Files of `torch.save` holding named tensors: read without running their code, written a tensor at a time.

Needs torch's `skip_data` and the record offsets its loader notes; both are in torch 2.11 to 2.13.
"""

import pickle
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from arriero.checkpoint.formats.source import raw_bytes, read_into
from arriero.checkpoint.formats.zipsums import write_checksums
from arriero.errors import UserError


class TorchReader:
    """`tensors` has names, shapes and types, on meta; `read` gives one, and nothing else is held."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = _index(path)

    def read(self, name: str) -> Tensor:
        planned = self.tensors[name]
        reach = sum((size - 1) * step for size, step in zip(planned.shape, planned.stride(), strict=True)) + 1
        begins = _offset(planned) + int(planned.storage_offset()) * planned.dtype.itemsize
        flat = torch.empty(reach if planned.numel() else 0, dtype=planned.dtype)
        read_into(self.path, begins, flat)
        return flat.as_strided(planned.shape, planned.stride()).contiguous()


def _index(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), "unknown code")
        raise UserError(
            f"{path} is a pickle with more than tensors in it ({reason}), and is not opened",
            "such a file could run any code; ask its author for safetensors",
        ) from None
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as a file of torch.save ({str(error).splitlines()[0]})",
            "copy or download it again; a file older than torch 1.6 must be saved anew",
        ) from None
    if not isinstance(state, Mapping) or not all(isinstance(t, Tensor) for t in state.values()):
        raise UserError(f"{path} is not a flat table of names and tensors", "give a file of weights alone")
    return dict(state)


def _offset(tensor: Tensor) -> int:
    """Where its contents lie in the file; the loader notes it on the storages it leaves empty."""
    offset = tensor.untyped_storage()._checkpoint_offset
    assert offset is not None
    return offset


class TorchFile:
    """A file of empty places for `tensors`, which are then filled in any order."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._sums: dict[int, int] = {}
        with FakeTensorMode():
            empty = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(empty, path)
        self._places = {name: (_offset(t), t) for name, t in _index(path).items()}
        self._file = path.open("r+b")

    def put(self, name: str, tensor: Tensor) -> None:
        offset, planned = self._places[name]
        assert tensor.shape == planned.shape and tensor.dtype == planned.dtype, name
        content = raw_bytes(tensor)
        self._file.seek(offset)
        self._file.write(content)
        self._sums[offset] = zlib.crc32(content)

    def __enter__(self) -> "TorchFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                assert len(self._sums) == len(self._places), "a tensor was not written"
                write_checksums(self._file, self._sums)
