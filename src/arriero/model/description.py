"""The description of a stored model beside its weights: model.toml, run.toml, config.json or params.json."""

import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from arriero.config.fields import toml_value
from arriero.data.text.hub import local_model
from arriero.errors import UserError
from arriero.model.adapters import AdapterSettings, adapter_of
from arriero.model.family import meta_names
from arriero.model.presets import completed, resolve
from arriero.model.spec import ModelSpec

NAME = "model.toml"
ADAPTER = "adapter_config.json"
_STATE = "state.json"


@dataclass(frozen=True)
class Description:
    """`tokens` are token ids under Hugging Face's names; `remarks` are notes about them for the user."""

    spec: ModelSpec
    tokens: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    adapter: AdapterSettings | None = None
    start_from: str | None = None


def write_description(spec: ModelSpec, tokens: Mapping[str, Any], directory: Path) -> None:
    """Write model.toml: [model] as in a run file, and in [tokens] the ids of special tokens."""
    fields = spec.to_dict()
    fields.pop("nominal_params", None)
    lines = ["[model]", *(f"{name} = {toml_value(value)}" for name, value in fields.items())]
    if tokens:
        lines += ["", "[tokens]", *(f"{name} = {toml_value(value)}" for name, value in tokens.items())]
    (directory / NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_description(directory: Path) -> Description | None:
    """Read model.toml, or run.toml and state.json of a training checkpoint; None if there is neither."""
    path = next((p for p in (directory / NAME, directory / "run.toml") if p.is_file()), None)
    if path is None:
        return None
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error})", "copy the checkpoint again") from None
    if not isinstance(table.get("model"), dict):
        raise UserError(f"{path} has no [model] section", "give a checkpoint written by arriero")
    fields = {name: value for name, value in table["model"].items() if name != "preset"}
    try:
        spec = resolve(None, fields)
    except UserError as error:
        raise UserError(f"{path}: {error.what}", error.todo) from None
    if path.name == NAME:
        return Description(spec, checked_token_ids(path, table.get("tokens", {})))
    tokens = read_json(directory / _STATE).get("token_ids") if (directory / _STATE).is_file() else None
    adapter: dict[str, Any] = {
        "adapter": adapter_of(table),
        "start_from": table.get("checkpoint", {}).get("start_from"),
    }
    if tokens is None:
        older = f"{directory} was written by an older version, which did not record token ids"
        note = f"{older}: BOS and EOS are guessed from names in its tokenizer"
        return Description(spec, remarks=(note,), **adapter)
    return Description(spec, checked_token_ids(directory / _STATE, tokens), **adapter)


def checked_token_ids(path: Path, tokens: Any) -> dict[str, Any]:
    """Return token ids under Hugging Face's names after a check. Some models have several EOS or PAD ids."""
    if not isinstance(tokens, dict):
        raise UserError(f"{path}: the token ids are {tokens!r}, not a table", "copy the checkpoint again")
    for name, value in tokens.items():
        several = isinstance(value, list) and value and name != "bos_token_id"
        ids = value if several else [value]
        # old configs contain -1 for a token that the tokenizer does not have
        if name != "add_bos_token" and not all(type(i) is int and -1 <= i < 2**31 for i in ids):
            raise UserError(f"{path}: {name} is {value!r}, not a token id", "copy or download it again")
        if name == "add_bos_token" and not isinstance(value, bool):
            raise UserError(f"{path}: {name} is {value!r}, not true or false", "copy or download it again")
    return tokens


