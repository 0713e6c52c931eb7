"""The tokenizer of a Hugging Face directory, made where only Meta's or our own is there."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from arriero.checkpoint.formats.description import read_json, write_json
from arriero.data.tokens.tokenizer import KNOWN_BEGINNINGS, KNOWN_ENDS, read_definition
from arriero.errors import UserError
from arriero.model.spec import ModelSpec


def special_ids(tokenizer: Path, named: Mapping[str, str]) -> dict[str, int]:
    """{"eos_token": "<end>"} to {"eos_token_id": 3}."""
    ids = {e["content"]: e["id"] for e in read_json(tokenizer).get("added_tokens", [])}
    if unknown := [token for token in named.values() if token not in ids]:
        raise UserError(
            f"{tokenizer} has no special token {', '.join(unknown)}", "name one of its added tokens"
        )
    return {f"{name}_id": ids[token] for name, token in named.items()}


def write_tokenizer(directory: Path, spec: ModelSpec, tokens: dict[str, Any]) -> dict[str, Any]:
    """Completes what is in the directory; returns the ids for config.json."""
    path = directory / "tokenizer.json"
    if not path.is_file() and (directory / "tokenizer.model").is_file():
        path.write_text(_from_model_file(directory / "tokenizer.model"), encoding="utf-8")
    if not path.is_file():
        return tokens
    inner = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    if not (directory / "tokenizer_config.json").is_file():
        tokens = tokens or _usual_ids(inner)
        names = {key.removesuffix("_id"): _name(inner, value) for key, value in tokens.items()}
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": spec.max_seq_len,
            **{name: token for name, token in names.items() if token is not None},
            "clean_up_tokenization_spaces": False,
        }
        write_json(directory / "tokenizer_config.json", about)
    return tokens


def _usual_ids(inner: tokenizers.Tokenizer) -> dict[str, int]:
    """Where nothing names the beginning and the end, the special tokens of the usual names."""
    special = {t.content: i for i, t in inner.get_added_tokens_decoder().items() if t.special}
    kinds = (("bos_token_id", KNOWN_BEGINNINGS), ("eos_token_id", KNOWN_ENDS))
    found = {kind: next((special[n] for n in names if n in special), None) for kind, names in kinds}
    return {kind: number for kind, number in found.items() if number is not None}


def _name(inner: tokenizers.Tokenizer, number: int | list[int]) -> str | None:
    """A config may name several ends; a tokenizer has one, the first."""
    return inner.id_to_token(number[0] if isinstance(number, list) else number)


def _from_model_file(path: Path) -> str:
    """Meta's models were trained with the beginning token before each text, and transformers adds it so."""
    inner = tokenizers.Tokenizer.from_str(read_definition(path))
    begin = next((name for name in KNOWN_BEGINNINGS if inner.token_to_id(name) is not None), None)
    if begin is not None:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A",
            pair=f"{begin} $A {begin} $B:1",
            special_tokens=[(begin, inner.token_to_id(begin))],
        )
    return json.dumps(json.loads(inner.to_str()), ensure_ascii=False, indent=2)
