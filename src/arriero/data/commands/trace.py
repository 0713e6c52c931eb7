"""`arriero data trace`: at which steps a document was read, and which documents a step read."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arriero.config.options import AsJson, Sets, run_path
from arriero.data.commands.runs import config_of, streams_of
from arriero.errors import UserError
from arriero.ui import Console, StageProgress, Table, make_console, print_json
from arriero.units import counted

if TYPE_CHECKING:
    from arriero.config.schema import RunConfig
    from arriero.data.order.ledger import Ledger
    from arriero.data.order.order import Stream
    from arriero.data.order.streams import Streams

_LISTED, _SHOWN = 16, 40


def trace(
    trained: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL_OR_RUN",
            help="A run, a checkpoint, or a model that a run exported.",
            show_default=False,
        ),
    ],
    document: Annotated[
        int | None, typer.Option(min=0, help="Number of the document in its dataset, from 0.")
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="The dataset of the document, if the run has several: path or name.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Trace the documents that contain this text; reads the datasets.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="List the documents that were read at this step.")
    ] = None,
    sets: Sets = [],
    as_json: AsJson = False,
) -> None:
    """Show at which steps a document was read; or, with --step, which documents a step read.

    Give one of --document, --text and --step. The answer is computed from the data order of the run, up to
    the step that the run, checkpoint or model has reached. If the data was moved, pass
    --set data.sources=NEW_PATH.

    Example: arriero data trace runs/demo --document 12
    """
    from arriero.data.order.ledger import difference

    if [document, text, step].count(None) != 2:
        raise UserError("trace needs one of --document, --text and --step", "give one of them")
    console = make_console(as_json)
    with _trained_on(trained, sets, console) as (streams, ledger, config):
        stream = streams.train
        if problem := difference(ledger.order, ledger.names, stream, ledger.samples):
            raise UserError(problem, "restore the data it was trained on, or see --set data.sources")
        if step is not None:
            _trace_step(console, streams, ledger.samples, step, as_json)
            return
        numbers = _sources(stream, [each.path for each in config.data.sources], source, document)
        wanted = [(number, document) for number in numbers if document is not None]
        if text is not None:
            wanted = _with_text(stream, numbers, text, console)
        found = [_traced(streams, ledger, *each, console) for each in wanted]
    if as_json:
        print_json({"trained": str(trained), "samples": ledger.samples, "documents": found})
        return
    for each in found:
        _print_trace(console, each)
    if not found:
        console.plain("no document has this text")


@contextmanager
def _trained_on(
    path: Path, sets: list[str], console: Console
) -> "Iterator[tuple[Streams, Ledger, RunConfig]]":
    """Yield the data of a run, a checkpoint or an exported model, what of it was read, and the config."""
    from arriero.data.order.ledger import Ledger, Stretch, read_ledger

    directory = run_path(path)
    record = directory / "training.json"
    if record.is_file():
        try:
            about = json.loads(record.read_bytes())
            data = about["data"]
            ranges = [(int(first), int(end)) for first, end in data["skipped"]]
            read = Stretch(0, int(data["samples"]), 0, 0, int(data["samples"]))
            ledger = Ledger(0, data["order"], data["names"], [read], skipped=ranges)
            text, version = about["config"], data["order"].get("order", 1)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{record} is damaged ({type(error).__name__})", "give the run instead") from None
        with tempfile.TemporaryDirectory(prefix="arriero-trace-") as folder:
            (Path(folder) / "run.toml").write_text(text, encoding="utf-8")
            config = config_of(Path(folder), sets)
            yield streams_of(config, Path(folder), console, version), ledger, config
        return
    places = [each for each in (directory, directory.resolve().parent) if (each / "run.toml").is_file()]
    if not places:
        todo = "give a run, a checkpoint, or a model that `arriero train` exported"
        raise UserError(f"{directory} has no record of its training", todo)
    config = config_of(places[0], sets)
    yield streams_of(config, places[0], console), read_ledger(places[0]), config


def _sources(stream: "Stream", paths: list[str], name: str | None, document: int | None) -> list[int]:
    """Return the numbers of the sources that a name chooses, or all; a document needs one of them."""
    names = [source.name for source in stream.sources]
    chosen = list(range(len(names)))
    if name is not None:
        given = name.rstrip("/")
        # built-in and raw text is prepared into the cache, under another name
        known = dict(zip((path.rstrip("/") for path in paths), chosen, strict=False))
        known |= {each: i for i, each in enumerate(names)}
        ends = [i for i, each in enumerate(names) if Path(each).name == given]
        chosen = [known[given]] if given in known else ends
        if not chosen:
            todo = f"choose one of {', '.join(names)}"
            raise UserError(f"--source {name} is not a source of the run", todo)
        if len(chosen) > 1:
            several = ", ".join(names[i] for i in chosen)
            raise UserError(f"--source {name} is the name of several sources", f"give one of {several}")
    if document is not None:
        if len(chosen) > 1:
            raise UserError("the run has several sources", f"give --source: {', '.join(names)}")
        count = stream.sources[chosen[0]].store.documents
        if document >= count:
            what = f"{names[chosen[0]]} has no document {document}"
            raise UserError(what, f"choose one from 0 to {count - 1}")
    return chosen


def _with_text(stream: "Stream", numbers: list[int], text: str, console: Console) -> list[tuple[int, int]]:
    """Return (source, document) of the first documents that contain a text."""
    from arriero.data.tokens.tokenizer import tokenizer_of

    found = []
    with StageProgress(console) as draw:
        for number in numbers:
            store = stream.sources[number].store
            decode = tokenizer_of(store).decode
            for document in range(store.documents):
                start, length = store.document_span(document)
                if length and text in decode(store.read(store.place_of(start), length).tolist()):
                    found.append((number, document))
                    if len(found) == _LISTED:
                        return found
                if document % 256 == 0:
                    draw(f"searching {store.directory}", document, store.documents)
    return found


def _traced(
    streams: "Streams", ledger: "Ledger", source: int, document: int, console: Console
) -> dict[str, Any]:
    from arriero.data.order.documents import readings_of

    stream, timeline = streams.train, streams.timeline
    with StageProgress(console) as draw:
        found = readings_of(stream, source, document, ledger.samples, partial(draw, "replaying the order"))
    store, rows = stream.sources[source].store, []
    for each in found:
        step = timeline.steps_before(each.sample) + 1
        rows.append(
            {
                "step": step,
                "sequence": each.sample - timeline.samples_after(step - 1),
                "epoch": each.epoch + 1,
                "position": each.offset,
                "tokens": [each.first, each.end],
                "passed_over": any(first <= each.sample < end for first, end in ledger.skipped),
            }
        )
    start, length = store.document_span(document)
    heldout = bool(length) and store.place_of(start) not in stream.sources[source].tokens
    about = {"source": stream.sources[source].name, "document": document, "tokens": length}
    return about | {"held_out": heldout, "readings": rows}


def _print_trace(console: Console, found: dict[str, Any]) -> None:
    rows = found["readings"]
    steps = len({row["step"] for row in rows})
    times = f"read at {counted(steps, 'step')}" if rows else "never read"
    why = " (held out for validation)" if found["held_out"] else ""
    which = f"document {found['document']} of {found['source']}, {counted(found['tokens'], 'token')}"
    console.plain(f"{which}: {times}{why}")
    table = Table(">step", ">sequence", ">epoch", ">position", ">tokens of the document", "")
    for row in rows[:_SHOWN]:
        first, end = row["tokens"]
        where = (f"{row['step']:,}", row["sequence"], row["epoch"], row["position"])
        note = "read, not trained on: bad loss" if row["passed_over"] else ""
        table.row(*where, f"{first:,} to {end - 1:,}", note)
    if rows:
        console.print(table)
    if len(rows) > _SHOWN:
        console.print(f"and {len(rows) - _SHOWN:,} more (--json lists all)")


def _trace_step(console: Console, streams: "Streams", samples: int, step: int, as_json: bool) -> None:
    from arriero.data.order.documents import documents_of

    timeline = streams.timeline
    last = timeline.steps_before(samples)
    if step > last:
        raise UserError(f"step {step} was not trained: there are {last:,}", "give an earlier step")
    found = documents_of(streams.train, range(timeline.samples_after(step - 1), timeline.samples_after(step)))
    if as_json:
        print_json({"step": step, "sources": found})
        return
    table = Table("source", ">documents", "numbers")
    for each in found:
        more = f" and {each['count'] - _LISTED:,} more" if each["count"] > _LISTED else ""
        table.row(each["source"], each["count"], ", ".join(map(str, each["documents"][:_LISTED])) + more)
    console.print(table)
