"""From files and --set to one frozen RunConfig that knows where each value came from."""

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
# Completes the [model] table, given the other sections and the names that only the embedded default gives;
# a parameter because presets and model directories are read above this package.
ExpandModel = Callable[[Mapping[str, Any], Mapping[str, Any], Collection[str]], Mapping[str, Any]]
_EMBEDDED = "embedded default"
_BESIDE_STORED = ("events.jsonl", "manifest.json")


@dataclass(frozen=True)
class LoadedRun:
    config: RunConfig
    origins: Mapping[str, str]

    def origin(self, key: str) -> str:
        return _origin_of(key, self.origins, "default")


def load_run(path: Path | None, sets: Iterable[str], expand_model: ExpandModel) -> LoadedRun:
    """Layers, lowest first: schema defaults, preset or model to start from, `extends`, the file, --set."""
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
        raise UserError(f"{path} extends itself", "remove `extends` from one of the files in the circle")
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
        raise UserError(
            f"there is no run file {path}", "check the path, or leave it out for the embedded default"
        ) from None
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
    """Forget what files and earlier --set options gave a key or section."""
    key = ".".join(parts)
    for name in [n for n in origins if n == key or n.startswith(f"{key}.")]:
        del origins[name]
    table: Any = tree
    for part in parts[:-1]:
        table = table.get(part) if isinstance(table, dict) else None
    if isinstance(table, dict):
        table.pop(parts[-1], None)


def _parse_value(text: str) -> Any:
    """A TOML value, or plain text where quotes were left to the shell."""
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
    """The model section with every dimension; of a faulty section only the preset's name is checked."""
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
    """Where a dimension came from that the run file does not give."""
    start = sections.get("checkpoint")
    if start is not None and (start.start_from or start.resume_from):
        return "checkpoint.start_from" if start.start_from else "checkpoint.resume_from"
    if preset:
        return f"preset {preset}" if base.get(name) == full[name] else "derived"
    return "data.seq_len" if name == "max_seq_len" else "default"


def _validate_sections(tree: Table) -> tuple[Table, list[Problem]]:
    """Each section by itself, so that one wrong key does not hide what is wrong elsewhere."""
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
    """Strictly, through JSON, where a list may stand for a tuple but text never for a number."""
    return section.model_validate_json(json.dumps(table, default=str), strict=True)


def _origin_of(key: str, origins: Mapping[str, str], otherwise: str) -> str:
    """Where a key, the table around it, or something inside it was given; --set speaks last."""
    around = key
    while around:
        if around in origins:
            return origins[around]
        around = around[: max(around.rfind("."), around.rfind("["), 0)]
    inside = [origin for name, origin in origins.items() if name.startswith((f"{key}.", f"{key}["))]
    return "--set" if "--set" in inside else next(iter(inside), otherwise)


_MOST_SEQUENCES = 2**22  # all divisors are tried as micro-batches


def cross_check(sections: Mapping[str, Any]) -> list[Problem]:
    """Every broken rule whose sections are valid in themselves."""
    problems = []
    for names, rule in _RULES:
        if all(name in sections for name in names):
            problems += rule(*(sections[name] for name in names))
    return problems


def _lengths(data) -> Iterator[tuple[str, int]]:
    """Every sequence length of a run, with its key."""
    yield "data.seq_len", data.seq_len
    for i, phase in enumerate(data.phases):
        if phase.seq_len is not None:
            yield f"data.phases[{i}].seq_len", phase.seq_len


def _sequence_fits_model(data, model) -> list[Problem]:
    return [
        Problem(
            key,
            f"{length} is longer than the model allows ({model.max_seq_len})",
            "shorten it, or raise model.max_seq_len",
        )
        for key, length in _lengths(data)
        if model.max_seq_len is not None and length > model.max_seq_len
    ]


def _batch_is_whole_sequences(data, train) -> list[Problem]:
    problems, batch, length = [], train.batch.amount, data.seq_len
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
            problems.append(Problem(keys[0], what, f"let the batch be {near}"))
        elif batch // length > _MOST_SEQUENCES:
            what = f"'{Span(batch, 'tok')}' is {batch // length:,} sequences of {length} tokens in one step"
            problems.append(Problem(keys[0], what, f"take at most {_MOST_SEQUENCES:,} sequences"))
    return problems


