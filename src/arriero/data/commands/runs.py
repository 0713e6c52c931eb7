"""`arriero data show` and `audit`: what a run was or will be trained on, and whether its ledger holds."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arriero.config.options import AsJson, Sets, run_path
from arriero.errors import UserError
from arriero.ui import (
    Console,
    StageProgress,
    Table,
    Text,
    byte_progress,
    escape,
    make_console,
    print_json,
    styled,
)
from arriero.units import human_count

if TYPE_CHECKING:
    from arriero.config.schema import RunConfig
    from arriero.config.timeline import Timeline
    from arriero.data.order.ledger import Audit
    from arriero.data.order.loader import Batch
    from arriero.data.order.order import Located, Stream
    from arriero.data.order.streams import Streams
    from arriero.data.tokens.tokenizer import Tokenizer

Run = Annotated[Path, typer.Argument(help="A run directory, or a run file.", show_default=False)]
LISTED = 16
LAST_STEP = 10**9


def show(
    run: Run,
    step: Annotated[int, typer.Option(help="Step of the run, from 1.", min=1)] = 1,
    sample: Annotated[
        int, typer.Option(help="Number of the sequence in the global batch, from 0.", min=0)
    ] = 0,
    sets: Sets = [],
    as_json: AsJson = False,
) -> None:
    """Print the decoded tokens that a run was or will be trained on at a step.

    A line separates documents. Text in double brackets is excluded from the loss. If the data was moved, pass
    --set data.sources=NEW_PATH.

    Example: arriero data show runs/demo --step 81234 --sample 3
    """
    import numpy as np

    from arriero.config.timeline import total_steps
    from arriero.data.order.loader import Loader
    from arriero.data.tokens.tokenizer import separators_of, tokenizer_of

    console = make_console(as_json)
    config = config_of(run, sets)
    streams = streams_of(config, run_path(run), console)
    stream, timeline = streams.train, streams.timeline
    if step > LAST_STEP:
        raise UserError(f"--step {step} is beyond any run", f"give a step up to {LAST_STEP:,}")
    phase, first = timeline.at(step - 1), timeline.samples_after(step - 1)
    per_step = phase.sequences
    if sample >= per_step:
        raise UserError(f"a step has {per_step} sequences, and --sample is {sample}", "count from 0")
    located = stream.locate(np.arange(first, first + per_step))
    store = stream.sources[located.source[sample]].store
    with Loader(stream, 1, first + sample, documents=config.data.document_mask) as loader:
        batch = next(loader)
    if as_json:
        about = {"step": step, "first_sample": first, "sequences": per_step, "seq_len": phase.seq_len}
        samples = [
            {"source": stream.sources[source].name, "epoch": int(epoch), "index": int(index)}
            for source, epoch, index in zip(*located, strict=True)
        ]
        decoded = {"number": sample, **_decoded(batch, tokenizer_of(store))}
        print_json({**about, "packing": config.data.packing, "samples": samples, "sample": decoded})
        return
    console.print(
        f"step {step}: samples {first:,} to {first + per_step - 1:,}, "
        f"{per_step} sequences of {phase.seq_len} tokens, packing {config.data.packing}"
    )
    steps = total_steps(config)
    if steps is not None and step > steps:
        console.print(f"[yellow]the run ends before this step, after {config.train.horizon}")
    console.print(_listing(stream, first, located, sample))
    end = separators_of(store).eos
    console.print(f"\n[bold]sample {sample}[/] of the step, {batch.real_tokens} tokens")
    _print_sequence(console, batch, tokenizer_of(store), end.id if end else None)


def _decoded(batch: "Batch", tokenizer: "Tokenizer") -> dict[str, Any]:
    from arriero.data.order.loader import IGNORED

    columns = (batch.tokens_BT, batch.labels_BT, batch.documents_BT)
    tokens, labels, documents = (
        None if column is None else column[0, : batch.real_tokens].tolist() for column in columns
    )
    labels = [None if label == IGNORED else label for label in labels or []]
    return {
        "tokens": tokens,
        "labels": labels,
        "documents": documents,
        "text": tokenizer.decode(tokens or []),
    }


def audit(
    run: Annotated[Path, typer.Argument(help="The directory of a run that has trained.", show_default=False)],
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Also read every shard and compare its checksum.")
    ] = False,
    sets: Sets = [],
    as_json: AsJson = False,
) -> None:
    """Verify a run's ledger: which samples were read, none twice within an epoch, none skipped.

    The exit code is 1 if the ledger is wrong. No GPU is needed.

    Example: arriero data audit runs/demo
    """
    from arriero.data.order.ledger import Audit, read_ledger

    console = make_console(as_json)
    directory = run_path(run)
    ledger = read_ledger(directory)
    streams = streams_of(config_of(run, sets), directory, console)
    result = Audit(ledger, streams.train)
    with StageProgress(console) as draw:
        result.run(partial(draw, "replaying the order"))
    if not result.problems:
        result.problems += _changed_files(streams.train, checksums, console)
    if as_json:
        print_json(_audited(directory, result, streams.timeline, checksums))
        raise typer.Exit(1 if result.problems else 0)
    if result.problems:
        for problem in result.problems:
            console.print(f"[bold red]wrong:[/] {escape(problem)}")
        raise typer.Exit(1)
    _print_audit(console, result, streams.timeline, checksums)


def _audited(directory: Path, result: "Audit", timeline: "Timeline", checksums: bool) -> dict[str, Any]:
    ledger, stream = result.ledger, result.stream
    steps = timeline.steps_before(ledger.samples)
    sources = []
    if not result.problems:
        for source, cut, drawn in zip(stream.sources, stream.cuts, stream.drawn(ledger.samples), strict=True):
            sources.append({"source": source.name, "samples_seen": int(drawn), "samples": int(cut.count)})
    return {
        "run": str(directory),
        "holds": not result.problems,
        "problems": result.problems,
        "samples": ledger.samples,
        "steps": steps,
        "tokens": timeline.tokens_after(steps),
        "read_again": result.discarded,
        "skipped": sum(end - first for first, end in ledger.skipped),
        "checksums_compared": checksums,
        "sources": sources,
    }


def _print_audit(console: Console, result: "Audit", timeline: "Timeline", read_all: bool) -> None:
    ledger, stream = result.ledger, result.stream
    table = Table("source", ">samples seen", ">of", ">epochs", ">each sample was seen")
    for i, drawn in enumerate(stream.drawn(ledger.samples).tolist()):
        whole, partly = stream.source_orders[i].epochs_before(drawn)
        times = f"{whole} or {whole + 1} times" if partly else f"{whole} times"
        epochs, name = stream.source_orders[i].epochs(drawn), stream.sources[i].name
        table.row(name, f"{drawn:,}", f"{stream.counts[i]:,}", f"{epochs:.4g}", times)
    console.print(table)
    steps = timeline.steps_before(ledger.samples)
    bytes_proved = (
        "every byte was verified" if read_all else "their bytes were not read (--checksums reads them)"
    )
    console.print(
        f"holds: {ledger.samples:,} samples in {steps:,} steps, "
        f"{human_count(timeline.tokens_after(steps))} slots; none twice within an epoch, none skipped; "
        f"the datasets' manifests are the ones the run began with, {bytes_proved}",
    )
    if ledger.skipped:
        count = sum(end - first for first, end in ledger.skipped)
        console.print(f"{count:,} samples were read and not trained on, because their loss was bad")
    if result.discarded:
        console.print(
            f"{result.discarded:,} samples were read again because the run resumed from an earlier step",
        )


def _changed_files(stream: "Stream", read_all: bool, console: Console) -> Iterator[str]:
    """Yield shards that are missing or have another size; with `read_all` everything `verify` finds."""
    from arriero.data.store.verify import verify_dataset

    for source in stream.sources:
        store = source.store
        yield from store.shard_size_problems()
        if read_all:
            size = store.tokens * store.dtype.itemsize
            with byte_progress(console, f"reading {store.directory}", size) as advance:
                found = verify_dataset(store, advance=advance)
            yield from (f"{store.directory / problem.file}: {problem.what}" for problem in found.problems)


def _listing(stream: "Stream", first: int, located: "Located", chosen: int) -> Table:
    """Return a table of the samples around `chosen`."""
    per_step = len(located.source)
    begin = max(0, min(chosen - LISTED // 2, per_step - LISTED))
    shown = (column[begin : begin + LISTED].tolist() for column in located)
    table = Table(">", ">sample", "source", ">epoch", ">number in the epoch")
    for k, (source, epoch, index) in enumerate(zip(*shown, strict=True), begin):
        count = stream.cut_of(first, source, epoch).count
        name = stream.sources[source].name
        table.row(">" if k == chosen else "", k, name, epoch + 1, f"{index:,} of {count:,}")
    if per_step > LISTED:
        table.caption = f"{LISTED} of {per_step}"
    return table


def _print_sequence(console: Console, batch: "Batch", tokenizer: "Tokenizer", end_id: int | None) -> None:
    """Print a sequence. A token is included in the loss if it is the label of the token before it."""
    from arriero.data.order.loader import IGNORED

    tokens, labels = batch.tokens_BT[0].tolist(), batch.labels_BT[0].tolist()
    documents = batch.documents_BT[0].tolist() if batch.documents_BT is not None else [0] * len(tokens)
    in_loss = [False] + [label != IGNORED for label in labels]
    ends = batch.real_tokens
    begin = 0
    for end in range(1, ends + 1):
        changed = end < ends and documents[end] != documents[begin]
        ended = tokens[end - 1] == end_id
        if end < ends and not changed and not ended and in_loss[end] == in_loss[begin]:
            continue
        text = tokenizer.decode(tokens[begin:end])
        console.print(Text(text) if in_loss[begin] else styled(f"⟦{text}⟧", "dim"), end="")
        if end < ends and (changed or ended):
            console.print(f"\n[cyan]-- token {end}: next document --[/]")
        begin = end
    if labels[ends - 1] != IGNORED:
        last = tokenizer.decode(labels[ends - 1 : ends])
        console.plain(f"\n(last label: {last!r})", "dim")
    console.print()


def config_of(run: Path, sets: list[str]) -> "RunConfig":
    """Return the config of a run directory, a checkpoint or a run file."""
    from arriero.config.load import load_run
    from arriero.model.presets import expand

    path = run_path(run)
    if path.is_dir():
        if not (path / "run.toml").exists():
            raise UserError(f"{path} holds no run.toml", "give the directory of a run")
        path = path / "run.toml"
    return load_run(path, sets, expand).config


def streams_of(config: "RunConfig", run: Path, console: Console, version: int | None = None) -> "Streams":
    from arriero.data.order.ledger import order_version
    from arriero.data.order.streams import build_streams

    with StageProgress(console) as progress:
        return build_streams(config, progress, version or order_version(run))
