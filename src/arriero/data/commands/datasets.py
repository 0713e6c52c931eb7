"""Verbs of `arriero data` for prepared datasets: inspect, verify, pack, import, export."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from arriero.config.options import AsJson
from arriero.errors import UserError
from arriero.files import LinkKind
from arriero.ui import (
    Console,
    StageProgress,
    Table,
    Text,
    bar,
    byte_progress,
    escape,
    facts,
    make_console,
    panel,
    print_json,
)
from arriero.units import counted, human_bytes, human_count

if TYPE_CHECKING:
    from arriero.data.dataset import Document, Lengths
    from arriero.data.exchange import Imported
    from arriero.data.store.store import TokenStore
    from arriero.data.store.verify import Problem, Verified

DatasetPath = Annotated[Path, typer.Argument(metavar="DIR", help="A prepared dataset.")]
_SAMPLE_TOKENS = 120


def pack(
    dataset: Annotated[Path, typer.Argument(help="A prepared dataset.", show_default=False)],
    seq_len: Annotated[int, typer.Option(help="data.seq_len of the runs.", min=1, show_default=False)],
    packing: Annotated[
        Literal["bestfit", "none"], typer.Option(help="data.packing of the runs.")
    ] = "bestfit",
    long_docs: Annotated[
        Literal["split", "truncate", "drop"], typer.Option(help="data.long_docs of the runs.")
    ] = "split",
    heldout: Annotated[str, typer.Option(help="eval.heldout of the runs, like '1M tok'.")] = "0 tok",
    prompt: Annotated[str | None, typer.Option(help="Prompt of the source in the run file.")] = None,
    workers: Annotated[int, typer.Option(help="Number of processes.", min=1)] = 1,
    cache: Annotated[
        Path | None, typer.Option(help="data.cache of the runs, if the dataset is read-only.")
    ] = None,
) -> None:
    """Make the packing plan of a dataset before training: which documents make up each row.

    The plan is stored in DATASET/plans, or in CACHE/plans, where `arriero train` finds it. An interrupted
    command resumes when it is repeated. A run makes the plan itself for up to 50 million documents.

    Example: arriero data pack data/web --seq-len 8192 --heldout '10M tok' --workers 32
    """
    from arriero.data.order.packing import Packing, TokenSource
    from arriero.data.order.packing_plan import PLANS, find_plan, make_plan
    from arriero.data.order.shuffle import move_heldout_last, split_heldout
    from arriero.data.store.store import TokenStore
    from arriero.data.tokens.tokenizer import tokenizer_of
    from arriero.units import parse_span

    console = make_console()
    try:
        span = parse_span(heldout)
    except ValueError as error:
        raise UserError(f"--heldout: {error}", "write it like '10M tok'") from None
    if span.unit != "tok":
        raise UserError(f"--heldout {heldout} is not a number of tokens", "write it like '10M tok'")
    store = move_heldout_last(TokenStore.open(dataset), span.amount)
    ids = tuple(tokenizer_of(store).encode(prompt)) if prompt else ()
    folder = (cache or store.directory) / PLANS
    for part, tokens in zip(("training", "held-out"), split_heldout(store, span.amount), strict=True):
        if not len(tokens):
            continue
        request = Packing(packing, long_docs).request(TokenSource(store, tokens, prompt=ids), seq_len)
        path, plan = folder / request.name, find_plan(folder, request)
        if is_new := plan is None or bool(plan.problems()):
            with StageProgress(console) as progress:
                plan = make_plan(folder, request, workers, progress)
        filled = plan.counts["tokens"] / max(1, plan.rows * seq_len)
        console.print(
            f"{part}: {plan.counts['documents']:,} documents in {plan.rows:,} rows of {seq_len}, "
            f"{filled:.2%} filled, {human_bytes(path.stat().st_size)} in {path}"
            + ("" if is_new else ", made before"),
        )


def inspect(
    directory: DatasetPath,
    samples: Annotated[int, typer.Option(min=0, help="Number of documents to decode.")] = 3,
    document: Annotated[int | None, typer.Option(min=0, help="Decode this document in full.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of samples.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Show what a dataset holds: counts, origin, lengths of documents, decoded samples.

    Example: arriero data inspect data/web --samples 5
    """
    from arriero.data.dataset import Dataset, choose_documents, measure_lengths

    console = make_console(as_json)
    dataset = Dataset(directory)
    store = dataset.store
    if document is not None:
        sample = dataset.document(document)
        if as_json:
            print_json({"dataset": str(directory), "document": sample._asdict()})
            return
        console.print(_sample_panel(sample, whole=True))
        return
    lengths = measure_lengths(store)
    decoded = [dataset.document(number, _SAMPLE_TOKENS) for number in choose_documents(store, samples, seed)]
    if as_json:
        print_json(_inspected(store, lengths, decoded))
        return
    console.print(_facts(store, lengths))
    if lengths.buckets:
        console.print(_histogram(store, lengths))
    for sample in decoded:
        console.print(_sample_panel(sample, whole=False))


