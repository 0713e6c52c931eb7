"""Meta's original files: `params.json` and one `consolidated.NN.pth` per model-parallel shard.

Mistral's weights are `consolidated.safetensors`, or one file of Meta's.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arriero.checkpoint.formats.model_reader import (
    ModelReader,
    WriteOptions,
    check_dtypes,
    find_extra_files,
    write_model_files,
)
from arriero.checkpoint.formats.tensor_files import (
    TorchFileWriter,
    open_tensors,
    write_safetensors,
)
from arriero.errors import UserError
from arriero.files import Advance, no_progress
from arriero.model.description import read_description, read_json, write_json
from arriero.model.family import meta_names
from arriero.model.name_maps import TensorRule, check_names, check_tensors, own_tensors
from arriero.model.spec import ModelSpec

_SAFETENSORS = "consolidated.safetensors"
_NOT_WEIGHTS = "rope.freqs"


def open_meta(directory: Path) -> ModelReader:
    meta = meta_names()
    if not (directory / "params.json").is_file():
        raise UserError(f"{directory} holds no params.json", "copy the one that came with the weights there")
    params = meta.read_params(directory / "params.json")
    files = [open_tensors(path) for path in _shard_files(directory)]
    pieces = [{n: t for n, t in file.tensors.items() if n != _NOT_WEIGHTS} for file in files]
    for file, shard in zip(files[1:], pieces[1:], strict=True):
        check_names(shard, pieces[0], str(file.path))
    if meta.EMBEDDING not in pieces[0] or meta.HEAD not in pieces[0]:
        raise UserError(
            f"{files[0].path} lacks {meta.EMBEDDING} or {meta.HEAD}", "give Meta's original weights"
        )
    rule = meta.rule_of_stored_shards(pieces[0][meta.EMBEDDING], params.get("dim", 0))
    whole = {}
    for name, piece in pieces[0].items():
        shape = meta.merged_shape(name, [shard[name] for shard in pieces], rule)
        whole[name] = torch.empty(shape, dtype=piece.dtype, device="meta")

    def read(name: str) -> Tensor:
        parts = [partial(file.read, name) for file in files]
        return meta.merge(name, parts, whole[name].shape, rule)

    spec, tokens = _spec(directory, params, whole, read)
    kv_heads = params.get("n_kv_heads") or spec.kv_heads
    wanted = {
        n: made.of(own_tensors(spec).__getitem__) for n, made in meta.meta_from_own(spec, kv_heads).items()
    }
    check_tensors(whole, wanted, str(directory))
    recipe = meta.own_from_meta(spec, kv_heads)
    tensors = {name: t.to(whole[recipe[name].parts[0]].dtype) for name, t in own_tensors(spec).items()}
    check_dtypes(tensors, str(directory))
    extra_files = find_extra_files(directory)
    return ModelReader(
        "meta", str(directory), spec, tensors, lambda name: recipe[name].of(read), extra_files, tokens
    )


def write_meta(
    source: ModelReader, directory: Path, writing: WriteOptions, advance: Advance = no_progress
) -> None:
    spec, shards, meta = source.spec, writing.model_parallel, meta_names(source.spec.family)
    rule = writing.meta_rule or meta.rule_of(spec)
    kv_heads = meta.stored_kv_heads(spec, shards)
    params = meta.meta_params(spec, rule, kv_heads)
    meta.check_divisible(spec, shards, rule)
    recipe, own = meta.meta_from_own(spec, kv_heads), source.tensors
    planned = {
        name: meta.split(name, made.of(own.__getitem__), shards, rule) for name, made in recipe.items()
    }
    if meta.is_safetensors(spec):
        whole = {name: pieces[0] for name, pieces in planned.items()}
        write_safetensors(directory / _SAFETENSORS, whole, lambda n: recipe[n].of(source.load), advance)
    else:
        _write_shards(
            source, directory, recipe, planned, partial(meta.split, shards=shards, rule=rule), advance
        )
    write_json(directory / "params.json", params)
    write_model_files(source, directory)


def _write_shards(
    source: ModelReader,
    directory: Path,
    recipe: Mapping[str, TensorRule],
    planned: Mapping[str, list[Tensor]],
    split: Callable[[str, Tensor], list[Tensor]],
    advance: Advance,
) -> None:
    with ExitStack() as opened:
        files = [
            opened.enter_context(
                TorchFileWriter(directory / _file_name(i), {n: p[i] for n, p in planned.items()})
            )
            for i in range(len(next(iter(planned.values()))))
        ]
        for name, made in recipe.items():
            tensor = made.of(source.load)
            for file, piece in zip(files, split(name, tensor), strict=True):
                file.put(name, piece)
            advance(tensor.nbytes)


def _shard_files(directory: Path) -> list[Path]:
    if (directory / _SAFETENSORS).is_file():
        return [directory / _SAFETENSORS]
    files = sorted(directory.glob("consolidated.*.pth"))
    wanted = [_file_name(i) for i in range(max(1, len(files)))]
    if [path.name for path in files] != wanted:
        last = max((int(m[1]) for p in files if (m := re.search(r"\.(\d+)\.pth$", p.name))), default=0)
        missing = [n for i in range(last + 1) if not (directory / (n := _file_name(i))).is_file()]
        raise UserError(f"{directory} lacks {', '.join(missing) or wanted[0]}", "copy all shards there")
    return files


def _file_name(shard: int) -> str:
    return f"consolidated.{shard:02d}.pth"


def _spec(
    directory: Path, params: Mapping[str, Any], whole: Mapping[str, Tensor], read: Callable[[str], Tensor]
) -> tuple[ModelSpec, Mapping[str, Any]]:
    """Return the spec and the token ids: of model.toml if it exists, else of params.json and the weights."""
    meta = meta_names()
    if (directory / "model.toml").is_file() and (found := read_description(directory)):
        spec, tokens = found.spec, found.tokens
        kv_heads = params.get("n_kv_heads") or spec.kv_heads
        if _comparable(meta.meta_params(spec, meta.rule_of(spec), kv_heads)) != _comparable(params):
            raise UserError(
                f"{directory / 'params.json'} and model.toml describe different models",
                "remove the wrong one",
            )
        return spec, tokens
    vocab_size = params.get("vocab_size", -1)
    vocab_size = whole[meta.HEAD].shape[0] if vocab_size == -1 else vocab_size
    spec = meta.spec_from_params(params, vocab_size, _is_tied(whole, read))
    config = directory / "config.json"
    # the context length is not in params.json
    length = read_json(config).get("max_position_embeddings") if config.is_file() else None
    return replace(spec, max_seq_len=length) if type(length) is int else spec, {}


def _comparable(params: Mapping[str, Any]) -> list[Any]:
    defaults = {"rope_theta": 10000.0, "use_scaled_rope": False}
    names = ("dim", "n_layers", "n_heads", "vocab_size", "norm_eps", "rope_theta", "use_scaled_rope")
    return [params.get(name, defaults.get(name)) for name in names]


def _is_tied(whole: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> bool:
    """Return whether embedding and head are equal: Meta's files of tied models hold the table twice."""
    meta = meta_names()
    embedding, head = whole[meta.EMBEDDING], whole[meta.HEAD]
    if embedding.shape != head.shape or embedding.dtype != head.dtype:
        return False
    return torch.equal(read(meta.EMBEDDING), read(meta.HEAD))
