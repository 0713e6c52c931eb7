"""Load a run file and --set into a frozen RunConfig, with the origin of each value and all problems."""

import inspect
import json
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from arriero.config.keys import (
    ConfigError,
    Problem,
    field_at,
    from_validation,
    renamed_keys,
    section_of,
    unknown_section,
    without_unset,
)
from arriero.config.schema import ModelSection, RunConfig
from arriero.config.timeline import Timeline
from arriero.errors import UserError
from arriero.units import Span

Table = dict[str, Any]
# Completes the [model] table, given the other sections and the names that only the embedded default gives.
# A parameter, because presets and model directories are read by packages that import this one.
ExpandModel = Callable[[Mapping[str, Any], Mapping[str, Any], Collection[str]], Mapping[str, Any]]
_EMBEDDED = "embedded default"
_DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
_BESIDE_STORED = ("events.jsonl", "manifest.json")


@dataclass(frozen=True)
class LoadedRun:
    config: RunConfig
    origins: Mapping[str, str]

    def origin(self, key: str) -> str:
        return _origin_of(key, self.origins, "default")


def load_run(path: Path | None, sets: Iterable[str], expand_model: ExpandModel) -> LoadedRun:
    """Load a run file, or the embedded default without a path; raise a ConfigError with all problems.

    Later layers win: schema defaults, preset or model to start from, `extends`, the file, --set.
    """
    loaded, problems = read_run(path, sets, expand_model)
    if problems or loaded is None:
        raise ConfigError(problems)
    return loaded


def read_run(
    path: Path | None, sets: Iterable[str], expand_model: ExpandModel
) -> tuple[LoadedRun | None, list[Problem]]:
    """Return the run and all its problems; no run where a section cannot be read."""
    tree: Table = {}
    origins: dict[str, str] = {}
    if path is None:
        default = files("arriero.config").joinpath("default.toml").read_text(encoding="utf-8")
        _overlay(tree, tomllib.loads(default), _EMBEDDED, origins)
    else:
        _overlay_file(tree, origins, path, seen=())
    _overlay_sets(tree, origins, sets)
    return _validate(tree, origins, expand_model, str(path or _EMBEDDED))


def config_from_toml(path: Path) -> RunConfig:
    """Read a stored run.toml, which holds every value itself; keys of earlier versions are renamed."""
    loaded, problems = _validate(_upgraded(_read_toml(path)), {}, lambda table, *_: table, str(path))
    if problems or loaded is None:
        raise ConfigError(problems)
    return loaded.config


def _upgraded(table: Table) -> Table:
    """Rename the keys of earlier versions in a stored run file."""
    for old, new in renamed_keys().items():
        (old_section, old_name), (section, name) = old.split("."), new.split(".")
        if isinstance(table.get(old_section), dict) and old_name in table[old_section]:
            table.setdefault(section, {})[name] = table[old_section].pop(old_name)
    return table


def _is_stored(path: Path) -> bool:
    """Return whether a file is the run.toml of a run directory or of a checkpoint."""
    return path.name == "run.toml" and any((path.parent / name).exists() for name in _BESIDE_STORED)


def _overlay_file(tree: Table, origins: dict[str, str], path: Path, seen: tuple[Path, ...]) -> None:
    table = _upgraded(_read_toml(path)) if _is_stored(path) else _read_toml(path)
    if path.resolve() in seen:
        raise UserError(f"{path} extends itself", "remove `extends` from one of the files")
    base = table.pop("extends", None)
    if base is not None:
        if not isinstance(base, str):
            raise UserError(
                f"{path}: extends = {base!r} is not a file name", 'write it like extends = "base.toml"'
            )
        _overlay_file(tree, origins, path.parent / base, (*seen, path.resolve()))
    _overlay(tree, table, str(path), origins)


def _read_toml(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"there is no run file {path}", "check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error})", "give a readable TOML file") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML ({error})", "correct the file") from None


def _overlay_sets(tree: Table, origins: dict[str, str], sets: Iterable[str]) -> None:
    for item in sets:
        key, equals, text = item.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise UserError(f"--set {item} is not an assignment", "write it like --set train.batch='4M tok'")
        if text.strip() == "default" and field_at(RunConfig, key.strip()):
            _restore_default(tree, origins, parts)
            continue
        table: Table = {parts[-1]: _parse_value(text.strip())}
        for part in reversed(parts[:-1]):
            table = {part: table}
        _overlay(tree, table, "--set", origins)


def _restore_default(tree: Table, origins: dict[str, str], parts: list[str]) -> None:
    """Remove what files and earlier --set options gave for a key or section."""
    key = ".".join(parts)
    for name in [n for n in origins if n == key or n.startswith(f"{key}.")]:
        del origins[name]
    table: Any = tree
    for part in parts[:-1]:
        table = table.get(part) if isinstance(table, dict) else None
    if isinstance(table, dict):
        table.pop(parts[-1], None)


