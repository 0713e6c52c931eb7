"""A Hugging Face directory: safetensors in shards, config, generation config, tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from arriero.checkpoint.formats.hf_tokenizer import refuse_damaged_tokenizer, write_tokenizer
from arriero.checkpoint.formats.safetensors import SafetensorsReader, write_safetensors
from arriero.checkpoint.formats.source import (
    Advance,
    Cut,
    Source,
    Writing,
    cast,
    companions_of,
    copy_companions,
    refuse_other_dtypes,
    retyped,
    silent,
)
from arriero.checkpoint.formats.torchfile import TorchReader
from arriero.errors import UserError
from arriero.model.description import checked_token_ids, read_json, write_json
from arriero.model.name_maps import (
    check_tensors,
    hf_config,
    hf_from_own,
    hf_names,
    own_from_hf,
    own_tensors,
    spec_from_hf,
    to_hf,
    unchanged,
)
from arriero.model.spec import ModelSpec

CONFIG = "config.json"
_WEIGHTS, _PICKLED = "model.safetensors", "pytorch_model.bin"
_INDEX = f"{_WEIGHTS}.index.json"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def open_hf(directory: Path) -> Source:
    config = _config(directory)
    spec = spec_from_hf(config, str(directory / CONFIG))
    readers = {name: file for path in _files(directory) for file in [_reader(path)] for name in file.tensors}
    found = {name: file.tensors[name] for name, file in readers.items()}
    names = hf_names(found, spec)
    check_tensors(
        {theirs: found[name] for theirs, name in names.items()},
        to_hf(own_tensors(spec), spec),
        str(directory),
    )
    recipe = own_from_hf(spec)
    tensors = {name: t.to(found[names[recipe[name].parts[0]]].dtype) for name, t in own_tensors(spec).items()}
    refuse_other_dtypes(tensors, str(directory))

    def read(theirs: str) -> Tensor:
        return readers[names[theirs]].read(names[theirs])

    def read_part(name: str, cut: Cut) -> Tensor:
        """GPT-2 stores matrices fused and transposed; its models are small enough to be read whole."""
        made = recipe[name]
        if made.make is not unchanged:
            return made.of(read)[cut]
        stored = names[made.parts[0]]
        reader = readers[stored]
        if isinstance(reader, SafetensorsReader):
            return reader.read_part(stored, cut)
        return reader.read(stored)[cut]

    ids = {name: config[name] for name in _TOKEN_IDS if config.get(name) is not None}
    return Source(
        "hf",
        str(directory),
        spec,
        tensors,
        lambda name: recipe[name].of(read),
        companions_of(directory),
        checked_token_ids(directory / CONFIG, ids),
        load_part=read_part,
    )


def write_hf(source: Source, directory: Path, writing: Writing, advance: Advance = silent) -> None:
    spec, recipe = source.spec, hf_from_own(source.spec)
    own = retyped(source.tensors, writing.dtype)
    planned = {name: made.of(own.__getitem__) for name, made in recipe.items()}
    refuse_damaged_tokenizer(source.companions, source.tokens)

    def load(name: str) -> Tensor:
        return cast(recipe[name].of(source.load), planned[name].dtype, name)

    shards = _shards(planned, writing.shard_bytes)
    for file, names in shards.items():
        write_safetensors(directory / file, {n: planned[n] for n in names}, load, advance)
    if len(shards) > 1:
        places = {name: file for file, names in shards.items() for name in names}
        total = sum(t.nbytes for t in planned.values())
        write_json(directory / _INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    copy_companions(source, directory)
    tokens = write_tokenizer(directory, spec, source.tokens)
    write_json(directory / CONFIG, hf_config(spec, next(iter(planned.values())).dtype) | tokens)
    if "generation_config.json" not in source.companions:
        write_json(directory / "generation_config.json", {"do_sample": False, **tokens})


def load_hf(directory: str | Path) -> tuple[dict[str, Tensor], ModelSpec]:
    source = open_hf(Path(directory))
    return source.state(), source.spec


def _config(directory: Path) -> dict[str, Any]:
    if not (directory / CONFIG).is_file():
        raise UserError(f"{directory} holds no {CONFIG}", "give a Hugging Face model directory")
    return read_json(directory / CONFIG)


def _reader(path: Path) -> SafetensorsReader | TorchReader:
    return SafetensorsReader(path) if path.suffix == ".safetensors" else TorchReader(path)


def _files(directory: Path) -> list[Path]:
    """One file, or several named by an index; safetensors before files of torch.save."""
    places = (directory / f"{name}{index}" for name in (_WEIGHTS, _PICKLED) for index in ("", ".index.json"))
    found = [path for path in places if path.is_file()]
    if not found:
        raise UserError(f"{directory} lacks {_WEIGHTS}", "copy the weights there")
    # an index counts before a single file of the same kind
    first = found[1] if found[1:] and found[1].name == f"{found[0].name}.index.json" else found[0]
    if first.suffix != ".json":
        return [first]
    names = _indexed(first)
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise UserError(f"{directory} lacks {', '.join(missing)}", f"copy the files that {first.name} names")
    return [directory / name for name in names]


def _indexed(path: Path) -> list[str]:
    """The files an index names, all of them beside it."""
    table = read_json(path).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise UserError(f"{path} has no weight_map", "copy or download it again")
    for tensor, name in table.items():
        plain = isinstance(name, str) and name == Path(name).name and not set(name) & {"\\", "\0"}
        if not plain or name in ("", ".", ".."):
            raise UserError(
                f"{path}: {tensor} is said to be in {name!r}, which is not the name of a file beside it",
                "copy or download it again, from a source you trust",
            )
    return sorted(set(table.values()))


def _shards(planned: Mapping[str, Tensor], limit: int) -> dict[str, list[str]]:
    """In order, each at most `limit` bytes; a tensor larger than that has a file of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in planned.items():
        if shards[-1] and filled + tensor.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.nbytes
    if len(shards) == 1:
        return {_WEIGHTS: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}
