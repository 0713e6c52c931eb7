"""A single torch file: `model.pt`, a flat table of our names, beside `model.toml`."""

from pathlib import Path

from arriero.checkpoint.formats.source import (
    Advance,
    Source,
    Writing,
    cast,
    companions_of,
    copy_companions,
    refuse_other_dtypes,
    retyped,
    silent,
)
from arriero.checkpoint.formats.torchfile import TorchFile, TorchReader
from arriero.model.description import described, write_description
from arriero.model.name_maps import check_tensors, own_tensors

NAME = "model.pt"


def open_torch(path: Path) -> Source:
    """The file itself, or the directory that holds `model.pt`."""
    directory, file = (path, path / NAME) if path.is_dir() else (path.parent, path)
    reader = TorchReader(file)
    found = dict(reader.tensors)
    about = described(directory)
    spec = about.spec
    if spec.tied:
        found.pop("head.weight", None)
    check_tensors(found, own_tensors(spec), str(file))
    refuse_other_dtypes(found, str(file))
    return Source(
        "torch",
        str(path),
        spec,
        found,
        reader.read,
        companions_of(directory),
        about.tokens,
        about.remarks,
    )


def write_torch(source: Source, directory: Path, writing: Writing, advance: Advance = silent) -> None:
    planned = retyped(source.tensors, writing.dtype)
    with TorchFile(directory / NAME, planned) as file:
        for name in planned:
            tensor = cast(source.load(name), writing.dtype, name)
            file.put(name, tensor)
            advance(tensor.nbytes)
    write_description(source.spec, source.tokens, directory)
    copy_companions(source, directory)
