"""`arriero eval speculator` and `arriero data generate`."""

from pathlib import Path
from typing import Annotated

import typer

from arriero.config.options import AsJson
from arriero.evaluate.commands import DeviceName, Model, TokenizerFile
from arriero.ui import StageProgress, Table, make_console, print_json
from arriero.units import counted

PromptTokens = Annotated[
    int, typer.Option(min=1, help="Tokens at the start of a document that are the prompt.")
]
Batch = Annotated[int, typer.Option(min=1, help="Prompts to continue at the same time.")]
Cache = Annotated[str, typer.Option(help="Directory for tokenised text.")]


def speculator(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="SPECULATOR",
            help="A finished run with \\[speculator], or its folder model/.",
            show_default=False,
        ),
    ],
    data: Annotated[
        str, typer.Option(help="Held-out text for prompts: a dataset or text files.", show_default=False)
    ],
    base: Annotated[
        str | None, typer.Option(help="The base model; default: the one it was trained on.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Documents to continue.")] = 64,
    prompt_tokens: PromptTokens = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens to generate per prompt.")] = 128,
    batch: Batch = 8,
    tokenizer: TokenizerFile = None,
    cache: Cache = "data",
    device: DeviceName = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure the acceptance length of a speculator: tokens per step of the base model.

    The base model continues held-out prompts greedily; with the speculator it generates the same tokens in
    fewer steps. A length of 1 means that no proposal is accepted, n_predict + 1 that all are.

    Example: arriero eval speculator runs/speculator --data data/heldout --prompts 200
    """
    from arriero.evaluate.speculator import Prompts, measure_acceptance
    from arriero.train.device import choose_device

    asked = Prompts(data, prompts, prompt_tokens, tokenizer, cache)
    with StageProgress(make_console(as_json=True)) as bars:
        advance = _Counter(bars, "continuing prompts", prompts)
        place = choose_device(device).torch_device
        facts = measure_acceptance(path, base, asked, max_tokens, batch, place, advance)
    if as_json:
        print_json(facts)
        return
    table = Table("head", ">accepted")
    for number, rate in enumerate(facts["acceptance_by_head"], 1):
        table.row(str(number), f"{rate:.1%}")
    make_console().print(table)
    steps, where = counted(facts["steps"], "step"), counted(facts["prompts"], "prompt")
    make_console().plain(f"acceptance length {facts['acceptance_length']:.3f} ({steps} of {where})")


def generate(
    model: Model,
    data: Annotated[str, typer.Option(help="Text for prompts: a dataset or text files.", show_default=False)],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Directory of the new dataset.", show_default=False)
    ],
    prompts: Annotated[int, typer.Option(min=1, help="Documents to continue.")] = 1000,
    prompt_tokens: PromptTokens = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens to generate per prompt.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy decoding.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=1, help="Sample from this many of the most likely tokens.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    batch: Batch = 8,
    tokenizer: TokenizerFile = None,
    cache: Cache = "data",
    device: DeviceName = "auto",
    as_json: AsJson = False,
) -> None:
    """Write a dataset of a model's own continuations of text, for the second stage of a speculator.

    Each document is a prompt and what the model generates after it; the loss excludes the prompt.

    Example: arriero data generate runs/demo --data builtin:stdlib --prompts 100 -o data/generated
    """
    from arriero.evaluate.speculator import Prompts, write_generations
    from arriero.model.generation import Sampling
    from arriero.train.device import choose_device

    asked = Prompts(data, prompts, prompt_tokens, tokenizer, cache)
    sampling = Sampling(temperature, top_k if temperature else None, seed=seed)
    with StageProgress(make_console(as_json=True)) as bars:
        advance = _Counter(bars, "generating", prompts)
        place = choose_device(device).torch_device
        facts = write_generations(model, asked, output, max_tokens, sampling, batch, place, advance)
    if as_json:
        print_json(facts)
        return
    documents = counted(facts["documents"], "document")
    make_console().plain(f"{facts['dataset']}: {documents}, {facts['tokens']:,} tokens")


class _Counter:
    def __init__(self, bars: StageProgress, title: str, total: int) -> None:
        self._bars, self._title, self._total, self._done = bars, title, total, 0

    def __call__(self, steps: int) -> None:
        self._done += steps
        self._bars(self._title, self._done, self._total)
