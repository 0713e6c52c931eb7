"""Formats with Arriero's tensor names: torch's sharded checkpoint (DCP) and a single torch file."""

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from arriero.checkpoint.directory import unreadable
from arriero.checkpoint.formats.model_reader import (
    Adapter,
    ModelReader,
    WriteOptions,
    check_dtypes,
    find_extra_files,
    write_model_files,
)
from arriero.checkpoint.formats.peft_directory import with_adapter
from arriero.checkpoint.formats.tensor_files import TorchFileWriter, TorchReader
from arriero.checkpoint.ranks import cause_of
from arriero.errors import UserError
from arriero.files import Advance, no_progress
from arriero.model.adapters import is_adapter
from arriero.model.description import require_description
from arriero.model.name_maps import check_tensors, own_tensors
from arriero.model.quantized import PACKED, unpack
from arriero.model.speculator.settings import is_speculator

_PREFIX = "model."
_TODO = "copy the checkpoint again, or take another"


def open_dcp(directory: Path) -> ModelReader:
    """Open the weights of a training checkpoint, or of a directory that `write_dcp` wrote."""
    about = require_description(directory)
    spec = about.spec
    reader = SafeDcpReader(directory)
    found = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if name.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata):
            planned = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            found[name.removeprefix(_PREFIX)] = planned
    if spec.tied:
        found.pop("head.weight", None)
    # a speculator is no part of the model that it was trained for
    found = {name: tensor for name, tensor in found.items() if not is_speculator(name)}
    expected = own_tensors(spec)
    own = {}
    for name, tensor in found.items():
        # a quantised weight is read as the weight it stands for
        layer = name.removesuffix(PACKED)
        weight = expected.get(f"{layer}.weight") if layer != name else None
        if weight is not None:
            own[f"{layer}.weight"] = weight
        elif not is_adapter(name):
            own[name] = tensor
    check_dtypes(own, str(directory))
    check_tensors(own, expected, str(directory))

    def load(name: str) -> Tensor:
        layer = name.removesuffix(".weight")
        if (packed := layer + PACKED) in found:
            return unpack(stored(packed), own[name].shape[1])
        return stored(name)

    def stored(name: str) -> Tensor:
        into = {_PREFIX + name: torch.empty(found[name].shape, dtype=found[name].dtype)}
        try:
            with without_warning():
                torch_dcp.load(into, storage_reader=reader, no_dist=True)
        except (torch_dcp.api.CheckpointException, RuntimeError, OSError, EOFError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise UserError(f"{directory}: {name} cannot be read ({reason})", _TODO) from None
        return into[_PREFIX + name]

    extra_files = find_extra_files(directory)
    opened = ModelReader("dcp", str(directory), spec, own, load, extra_files, about.tokens, about.remarks)
    tensors = {name: tensor for name, tensor in found.items() if is_adapter(name)}
    if not tensors:
        return opened
    if about.adapter is None:
        raise UserError(f"{directory} has an adapter, and its run.toml has none", _TODO)
    return with_adapter(opened, Adapter(about.adapter, tensors, stored, about.start_from))


def write_dcp(source: ModelReader, directory: Path, _: WriteOptions, advance: Advance = no_progress) -> None:
    planned = {_PREFIX + name: tensor for name, tensor in source.tensors.items()}
    planner = _LazySavePlanner(source, advance)
    # torch keeps the tensors of a file in memory until it is complete, so each gets its own file
    writer = FileSystemWriter(directory, single_file_per_rank=False, sync_files=False)
    try:
        with without_warning():
            torch_dcp.save(planned, storage_writer=writer, planner=planner, no_dist=True)
    except torch_dcp.api.CheckpointException as error:
        raise cause_of(error) from None
    write_model_files(source, directory)


@contextmanager
def without_warning() -> Iterator[None]:
    """Silence torch's warning about saving and loading in a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is (disabled|unavailable)")
        yield


class _LazySavePlanner(torch_dcp.DefaultSavePlanner):
    """Plans with tensors on the meta device and loads each when the writer asks for it."""

    def __init__(self, source: ModelReader, advance: Advance) -> None:
        super().__init__()
        self._source, self._advance = source, advance

    def lookup_object(self, index: MetadataIndex) -> Any:
        tensor = self._source.load(index.fqn.removeprefix(_PREFIX))
        self._advance(tensor.nbytes)
        return tensor


class SafeDcpReader(FileSystemReader):
    """Reads `.metadata` with an unpickler that accepts only the classes DCP writes; torch accepts any."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._path = Path(directory) / ".metadata"
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = self._read()
        return self._metadata

    def _read(self) -> Metadata:
        try:
            with self._path.open("rb") as file:
                metadata = _Unpickler(file).load()
        except pickle.UnpicklingError as error:
            raise UserError(f"{self._path} is not opened: {error}", _TODO) from None
        except OSError as error:
            raise unreadable(self._path, error) from None
        except (EOFError, ValueError, IndexError, AttributeError, KeyError, TypeError) as error:
            raise UserError(f"{self._path} is damaged ({error})", _TODO) from None
        if not isinstance(metadata, Metadata):
            raise UserError(f"{self._path} is not the index of a DCP checkpoint", _TODO)
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        plain = {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"),
            ("pathlib", "PurePosixPath"),
            ("pathlib._local", "PosixPath"),
        }
        of_dcp = getattr(getattr(dcp_metadata, name, None), "__module__", None) == module
        of_dcp = of_dcp and module == dcp_metadata.__name__
        a_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if of_dcp or a_dtype or (module, name) in plain:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no DCP index needs")


TORCH_NAME = "model.pt"


def open_torch(path: Path) -> ModelReader:
    """Open a torch file of Arriero's tensor names, or the directory that holds `model.pt`."""
    directory, file = (path, path / TORCH_NAME) if path.is_dir() else (path.parent, path)
    reader = TorchReader(file)
    found = dict(reader.tensors)
    about = require_description(directory)
    spec = about.spec
    if spec.tied:
        found.pop("head.weight", None)
    check_tensors(found, own_tensors(spec), str(file))
    check_dtypes(found, str(file))
    extra_files = find_extra_files(directory)
    return ModelReader("torch", str(path), spec, found, reader.read, extra_files, about.tokens, about.remarks)


def write_torch(
    source: ModelReader, directory: Path, _: WriteOptions, advance: Advance = no_progress
) -> None:
    with TorchFileWriter(directory / TORCH_NAME, source.tensors) as file:
        for name in source.tensors:
            tensor = source.load(name)
            file.put(name, tensor)
            advance(tensor.nbytes)
    write_model_files(source, directory)
