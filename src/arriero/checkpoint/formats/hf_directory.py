"""A Hugging Face directory: safetensors in shards, config, generation config, tokenizer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arriero.checkpoint.formats.model_reader import (
    ModelReader,
    WriteOptions,
    check_dtypes,
    copy_extra_files,
    find_extra_files,
)
from arriero.checkpoint.formats.tensor_files import (
    Slices,
    open_tensors,
    split_by_size,
    write_safetensors,
)
from arriero.data.tokens.tokenizer import KNOWN_BEGINNINGS, KNOWN_ENDS, first_token, parsed, read_definition
from arriero.errors import UserError
from arriero.files import Advance, no_progress
from arriero.model.description import checked_token_ids, read_json, write_json
from arriero.model.name_maps import (
    HF_HEAD,
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
_EMBEDDING = "embedding.weight"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def open_hf(directory: Path) -> ModelReader:
    config = _config(directory)
    spec = spec_from_hf(config, str(directory / CONFIG))
    readers = {name: file for file in map(open_tensors, _files(directory)) for name in file.tensors}
    found = {name: file.tensors[name] for name, file in readers.items()}
    own, names, head = own_tensors(spec), hf_names(found, spec), readers.get(HF_HEAD) if spec.tied else None
    stored, wanted = {theirs: found[name] for theirs, name in names.items()}, to_hf(own, spec)
    if head is not None:
        stored[HF_HEAD], wanted[HF_HEAD] = found[HF_HEAD], own[_EMBEDDING]
    check_tensors(stored, wanted, str(directory))
    recipe = own_from_hf(spec)
    tensors = {name: t.to(stored[recipe[name].parts[0]].dtype) for name, t in own.items()}
    check_dtypes(tensors, str(directory))

    def read(theirs: str) -> Tensor:
        return readers[names[theirs]].read(names[theirs])

    def load(name: str) -> Tensor:
        tensor = recipe[name].of(read)
        if name == _EMBEDDING and head is not None:
            _check_tied(tensor, head.read(HF_HEAD), directory)
        return tensor

    def read_slice(name: str, slices: Slices) -> Tensor:
        """GPT-2 stores matrices fused and transposed; its models are small enough to be read whole."""
        made = recipe[name]
        if made.make is not unchanged:
            return made.of(read)[slices]
        stored = names[made.parts[0]]
        part = readers[stored].read_slice(stored, slices)
        if name == _EMBEDDING and head is not None:
            _check_tied(part, head.read_slice(HF_HEAD, slices), directory)
        return part

    ids = {name: config[name] for name in _TOKEN_IDS if config.get(name) is not None}
    return ModelReader(
        "hf",
        str(directory),
        spec,
        tensors,
        load,
        find_extra_files(directory),
        checked_token_ids(directory / CONFIG, ids),
        load_slice=read_slice,
    )


def _check_tied(embedding: Tensor, head: Tensor, directory: Path) -> None:
    """Raise UserError if a head that is stored beside the embedding it is tied to is another matrix."""
    if not torch.equal(embedding, head.to(embedding.dtype)):
        what = f"{directory / CONFIG} has tie_word_embeddings = true, and {HF_HEAD} is not the embedding"
        raise UserError(what, "set tie_word_embeddings to false, or remove the head from the weights")


def write_hf(
    source: ModelReader, directory: Path, writing: WriteOptions, advance: Advance = no_progress
) -> None:
    spec, recipe = source.spec, hf_from_own(source.spec)
    planned = {name: made.of(source.tensors.__getitem__) for name, made in recipe.items()}
    check_tokenizer(source.extra_files, source.tokens)

    def load(name: str) -> Tensor:
        return recipe[name].of(source.load)

    shards = _shards(planned, writing.shard_bytes)
    for file, names in shards.items():
        write_safetensors(directory / file, {n: planned[n] for n in names}, load, advance)
    if len(shards) > 1:
        places = {name: file for file, names in shards.items() for name in names}
        total = sum(t.nbytes for t in planned.values())
        write_json(directory / _INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    copy_extra_files(source, directory)
    tokens = write_tokenizer(directory, spec, source.tokens)
    write_json(directory / CONFIG, hf_config(spec, next(iter(planned.values())).dtype) | tokens)
    if "generation_config.json" not in source.extra_files:
        write_json(directory / "generation_config.json", {"do_sample": False, **tokens})


def load_hf(directory: str | Path) -> tuple[dict[str, Tensor], ModelSpec]:
    source = open_hf(Path(directory))
    return source.state(), source.spec


def _config(directory: Path) -> dict[str, Any]:
    if not (directory / CONFIG).is_file():
        raise UserError(f"{directory} holds no {CONFIG}", "give a Hugging Face model directory")
    return read_json(directory / CONFIG)


def _files(directory: Path) -> list[Path]:
    """Return the weight files: safetensors before torch.save files, an index before a single file."""
    places = (directory / f"{name}{index}" for name in (_WEIGHTS, _PICKLED) for index in ("", ".index.json"))
    found = [path for path in places if path.is_file()]
    if not found:
        raise UserError(f"{directory} lacks {_WEIGHTS}", "copy the weights there")
    first = found[1] if found[1:] and found[1].name == f"{found[0].name}.index.json" else found[0]
    if first.suffix != ".json":
        return [first]
    names = _indexed(first)
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise UserError(f"{directory} lacks {', '.join(missing)}", f"copy the files that {first.name} names")
    return [directory / name for name in names]


def _indexed(path: Path) -> list[str]:
    """Return the files that an index names; each must be a plain name beside it."""
    table = read_json(path).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise UserError(f"{path} has no weight_map", "copy or download it again")
    for tensor, name in table.items():
        plain = isinstance(name, str) and name == Path(name).name and not set(name) & {"\\", "\0"}
        if not plain or name in ("", ".", ".."):
            raise UserError(
                f"{path} places {tensor} in {name!r}, which is not the name of a file beside it",
                "copy or download it again, from a source you trust",
            )
    return sorted(set(table.values()))


def _shards(planned: Mapping[str, Tensor], limit: int) -> dict[str, list[str]]:
    """Distribute tensors over files of at most `limit` bytes; a larger tensor gets its own file."""
    shards = list(split_by_size({name: tensor.nbytes for name, tensor in planned.items()}, limit))
    if len(shards) == 1:
        return {_WEIGHTS: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}


TEMPLATE = "add_bos_token"


def check_tokenizer(extra_files: Mapping[str, Path], tokens: Mapping[str, Any]) -> None:
    """Reject a damaged tokenizer before weights are written, unless it is only copied."""
    if "tokenizer.json" in extra_files and (TEMPLATE in tokens or "tokenizer_config.json" not in extra_files):
        read_definition(extra_files["tokenizer.json"])


def write_tokenizer(directory: Path, spec: ModelSpec, tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the tokenizer files in the directory; return the token ids for config.json.

    Where `tokens` says whether texts began with the BOS in training, tokenizer.json is made to do the same.
    """
    path = directory / "tokenizer.json"
    ids = {name: value for name, value in tokens.items() if name != TEMPLATE}
    if path.is_file() and TEMPLATE in tokens:
        bos_id = ids.get("bos_token_id") if tokens[TEMPLATE] else None
        path.write_text(set_bos_template(read_definition(path), bos_id), encoding="utf-8")
    elif not path.is_file() and (directory / "tokenizer.model").is_file():
        path.write_text(_from_model_file(directory / "tokenizer.model"), encoding="utf-8")
    if not path.is_file() or (directory / "tokenizer_config.json").is_file():
        return ids
    inner = parsed(read_definition(path))
    special = {i: token.content for i, token in inner.get_added_tokens_decoder().items() if token.special}
    if TEMPLATE not in tokens:
        ids = ids or _usual_ids(special)
    names = {key.removesuffix("_id"): _name(special, value) for key, value in ids.items()}
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.max_seq_len,
        # transformers would cut a plain vocabulary entry out of every text if it were named here
        **{name: token for name, token in names.items() if token is not None},
        **({TEMPLATE: tokens[TEMPLATE], "add_eos_token": False} if TEMPLATE in tokens else {}),
        "clean_up_tokenization_spaces": False,
    }
    write_json(directory / "tokenizer_config.json", about)
    return ids