def _phases_change_something(data) -> list[Problem]:
    problems = []
    for i, phase in enumerate(data.phases):
        if not (phase.sources or phase.batch or phase.seq_len or phase.lr):
            todo = "give its sources, batch, seq_len or lr, or remove it"
            problems.append(Problem(f"data.phases[{i}]", "changes nothing", todo))
        if phase.seq_len is not None and data.packing != "concat":
            what = f"rows of packing '{data.packing}' are planned for one sequence length"
            todo = "set data.packing to 'concat', or start another run from the weights of this one"
            problems.append(Problem(f"data.phases[{i}].seq_len", what, todo))
    return problems


def _prompts_meet_whole_documents(data) -> list[Problem]:
    if data.packing != "concat":
        return []
    later = [(f"data.phases[{i}]", phase.sources or ()) for i, phase in enumerate(data.phases)]
    return [
        Problem(
            f"{where}.sources[{i}].prompt",
            "a prompt stands before a document, and packing 'concat' cuts documents anywhere",
            "set data.packing to 'bestfit' or 'none'",
        )
        for where, sources in [("data", data.sources), *later]
        for i, source in enumerate(sources)
        if source.prompt is not None
    ]


def _shares_sum_to_one(data) -> list[Problem]:
    """Weights that are all below 1 read as shares; a mistyped one would quietly change the others."""
    later = [(f"data.phases[{i}].sources", p.sources) for i, p in enumerate(data.phases) if p.sources]
    problems = []
    for key, sources in [("data.sources", data.sources), *later]:
        weights = [source.weight for source in sources]
        if max(weights) < 1 and abs(sum(weights) - 1) > 1e-6:
            what = f"the weights are shares and sum to {sum(weights):g}"
            problems.append(Problem(key, what, "let them sum to 1, or give proportions like 9 and 1"))
    return problems


def _phases_begin_within_the_run(data, train) -> list[Problem]:
    if train.horizon.unit == "s":
        return []
    timeline = Timeline(data, train)
    end = timeline.steps_of(train.horizon)
    return [
        Problem(
            f"data.phases[{i}].at",
            f"'{phase.at}' is not before train.horizon ('{train.horizon}')",
            "bring it forward",
        )
        for i, phase in enumerate(data.phases)
        if timeline.phases[i + 1].step >= end
    ]


def _phases_follow_each_other(data, train) -> list[Problem]:
    problems, before = [], 0
    timeline = Timeline(data, train)
    for i, phase in enumerate(data.phases):
        step = timeline.phases[i + 1].step
        if step <= before:
            what = f"'{phase.at}' is step {step}, not after step {before}, where the phase before begins"
            problems.append(
                Problem(f"data.phases[{i}].at", what, "let each phase begin after the one before")
            )
        before = step
    return problems


def _schedule_has_an_end(train, schedule) -> list[Problem]:
    if train.horizon.unit != "s" or schedule.kind == "constant" or schedule.horizon is not None:
        return []
    what = f"is missing: '{schedule.kind}' must end at some token or step, and train.horizon is wall time"
    return [Problem("schedule.horizon", what, "give it, or set schedule.kind = 'constant'")]


def _decay_is_wsd(schedule) -> list[Problem]:
    if schedule.decay is None or schedule.kind == "wsd":
        return []
    return [
        Problem(
            "schedule.decay",
            f"has no meaning for '{schedule.kind}'",
            "remove it, or set schedule.kind = 'wsd'",
        )
    ]


def _eval_has_data(evaluation) -> list[Problem]:
    if not evaluation.every or evaluation.heldout:
        return []
    return [
        Problem("eval.every", "there is nothing held out to evaluate on", "give eval.heldout, like '1M tok'")
    ]


def _momentum_has_a_use(optim) -> list[Problem]:
    if optim.momentum is None or optim.name != "adamw":
        return []
    what = "has no meaning for 'adamw', whose first moment decays by optim.betas[0]"
    return [Problem("optim.momentum", what, "remove it, or set optim.name to 'muon' or 'sgd'")]


_RULES = [
    (("data", "model"), _sequence_fits_model),
    (("data", "train"), _batch_is_whole_sequences),
    (("data",), _phases_change_something),
    (("data",), _prompts_meet_whole_documents),
    (("data",), _shares_sum_to_one),
    (("data", "train"), _phases_follow_each_other),
    (("data", "train"), _phases_begin_within_the_run),
    (("train", "schedule"), _schedule_has_an_end),
    (("schedule",), _decay_is_wsd),
    (("eval",), _eval_has_data),
    (("optim",), _momentum_has_a_use),
]
