"""The verbs of `arriero data` about datasets that exist: import, export, inspect, verify."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.bar import Bar
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from arriero.config.options import AsJson
from arriero.ui import byte_bar, make_console, print_json
from arriero.units import counted, human_bytes, human_count

if TYPE_CHECKING:
    from arriero.data.exchange.importing import Imported
    from arriero.data.store.inspect import Lengths, Sample
    from arriero.data.store.store import TokenStore
    from arriero.data.store.verify import Problem, Verified

Format = Literal["megatron", "datatrove", "olmo", "fms-arrow", "hf-parquet"]
Linking = Literal["auto", "hard", "symbolic", "copy"]
Dataset = Annotated[Path, typer.Argument(metavar="DIR", help="A prepared dataset.")]

_LINK_HELP = (
    "How files of raw tokens are placed: auto is a hard link, or a symbolic one on another filesystem."
)
_SAMPLE_TOKENS = 120


def import_tokens(
    format: Annotated[Format, typer.Argument(help="Whose files they are.")],
    sources: Annotated[list[Path], typer.Argument(metavar="SRC", help="Token files, or their directories.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="The dataset to make.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            help="The tokenizer the tokens were made with: a file, a directory, or hf://OWNER/MODEL."
        ),
    ],
    eos: Annotated[
        str | None, typer.Option(help="The token that ends a document; else the usual names.")
    ] = None,
    separator: Annotated[
        Literal["add", "keep"],
        typer.Option(
            help="fms-arrow and hf-parquet: add the end-of-document token where it is absent, or not."
        ),
    ] = "add",
    column: Annotated[str | None, typer.Option(help="The column of token ids, in Arrow and Parquet.")] = None,
    dtype: Annotated[
        Literal["uint16", "int32"] | None,
        typer.Option(help="Bytes of a token where no index tells; int32 reads uint32 too."),
    ] = None,
    link: Annotated[Linking, typer.Option(help=_LINK_HELP)] = "auto",
) -> None:
    """Make a dataset of token files another system wrote; raw tokens are linked, not copied.

    Every byte is read once, for its checksum and to refuse ids beyond the vocabulary.

    Example: arriero data import datatrove tokens/ -o data/web --tokenizer tokenizer.json
    """
    from arriero.data.exchange.importing import Import
    from arriero.data.text.hub import local_model
    from arriero.data.tokens.tokenizer import load_tokenizer

    console = make_console()
    job = Import(
        format,
        sources,
        load_tokenizer(local_model(tokenizer), eos),
        dtype=dtype,
        column=column,
        separator=separator,
        link=link,
    )
    with byte_bar(console) as bar:
        task = bar.add_task(f"importing {len(job.files)} files", total=job.total_bytes)
        made = job.into(out, lambda got: bar.advance(task, got))
    _show_import(console, out, made)


def export_tokens(
    directory: Dataset,
    format: Annotated[Format, typer.Argument(help="For whom.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The directory to make.")],
    column: Annotated[str, typer.Option(help="The column of token ids, in Parquet.")] = "input_ids",
    link: Annotated[Linking, typer.Option(help=_LINK_HELP)] = "auto",
) -> None:
    """Write a dataset in another system's layout; where that is raw tokens too, as links.

    Example: arriero data export data/web megatron exported/web
    """
    from arriero.data.exchange.exporting import export_dataset
    from arriero.data.store.store import TokenStore

    console = make_console()
    store = TokenStore.open(directory)
    store.check_tokenizer()
    with byte_bar(console) as bar:
        task = bar.add_task(f"exporting {store.shards} shards", total=store.tokens * store.dtype.itemsize)
        made = export_dataset(
            store, format, target, column=column, link=link, advance=lambda got: bar.advance(task, got)
        )
    how = ", ".join(f"{count} by {how}" for how, count in made.placed.items()) or "rewritten"
    held = f"{human_count(store.tokens)} tokens in {counted(store.documents, 'document')}"
    console.print(
        f"{held} -> {escape(str(target))}: {counted(made.files, f'{format} file')} ({how})",
        soft_wrap=True,
    )
    if format == "fms-arrow":
        console.print("end-of-document tokens left out: fms-fsdp's loader adds its own", soft_wrap=True)
    if made.kept_eos:
        console.print(
            f"[yellow]but kept in {made.kept_eos} files[/], where some documents lack one; "
            "let fms-fsdp strip it, or it sees the separator twice",
            soft_wrap=True,
        )
    if made.empty and format in ("datatrove", "olmo"):
        console.print(
            f"[yellow]{counted(made.empty, 'document')} without a token[/]: datatrove then counts "
            "positions wrong, OLMo-core refuses one at the end of a file",
            soft_wrap=True,
        )
    console.print(f"the tokenizer stays at {escape(str(store.tokenizer_path))}", soft_wrap=True)


def inspect(
    directory: Dataset,
    samples: Annotated[int, typer.Option(min=0, help="How many documents to decode.")] = 3,
    document: Annotated[int | None, typer.Option(min=0, help="Decode this one, whole.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the samples.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Show what a dataset holds: counts, origin, lengths of documents, decoded samples.

    Example: arriero data inspect data/web --samples 5
    """
    from arriero.data.store.inspect import choose_documents, measure_lengths, read_document
    from arriero.data.store.store import TokenStore
    from arriero.data.tokens.tokenizer import tokenizer_of

    console = make_console(as_json)
    store = TokenStore.open(directory)
    if document is not None:
        sample = read_document(store, tokenizer_of(store), document, None)
        if as_json:
            print_json({"dataset": str(directory), "document": sample._asdict()})
            return
        console.print(_sample_panel(sample, whole=True))
        return
    lengths = measure_lengths(store)
    numbers = choose_documents(store, samples, seed)
    tokenizer = tokenizer_of(store) if numbers else None
    decoded = [read_document(store, tokenizer, number, _SAMPLE_TOKENS) for number in numbers if tokenizer]
    if as_json:
        print_json(_inspected(store, lengths, decoded))
        return
    console.print(_facts(store, lengths))
    if lengths.buckets:
        console.print(_histogram(store, lengths))
    for sample in decoded:
        console.print(_sample_panel(sample, whole=False))


