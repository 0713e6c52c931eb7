"""`arriero data pack`, `show` and `audit`: what a run was or will be trained on, and the proof of it."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from arriero.config.options import AsJson, Sets
from arriero.errors import UserError
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
    styled,
)
from arriero.units import counted, human_bytes, human_count

if TYPE_CHECKING:
    from arriero.config.schema import RunConfig
    from arriero.config.timeline import Timeline
    from arriero.data.dataset import Document, Lengths
    from arriero.data.order.ledger import Audit
    from arriero.data.order.loader import Batch
    from arriero.data.order.order import Stream
    from arriero.data.order.streams import Streams
    from arriero.data.store.store import TokenStore
    from arriero.data.store.verify import Problem, Verified
    from arriero.data.tokens.tokenizer import Tokenizer

DatasetPath = Annotated[Path, typer.Argument(metavar="DIR", help="A prepared dataset.")]
_SAMPLE_TOKENS = 120
Run = Annotated[Path, typer.Argument(help="A run directory, or a run file.", show_default=False)]
LISTED = 16
LAST_STEP = 10**9


def pack(
    dataset: Annotated[Path, typer.Argument(help="A prepared dataset.", show_default=False)],
    seq_len: Annotated[
        int, typer.Option(help="data.seq_len of the runs to come.", min=1, show_default=False)
    ],
    packing: Annotated[
        Literal["bestfit", "none"], typer.Option(help="data.packing of the runs.")
    ] = "bestfit",
    long_docs: Annotated[
        Literal["split", "truncate", "drop"], typer.Option(help="data.long_docs of the runs.")
    ] = "split",
    heldout: Annotated[str, typer.Option(help="eval.heldout of the runs, like '1M tok'.")] = "0 tok",
    prompt: Annotated[str | None, typer.Option(help="The source's prompt, if it has one.")] = None,
    workers: Annotated[int, typer.Option(help="Number of processes.", min=1)] = 1,
    cache: Annotated[
        Path | None, typer.Option(help="data.cache of the runs, where the dataset cannot be written.")
    ] = None,
) -> None:
    """Plan the packing of a dataset ahead of training: which documents make up each row.

    The plan is kept in DATASET/plans, or in CACHE/plans, where `arriero train` finds it. Interrupted, the
    same command resumes. Datasets of up to 50 million documents are planned when a run starts.

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
        path, found = folder / request.name, find_plan(folder, request)
        found = None if found is None or found.problems() else found
        plan = found or _drawn(make_plan, folder, request, workers, console=console)
        filled = plan.counts["tokens"] / max(1, plan.rows * seq_len)
        console.print(
            f"{part}: {plan.counts['documents']:,} documents in {plan.rows:,} rows of {seq_len}, "
            f"{filled:.2%} filled, {human_bytes(path.stat().st_size)} in {path}"
            + (", made before" if found else ""),
        )


def show(
    run: Run,
    step: Annotated[int, typer.Option(help="A step of the run, from 1.", min=1)] = 1,
    sample: Annotated[int, typer.Option(help="Which sequence of the step's batch, from 0.", min=0)] = 0,
    sets: Sets = [],
    as_json: AsJson = False,
) -> None:
    """Print exactly what was or will be trained on at a step, decoded.

    A line separates documents. Text in double brackets is excluded from the loss. If the data was moved, give
    its new place: --set data.sources=[{path='...'}].

    Example: arriero data show runs/demo --step 81234 --sample 3
    """
    from arriero.config.timeline import total_steps
    from arriero.data.order.loader import Loader
    from arriero.data.tokens.tokenizer import separators_of, tokenizer_of

    console = make_console(as_json)
    config = _config(run, sets)
    streams = _streams(config, _directory(run), console)
    timeline = streams.timeline
    if step > LAST_STEP:
        raise UserError(f"--step {step} is beyond any run", f"give a step up to {LAST_STEP:,}")
    phase = timeline.at(step - 1)
    per_step = phase.sequences
    if sample >= per_step:
        raise UserError(f"a step has {per_step} sequences, and --sample is {sample}", "count from 0")
    first = timeline.samples_after(step - 1)
    if as_json:
        print_json(_shown(config, streams, step, sample))
        return
    console.print(
        f"step {step}: samples {first:,} to {first + per_step - 1:,}, "
        f"{per_step} sequences of {phase.seq_len} tokens, packing {config.data.packing}"
    )
    steps = total_steps(config)
    if steps is not None and step > steps:
        console.print(f"[yellow]the run ends before this step, after {config.train.horizon}")
    console.print(_listing(streams.train, first, per_step, sample))
    with Loader(streams.train, 1, first + sample, documents=config.data.document_mask) as loader:
        batch = next(loader)
    source = int(streams.train.locate(_one(first + sample)).source[0])
    store = streams.train.sources[source].store
    end = separators_of(store).eos
    console.print(f"\n[bold]sample {sample}[/] of the step, {batch.real_tokens} tokens")
    _print_sequence(console, batch, tokenizer_of(store), end.id if end else None)


