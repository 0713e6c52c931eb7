"""`arriero init`: write a commented run file for a model, a dataset and a device."""

import sys
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Annotated

import typer

from arriero.config.fields import toml_value
from arriero.config.load import load_run
from arriero.errors import UserError, nearest
from arriero.files import publish_file
from arriero.model.presets import expand, load_preset, preset_names
from arriero.plan.commands import decisions_on
from arriero.plan.hardware import MACHINES
from arriero.plan.resolve import Decision
from arriero.ui import facts, make_console
from arriero.units import human_count, parse_span

# peak learning rates by parameters: our demo, GPT-3 125M, OLMo 1B, Llama 3 8B, 70B and 405B
_LEARNING_RATES = ((1e6, 4e-3), (1.25e8, 6e-4), (1e9, 4e-4), (8e9, 3e-4), (7e10, 1.5e-4), (4e11, 8e-5))
# largest model and its global batch size in tokens
_BATCHES = ((2e7, 2**14), (3e8, 2**18), (2e9, 2**19), (6e9, 2**20), (3e10, 2**22), (float("inf"), 2**24))
_TOKENS_PER_PARAMETER = 20
_LEAST_STEPS = 200
_BUILTIN = "builtin:stdlib"

_FILE = """\
# A run file of Arriero. `arriero config explain KEY` describes a key, docs/config.md lists all of them.
# Keys that are left out are derived; `arriero config check {file}` shows how, and why.

[run]
name = "{name}"  # the run is stored in runs/{name}

[model]
preset = "{model}"  # {parameters} parameters; a dimension may be overridden: layers = 4{vocabulary}

[data]
sources = [{{ path = {data}{tokenizer} }}]  # several sources are mixed by weight = 0.9
seq_len = {seq_len}
document_mask = {mask}  # attention stays inside a document

[train]
batch = "{batch}"  # global batch size; micro-batch and gradient accumulation are derived
horizon = "{horizon}"  # also "5000 steps" or "12h"

[optim]
lr = {lr:.2g}  # usual for this size

[schedule]
kind = "cosine"
warmup = "{warmup}"
floor = 0.1  # the learning rate ends at this fraction of its peak

[eval]
heldout = "{heldout}"  # documents of each source that are not trained on
every = "{every}"

[checkpoint]
every = "{save} steps"
keep = 3
"""


def init(
    model: Annotated[str | None, typer.Option(metavar="PRESET", help="Preset; default: llama-demo.")] = None,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="A prepared dataset, or text; default: builtin:stdlib.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="PATH", help="Tokenizer of text.")] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="SPAN", help="Length: '20B tok'; default: 20 tokens per parameter.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(min=2, help="Sequence length; default: up to 8192.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Device to check it for: {', '.join(MACHINES)}.")
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Number of ranks, one per device.")] = 1,
    out: Annotated[Path, typer.Option("--out", "-o", help="The run file to write.")] = Path("run.toml"),
) -> None:
    """Write a commented run file.

    On a terminal it asks for model, data, length and device that are not given; elsewhere it takes defaults.
    An existing file with other content is not overwritten.

    Example: arriero init --model llama3.2-1b --data data/corpus --tokens '20B tok' --device h200 --nproc 8
    """
    model = model or _ask("model preset (see `arriero config models`)", "llama-demo")
    if model not in preset_names():
        near = nearest(model, preset_names())
        hint = f"did you mean '{near}'? " if near else ""
        raise UserError(f"there is no preset '{model}'", f"{hint}`arriero config models` lists them")
    data = data or _ask("data: a prepared dataset, or text", _BUILTIN)
    if tokenizer is None and _is_text(data):
        tokenizer = _ask("tokenizer of the text", "tokenizer.json")
    parameters = load_preset(model).parameters
    usual = f"{human_count(_TOKENS_PER_PARAMETER * parameters)} tok"
    tokens = tokens or _ask("tokens to train on (20 per parameter)", usual)
    device = device or _ask("device to check it for, such as h200 (empty: none)", "") or None
    content = _content(model, data, tokenizer, tokens, seq_len, nproc, out)
    if out.exists() and out.read_bytes() != content.encode():
        raise UserError(f"{out} exists and is different", "choose another file with --out")
    decisions = _checked(content, out, device, nproc)
    console = make_console()
    if decisions:
        console.print(facts([(each.name, each.value, each.reason) for each in decisions]))
    if ":" not in data and "*" not in data and not Path(data).exists():
        console.plain(f"there is no {data} yet: `arriero data prepare` writes a dataset")
    if tokenizer and _is_text(data) and ":" not in tokenizer and not Path(tokenizer).exists():
        console.plain(
            f"there is no {tokenizer} yet: `arriero data train-tokenizer {data} -o {tokenizer}` makes one"
        )
    ranks = f" --nproc {nproc}" if nproc > 1 else ""
    console.plain(f"wrote {out}; start it with: arriero train {out}{ranks}")


