"""Progress and summary of `data prepare` and `data train-tokenizer`."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from arriero.data.prepare.planning import Preparation, sample_texts
from arriero.data.prepare.prepare import PrepareWatcher
from arriero.data.store.store import TokenStore
from arriero.data.text.readers import BadLimit, BadRecords, check_utf8
from arriero.data.text.sources import Input, TextSources, names_of
from arriero.data.tokens.encoders import REFERENCE
from arriero.data.tokens.llama_tokenizers import LLAMA3_PATTERN
from arriero.data.tokens.tokenizer import added_by_template, train_tokenizer
from arriero.ui import LiveBar, escape, facts, make_console
from arriero.units import counted, human_bytes, human_count, human_time

SHOWN_SOURCES = 10
FAST_HINT = "[yellow]hint[/]  pip install 'arriero\\[fast]': encoding is then about 20 times faster"


class PrepareBar(PrepareWatcher):
    """Shows a bar with MB/s, tokens and the time left; without a terminal a line at each tenth."""

    def __init__(self) -> None:
        self._console = make_console()
        self._progress = LiveBar(self._console)
        self._status = self._console.status("reading the inputs and checking the encoder")
        self._read = self._tokens = self._tenth = 0
        self._total = 1
        self._began = time.monotonic()

    def planned(self, preparation: Preparation, todo: Sequence[int], workers: int) -> None:
        self._status.stop()
        self._console.print(_decisions(preparation, todo, workers))
        if preparation.backend.lacks_fast:
            self._console.print(FAST_HINT)
        self._total = max(1, sum(preparation.shard_bytes(number) for number in todo))
        self._began = time.monotonic()
        self._progress.start("tokenising", self._total)

    def advanced(self, read_bytes: int, tokens: int) -> None:
        self._read += read_bytes
        self._tokens += tokens
        percent = min(100, 100 * self._read // self._total)  # the size of compressed text is a guess
        if self._progress.started:
            self._progress.update(self._read, f"{percent:3d}%  {self._numbers()}")
        tenth = percent // 10
        if not self._console.is_terminal and tenth > self._tenth:
            self._tenth = tenth
            self._console.print(f"{10 * tenth:3d}%  {self._numbers()}")

    def __enter__(self) -> "PrepareBar":
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()
        self._progress.stop()

    def summary(self, store: TokenStore) -> None:
        about = store.about
        if not self._progress.started:
            self._console.print("this dataset was finished by an earlier command")
        per_token = f"{store.text_bytes / max(1, store.tokens):.2f} bytes per token"
        rows = [
            ("tokens", human_count(store.tokens), per_token),
            (
                "documents",
                f"{store.documents:,}",
                f"{counted(about['empty_documents'], 'empty one')} skipped",
            ),
            (
                "shards",
                f"{store.shards:,}",
                f"{human_bytes(store.tokens * store.dtype.itemsize)} of {store.dtype}",
            ),
        ]
        rows += _skipped_rows(about)
        redone = about["backend"].get("redone", []) if "backend" in about else []
        rows += [("warning", "encoded again with tokenizers", each) for each in redone[:SHOWN_SOURCES]]
        rows += _spelled_out_warnings(about)
        rows.append(("dataset", str(store.directory), f"fingerprint {store.fingerprint[:12]}"))
        self._console.print(facts(rows))

    def _numbers(self) -> str:
        seconds = max(1e-9, time.monotonic() - self._began)
        share = min(1.0, self._read / self._total)
        left = human_time(seconds * (1 - share) / share) if share else "?"
        rate = f"{self._read / seconds / 1e6:.1f} MB/s"
        return f"{rate}  {human_count(self._tokens)} tokens  {left} left"


def _spelled_out_warnings(about: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for mark, does in (("bos", "begin"), ("eos", "end")):
        if count := about.get("spelled_out", {}).get(mark, 0):
            token = about["separators"][mark]["token"]
            does = f"{does}s" if count == 1 else does
            value = f"{counted(count, 'document')} {does} with the text {token}"
            yield "warning", value, "kept as plain text beside the token of the same name"


def _skipped_rows(about: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    some = [each for each in about.get("per_source", []) if each["skipped"]]
    for each in some[:SHOWN_SOURCES]:
        records = each["documents"] + each["skipped"]
        value = f"{counted(each['skipped'], 'bad record')} of {records:,} in {each['source']}"
        yield "skipped", value, each["skipped_examples"][0]
    if len(some) > SHOWN_SOURCES:
        total = sum(each["skipped"] for each in some)
        yield "skipped", counted(total, "bad record"), f"in {len(some):,} sources; all are in the manifest"


def _input_rows(text: TextSources, inputs: Sequence[Input]) -> Iterator[tuple[str, str, str]]:
    """Yield the inputs by kind, and how they become documents."""
    kinds: dict[str, list[Input]] = {}
    for each in inputs:
        kinds.setdefault(each.kind, []).append(each)
    for kind, some in kinds.items():
        formats = [text.format_of(each) for each in some] if kind in _RECORDS else []
        names = {name for each in formats for name in ([each] if isinstance(each, str) else each.columns)}
        columns = sorted(names)
        named = (
            f", column {', '.join(map(repr, columns[:3]))}{', ...' if columns[3:] else ''}" if columns else ""
        )
        counts = Counter("".join(Path(each.path).suffixes[-1:]) or "no suffix" for each in some)
        suffixes = ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common(4))
        rest = ", ..." if len(counts) > 4 else ""
        files = f"{counted(len(some), 'file')}, {human_bytes(sum(each.size for each in some))}"
        how = _HOW.get(kind, kind)
        yield "inputs", files, f"{how}{named}" + (f" ({suffixes}{rest})" if kind == "text" else "")
    if left_out := text.left_out():
        yield (
            "left out",
            counted(len(left_out), "named file"),
            f"by your patterns: {names_of(left_out)}",
        )


_RECORDS = ("jsonl", "parquet", "arrow")
_HOW = {
    "jsonl": "JSON lines: one document per line",
    "parquet": "Parquet: one document per row",
    "arrow": "Arrow: one document per row",
    "text": "text: one document per file",
    "synthetic": "generated text",
    "dangling": "broken links, skipped",
}


def _decisions(preparation: Preparation, todo: Sequence[int], workers: int):
    """Return the table of derived settings."""
    separators = preparation.separators
    marks = [
        f"{word} {mark.token}"
        for word, mark in (("before", separators.bos), ("after", separators.eos))
        if mark
    ]
    done = len(preparation.shards) - len(todo)
    backend = preparation.backend
    reasons = [f"{each['name']}: {each['outcome']}" for each in backend.tried] or ["as requested"]
    reasons += ["spot-checked in each shard"] if backend.used != REFERENCE else []
    rows = [
        *_input_rows(preparation.text, preparation.inputs),
        ("shards", f"{len(todo):,} to make", f"{done:,} finished earlier or by other parts" if done else ""),
        ("encoder", f"{backend.used} {backend.version}", "; ".join(reasons)),
        ("separators", ", ".join(marks) or "none", _template_note(preparation)),
    ]
    if workers > max(1, len(todo)):
        rows.insert(
            -2, ("workers", f"{max(1, len(todo))} of {workers} used", _smaller_shards(preparation, workers))
        )
    return facts(rows)


def _smaller_shards(preparation: Preparation, workers: int) -> str:
    """Suggest a shard size that gives every process work; a shard is made by one process."""
    total = sum(preparation.shard_bytes(number) for number in range(len(preparation.shards)))
    size = total // workers // 10**6
    done = "a shard is made by one process"
    return f"{done}; --shard-size {size}MB in a new directory gives work to all" if size else done


def _template_note(preparation: Preparation) -> str:
    added = added_by_template(preparation.definition)
    return (
        f"the tokenizer's own template ({' '.join(added)}) is not applied, so separators are not doubled"
        if added
        else ""
    )


def show_submission(preparation: Preparation, tasks: int, jobs: tuple[str, str]) -> None:
    console = make_console()
    console.print(_decisions(preparation, preparation.unfinished(), 1))
    shards = counted(len(preparation.unfinished()), "shard")
    console.print(f"[bold]array[/]   job {jobs[0]}: {counted(tasks, 'task')}, {shards} to make")
    console.print(f"[bold]finish[/]  job {jobs[1]}: runs after them, writes the manifest")
    console.print(f"[bold]logs[/]    {preparation.work}")


def train_tokenizer_with_bar(
    text: TextSources,
    limit_bytes: int,
    vocab_size: int,
    output: Path,
    end: str,
    max_bad: str,
    seed: int,
) -> None:
    console = make_console()
    bad: dict[int, BadRecords] = {}
    taken = documents = 0
    inputs = text.find()
    if not text.skip_bad:
        check_utf8(inputs)
    for name, value, remark in _input_rows(text, inputs):
        console.print(f"[bold]{name}[/]  {escape(value)}  [dim]{escape(remark)}")

    def watched(texts: Iterator[str]) -> Iterator[str]:
        nonlocal taken, documents
        for text in texts:
            taken, documents = taken + len(text), documents + 1
            if documents % 256 == 0:
                status.update(f"training {vocab_size:,} tokens on {human_bytes(taken)} of text")
            yield text

    with console.status(f"training {vocab_size:,} tokens") as status:
        texts = watched(sample_texts(text, inputs, limit_bytes, bad, BadLimit.parse(max_bad), seed))
        tokenizer = train_tokenizer(texts, vocab_size, output, split=LLAMA3_PATTERN, end=end)
    console.print(
        f"[bold]tokenizer[/]  {escape(str(output))}: {tokenizer.vocab_size:,} tokens from "
        f"{counted(documents, 'document')}, {human_bytes(taken)}; a document ends with {escape(end)} "
        f"(id {tokenizer.eos_id})",
    )
    for number, each in bad.items():
        if each.count:
            where = (
                f"{counted(each.count, 'bad record')} of {each.kept + each.count:,} in {text.names[number]}"
            )
            console.print(f"[bold]skipped[/]  {escape(where)}, the first: {escape(each.examples[0])}")
