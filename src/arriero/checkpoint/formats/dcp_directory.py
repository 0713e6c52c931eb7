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
    Advance,
    ModelReader,
    WriteOptions,
    cast,
    check_dtypes,
    copy_extra_files,
    find_extra_files,
    no_progress,
    retyped,
)
from arriero.checkpoint.formats.tensor_files import TorchFileWriter, TorchReader
from arriero.errors import UserError
from arriero.model.description import described, write_description
from arriero.model.name_maps import check_tensors, own_tensors

_PREFIX = "model."
_DIGEST = "copy the checkpoint again, or take another"


def open_dcp(directory: Path) -> ModelReader:
    """A checkpoint of training, of which only the weights are read, or one that `write_dcp` made."""
    about = described(directory)
    spec = about.spec
    reader = SafeDcpReader(directory)
    found = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if name.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata):
            found[name.removeprefix(_PREFIX)] = torch.empty(
                entry.size, dtype=entry.properties.dtype, device="meta"
            )
    if spec.tied:
        found.pop("head.weight", None)
    check_tensors(found, own_tensors(spec), str(directory))
    check_dtypes(found, str(directory))

    def load(name: str) -> Tensor:
        into = {_PREFIX + name: torch.empty(found[name].shape, dtype=found[name].dtype)}
        try:
            with _alone():
                torch_dcp.load(into, storage_reader=reader, no_dist=True)
        except (torch_dcp.api.CheckpointException, RuntimeError, OSError, EOFError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise UserError(f"{directory}: {name} cannot be read ({reason})", _DIGEST) from None
        return into[_PREFIX + name]

    extra_files = find_extra_files(directory)
    return ModelReader("dcp", str(directory), spec, found, load, extra_files, about.tokens, about.remarks)


def write_dcp(
    source: ModelReader, directory: Path, writing: WriteOptions, advance: Advance = no_progress
) -> None:
    planned = {_PREFIX + name: t for name, t in retyped(source.tensors, writing.dtype).items()}
    planner = _OneAtATime(source, writing.dtype, advance)
    # of a file it is writing, torch keeps every tensor until the end: so a file for each
    writer = FileSystemWriter(directory, single_file_per_rank=False, sync_files=False)
    with _alone():
        torch_dcp.save(planned, storage_writer=writer, planner=planner, no_dist=True)
    write_description(source.spec, source.tokens, directory)
    copy_extra_files(source, directory)


@contextmanager
def _alone() -> Iterator[None]:
    """Without ranks is how it is meant; torch warns of it each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _OneAtATime(torch_dcp.DefaultSavePlanner):
    """Plans with tensors on meta and reads each when the writer asks for it."""

    def __init__(self, source: ModelReader, dtype: torch.dtype | None, advance: Advance) -> None:
        super().__init__()
        self._source, self._dtype, self._advance = source, dtype, advance

    def lookup_object(self, index: MetadataIndex) -> Any:
        name = index.fqn.removeprefix(_PREFIX)
        tensor = cast(self._source.load(name), self._dtype, name)
        self._advance(tensor.nbytes)
        return tensor


class SafeDcpReader(FileSystemReader):
    """torch unpickles `.metadata` as it comes; here it may name nothing but what DCP itself writes."""

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
            raise UserError(f"{self._path} is not opened: {error}", _DIGEST) from None
        except OSError as error:
            raise unreadable(self._path, error) from None
        except (EOFError, ValueError, IndexError, AttributeError, KeyError, TypeError) as error:
            raise UserError(f"{self._path} is damaged ({error})", _DIGEST) from None
        if not isinstance(metadata, Metadata):
            raise UserError(f"{self._path} is not the index of a DCP checkpoint", _DIGEST)
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
        raise pickle.UnpicklingError(f"it is a pickle that asks for {module}.{name}, which no index needs")


NAME = "model.pt"


def open_torch(path: Path) -> ModelReader:
    """The file itself, or the directory that holds `model.pt`."""
    directory, file = (path, path / NAME) if path.is_dir() else (path.parent, path)
    reader = TorchReader(file)
    found = dict(reader.tensors)
    about = described(directory)
    spec = about.spec
    if spec.tied:
        found.pop("head.weight", None)
    check_tensors(found, own_tensors(spec), str(file))
    check_dtypes(found, str(file))
    return ModelReader(
        "torch",
        str(path),
        spec,
        found,
        reader.read,
        find_extra_files(directory),
        about.tokens,
        about.remarks,
    )


def write_torch(
    source: ModelReader, directory: Path, writing: WriteOptions, advance: Advance = no_progress
) -> None:
    planned = retyped(source.tensors, writing.dtype)
    with TorchFileWriter(directory / NAME, planned) as file:
        for name in planned:
            tensor = cast(source.load(name), writing.dtype, name)
            file.put(name, tensor)
            advance(tensor.nbytes)
    write_description(source.spec, source.tokens, directory)
    copy_extra_files(source, directory)