def _shown(config: "RunConfig", streams: "Streams", step: int, sample: int) -> dict[str, Any]:
    import numpy as np

    from arriero.data.order.loader import IGNORED, Loader
    from arriero.data.tokens.tokenizer import tokenizer_of

    stream, phase = streams.train, streams.timeline.at(step - 1)
    per_step, first = phase.sequences, streams.timeline.samples_after(step - 1)
    located = stream.locate(np.arange(first, first + per_step))
    with Loader(stream, 1, first + sample, documents=config.data.document_mask) as loader:
        batch = next(loader)
    tokenizer = tokenizer_of(stream.sources[located.source[sample]].store)
    tokens = batch.tokens_BT[0, : batch.real_tokens].tolist()
    labels = batch.labels_BT[0, : batch.real_tokens].tolist()
    documents = None if batch.documents_BT is None else batch.documents_BT[0, : batch.real_tokens].tolist()
    names = ("source", "epoch", "index")
    samples = [
        dict(zip(names, (stream.sources[s].name, int(epoch), int(index)), strict=True))
        for s, epoch, index in zip(*located, strict=True)
    ]
    return {
        "step": step,
        "first_sample": first,
        "sequences": per_step,
        "seq_len": phase.seq_len,
        "packing": config.data.packing,
        "samples": samples,
        "sample": {
            "number": sample,
            "tokens": tokens,
            "labels": [None if label == IGNORED else label for label in labels],
            "documents": documents,
            "text": tokenizer.decode(tokens),
        },
    }


def audit(
    run: Annotated[Path, typer.Argument(help="The directory of a run that has trained.", show_default=False)],
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Also hash every shard that was read; reads all of it.")
    ] = False,
    sets: Sets = [],
    as_json: AsJson = False,
) -> None:
    """Prove a run's ledger: what was seen, how often, nothing twice within an epoch, nothing skipped.

    Ends with exit code 1 and a sentence when it does not hold. Needs no GPU.

    Example: arriero data audit runs/demo
    """
    from arriero.data.order.ledger import Audit, read_ledger

    console = make_console(as_json)
    directory = _directory(run)
    ledger = read_ledger(directory)
    streams = _streams(_config(run, sets), directory, console)
    proof = Audit(ledger, streams.train)
    with StageProgress(console) as draw:
        proof.run(partial(draw, "replaying the order"))
    if not proof.problems:
        proof.problems += _changed_files(streams.train, checksums, console)
    if as_json:
        print_json(_audited(directory, proof, streams.timeline, checksums))
        raise typer.Exit(1 if proof.problems else 0)
    if proof.problems:
        for problem in proof.problems:
            console.print(f"[bold red]does not hold:[/] {escape(problem)}")
        raise typer.Exit(1)
    _print_proof(console, proof, streams.timeline, checksums)


def _audited(directory: Path, proof: "Audit", timeline: "Timeline", checksums: bool) -> dict[str, Any]:
    ledger, stream = proof.ledger, proof.stream
    steps = timeline.steps_before(ledger.samples)
    sources = []
    if not proof.problems:
        for source, cut, drawn in zip(stream.sources, stream.cuts, stream.drawn(ledger.samples), strict=True):
            sources.append({"source": source.name, "samples_seen": int(drawn), "samples": int(cut.count)})
    return {
        "run": str(directory),
        "holds": not proof.problems,
        "problems": proof.problems,
        "samples": ledger.samples,
        "steps": steps,
        "tokens": timeline.tokens_after(steps),
        "read_again": proof.discarded,
        "checksums_compared": checksums,
        "sources": sources,
    }


def _print_proof(console: Console, proof: "Audit", timeline: "Timeline", read_all: bool) -> None:
    ledger, stream = proof.ledger, proof.stream
    table = Table("source", ">samples seen", ">of", ">epochs", ">each sample was seen")
    for i, drawn in enumerate(stream.drawn(ledger.samples).tolist()):
        whole, partly = stream.source_orders[i].epochs_before(drawn)
        times = f"{whole} or {whole + 1} times" if partly else f"{whole} times"
        epochs, name = stream.source_orders[i].epochs(drawn), stream.sources[i].name
        table.row(name, f"{drawn:,}", f"{stream.counts[i]:,}", f"{epochs:.4g}", times)
    console.print(table)
    steps = timeline.steps_before(ledger.samples)
    bytes_proved = "every byte was compared" if read_all else "their bytes were not read (--checksums does)"
    console.print(
        f"holds: {ledger.samples:,} samples in {steps:,} steps, "
        f"{human_count(timeline.tokens_after(steps))} slots; none twice within an epoch, none skipped; "
        f"the datasets' manifests are the ones the run began with, {bytes_proved}",
    )
    if proof.discarded:
        console.print(
            f"{proof.discarded:,} samples were read more than once because the run began again before them",
        )


