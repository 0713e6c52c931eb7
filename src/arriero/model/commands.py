"""`arriero config models` and `arriero config show`: the verbs that know the presets."""

from typing import Any

import typer
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from arriero.config.load import load_run
from arriero.config.options import AsJson, RunFile, Sets
from arriero.config.toml import to_toml
from arriero.model.presets import about, expand, load_preset, preset_names
from arriero.model.spec import flops_per_token
from arriero.ui import make_console, print_json


def show(run_file: RunFile = None, sets: Sets = []) -> None:
    """Print the resolved run file, each value with where it came from.

    Example: arriero config show run.toml --set optim.lr=1e-3
    """
    loaded = load_run(run_file, sets, expand)
    text = to_toml(loaded.config, loaded.origin)
    console = Console()
    if console.is_terminal:
        console.print(Syntax(text, "toml", background_color="default", word_wrap=True))
    else:
        typer.echo(text, nl=False)


def models(as_json: AsJson = False) -> None:
    """List the model presets with parameters, GFLOP per token and size in bf16.

    GFLOP per token counts forward and backward by the causal formula, at the model's longest sequence or at
    8192 tokens if that is shorter.

    Example: arriero config models
    """
    if as_json:
        print_json({"models": [_facts(name) for name in preset_names()]})
        return
    table = Table(box=None, header_style="bold")
    for heading in ("preset", "parameters", "GFLOP/token", "at", "in bf16", "what it is"):
        table.add_column(
            heading,
            justify="left" if heading in ("preset", "what it is") else "right",
            no_wrap=heading == "preset",
        )
    for facts in map(_facts, preset_names()):
        table.add_row(
            facts["preset"],
            _count(facts["parameters"]),
            f"{facts['flops_per_token'] / 1e9:.3f}",
            str(facts["seq_len"]),
            f"{facts['bf16_bytes'] / 1e9:.3f} GB",
            facts["about"],
        )
    make_console(wide=True).print(table)


def _facts(name: str) -> dict[str, Any]:
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
