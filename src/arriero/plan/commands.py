"""The verbs of `arriero config`: show, check, explain, schema, reference and models."""

import json
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from arriero.config.fields import to_toml
from arriero.config.keys import ConfigError, advice_for, facts_of, key_for, keys_of, suggestion
from arriero.config.load import load_run, read_run
from arriero.config.options import AsJson, Key, RunFile, Sets
from arriero.config.schema import RunConfig, meaning_of
from arriero.errors import UserError
from arriero.model.presets import about, expand, load_preset, preset_names
from arriero.model.spec import flops_per_token
from arriero.plan.hardware import MACHINES, machine_named
from arriero.plan.resolve import Decision, resolve
from arriero.ui import Table, escape, facts, make_console, print_json, print_toml


def schema() -> None:
    """Print the JSON Schema of the run file, for editors.

    Example: arriero config schema > run.schema.json
    """
    document = _for_editors(RunConfig.model_json_schema())
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    document["properties"]["extends"] = _EXTENDS
    typer.echo(json.dumps(document, indent=2))


_EXTENDS = {"type": "string", "description": "A run file this one builds on."}


def _for_editors(node: Any) -> Any:
    """Replace null by the TOML values "auto" and false; no key is required, because of `extends`."""
    if isinstance(node, list):
        return [_for_editors(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if key != "required"}
    if "anyOf" in kept:
        unset = {"const": False if {"type": "string"} in kept["anyOf"] else "auto"}
        kept["anyOf"] = [unset if branch == {"type": "null"} else branch for branch in kept["anyOf"]]
    if kept.get("default", "") is None:
        del kept["default"]
    return {key: _for_editors(value) for key, value in kept.items()}


def check(
    run_file: RunFile = None,
    sets: Sets = [],
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Number of ranks of the run.")] = 1,
    device: Annotated[
        str, typer.Option(metavar="NAME", help=f"Device of each rank: {', '.join(MACHINES)}.")
    ] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Resolve a run for a machine without starting it, and print every derived setting or every problem.

    Needs neither torch nor a GPU, so it runs on a login node. Without --device the run is resolved for the
    CPU and the free memory of this machine. The data is not opened. Exit code 2 if there are problems.

    Example: arriero config check run.toml --nproc 64 --device h200
    """
    machine = machine_named(device, nproc)
    loaded, problems = read_run(run_file, sets, expand)
    decisions: tuple[Decision, ...] = ()
    if loaded is not None:
        try:
            decisions = decisions_on(loaded.config, device, nproc)
        except ConfigError as error:
            problems += [replace(each, origin=loaded.origin(each.key)) for each in error.problems]
    if as_json:
        print_json(
            {
                "ranks": nproc,
                "device": machine.name,
                "decisions": [] if problems else [asdict(each) for each in decisions],
                "problems": [
                    {"key": each.key, "problem": each.what, "todo": each.todo, "origin": each.origin}
                    for each in problems
                ],
            }
        )
    elif problems:
        raise ConfigError(problems)
    else:
        rows = [(each.name, each.value, each.reason) for each in decisions]
        make_console().print(facts([("ranks", str(nproc), "--nproc"), *rows]))
    if problems:
        raise typer.Exit(2)


def decisions_on(config: RunConfig, device: str, nproc: int) -> tuple[Decision, ...]:
    """Resolve a run for `nproc` devices of a named type."""
    found = resolve(config, machine_named(device, nproc), nproc).decisions
    return tuple(
        replace(each, reason=f"--device {device}") if each.name == "device" else each for each in found
    )


def explain(key: Key) -> None:
    """Explain a key of the run file: type, default, names in other trainers. A section lists its keys.

    Names that other trainers or earlier versions use are translated to the key here.

    Example: arriero config explain train.batch
    """
    console = make_console()
    if key == "extends":
        console.print(f"[bold]extends[/]  {_EXTENDS['description']}")
        return
    facts = facts_of(key)
    if facts is None and (answer := advice_for(key)):
        console.print(f"[bold]{escape(key)}[/]  not a key here: {answer}")
        return
    if facts is None and (ours := key_for(key)):
        console.print(f"[bold]{escape(key)}[/]  the key here is {ours}")
        key, facts = ours, facts_of(ours)
    if facts is None:
        todo = suggestion(key) or f"the sections are {', '.join(RunConfig.model_fields)}"
        raise UserError(f"'{key}' is not a key of the run file", todo)
    console.print(f"[bold]{escape(key)}[/]  {escape(facts.meaning)}")
    if facts.type:
        console.plain(f"  type     {facts.type}")
        console.plain(f"  default  {facts.default}")
    for who, names in facts.elsewhere.items():
        console.plain(f"  {who:<12}  {', '.join(names)}")
    if inner := keys_of(facts.key):
        console.print(_listing(inner))


def reference() -> None:
    """Print the reference of all keys as Markdown: type, default, meaning, names in other trainers.

    Example: arriero config reference > docs/config.md
    """
    typer.echo(page(), nl=False)


def _listing(keys: list[str]) -> Table:
    table = Table("key", "type", "default", "meaning", no_wrap=("key",))
    for key in keys:
        facts = facts_of(key)
        assert facts is not None
        table.row(key, facts.type or "table", facts.default, facts.meaning)
    return table


def page() -> str:
    """Return the Markdown reference of all keys."""
    lines = [_HEAD]
    for section in RunConfig.model_fields:
        lines += [f"\n## [{section}]", f"{meaning_of(RunConfig, section)}\n", *_table(section)]
    return "\n".join(lines) + "\n"


_HEAD = """# Run file reference
<!-- Generated from src/arriero/config/schema.py and aliases.toml by `make docs`; do not edit. -->

Every key of the run file. `arriero config explain KEY` prints one entry, `arriero config show RUN.toml` the
values of a run with their origin.

- `--set KEY=VALUE` overrides a key. VALUE is TOML; the quotes around plain text may be left out.
- `--set KEY=default` restores the default of any key or section, whatever the run file and the files it
  extends set. To give a text key the value "default", quote it: `--set run.name='"default"'`.
- A key whose default is `"auto"` is derived, or not used, unless it is set. The value `"auto"` unsets it, and
  `false` unsets a text key whose default is `false`. So a file can undo what the file it extends sets.
- Quantities need a unit: `"4M tok"`, `"500 steps"`, `"2h"`. The suffixes k, M, B (or G) and T are decimal;
  `1e9` and `1E+9` are accepted.
- The last column has the names of the key in other trainers. If a run file uses such a name, the error names
  the key here."""


def _table(section: str) -> list[str]:
    lines = ["| key | type | default | meaning | elsewhere |", "|---|---|---|---|---|"]
    for key in keys_of(section):
        facts = facts_of(key)
        assert facts is not None
        # the keys of data.phases.sources are those of data.sources
        inner = keys_of(key) if key != "data.phases.sources" else []
        names = "; ".join(
            f"{who}: {_code(names)}" for who, names in facts.elsewhere.items() if who != "others"
        )
        others = _code(facts.elsewhere.get("others", []))
        default = facts.default if facts.default in ("", "required") else f"`{facts.default}`"
        cells = [
            f"`{key}`",
            facts.type or "table",
            default,
            facts.meaning,
            "; ".join(filter(None, (names, others))),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines += _table(key)[2:] if inner else []
    return lines


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def show(run_file: RunFile = None, sets: Sets = []) -> None:
    """Print the resolved run file, each value with its origin.

    Example: arriero config show run.toml --set optim.lr=1e-3
    """
    loaded = load_run(run_file, sets, expand)
    print_toml(to_toml(loaded.config, loaded.origin))


def models(as_json: AsJson = False) -> None:
    """List the model presets with parameters, GFLOP per token and size in bf16.

    GFLOP per token counts forward and backward by the causal formula, at the model's longest sequence or at
    8192 tokens if that is shorter.

    Example: arriero config models
    """
    if as_json:
        print_json({"models": [_model_facts(name) for name in preset_names()]})
        return
    headings = ("preset", ">parameters", ">GFLOP/token", ">at", ">in bf16", "what it is")
    table = Table(*headings, no_wrap=("preset",))
    for model in map(_model_facts, preset_names()):
        table.row(
            model["preset"],
            _count(model["parameters"]),
            f"{model['flops_per_token'] / 1e9:.3f}",
            model["seq_len"],
            f"{model['bf16_bytes'] / 1e9:.3f} GB",
            model["about"],
        )
    make_console().print(table)


def _model_facts(name: str) -> dict[str, Any]:
    spec = load_preset(name)
    length = min(spec.max_seq_len, 8192)
    return {
        "preset": name,
        "family": spec.family,
        "parameters": spec.parameters,
        "flops_per_token": flops_per_token(spec, length),
        "seq_len": length,
        "bf16_bytes": spec.bf16_bytes,
        "about": about(name),
    }


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.3f} B" if parameters >= 1e8 else f"{parameters / 1e6:.3f} M"