def _changed_files(stream: "Stream", read_all: bool, console: Console) -> Iterator[str]:
    """Shards that are missing or of another size; with `read_all` whatever `verify` finds."""
    from arriero.data.store.verify import verify_dataset

    for source in stream.sources:
        store = source.store
        yield from store.shard_size_problems()
        if read_all:
            size = store.tokens * store.dtype.itemsize
            with byte_progress(console, f"reading {store.directory}", size) as advance:
                found = verify_dataset(store, advance=advance)
            yield from (f"{store.directory / problem.file}: {problem.what}" for problem in found.problems)


def _listing(stream: "Stream", first: int, per_step: int, chosen: int) -> Table:
    import numpy as np

    begin = max(0, min(chosen - LISTED // 2, per_step - LISTED))
    samples = np.arange(first + begin, first + min(per_step, begin + LISTED))
    located = stream.locate(samples)
    table = Table(">", ">sample", "source", ">epoch", ">number in the epoch")
    for k, (source, epoch, index) in enumerate(zip(*located, strict=True), begin):
        mark = ">" if k == chosen else ""
        name = stream.sources[source].name
        count = stream.cut_of(first, int(source), int(epoch)).count
        table.row(mark, k, name, epoch + 1, f"{index:,} of {count:,}")
    if per_step > LISTED:
        table.caption = f"{len(samples)} of {per_step}"
    return table


def _print_sequence(console: Console, batch: "Batch", tokenizer: "Tokenizer", end_id: int | None) -> None:
    """A token is learnt where it is the label of the token before it."""
    from arriero.data.order.loader import IGNORED

    tokens, labels = batch.tokens_BT[0].tolist(), batch.labels_BT[0].tolist()
    documents = batch.documents_BT[0].tolist() if batch.documents_BT is not None else [0] * len(tokens)
    learnt = [False] + [label != IGNORED for label in labels]
    ends = batch.real_tokens
    begin = 0
    for end in range(1, ends + 1):
        changed = end < ends and documents[end] != documents[begin]
        ended = tokens[end - 1] == end_id
        if end < ends and not changed and not ended and learnt[end] == learnt[begin]:
            continue
        text = tokenizer.decode(tokens[begin:end])
        console.print(Text(text) if learnt[begin] else styled(f"⟦{text}⟧", "dim"), end="")
        if end < ends and (changed or ended):
            console.print(f"\n[cyan]-- token {end}: next document --[/]")
        begin = end
    if labels[ends - 1] != IGNORED:
        last = tokenizer.decode(labels[ends - 1 : ends])
        console.plain(f"\n(last label: {last!r})", "dim")
    console.print()


def _one(sample: int):
    import numpy as np

    return np.array([sample])


def _directory(run: Path) -> Path:
    if not run.exists() and not run.is_absolute() and (Path("runs") / run).is_dir():
        return Path("runs") / run
    return run


def _config(run: Path, sets: list[str]) -> "RunConfig":
    from arriero.config.load import load_run
    from arriero.model.presets import expand

    directory = _directory(run)
    if directory.is_dir():
        if not (directory / "run.toml").exists():
            raise UserError(f"{directory} holds no run.toml", "give the directory of a run")
        directory = directory / "run.toml"
    return load_run(directory, sets, expand).config


def _streams(config: "RunConfig", run: Path, console: Console):
    from arriero.data.order.ledger import order_version
    from arriero.data.order.streams import build_streams

    return _drawn(lambda draw: build_streams(config, draw, order_version(run)), console=console)


T = TypeVar("T")


def _drawn(work: Callable[..., T], *arguments: object, console: Console) -> T:
    """Call `work` with these arguments and a progress bar."""
    with StageProgress(console) as draw:
        return work(*arguments, draw)


def inspect(
    directory: DatasetPath,
    samples: Annotated[int, typer.Option(min=0, help="How many documents to decode.")] = 3,
    document: Annotated[int | None, typer.Option(min=0, help="Decode this one, whole.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the samples.")] = 1,
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
    workers: Annotated[int, typer.Option(min=1, help="Shards checked at once.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Check every byte of a dataset: checksums, ids, indexes, counts, ends of documents, packing plans.

    Exit code 1 and the names of the bad files if anything is wrong.

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
