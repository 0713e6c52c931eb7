"""The tokenizer of a Hugging Face directory: completed from what lies beside the weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arriero.data.tokens.tokenizer import KNOWN_BEGINNINGS, KNOWN_ENDS, parsed, read_definition
from arriero.errors import UserError
from arriero.model.description import write_json
from arriero.model.spec import ModelSpec

TEMPLATE = "add_bos_token"


def refuse_damaged_tokenizer(companions: Mapping[str, Path], tokens: Mapping[str, Any]) -> None:
    """Checked before the weights are written; a tokenizer that is only copied is not read."""
    if "tokenizer.json" in companions and (TEMPLATE in tokens or "tokenizer_config.json" not in companions):
        read_definition(companions["tokenizer.json"])


def write_tokenizer(directory: Path, spec: ModelSpec, tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the tokenizer files in the directory; returns the token ids for config.json.

    Where `tokens` says whether texts began with the BOS in training, tokenizer.json is made to do the same.
    """
    path = directory / "tokenizer.json"
    ids = {name: value for name, value in tokens.items() if name != TEMPLATE}
    if path.is_file() and TEMPLATE in tokens:
        bos_id = ids.get("bos_token_id") if tokens[TEMPLATE] else None
        path.write_text(with_template(read_definition(path), bos_id), encoding="utf-8")
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
        # a plain vocabulary entry is not named: transformers would cut it out of every text
        **{name: token for name, token in names.items() if token is not None},
        **({TEMPLATE: tokens[TEMPLATE], "add_eos_token": False} if TEMPLATE in tokens else {}),
        "clean_up_tokenization_spaces": False,
    }
    write_json(directory / "tokenizer_config.json", about)
    return ids


def with_template(definition: str, bos_id: int | None) -> str:
    """The same tokenizer, with a post-processor that adds `bos_id` before a text, and nothing else."""
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
    """A config may name several EOS tokens; a tokenizer has one, the first."""
    return special.get(number[0] if isinstance(number, list) else number)


def _from_model_file(path: Path) -> str:
    """Meta's models were trained with the BOS before each text, and transformers adds it so."""
    definition = read_definition(path)
    inner = parsed(definition)
    found = (inner.token_to_id(name) for name in KNOWN_BEGINNINGS)
    return with_template(definition, next((number for number in found if number is not None), None))
