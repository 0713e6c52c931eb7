"""`arriero generate` and `arriero eval perplexity | tasks | watch`."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from arriero.checkpoint.commands import Run, run_directory_at
from arriero.config.options import AsJson, Sets
from arriero.errors import UserError
from arriero.train.commands import Nproc
from arriero.ui import StageProgress, Table, Text, make_console, print_json
from arriero.units import counted

if TYPE_CHECKING:
    from arriero.checkpoint.formats.model_reader import ModelReader
    from arriero.evaluate.generate import Completion

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
Attach = Annotated[
    bool,
    typer.Option("--attach/--no-attach", help="Store the result beside the checkpoint, for `ckpt list`."),
]


Data = Annotated[
    list[str],
    typer.Option(
        help="A prepared dataset, or text: JSONL, Parquet, files. Repeatable. Default: the held-out data of "
        "the checkpoint's run."
    ),
]
SeqLen = Annotated[
    int | None,
    typer.Option(min=2, help="Longest context, in tokens; default: the run's, else the model's up to 4,096."),
]
Include = Annotated[
    Path | None, typer.Option(help="A folder of your own task files (YAML of lm-evaluation-harness).")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Examples per task, for a trial; default: all.")]


def generate(
    model: Model,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT", help="Texts to continue; without any, standard input is the prompt."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens to generate per prompt.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 is greedy decoding; 1 samples from the model's probabilities.")
    ] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Sample from the most likely tokens of this total probability."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Sample from this many of the most likely tokens; default: all.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of standard input is a prompt.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Prompts to continue at the same time.")] = 8,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not stop at the end of a text.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a user message; the model needs a chat template.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System message before the chat; implies --chat.")
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A chat template (Jinja) instead of the model's; implies --chat."),
    ] = None,
    tokenizer: TokenizerFile = None,
    device: DeviceName = "auto",
    dtype: Precision = None,
    as_json: AsJson = False,
) -> None:
    """Continue texts with a model of any format: a run, a checkpoint, Hugging Face, Meta, DCP or torch files.

    Greedy decoding by default, with the tokens that transformers generates. A single prompt is printed while
    it is generated. Generation stops at the end of text, after --max-tokens, or when the context is full.

    Example: arriero generate runs/demo "def add(" --max-tokens 40 --temperature 0.8 --top-p 0.95
    """
    if temperature == 0.0 and (top_p is not None or top_k is not None):
        raise UserError("--top-p and --top-k need a --temperature above 0", "add --temperature 1")
    texts = _prompts(prompts, lines)
    from arriero.checkpoint.convert import find_model
    from arriero.data.tokens.prompts import find_tokenizer, prompt_tokenizer
    from arriero.evaluate.generate import complete, load
    from arriero.model.generation import Sampling, check_prompts, why_not_cached
    from arriero.train.device import choose_device

    source = find_model(model)
    files = prompt_tokenizer(find_tokenizer(source.extra_files, tokenizer, source.where), source.tokens)
    is_chat = chat or system is not None or chat_template is not None
    encoded = [files.chat(text, system, chat_template) if is_chat else files.encode(text) for text in texts]
    loaded = load(source, choose_device(device).torch_device, dtype)
    check_prompts(loaded, encoded)
    if (reason := why_not_cached(loaded)) is not None:
        make_console(as_json=True).plain(f"without a key-value cache: {reason}", "yellow")
    shows = not as_json and len(texts) == 1
    stop = files.eos_ids | files.ends_of_turns if is_chat else files.eos_ids
    if shows and not is_chat:
        _write(texts[0], bold=True)
    start, results = time.monotonic(), []
    for first in range(0, len(texts), batch):
        chosen = Sampling(temperature, top_k, top_p, seed + first)
        results += complete(
            loaded,
            files,
            texts[first : first + batch],
            encoded[first : first + batch],
            max_tokens,
            chosen,
            frozenset() if ignore_eos else stop,
            (lambda _, text: _write(text)) if shows else lambda _row, _text: None,
        )
        if not as_json and not shows:
            for each in results[first:]:
                _write(f"{each.text}\n\n" if is_chat else f"{each.prompt}{each.text}\n\n")
    _report(results, source, time.monotonic() - start, as_json, shows)


def _prompts(given: list[str] | None, lines: bool) -> list[str]:
    if given and lines:
        raise UserError("--lines reads prompts from standard input, but prompts are given", "omit one")
    if not given and (sys.stdin is None or sys.stdin.isatty()):
        raise UserError("there is no prompt", 'give one: arriero generate CKPT "Once upon a time"')
    texts = given or (sys.stdin.read().splitlines() if lines else [sys.stdin.read()])
    if not any(texts):
        raise UserError("the prompt is empty", "give a text")
    return [text for text in texts if text] if lines else texts


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


def perplexity(
    model: Model,
    data: Data = [],
    seq_len: SeqLen = None,
    packing: Annotated[
        Literal["bestfit", "concat", "none"] | None,
        typer.Option(help="bestfit (default): each document alone. concat: windows over all documents."),
    ] = None,
    column: Annotated[str | None, typer.Option(help="Column of the text in records; default: text.")] = None,
    tokenizer: TokenizerFile = None,
    cache: Annotated[str, typer.Option(help="Directory for tokenised text.")] = "data",
    sets: Sets = [],
    nproc: Nproc = None,
    attach: Attach = True,
    as_json: AsJson = False,
) -> None:
    """Compute the loss and perplexity of a model of any format, for each source and overall.

    Every token is predicted once, from the tokens before it in its document. --nproc, torchrun or srun start
    several ranks; --set parallel.tp=2 sets the layout. The result is the same on every layout.

    Example: arriero eval perplexity runs/demo --data builtin:stdlib --seq-len 256
    """
    from arriero.data.workers import no_progress
    from arriero.evaluate.perplexity import PerplexityRequest, measure_perplexity
    from arriero.parallel.world import world_from

    request = PerplexityRequest(model, data, seq_len, packing, column, tokenizer, cache, sets)
    console = make_console(as_json=True)
    with StageProgress(console) as bars:
        result = measure_perplexity(request, nproc, bars if world_from().is_leader else no_progress)
    if not world_from().is_leader:
        return
    facts = result.to_dict()
    if attach:
        _attach(Path(facts["model"]), "perplexity", result.main(), request.settings(), facts)
    if as_json:
        print_json(facts)
        return
    table = Table("source", ">tokens", ">loss", ">perplexity")
    for row in [*facts["sources"], *([{"source": "all", **facts}] if len(facts["sources"]) > 1 else [])]:
        exact = row["perplexity"]
        shown = "overflow" if exact is None else f"{exact:,.3f}"
        table.row(row["source"], f"{row['tokens']:,}", f"{row['loss']:.5f}", shown)
    make_console().print(table)


def tasks(
    model: Model,
    tasks: Annotated[
        str, typer.Option("--tasks", help="Names of tasks, separated by commas: hellaswag,arc_easy.")
    ],
    include: Include = None,
    fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples in the prompt; default: as the task says.")
    ] = None,
    limit: Limit = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 8,
    device: DeviceName = "auto",
    dtype: Precision = None,
    attach: Attach = True,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model of any format on tasks of lm-evaluation-harness (pip install 'arriero\\[eval]').

    Needs no network if the data of the tasks are on this machine. Adapters are evaluated with their model.

    Example: arriero eval tasks runs/demo --tasks hellaswag,arc_easy --limit 100
    """
    from arriero.evaluate.tasks import TasksRequest, evaluate_tasks

    request = TasksRequest(model, _names(tasks), include, fewshot, limit, batch, device, dtype)
    found = evaluate_tasks(request)
    facts = found.to_dict()
    if attach:
        _attach(Path(found.model), "tasks", found.main(), request.settings(), facts)
    if as_json:
        print_json(facts)
        return
    table = Table("task", ">examples", "metric", ">value", ">standard error")
    for row in facts["tasks"]:
        for name, value in row["metrics"].items():
            error = row["stderr"].get(name)
            shown = "" if error is None else f"{error:.4f}"
            table.row(row["task"], row["examples"] or "", name, f"{value:.4f}", shown)
    make_console().print(table)


