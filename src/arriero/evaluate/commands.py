"""`arriero generate` and `arriero eval perplexity | tasks | watch`."""

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from arriero.config.options import AsJson
from arriero.errors import UserError
from arriero.ui import Text, byte_progress, make_console, print_json
from arriero.units import counted

if TYPE_CHECKING:
    from arriero.checkpoint.formats.model_reader import ModelReader
    from arriero.evaluate.generate import Completion
    from arriero.model.language_model import LanguageModel

Model = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="A run, a checkpoint, a model in any format, or hf://OWNER/MODEL.",
        show_default=False,
    ),
]
DeviceName = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")]
Precision = Annotated[
    Literal["fp32", "bf16", "fp16"] | None,
    typer.Option(help="Dtype of the weights; as stored if not given.", show_default=False),
]
TokenizerFile = Annotated[
    Path | None,
    typer.Option(help="A tokenizer.json or tokenizer.model; the model's own if not given."),
]


def generate(
    model: Model,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="Texts to continue; without any, standard input is one."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate per prompt.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 is greedy decoding; 1 samples from the model's probabilities.")
    ] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens of this total share."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Sample from this many of the likeliest tokens.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of standard input is a prompt.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Prompts to continue at the same time.")] = 8,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not stop at the end of a text.")
    ] = False,
    tokenizer: TokenizerFile = None,
    device: DeviceName = "auto",
    dtype: Precision = None,
    as_json: AsJson = False,
) -> None:
    """Continue texts with a model of any format: a run, a checkpoint, Hugging Face, Meta, DCP or torch files.

    Greedy decoding by default, with the tokens that transformers generates. A single prompt is printed while
    it is generated. A prompt ends at the end of text, after --max-tokens, or when the context is full.

    Example: arriero generate runs/demo "def add(" --max-tokens 40 --temperature 0.8 --top-p 0.95
    """
    if temperature == 0.0 and (top_p is not None or top_k is not None):
        raise UserError("--top-p and --top-k need a --temperature above 0", "add --temperature 1")
    texts = _prompts(prompts, lines)
    from arriero.checkpoint.convert import find_model
    from arriero.data.tokens.prompts import find_tokenizer, prompt_tokenizer
    from arriero.evaluate.generate import complete
    from arriero.model.generation import Sampling, why_not_cached

    source = find_model(model)
    files = prompt_tokenizer(find_tokenizer(source.extra_files, tokenizer, source.where), source.tokens)
    loaded = _load(source, device, dtype)
    if (reason := why_not_cached(loaded)) is not None:
        make_console(as_json=True).plain(f"without a key-value cache: {reason}", "yellow")
    shows = not as_json and len(texts) == 1
    stop = frozenset() if ignore_eos else files.eos_ids
    if shows:
        _write(texts[0], bold=True)
    start, results = time.monotonic(), []
    for first in range(0, len(texts), batch):
        chosen = Sampling(temperature, top_k, top_p, seed + first)
        results += complete(
            loaded,
            files,
            texts[first : first + batch],
            max_tokens,
            chosen,
            stop,
            (lambda _, text: _write(text)) if shows else lambda _row, _text: None,
        )
        if not as_json and not shows:
            for each in results[first:]:
                _write(f"{each.prompt}{each.text}\n\n")
    _report(results, source, time.monotonic() - start, as_json, shows)


def _prompts(given: list[str] | None, lines: bool) -> list[str]:
    if given and lines:
        raise UserError("--lines reads prompts from standard input, but prompts are given", "omit one")
    if not given and sys.stdin.isatty():
        raise UserError("there is no prompt", 'give one: arriero generate CKPT "Once upon a time"')
    texts = given or (sys.stdin.read().splitlines() if lines else [sys.stdin.read()])
    if not any(texts):
        raise UserError("the prompt is empty", "give a text")
    return [text for text in texts if text] if lines else texts


def _load(source: "ModelReader", device: str, dtype: str | None) -> "LanguageModel":
    from arriero.checkpoint.convert import read_model
    from arriero.checkpoint.formats.model_reader import DTYPES
    from arriero.train.device import choose_device

    console = make_console(as_json=True)
    with byte_progress(console, f"reading {source.where}", source.nbytes()) as advance:
        place = choose_device(device).torch_device
        return read_model(source, place, DTYPES[dtype] if dtype else None, advance)


def _write(text: str, bold: bool = False) -> None:
    """Print text as it is, at once."""
    console = make_console()
    console.print(Text(text, "bold" if bold else ""), end="")
    console.file.flush()


def _report(
    results: "list[Completion]", source: "ModelReader", seconds: float, as_json: bool, shows: bool
) -> None:
    count = sum(len(each.tokens) for each in results)
    speed = count / max(seconds, 1e-9)
    if as_json:
        facts: dict[str, Any] = {"model": source.where, "format": source.format, "tokens_per_s": speed}
        print_json(facts | {"results": [asdict(each) for each in results]})
        return
    if shows:
        _write("\n")
    ended = f"; ended by: {results[0].ended_by}" if len(results) == 1 else ""
    make_console(as_json=True).plain(f"{counted(count, 'token')}, {speed:,.1f} tok/s{ended}", "dim")
