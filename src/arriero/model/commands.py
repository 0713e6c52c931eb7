"""`arriero config models` and `arriero config show`: the verbs that know the presets."""

from typing import Any

from arriero.config.fields import to_toml
from arriero.config.load import load_run
from arriero.config.options import AsJson, RunFile, Sets
from arriero.model.presets import about, expand, load_preset, preset_names
from arriero.model.spec import flops_per_token
from arriero.ui import Table, make_console, print_json, print_toml


def show(run_file: RunFile = None, sets: Sets = []) -> None:
    """Print the resolved run file, each value with where it came from.

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
        print_json({"models": [_facts(name) for name in preset_names()]})
        return
    headings = ("preset", ">parameters", ">GFLOP/token", ">at", ">in bf16", "what it is")
    table = Table(*headings, no_wrap=("preset",))
    for facts in map(_facts, preset_names()):
        table.row(
            facts["preset"],
            _count(facts["parameters"]),
            f"{facts['flops_per_token'] / 1e9:.3f}",
            facts["seq_len"],
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