def _ask(question: str, default: str) -> str:
    return str(typer.prompt(question, default=default)) if sys.stdin and sys.stdin.isatty() else default


def _is_text(data: str) -> bool:
    return Path(data).exists() and not (Path(data) / "manifest.json").is_file()


def _content(
    model: str, data: str, tokenizer: str | None, tokens: str, seq_len: int | None, nproc: int, out: Path
) -> str:
    spec = load_preset(model)
    seq_len = seq_len or min(spec.max_seq_len, 8192)
    usual = next(batch for size, batch in _BATCHES if spec.parameters <= size)
    try:
        horizon = parse_span(tokens).in_tokens(usual)
    except ValueError as error:
        raise UserError(f"--tokens: {error}", "write it like '20B tok' or '5000 steps'") from None
    if horizon < seq_len:
        raise UserError(f"--tokens: '{tokens}' is less than one sequence", "write it like '20B tok'")
    needed = _vocabulary(data)
    # a short training needs smaller batches, or it would have too few updates
    sequences = max(1, min(usual, horizon // _LEAST_STEPS) // seq_len)
    batch = -(-sequences // nproc) * nproc * seq_len
    return _FILE.format(
        file=out,
        name=out.stem if out.stem != "run" else model,
        model=model,
        parameters=human_count(spec.parameters),
        vocabulary=f"\nvocab_size = {needed}  # that of the data" if needed > spec.vocab_size else "",
        data=toml_value(data),
        tokenizer=f", tokenizer = {toml_value(tokenizer)}" if tokenizer else "",
        seq_len=seq_len,
        mask="true" if data != _BUILTIN else "false",
        batch=_exact(batch),
        horizon=_exact(horizon),
        lr=_learning_rate(spec.parameters),
        warmup=_exact(max(batch, min(horizon // 50, 2000 * batch))),
        heldout=_exact(max(8 * seq_len, min(horizon // 100, 10**6))),
        every=_exact(max(batch, horizon // 50)),
        save=max(1, min(1000, horizon // batch // 10)),
    )


def _vocabulary(data: str) -> int:
    """Return the size of the vocabulary of a dataset that is built in or prepared, else 0."""
    if data == _BUILTIN:
        from arriero.data.prepare.builtin import VOCAB_SIZE

        return VOCAB_SIZE
    if not (Path(data) / "manifest.json").is_file():
        return 0
    from arriero.data.store.store import TokenStore

    return TokenStore.open(Path(data)).vocab_size


def _exact(tokens: int) -> str:
    """Write a number of tokens with the largest suffix that keeps it exact: '100B tok'."""
    for scale, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if tokens % scale == 0:
            return f"{tokens // scale}{suffix} tok"
    return f"{tokens} tok"


def _checked(content: str, out: Path, device: str | None, nproc: int) -> tuple[Decision, ...]:
    """Write the file, load it, and resolve it for the device; remove a new file if that fails."""
    is_new = not out.exists()
    out.parent.mkdir(parents=True, exist_ok=True)
    publish_file(out, content.encode())
    try:
        config = load_run(out, [], expand).config
        return decisions_on(config, device, nproc) if device else ()
    except UserError:
        if is_new:
            out.unlink()
        raise


def _learning_rate(parameters: int) -> float:
    """Interpolate between published learning rates, on logarithmic scales."""
    points = [(log(size), log(rate)) for size, rate in _LEARNING_RATES]
    place = min(max(log(parameters), points[0][0]), points[-1][0])
    (left, low), (right, high) = next(pair for pair in pairwise(points) if place <= pair[1][0])
    return exp(low + (high - low) * (place - left) / (right - left))