def _parse_value(text: str) -> Any:
    """Read a TOML value, or plain text where the shell removed the quotes."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text


def _overlay(
    tree: Table, table: Mapping[str, Any], origin: str, origins: dict[str, str], prefix: str = ""
) -> None:
    for name, value in table.items():
        key = prefix + name
        if key == "parallel" and value == "auto":
            value = dict.fromkeys(_DEGREES, "auto")
        if isinstance(value, dict) and isinstance(tree.get(name, {}), dict):
            _overlay(tree.setdefault(name, {}), value, origin, origins, f"{key}.")
            continue
        tree[name] = value
        origins[key] = origin


def _validate(
    tree: Table, origins: dict[str, str], expand_model: ExpandModel, where: str
) -> tuple[LoadedRun | None, list[Problem]]:
    sections, problems = _validate_sections(tree)
    try:
        model = _expanded_model(tree, sections, expand_model, origins)
    except UserError as error:
        model = {}
        preset = _preset_of(tree)
        key = "model.preset" if preset and preset in error.what else "model"
        problems.append(Problem(key, error.what, error.todo))
    problems += cross_check(sections | model)
    complete = model and sections.keys() == RunConfig.model_fields.keys()
    loaded = LoadedRun(RunConfig(**(sections | model)), origins) if complete else None
    return loaded, [replace(p, origin=_origin_of(p.key, origins, where)) for p in problems]


def _preset_of(tree: Table) -> str | None:
    table = tree.get("model")
    preset = table.get("preset") if isinstance(table, dict) else None
    return preset if isinstance(preset, str) else None


def _expanded_model(
    tree: Table, sections: Table, expand_model: ExpandModel, origins: dict[str, str]
) -> dict[str, Any]:
    """Return the model section with every dimension; of an invalid section only the preset is checked."""
    preset = _preset_of(tree)
    base = expand_model({"preset": preset}, {}, ()) if preset else {}
    if "model" not in sections:
        return {}
    given = sections["model"].model_dump(exclude_unset=True, exclude_none=True)
    embedded = {name for name in given if _origin_of(f"model.{name}", origins, "") == _EMBEDDED}
    fields = expand_model(given, sections, embedded)
    if "preset" in embedded and fields.get("dim") != base.get("dim"):
        del given["preset"]
    full = {**given, **fields}
    for name in full.keys() - given.keys():
        origins[f"model.{name}"] = _origin_of_dimension(name, full, base, preset, sections)
    return {"model": ModelSection.model_validate(full)}


def _origin_of_dimension(
    name: str, full: Mapping[str, Any], base: Mapping[str, Any], preset: str | None, sections: Table
) -> str:
    """Return the origin of a dimension that the run file does not give."""
    start = sections.get("checkpoint")
    if start is not None and (start.start_from or start.resume_from):
        return "checkpoint.start_from" if start.start_from else "checkpoint.resume_from"
    if preset:
        return f"preset {preset}" if base.get(name) == full[name] else "derived"
    return "data.seq_len" if name == "max_seq_len" else "default"


def _validate_sections(tree: Table) -> tuple[Table, list[Problem]]:
    """Validate each section alone, so that one wrong key does not hide problems elsewhere."""
    sections: Table = {}
    errors: list[Any] = [
        error
        for name, value in tree.items()
        if name not in RunConfig.model_fields
        for error in unknown_section(name, value)
    ]
    for name, field in RunConfig.model_fields.items():
        section = section_of(field.annotation)
        assert section is not None
        table = without_unset(section, tree.get(name, {}))
        try:
            sections[name] = _read_section(section, table)
        except ValidationError as error:
            errors += [{**e, "loc": (name, *e["loc"])} for e in error.errors()]
            unknown = {e["loc"][0] for e in error.errors() if e["type"] == "extra_forbidden"}
            if len(unknown) == error.error_count():
                rest = {key: value for key, value in table.items() if key not in unknown}
                sections[name] = _read_section(section, rest)
    return sections, from_validation(errors)


def _read_section(section: type[BaseModel], table: Any) -> BaseModel:
    """Validate strictly, as JSON: a list is accepted for a tuple, but text is never a number."""
    return section.model_validate_json(json.dumps(table, default=str), strict=True)


def _origin_of(key: str, origins: Mapping[str, str], otherwise: str) -> str:
    """Return where a key, the table around it, or a key inside it was given; --set wins."""
    around = key
    while around:
        if around in origins:
            return origins[around]
        around = around[: max(around.rfind("."), around.rfind("["), 0)]
    inside = [origin for name, origin in origins.items() if name.startswith((f"{key}.", f"{key}["))]
    return "--set" if "--set" in inside else next(iter(inside), otherwise)


# a larger batch is a mistyped unit
_MOST_SEQUENCES = 2**22


def cross_check(sections: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of keys that depend on each other; rules about layout and device are in plan/.

    The parameters of a rule are the sections that it needs.
    """
    problems: list[Problem] = []
    for rule in _RULES:
        names = inspect.signature(rule).parameters
        if names.keys() <= sections.keys():
            problems += rule(**{name: sections[name] for name in names})
    return problems