def set_bos_template(definition: str, bos_id: int | None) -> str:
    """Return the tokenizer with a post-processor that adds `bos_id` before a text, and nothing else."""
    document = json.loads(definition)
    before = document.get("post_processor") or {}
    steps = before.get("processors", []) if before.get("type") == "Sequence" else [before]
    kept = [step for step in steps if step.get("type") == "ByteLevel"]
    if bos_id is not None:
        token = parsed(definition).id_to_token(bos_id) if bos_id >= 0 else None
        if token is None:
            raise UserError(f"the tokenizer has no token {bos_id}, the model's BOS", "restore the tokenizer")
        kept.append(_template(token, bos_id))
    sequence = {"type": "Sequence", "processors": kept}
    document["post_processor"] = sequence if len(kept) > 1 else next(iter(kept), None)
    document["truncation"] = document["padding"] = None
    return json.dumps(document, ensure_ascii=False, indent=2)


def _template(token: str, number: int) -> dict[str, Any]:
    def part(sequence: str, kind: int) -> list[dict[str, Any]]:
        bos = {"SpecialToken": {"id": token, "type_id": kind}}
        return [bos, {"Sequence": {"id": sequence, "type_id": kind}}]

    return {
        "type": "TemplateProcessing",
        "single": part("A", 0),
        "pair": part("A", 0) + part("B", 1),
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _usual_ids(special: Mapping[int, str]) -> dict[str, int]:
    """Guess BOS and EOS by their usual names."""
    numbers = {content: number for number, content in special.items()}
    kinds = (("bos_token_id", KNOWN_BEGINNINGS), ("eos_token_id", KNOWN_ENDS))
    found = {kind: next((numbers[n] for n in names if n in numbers), None) for kind, names in kinds}
    return {kind: number for kind, number in found.items() if number is not None}


def _name(special: Mapping[int, str], number: int | list[int]) -> str | None:
    """Return the name of a token id; of several EOS tokens the first, because a tokenizer has one."""
    return special.get(number[0] if isinstance(number, list) else number)


def _from_model_file(path: Path) -> str:
    """Convert Meta's tokenizer.model; it adds the BOS, as in the training of Meta's models."""
    definition = read_definition(path)
    bos = first_token(parsed(definition), KNOWN_BEGINNINGS)
    return set_bos_template(definition, bos.id if bos else None)