def _inspected(store: "TokenStore", lengths: "Lengths", samples: "list[Document]") -> dict[str, Any]:
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
    directory: DatasetPath,
    workers: Annotated[int, typer.Option(min=1, help="Number of shards to check at the same time.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Check every byte of a dataset: checksums, ids, indexes, counts, ends of documents, packing plans.

    The exit code is 1 if anything is wrong; every bad file is listed.

    Example: arriero data verify data/web --workers 8
    """
    from arriero.data.order.packing_plan import PLANS, plan_problems
    from arriero.data.store.store import TokenStore
    from arriero.data.store.verify import Problem, verify_dataset

    console = make_console(as_json)
    store = TokenStore.open(directory)
    size = store.tokens * store.dtype.itemsize
    with byte_progress(console, f"checking {store.shards} shards", size) as advance:
        found = verify_dataset(store, workers, advance)
    plans = plan_problems(directory / PLANS)
    found.problems += [Problem(f"{PLANS}/{name}", what) for name, what in plans]
    if as_json:
        listed = {name: [p._asdict() for p in getattr(found, name)] for name in ("problems", "remarks")}
        valid = {"dataset": str(directory), "valid": not found.problems}
        print_json(valid | asdict(found) | listed)
    else:
        _show_verified(console, directory, found)
    if found.problems:
        raise typer.Exit(1)


def _facts(store: "TokenStore", lengths: "Lengths"):
    all_seen = lengths.documents == store.documents
    of = "" if all_seen else f"of {lengths.documents} sampled documents in {lengths.shards} shards"
    per_token = (
        f"{store.text_bytes / store.tokens:.2f} bytes per token" if store.text_bytes and store.tokens else ""
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
    return facts(rows)


def _histogram(store: "TokenStore", lengths: "Lengths") -> Table:
    whole = lengths.documents == store.documents
    title = (
        "documents by length" if whole else f"documents by length ({lengths.shards} of {store.shards} shards)"
    )
    table = Table(">tokens", ">documents", ">", "", ">share of tokens", title=title)
    most = max(bucket.documents for bucket in lengths.buckets)
    tokens = max(1, sum(bucket.tokens for bucket in lengths.buckets))
    for low, high, documents, held in lengths.buckets:
        name = str(low) if low == high else f"{low}-{high}"
        share = f"{documents / lengths.documents:.1%}"
        table.row(name, f"{documents:,}", share, bar(documents, most), f"{held / tokens:.1%}")
    return table


def _sample_panel(sample: "Document", whole: bool):
    more = "" if whole or sample.tokens <= _SAMPLE_TOKENS else " ..."
    title = f"document {sample.number}, {sample.tokens} tokens, shard {sample.shard}"
    return panel(Text.assemble(sample.text, (more, "dim")), title, align="left")


def _show_verified(console: Console, directory: Path, found: "Verified") -> None:
    for problem in found.problems:
        console.print(f"[bold red]bad[/]  {_line(problem)}")
    for remark in found.remarks:
        console.print(f"[yellow]note[/] {_line(remark)}")
    files = len({problem.file for problem in found.problems})
    verdict = (
        f"[bold red]{counted(len(found.problems), 'problem')} in {counted(files, 'file')}"
        if files
        else "[bold green]valid"
    )
    console.print(
        f"{escape(str(directory))}: {verdict}[/]; {counted(found.shards, 'shard')}, {found.tokens:,} tokens, "
        f"{found.documents:,} documents, {found.empty} empty and {found.only_eos} with the end token alone",
    )


def _line(problem: "Problem") -> str:
    return f"{escape(problem.file)}: {escape(problem.what)}"


Format = Literal["megatron", "datatrove", "olmo", "fms-arrow", "hf-parquet"]
Linking = Annotated[
    LinkKind,
    typer.Option(
        help="How raw token files are placed: auto is a hard link, or a symbolic link across file systems."
    ),
]


def import_tokens(
    format: Annotated[Format, typer.Argument(help="Format of the files.")],
    sources: Annotated[list[Path], typer.Argument(metavar="SRC", help="Token files, or their directories.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Dataset to write.")],
    tokenizer: Annotated[
        str,
        typer.Option(help="Tokenizer that made the tokens: a file, a directory, or hf://OWNER/MODEL."),
    ],
    eos: Annotated[
        str | None, typer.Option(help="Token that ends a document; by default common names are tried.")
    ] = None,
    separator: Annotated[
        Literal["add", "keep"],
        typer.Option(
            help="fms-arrow and hf-parquet: add a missing end-of-document token, or keep documents unchanged."
        ),
    ] = "add",
    column: Annotated[
        str | None, typer.Option(help="Column of token ids; default: input_ids or tokens.")
    ] = None,
    dtype: Annotated[
        Literal["uint16", "int32"] | None,
        typer.Option(help="Type in files without an index (int32 or uint32); default: by the vocabulary."),
    ] = None,
    link: Linking = "auto",
) -> None:
    """Make a dataset from token files of another system; raw tokens are linked, not copied.

    Every byte is read once, to compute checksums and to reject ids outside the vocabulary.

    Example: arriero data import datatrove tokens/ -o data/web --tokenizer tokenizer.json
    """
    from arriero.data.exchange import Import
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
    with byte_progress(console, f"importing {len(job.files)} files", job.total_bytes) as advance:
        made = job.into(out, advance)
    _show_import(console, out, made)


def export_tokens(
    directory: DatasetPath,
    format: Annotated[Format, typer.Argument(help="Format to write.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Directory to write.")],
    column: Annotated[str, typer.Option(help="Column of token ids in Parquet files.")] = "input_ids",
    link: Linking = "auto",
) -> None:
    """Write a dataset in another system's format; formats of raw tokens are linked, not copied.

    Example: arriero data export data/web megatron exported/web
    """
    from arriero.data.exchange import export_dataset
    from arriero.data.store.store import TokenStore

    console = make_console()
    store = TokenStore.open(directory)
    store.check_tokenizer()
    total = store.tokens * store.dtype.itemsize
    with byte_progress(console, f"exporting {store.shards} shards", total) as advance:
        made = export_dataset(store, format, target, column=column, link=link, advance=advance)
    how = ", ".join(f"{count} by {how}" for how, count in made.placed.items()) or "rewritten"
    held = f"{human_count(store.tokens)} tokens in {counted(store.documents, 'document')}"
    console.print(
        f"{held} -> {escape(str(target))}: {counted(store.shards, f'{format} file')} ({how})",
    )
    if store.labels:
        console.print(f"[yellow]the loss mask is not exported[/]: {format} files hold tokens alone")
    if format == "fms-arrow":
        console.print("end-of-document tokens are removed: fms-fsdp's loader adds its own")
    if made.kept_eos:
        console.print(
            f"[yellow]but kept in {made.kept_eos} files[/] in which some documents lack one; "
            "let fms-fsdp strip them, or it sees separators twice",
        )
    if made.empty and format in ("datatrove", "olmo"):
        console.print(
            f"[yellow]{counted(made.empty, 'document')} without a token[/]: datatrove then counts "
            "positions wrong, OLMo-core rejects one at the end of a file",
        )
    console.print(f"the tokenizer stays at {escape(str(store.tokenizer_path))}")


def _show_import(console: Console, out: Path, made: "Imported") -> None:
    how = ", ".join(f"{count} by {how}" for how, count in made.placed.items())
    console.print(
        f"{human_count(made.tokens)} tokens in {counted(made.documents, 'document')} -> {escape(str(out))}: "
        f"{counted(len(made.shards), 'shard')}, {how}",
    )
    if made.placed["hard link"] or made.placed["symbolic link"]:
        console.print("the original files are now part of the dataset: do not change them in place")
    if made.placed["symbolic link"]:
        console.print("symbolic links break when the originals move; --link copy avoids that")
    if made.eos_added:
        added = counted(made.eos_added, "document")
        console.print(f"an end-of-document token was added to {added}")
    if made.empty:
        are = "is" if made.empty == 1 else "are"
        console.print(f"{counted(made.empty, 'document')} {are} empty")
    if made.without_eos:
        do = "does" if made.without_eos == 1 else "do"
        console.print(
            f"[yellow]{counted(made.without_eos, 'document')} {do} not end with the end-of-document token",
        )
    for remark in made.remarks[:10]:
        console.print(escape(remark))
    if len(made.remarks) > 10:
        console.print(f"and {len(made.remarks) - 10} more remarks")