def _sequence_fits_model(data, model) -> Iterator[Problem]:
    phases = [(f"data.phases[{i}].seq_len", phase.seq_len) for i, phase in enumerate(data.phases)]
    for key, length in [("data.seq_len", data.seq_len), *phases]:
        if model.max_seq_len is not None and length is not None and length > model.max_seq_len:
            what = f"{length} is longer than the model allows ({model.max_seq_len})"
            yield Problem(key, what, "shorten it, or raise model.max_seq_len")


def _batch_is_whole_sequences(data, train) -> Iterator[Problem]:
    batch, length = train.batch.amount, data.seq_len
    keys = ("train.batch", "data.seq_len")
    for i, phase in enumerate([None, *data.phases]):
        if phase is not None:
            if phase.batch is None and phase.seq_len is None:
                continue
            batch = phase.batch.amount if phase.batch else batch
            length = phase.seq_len or length
            at = f"data.phases[{i - 1}]"
            keys = (f"{at}.batch" if phase.batch else f"{at}.seq_len", f"{at}.seq_len")
        if batch % length:
            lower = batch // length * length
            near = " or ".join(f"'{Span(n, 'tok')}'" for n in (lower, lower + length) if n)
            what = f"a batch of '{Span(batch, 'tok')}' is not a multiple of {keys[1]} ({length})"
            yield Problem(keys[0], what, f"set the batch to {near}")
        elif batch // length > _MOST_SEQUENCES:
            what = f"'{Span(batch, 'tok')}' is {batch // length:,} sequences of {length} tokens in one step"
            yield Problem(keys[0], what, f"use at most {_MOST_SEQUENCES:,} sequences")


def _phases_change_something(data) -> Iterator[Problem]:
    for i, phase in enumerate(data.phases):
        if not (phase.sources or phase.batch or phase.seq_len or phase.lr):
            todo = "give its sources, batch, seq_len or lr, or remove it"
            yield Problem(f"data.phases[{i}]", "changes nothing", todo)
        if phase.seq_len is not None and data.packing != "concat":
            what = f"packing '{data.packing}' plans its rows for one sequence length"
            todo = "set data.packing to 'concat', or start another run from the weights of this one"
            yield Problem(f"data.phases[{i}].seq_len", what, todo)


def _mixtures(data) -> Iterator[tuple[str, Any]]:
    """Yield the sources of the run and of each phase that has its own, with their key."""
    yield "data.sources", data.sources
    yield from ((f"data.phases[{i}].sources", p.sources) for i, p in enumerate(data.phases) if p.sources)


def _prompts_need_whole_documents(data) -> Iterator[Problem]:
    for key, sources in _mixtures(data) if data.packing == "concat" else ():
        for i, source in enumerate(sources):
            if source.prompt is not None:
                what = "a prompt precedes a document, and packing 'concat' cuts documents anywhere"
                yield Problem(f"{key}[{i}].prompt", what, "set data.packing to 'bestfit' or 'none'")


def _shares_sum_to_one(data) -> Iterator[Problem]:
    """Weights that are all below 1 are shares; a mistyped one would silently change the others."""
    for key, sources in _mixtures(data):
        weights = [source.weight for source in sources]
        if max(weights) < 1 and abs(sum(weights) - 1) > 1e-6:
            what = f"the weights are shares and sum to {sum(weights):g}"
            yield Problem(key, what, "make them sum to 1, or give proportions like 9 and 1")


def _phases_are_in_order(data, train) -> Iterator[Problem]:
    timeline, before = Timeline(data, train), 0
    end = None if train.horizon.unit == "s" else timeline.steps_of(train.horizon)
    for i, phase in enumerate(data.phases):
        key, step = f"data.phases[{i}].at", timeline.phases[i + 1].step
        if step <= before:
            what = f"'{phase.at}' is step {step}, not after step {before}, where the previous phase begins"
            yield Problem(key, what, "start each phase after the previous one")
        if end is not None and step >= end:
            what = f"'{phase.at}' is not before train.horizon ('{train.horizon}')"
            yield Problem(key, what, "use an earlier start")
        before = step