def _inspected(store: "TokenStore", lengths: "Lengths", samples: "list[Sample]") -> dict[str, Any]:
    return {
        "dataset": str(store.directory),
        "fingerprint": store.fingerprint,
        "source": store.about.get("source"),
        "from": list(map(str, store.about.get("from", []))),
        "tokens": store.tokens,
        "documents": store.documents,
        "shards": store.shards,
        "dtype": store.dtype.name,
        "bytes": store.tokens * store.dtype.itemsize,
        "text_bytes": store.text_bytes,
        "tokenizer": {
            "file": store.tokenizer_path.name,
            "sha256": store.tokenizer_sha256,
            "vocab_size": store.vocab_size,
            "eos_id": store.eos_id,
        },
        "lengths": asdict(lengths) | {"buckets": [bucket._asdict() for bucket in lengths.buckets]},
        "samples": [sample._asdict() for sample in samples],
    }


def verify(
    directory: Dataset,
    workers: Annotated[int, typer.Option(min=1, help="Shards checked at once.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Check every byte of a dataset: checksums, ids, indexes, counts, ends of documents.

    Exit code 1 and the names of the bad files if anything is wrong.

    Example: arriero data verify data/web --workers 8
    """
    from arriero.data.store.store import TokenStore
    from arriero.data.store.verify import verify_dataset

    console = make_console(as_json)
    store = TokenStore.open(directory)
    with byte_bar(console) as bar:
        task = bar.add_task(f"checking {store.shards} shards", total=store.tokens * store.dtype.itemsize)
        found = verify_dataset(store, workers, lambda got: bar.advance(task, got))
    if as_json:
        listed = {name: [p._asdict() for p in getattr(found, name)] for name in ("problems", "remarks")}
        valid = {"dataset": str(directory), "valid": not found.problems}
        print_json(valid | asdict(found) | listed)
    else:
        _show_verified(console, directory, found)
    if found.problems:
        raise typer.Exit(1)


def _show_import(console: Console, out: Path, made: "Imported") -> None:
    how = ", ".join(f"{count} by {how}" for how, count in made.placed.items())
    console.print(
        f"{human_count(made.tokens)} tokens in {counted(made.documents, 'document')} -> {escape(str(out))}: "
        f"{counted(len(made.shards), 'shard')}, {how}",
        soft_wrap=True,
    )
    if made.placed["hard link"] or made.placed["symbolic link"]:
        console.print(
            "the original files are part of the dataset now: do not change them in place", soft_wrap=True
        )
    if made.placed["symbolic link"]:
        console.print(
            "symbolic links break when the originals move; --link copy makes it stand alone", soft_wrap=True
        )
    if made.eos_added:
        added = counted(made.eos_added, "document")
        console.print(f"an end-of-document token was added to {added}", soft_wrap=True)
    if made.empty:
        are = "is" if made.empty == 1 else "are"
        console.print(f"{counted(made.empty, 'document')} {are} empty", soft_wrap=True)
    if made.without_eos:
        do = "does" if made.without_eos == 1 else "do"
        console.print(
            f"[yellow]{counted(made.without_eos, 'document')} {do} not end with the end-of-document token",
            soft_wrap=True,
        )
    for remark in made.remarks[:10]:
        console.print(escape(remark), soft_wrap=True)
    if len(made.remarks) > 10:
        console.print(f"and {len(made.remarks) - 10} remarks of the same kind")


def _facts(store: "TokenStore", lengths: "Lengths") -> Table:
    table = Table.grid(padding=(0, 2))
    all_seen = lengths.documents == store.documents
    of = "" if all_seen else f"of {lengths.documents} documents in {lengths.shards} shards looked at"
    per_token = (
        f"{store.text_bytes / store.tokens:.2f} bytes a token" if store.text_bytes and store.tokens else ""
    )
    origin = ", ".join(map(str, store.about.get("from", [])))
    size = human_bytes(store.tokens * store.dtype.itemsize)
    rows = [
        ("dataset", str(store.directory), f"fingerprint {store.fingerprint[:16]}"),
        ("from", str(store.about.get("source", "unknown")), origin),
        ("tokens", f"{store.tokens:,}", f"{human_count(store.tokens)}, {size} as {store.dtype.name}"),
        ("documents", f"{store.documents:,}", f"{lengths.empty} without a token {of}".rstrip()),
        ("text", human_bytes(store.text_bytes) if store.text_bytes else "size unknown", per_token),
        (
            "tokenizer",
            store.tokenizer_path.name,
            f"{store.vocab_size} ids, end of document {store.eos_id}, sha256 {store.tokenizer_sha256[:16]}",
        ),
        ("shards", f"{store.shards:,}", ""),
        (
            "lengths",
            f"{lengths.shortest} to {lengths.longest}",
            f"median {lengths.median} tokens" + ("" if all_seen else f", {of}"),
        ),
    ]
    for name, value, remark in rows:
        table.add_row(f"[bold]{name}", escape(value), f"[dim]{escape(remark)}")
    return table


def _histogram(store: "TokenStore", lengths: "Lengths") -> Table:
    whole = lengths.documents == store.documents
    title = (
        "documents by length" if whole else f"documents by length ({lengths.shards} of {store.shards} shards)"
    )
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    for heading in ("tokens", "documents", ""):
        table.add_column(heading, justify="right")
    table.add_column("")
    table.add_column("share of tokens", justify="right")
    most = max(bucket.documents for bucket in lengths.buckets)
    tokens = max(1, sum(bucket.tokens for bucket in lengths.buckets))
    for low, high, documents, held in lengths.buckets:
        name = str(low) if low == high else f"{low}-{high}"
        share = f"{documents / lengths.documents:.1%}"
        table.add_row(
            name, f"{documents:,}", share, Bar(most, 0, documents, width=40), f"{held / tokens:.1%}"
        )
    return table


def _sample_panel(sample: "Sample", whole: bool) -> Panel:
    more = "" if whole or sample.tokens <= _SAMPLE_TOKENS else " [dim]...[/]"
    return Panel(
        escape(sample.text) + more,
        title=f"document {sample.number}, {sample.tokens} tokens, shard {sample.shard}",
        title_align="left",
    )


def _show_verified(console: Console, directory: Path, found: "Verified") -> None:
    for problem in found.problems:
        console.print(f"[bold red]bad[/]  {_line(problem)}", soft_wrap=True)
    for remark in found.remarks:
        console.print(f"[yellow]note[/] {_line(remark)}", soft_wrap=True)
    files = len({problem.file for problem in found.problems})
    verdict = (
        f"[bold red]{counted(len(found.problems), 'problem')} in {counted(files, 'file')}"
        if files
        else "[bold green]valid"
    )
    console.print(
        f"{escape(str(directory))}: {verdict}[/]; {counted(found.shards, 'shard')}, {found.tokens:,} tokens, "
        f"{found.documents:,} documents, {found.empty} empty and {found.only_eos} with the end token alone",
        soft_wrap=True,
    )


def _line(problem: "Problem") -> str:
    return f"{escape(problem.file)}: {escape(problem.what)}"
