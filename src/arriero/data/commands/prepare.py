"""`arriero data prepare` and `train-tokenizer`."""

import shlex
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from arriero.config.options import Account, Partition, SbatchOptions, SiteName, TimeLimit, read_size
from arriero.config.site import Site, chosen_site
from arriero.errors import UserError

if TYPE_CHECKING:
    from arriero.data.prepare.planning import PrepareRequest
    from arriero.data.text.sources import TextSources

SMALLEST = 10**6

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE",
        help="Files, folders or patterns (JSONL, .gz, .zst, Parquet, save_to_disk, text), "
        "builtin:stdlib, builtin:synthetic[:SIZE] or hf://NAME.",
        show_default=False,
    ),
]
Columns = Annotated[
    list[str],
    typer.Option(
        "--column",
        metavar="[SOURCE=]COLUMN",
        help="Column of the text, for all sources or for one. Repeatable.",
        show_default="text",
    ),
]
Include = Annotated[
    list[str], typer.Option("--include", metavar="PATTERN", help="Read only these files. Repeatable.")
]
Exclude = Annotated[
    list[str], typer.Option("--exclude", metavar="PATTERN", help="Skip these files. Repeatable.")
]
ReadAs = Annotated[
    Literal["auto", "mixed", "text", "jsonl", "parquet", "arrow"],
    typer.Option(
        "--as",
        help="How files are read: auto by suffix, and a folder with records and text is an error; mixed by "
        "suffix; the others read all files as that kind. A text file is one document.",
    ),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Skip and count records that cannot be read.")]
MaxBad = Annotated[
    str | None,
    typer.Option(
        "--max-bad",
        metavar="N|N%",
        help="Fail if more than this number or share of a source's records is bad. Implies --skip-bad.",
        show_default="50%",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the shuffle.")]


def prepare(
    sources: Sources,
    directory: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Dataset to write.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer",
            help="tokenizer.json, a Llama tokenizer.model, their folder, or hf://OWNER/MODEL@REVISION.",
        ),
    ],
    column: Columns = [],
    template: Annotated[
        list[str],
        typer.Option(
            "--template",
            metavar="[SOURCE=]TEMPLATE",
            help="Text with fields of a record in braces: 'Question: {question} Answer: {answer}'. The loss "
            "includes the last field and what follows it. For all sources or for one. Repeatable.",
        ),
    ] = [],
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Records are chats: a column 'messages' of roles and contents, written with the tokenizer's "
            "chat template. The loss includes the assistant's turns.",
        ),
    ] = False,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            "--chat-template", help="Chat template (Jinja file) instead of the tokenizer's; implies --chat."
        ),
    ] = None,
    include: Include = [],
    exclude: Exclude = [],
    read_as: ReadAs = "auto",
    bos: Annotated[str, typer.Option(help="Token before each document: none, auto or a token.")] = "none",
    eos: Annotated[str, typer.Option(help="Token after each document: auto, none or a token.")] = "auto",
    literal_eos: Annotated[
        bool, typer.Option("--literal-eos", help="Accept texts that end with the string of the end token.")
    ] = False,
    skip_bad: SkipBad = False,
    max_bad: MaxBad = None,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Text per shard.")] = "1GB",
    seed: Seed = 1,
    encoder: Annotated[
        Literal["auto", "tokenizers", "gigatoken", "fastokens"],
        typer.Option(help="Encoder to use; auto takes the fastest with the same ids as tokenizers."),
    ] = "auto",
    workers: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    slurm: Annotated[bool, typer.Option("--slurm", help="Prepare in a Slurm job array.")] = False,
    tasks: Annotated[int, typer.Option(min=1, help="With --slurm: size of the array.")] = 16,
    site: SiteName = None,
    account: Account = None,
    partition: Partition = None,
    time: TimeLimit = None,
    sbatch: SbatchOptions = [],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --slurm: print the scripts, submit nothing.")
    ] = False,
    part: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Tokenise text into a dataset for training. An interrupted command resumes when it is repeated.

    Example: arriero data prepare corpus/*.jsonl.zst -o data/corpus --tokenizer tokenizer.json --workers 8
    """
    from arriero.data.prepare.planning import PrepareRequest
    from arriero.data.text.hub import local_model

    _stay_offline_unless_asked([*sources, tokenizer])
    shard_bytes = _size("--shard-size", shard_size)
    text = _text_sources(sources, column, include, exclude, read_as, skip_bad or max_bad is not None)
    request = PrepareRequest(
        text.names,
        directory,
        local_model(tokenizer, weights=False),
        text.column,
        bos,
        eos,
        seed,
        shard_bytes,
        text.skip_bad,
        literal_eos,
        max_bad=_limit(max_bad),
        columns=text.columns,
        select=text.select,
        encoder=encoder,
        templates=_templates(template, sources),
        chat=chat_template if chat or chat_template else False,
    )
    if request.chat is not False and (template or bos != "none" or eos not in ("auto", "none")):
        raise UserError(
            "--chat excludes --template, --bos and --eos", "the chat template writes all of a chat"
        )
    if slurm:
        where = chosen_site(site, account, partition, time, sbatch)
        _prepare_on_slurm(request, where, tasks, workers, dry_run)
    elif part is not None:
        _prepare_part(request, part, workers)
    else:
        from arriero.data.commands.prepare_progress import PrepareBar
        from arriero.data.prepare.prepare import prepare as make_dataset

        with PrepareBar() as bar:
            store = make_dataset(request, workers, bar)
        bar.summary(store)


def train_tokenizer(
    sources: Sources,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="tokenizer.json to write.")],
    vocab_size: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 32000,
    column: Columns = [],
    include: Include = [],
    exclude: Exclude = [],
    read_as: ReadAs = "auto",
    skip_bad: SkipBad = False,
    max_bad: MaxBad = None,
    end: Annotated[str, typer.Option(help="Token that ends a document.")] = "<|end_of_text|>",
    sample: Annotated[
        str, typer.Option(metavar="SIZE", help="Amount of text to train on, sampled from all sources.")
    ] = "200MB",
    seed: Seed = 1,
) -> None:
    """Train a byte-level BPE tokenizer with Llama 3's word pattern, on the sources of `data prepare`.

    Example: arriero data train-tokenizer corpus/*.jsonl -o tokenizer.json --vocab-size 32000
    """
    from arriero.data.commands.prepare_progress import train_tokenizer_with_bar

    _stay_offline_unless_asked(sources)
    limit = _size("--sample", sample)
    text = _text_sources(sources, column, include, exclude, read_as, skip_bad or max_bad is not None)
    train_tokenizer_with_bar(text, limit, vocab_size, output, end, _limit(max_bad), seed)


def _templates(given: list[str], sources: list[str]) -> tuple[tuple[str, str], ...]:
    """Split SOURCE=TEMPLATE where SOURCE is a source or a path; any other equals sign is part of the text."""
    found = []
    for each in given:
        place, equals, text = each.partition("=")
        is_place = equals and (place in sources or has_magic(place) or Path(place).exists())
        found.append((place, text) if is_place else ("", each))
    return tuple(found)


def _text_sources(
    sources: list[str],
    columns: list[str],
    include: list[str],
    exclude: list[str],
    read_as: str,
    skip_bad: bool,
) -> "TextSources":
    from arriero.data.text.sources import Select, TextSources

    plain = [column for column in columns if "=" not in column]
    if len(plain) > 1:
        raise UserError(
            f"--column is both {plain[0]} and {plain[1]}", "write SOURCE=COLUMN to choose by source"
        )
    by_source = tuple((place, name) for place, _, name in (c.rpartition("=") for c in columns) if place)
    select = Select(tuple(include), tuple(exclude), read_as)
    return TextSources(tuple(sources), next(iter(plain), None), by_source, select, skip_bad)


def _limit(max_bad: str | None) -> str:
    from arriero.data.text.readers import MAX_BAD, BadLimit

    BadLimit.parse(max_bad or MAX_BAD)
    return max_bad or MAX_BAD


def _stay_offline_unless_asked(sources: list[str]) -> None:
    from arriero.data.text.hub import stay_offline
    from arriero.data.text.sources import HUB

    if not any(source.startswith(HUB) for source in sources):
        stay_offline()


def _size(option: str, text: str) -> int:
    size = read_size(option, text)
    if size < SMALLEST:
        raise UserError(f"{option} {text} is too small", "give 1MB or more")
    return size


def _prepare_part(request: "PrepareRequest", part: str, workers: int) -> None:
    from arriero.data.commands.prepare_progress import PrepareBar
    from arriero.data.prepare.planning import load_preparation
    from arriero.data.prepare.prepare import make_shards, prepare_lock, read_part

    first, step = read_part(part)
    preparation = load_preparation(request)
    with PrepareBar() as bar, prepare_lock(request.directory, shared=True):
        todo = [number for number in preparation.unfinished() if number % step == first]
        make_shards(preparation, todo, workers, bar)


def _prepare_on_slurm(request: "PrepareRequest", site: Site, tasks: int, workers: int, dry_run: bool) -> None:
    """Submit an array of jobs that make the shards, and a job after it that writes the manifest."""
    from arriero import slurm
    from arriero.data.commands.prepare_progress import show_submission
    from arriero.data.prepare.planning import draft
    from arriero.data.prepare.prepare import plan_for_slurm

    site.require_account()
    preparation = draft(request) if dry_run else plan_for_slurm(request)
    folder, tasks = preparation.work.absolute(), max(1, min(tasks, len(preparation.unfinished())))
    command = shlex.join([*request.command(), "--workers", str(workers)])
    array = slurm.JobScript(
        name="arriero-prepare",
        title=f"Tokenise: task i of {tasks} makes every {tasks}-th shard and skips finished ones.",
        log=folder / "part-%a.log",
        commands=[f'exec {slurm.program()} {command} --part "$SLURM_ARRAY_TASK_ID/{tasks}"'],
        cpus_per_task=workers,
        options=[f"--array=0-{tasks - 1}"],
    )
    finish = slurm.JobScript(
        name="arriero-finish",
        title="Make the shards of failed tasks and write the manifest.",
        log=folder / "finish.log",
        commands=[f"exec {slurm.program()} {command}"],
        cpus_per_task=workers,
    )
    if dry_run:
        typer.echo(f"{array.render(site, folder)}\n{finish.render(site, folder)}", nl=False)
        return
    first = slurm.submit(array.write(site, folder, "array.sbatch"))
    last = slurm.submit(finish.write(site, folder, "finish.sbatch"), f"--dependency=afterany:{first}")
    show_submission(preparation, tasks, (first, last))