def _schedule_has_an_end(train, schedule) -> Iterator[Problem]:
    if train.horizon.unit == "s" and schedule.kind != "constant" and schedule.horizon is None:
        what = f"is missing: '{schedule.kind}' must end at some token or step, and train.horizon is wall time"
        yield Problem("schedule.horizon", what, "give it, or set schedule.kind = 'constant'")


def _decay_is_wsd(schedule) -> Iterator[Problem]:
    if schedule.decay is not None and schedule.kind != "wsd":
        what = f"has no meaning for '{schedule.kind}'"
        yield Problem("schedule.decay", what, "remove it, or set schedule.kind = 'wsd'")


def _eval_has_data(eval) -> Iterator[Problem]:
    if eval.every and not eval.heldout:
        what = "there is nothing held out to evaluate on"
        yield Problem("eval.every", what, "give eval.heldout, like '1M tok'")


def _momentum_is_used(optim) -> Iterator[Problem]:
    if optim.momentum is not None and optim.name == "adamw":
        what = "has no meaning for 'adamw', whose first moment decays by optim.betas[0]"
        yield Problem("optim.momentum", what, "remove it, or set optim.name to 'muon' or 'sgd'")


def _adapter_keys(lora, prefix, llama_adapter) -> list[str]:
    """Return the keys that ask for an adapter."""
    sizes = {"lora.rank": lora.rank, "prefix.tokens": prefix.tokens}
    return [key for key, size in (sizes | {"llama_adapter.tokens": llama_adapter.tokens}).items() if size]


def _adapter_fits_the_rest(
    lora, prefix, llama_adapter, optim, precision, memory, checkpoint
) -> Iterator[Problem]:
    keys = _adapter_keys(lora, prefix, llama_adapter)
    if not keys and precision.base_weights != "master":
        what = f"'{precision.base_weights}' is for frozen weights, and the run has no adapter"
        yield Problem("precision.base_weights", what, "set lora.rank, or remove the key")
    if len(keys) > 1:
        yield Problem(keys[1], f"cannot be combined with {keys[0]}", "train one adapter at a time")
    if checkpoint.adapter_from and not (keys and checkpoint.start_from):
        what = "needs an adapter and its base model" if keys else "is for runs with an adapter"
        todo = "set checkpoint.start_from to the base model" if keys else "set lora.rank, or remove the key"
        yield Problem("checkpoint.adapter_from", what, todo)
    if not keys:
        return
    if precision.float8 not in ("off", "auto"):
        yield Problem(
            "precision.float8", f"does not work with {keys[0]}", f"set it to 'off', or {keys[0]} = false"
        )
    if optim.freeze:
        what = f"has no meaning with {keys[0]}: only the adapters are trained"
        yield Problem("optim.freeze", what, "remove it")
    if lora.dropout and memory.ffn_tile:
        what = "recomputes tiles without their dropout (lora.dropout)"
        yield Problem("memory.ffn_tile", what, "set it to false, or lora.dropout = 0")


def _speculator_fits_the_rest(
    speculator, lora, prefix, llama_adapter, optim, parallel, precision, checkpoint
) -> Iterator[Problem]:
    if not speculator.n_predict:
        return
    for axis in ("tp", "cp", "pp"):
        if getattr(parallel, axis) != 1:
            what = f"speculator.n_predict is trained with data parallelism, and {axis} is given"
            yield Problem(f"parallel.{axis}", what, "set it to 1, and parallel.dp_shard to -1")
    for key in _adapter_keys(lora, prefix, llama_adapter):
        yield Problem(key, "does not work with speculator.n_predict", "train one after the other")
    if optim.freeze:
        what = "has no meaning with speculator.n_predict: only the speculator is trained"
        yield Problem("optim.freeze", what, "remove it")
    if precision.float8 not in ("off", "auto"):
        yield Problem("precision.float8", "does not work with speculator.n_predict", "set it to 'off'")
    if speculator.tie_weights and speculator.n_predict == 1:
        yield Problem("speculator.tie_weights", "needs two heads or more", "remove it")
    if not (checkpoint.start_from or checkpoint.resume_from):
        what = "a speculator is trained on a finished model, and there is none"
        yield Problem("checkpoint.start_from", what, "name the base model: a run, a directory or hf://NAME")


_RULES: tuple[Callable[..., Iterator[Problem]], ...] = (
    _sequence_fits_model,
    _batch_is_whole_sequences,
    _phases_change_something,
    _prompts_need_whole_documents,
    _shares_sum_to_one,
    _phases_are_in_order,
    _schedule_has_an_end,
    _decay_is_wsd,
    _eval_has_data,
    _momentum_is_used,
    _adapter_fits_the_rest,
    _speculator_fits_the_rest,
)