def watch(
    run: Run,
    data: Data = [],
    seq_len: SeqLen = None,
    tasks: Annotated[str, typer.Option("--tasks", help="Tasks to evaluate, separated by commas.")] = "",
    include: Include = None,
    limit: Limit = None,
    poll: Annotated[float, typer.Option(min=0.1, help="Seconds between checks for a new checkpoint.")] = 30.0,
    once: Annotated[
        bool, typer.Option("--once", help="Evaluate the existing checkpoints, then exit.")
    ] = False,
    device: DeviceName = "auto",
    sets: Sets = [],
    nproc: Nproc = 1,
    as_json: AsJson = False,
) -> None:
    """Evaluate each new checkpoint of a run, while it trains or afterwards, until the run has ended.

    Computes the perplexity on --data, else on the held-out data of the run; with --tasks alone only the
    tasks. Results are stored beside the checkpoints, and a checkpoint that has them is not evaluated again.
    --json prints one line per result. Exit code 1 if a checkpoint could not be evaluated.

    Example: arriero eval watch runs/demo --data builtin:stdlib --once
    """
    from arriero.evaluate.perplexity import PerplexityRequest
    from arriero.evaluate.tasks import TasksRequest
    from arriero.evaluate.watch import Result, watch_run

    names = _names(tasks)
    requests: list[PerplexityRequest | TasksRequest] = []
    if data or not names:
        requests.append(PerplexityRequest("", data, seq_len, sets=[f"run.device={device}", *sets]))
    if names:
        requests.append(TasksRequest("", names, include, limit=limit, device=device))
    console = make_console(as_json=as_json)
    shown = 0

    def show(result: Result) -> None:
        nonlocal shown
        shown += 1
        if as_json:
            sys.stdout.write(f"{json.dumps(asdict(result))}\n")
            sys.stdout.flush()
            return
        what = ", ".join(
            f"{name} {'not finite' if value is None else f'{value:.4g}'}"
            for name, value in result.scores.items()
        )
        console.plain(f"step {result.step}  {result.problem or what}", "red" if result.problem else None)

    failed = watch_run(run_directory_at(run), requests, nproc or 1, poll, once, show)
    if not shown and not as_json:
        console.plain("nothing to evaluate: every readable checkpoint has these scores (`arriero ckpt list`)")
    if failed:
        raise typer.Exit(1)


def _names(tasks: str) -> list[str]:
    return [name.strip() for name in tasks.split(",") if name.strip()]


def _attach(directory: Path, kind: str, scores: Any, settings: Any, details: Any) -> None:
    from arriero.checkpoint.scores import attach_evaluation

    try:
        attach_evaluation(directory, kind, scores, settings, details)
    except OSError as error:
        text = f"the result is not stored beside {directory}: {error.strerror or error}"
        make_console(as_json=True).plain(text, "yellow")