def model_at(path: Path, own: Mapping[str, Any]) -> ModelSpec:
    """Return the model of a directory in any format, of a checkpoint or of a run, without reading weights.

    `own` gives what Meta's params.json does not: whether the head is tied, and Llama 2's vocabulary size.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist", "give a model directory, a checkpoint or a run")
    directory = path if path.is_dir() else path.parent
    # without directories that were renamed or never finished
    found = directory.glob("checkpoints/step-*/run.toml")
    saved = sorted(file for file in found if file.parent.name.removeprefix("step-").isdigit())
    if (about := read_description(saved[-1].parent if saved else directory)) is not None:
        return about.spec
    if (directory / ADAPTER).is_file():
        base = read_json(directory / ADAPTER).get("base_model_name_or_path")
        if not isinstance(base, str):
            raise UserError(
                f"{directory / ADAPTER} lacks base_model_name_or_path", "copy or download it again"
            )
        return model_at(base_of_adapter(directory, base, weights=False), own)
    if (directory / "config.json").is_file():
        from arriero.model.name_maps import spec_from_hf

        return spec_from_hf(read_json(directory / "config.json"), str(directory / "config.json"))
    if (directory / "params.json").is_file():
        meta = meta_names()
        params = meta.read_params(directory / "params.json")
        vocab_size = own.get("vocab_size", params.get("vocab_size", -1))
        if vocab_size == -1:
            raise UserError(f"{directory / 'params.json'} has no vocab_size", "set model.vocab_size")
        return meta.spec_from_params(params, vocab_size, own.get("tied", False))
    raise UserError(f"{path} holds no model", "give a model directory, a checkpoint or a run")


def base_of_adapter(adapter: Path, name: str, weights: bool = True) -> Path:
    """Return the directory of the base model that a PEFT adapter names, also beside it, or from the hub."""
    places = [each for each in (Path(name), adapter / name) if each.exists()]
    base = places[0] if places else local_model(f"hf://{name}", weights=weights)
    if (base / ADAPTER).is_file():
        what = f"{adapter} names {base} as its base, which is an adapter too"
        raise UserError(what, "merge that one first, or rename its directory if it is not the base")
    return base


def expand_from(
    table: Mapping[str, Any], sections: Mapping[str, Any], embedded: Collection[str]
) -> ModelSpec:
    """Return the model of checkpoint.start_from or resume_from; keys of [model] must not contradict it.

    If the directory cannot be read, a complete [model] is used, or the run's own run.toml: a run with
    checkpoints of its own does not need the directory any more.
    """
    section = sections["checkpoint"]
    key = "start_from" if section.start_from else "resume_from"
    path = section.start_from or section.resume_from
    given = {name: value for name, value in table.items() if name not in embedded}
    preset, own = given.get("preset"), {name: value for name, value in given.items() if name != "preset"}
    named = resolve(preset, own).to_dict() if preset else own
    try:
        found = model_at(local_model(path, weights=False), named)
    except UserError as error:
        try:
            return _recorded(sections, key, path) or completed(table, sections)
        except UserError:
            raise UserError(f"checkpoint.{key}: {error.what}", error.todo) from None
    wanted = resolve(preset, own) if preset else _overridden(found, own)
    check_model_unchanged(f"checkpoint.{key}: {path}", found, wanted, section.load.allow_model_changes)
    return wanted


def _recorded(sections: Mapping[str, Any], key: str, path: str) -> ModelSpec | None:
    """Return the model of a run that started from `path` earlier, from its run.toml."""
    run = sections.get("run")
    file = Path(run.dir) / run.name / "run.toml" if run is not None else None
    if file is None or not file.is_file():
        return None
    found = read_description(file.parent)
    began = tomllib.loads(file.read_text(encoding="utf-8")).get("checkpoint", {}).get(key)
    return found.spec if found is not None and began == path else None


def _overridden(found: ModelSpec, own: Mapping[str, Any]) -> ModelSpec:
    fields = found.to_dict()
    scaling = own.get("rope_scaling")
    if isinstance(scaling, Mapping):
        own = {**own, "rope_scaling": {**fields.get("rope_scaling", {}), **scaling}}
    if isinstance(own.get("extra"), Mapping):
        own = {**own, "extra": {**fields.get("extra", {}), **own["extra"]}}
    # from_dict takes false as "without"
    return ModelSpec.from_dict({**fields, **own})


def check_model_unchanged(
    where: str, found: ModelSpec, wanted: ModelSpec, allowed: Collection[str] = ()
) -> None:
    """Raise UserError if keys of [model] differ, except those that match a pattern in `allowed`."""
    old, new = ({**spec.to_dict(), "nominal_params": None} for spec in (found, wanted))
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    changed = [name for name in changed if not any(fnmatchcase(name, pattern) for pattern in allowed)]
    if changed:
        both = ", ".join(
            f"{n} = {toml_value(old.get(n))} (the run: {toml_value(new.get(n))})" for n in changed
        )
        raise UserError(
            f"{where} is another model: it has {both}",
            f"remove {', '.join(f'model.{name}' for name in changed)}, or allow the change: "
            f"checkpoint.load.allow_model_changes = {toml_value(changed)}",
        )


def require_description(directory: Path) -> Description:
    """Read the description of a directory that must have one."""
    found = read_description(directory)
    if found is None:
        raise UserError(
            f"{directory} holds weights but neither {NAME} nor run.toml, which describe the model",
            f"write {NAME} there, with the [model] section of the run file",
        )
    return found


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error})", "copy or download it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object", "copy or download it again")
    return content


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
