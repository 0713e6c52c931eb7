"""Text to a prepared dataset: shards made by one or many processes, the manifest last."""

import json
import mmap
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from arriero import files
from arriero.data.prepare.planning import (
    PLAN,
    TOKENIZER,
    WORK,
    Preparation,
    PrepareRequest,
    begin_or_resume,
    check_same_inputs,
    check_same_settings,
    draft,
    inputs_digest,
)
from arriero.data.store.manifest import MANIFEST, write_manifest
from arriero.data.store.shards import (
    DTYPES,
    Shard,
    ShardWriter,
    dtype_for,
)
from arriero.data.store.store import TokenStore
from arriero.data.text.readers import EXAMPLES, BadLimit, BadRecords, read_text_range
from arriero.data.text.sources import check_output_outside
from arriero.data.tokens.encoders import REFERENCE, Backend, IdsDiffer, SpotCheck, load_encoder
from arriero.data.tokens.tokenizer import Encoded
from arriero.data.workers import CONTEXT, worker_pool
from arriero.errors import UserError
from arriero.files import publish_file, space_for, sync

GATHERED_TOKENS = 2**20
MAKING = ".making"

Report = Callable[[int, int], None]
"""Called with bytes read and tokens made since the last call."""


def make_shard(preparation: Preparation, number: int, report: Report) -> None:
    name = preparation.shard_name(number)
    used, backend = load_encoder(preparation.backend.used, preparation.definition)
    seed = [preparation.settings["seed"], number]
    check = None if used == REFERENCE else SpotCheck(preparation.definition, seed)
    redone = ""
    work = preparation.work / f"{name}{MAKING}"
    shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed
    work.mkdir()
    try:
        with (work / "unshuffled").open("w+b", buffering=2**20) as file:
            gathering = _Gathering(preparation, backend, report, check)
            try:
                gathering.encode_shard(number, file)
            except IdsDiffer as error:
                report(-gathering.read_bytes, -sum(gathering.lengths))
                redone = f"shard {name}: {used} gave {error}"
                used, backend = load_encoder(REFERENCE, preparation.definition)
                file.seek(0)
                file.truncate()
                gathering = _Gathering(preparation, backend, report)
                gathering.encode_shard(number, file)
            file.flush()
            report(preparation.shard_bytes(number) - gathering.read_bytes, 0)
            shard = _write_shuffled(work, name, file, gathering, seed)
        for suffix in (".idx", ".bin"):
            (work / f"{name}{suffix}").replace(preparation.directory / f"{name}{suffix}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    sync(preparation.directory)
    record: dict[str, Any] = {
        "shard": shard._replace(text_bytes=gathering.text_bytes)._asdict(),
        "backend": used,
        "redone": redone,
        "empty": gathering.empty,
        "spelled_out": gathering.spelled_out,
        "sources": {
            number: [each.kept, each.count, each.links, each.examples]
            for number, each in gathering.sources.items()
        },
    }
    publish_file(preparation.record_path(number), json.dumps(record).encode())


class _Gathering:
    """Counts what goes into a shard while its pieces are encoded."""

    def __init__(
        self, preparation: Preparation, backend: Backend, report: Report, check: SpotCheck | None = None
    ) -> None:
        self._preparation = preparation
        self._check = check
        self._backend = backend
        self._report = report
        self.vocab_size = preparation.vocab_size
        self.dtype = DTYPES[dtype_for(preparation.vocab_size)].numpy
        self.lengths = array("i")
        self.text_bytes = 0
        self.read_bytes = 0
        self.empty = 0
        self.spelled_out = {"bos": 0, "eos": 0}
        self.sources: dict[int, BadRecords] = {}

    def encode_shard(self, number: int, file: IO[bytes]) -> None:
        preparation = self._preparation
        for piece in preparation.shards[number]:
            files = preparation.inputs[piece.first : piece.first + piece.files]
            column = preparation.text.column_of(files[0])
            bad = self.sources.setdefault(files[0].source, BadRecords(preparation.text.skip_bad))
            for batch in read_text_range(files, piece.begin, piece.end, column, bad):
                bad.kept += len(batch.texts)
                encoded = self._encode([text for text in batch.texts if text])
                for mark, count in preparation.separators.spelled_out(batch.texts).items():
                    self.spelled_out[mark] += count
                self.empty += len(batch.texts) - len(encoded.lengths)
                self.text_bytes += batch.text_bytes
                self.read_bytes += batch.read_bytes
                self._lay_down(encoded, file, files[0].path)
                self._report(batch.read_bytes, len(encoded.ids))

    def _encode(self, texts: list[str]) -> Encoded:
        encoded = self._backend.encode(texts)
        if self._check and texts:
            self._check.look(texts, encoded)
        if not encoded.lengths.all():
            encoded = Encoded(encoded.ids, encoded.lengths[encoded.lengths > 0])
        separators = self._preparation.separators
        separators.check_not_doubled(encoded)
        return separators.around(encoded)

    def _lay_down(self, encoded: Encoded, file: IO[bytes], path: str) -> None:
        if not len(encoded.ids):
            return
        if (largest := int(encoded.ids.max())) >= self.vocab_size:
            raise UserError(
                f"{path}: the tokenizer gives id {largest}, its vocabulary has {self.vocab_size}",
                "use a tokenizer whose ids lie within its vocabulary",
            )
        if (longest := int(encoded.lengths.max())) >= 2**31:
            raise UserError(f"{path}: a document has {longest} tokens", "split documents beyond 2**31 tokens")
        file.write(encoded.ids.astype(self.dtype).data)
        self.lengths.frombytes(encoded.lengths.astype(np.intc).tobytes())


def _write_shuffled(work: Path, name: str, file: IO[bytes], gathering: _Gathering, seed: list[int]) -> Shard:
    lengths = np.array(gathering.lengths, dtype=np.int64)
    ends = np.cumsum(lengths)
    order = np.random.default_rng(seed).permutation(len(lengths))
    with ShardWriter(work, name, gathering.vocab_size) as writer:
        if len(ends):
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                _gather(np.frombuffer(mapped, gathering.dtype), ends - lengths, lengths, order, writer)
        return writer.close()


def _gather(
    tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray, order: np.ndarray, writer: ShardWriter
) -> None:
    """Documents in their new order, about a million tokens at a time."""
    starts, lengths = starts[order], lengths[order]
    totals = np.cumsum(lengths)
    cuts = [0, *np.searchsorted(totals, np.arange(GATHERED_TOKENS, totals[-1], GATHERED_TOKENS)), len(order)]
    for begin, end in pairwise(cuts):
        if begin == end:
            continue
        first, size = starts[begin:end].tolist(), lengths[begin:end].tolist()
        chosen = [tokens[a : a + n] for a, n in zip(first, size, strict=True)]
        writer.add_many(np.concatenate(chosen), lengths[begin:end])


INPUTS = "inputs.jsonl"
POLL_S = 0.2


class Part(NamedTuple):
    """This process makes every `of`-th shard, from `number` on."""

    number: int
    of: int


class PrepareWatcher:
    """Told how a prepare goes on; the caller draws it."""

    def planned(self, preparation: Preparation, todo: Sequence[int], workers: int) -> None: ...

    def advanced(self, read_bytes: int, tokens: int) -> None: ...


def prepare(request: PrepareRequest, workers: int, watcher: PrepareWatcher, wait: bool = False) -> TokenStore:
    """The prepared dataset, whether made now, resumed or found finished.

    Where another process is preparing the same directory, `wait` for it instead of refusing.
    """
    drafted = _draft_unless_begun(request)
    if (request.directory / MANIFEST).is_file() and not (request.directory / WORK).exists():
        _check_same_request(request)
        return TokenStore.open(request.directory)
    with space_for(request.directory, _least_bytes(drafted)), alone(request.directory, wait) as locked:
        if not (request.directory / MANIFEST).is_file():
            preparation = begin_or_resume(request, drafted)
            if locked:
                _remove_leftovers(preparation)
            make_shards(preparation, preparation.unfinished(), workers, watcher)
            _finish(request, preparation)
        else:
            _check_same_request(request)
        shutil.rmtree(request.directory / WORK, ignore_errors=True)
    return TokenStore.open(request.directory)


def plan(request: PrepareRequest) -> Preparation:
    """The work ahead, written into the directory for any process to share."""
    drafted = _draft_unless_begun(request)
    with alone(request.directory):
        if (request.directory / MANIFEST).is_file():
            _check_same_request(request)
            raise UserError(f"{request.directory} is prepared already", "there is nothing to submit")
        return begin_or_resume(request, drafted)


def _draft_unless_begun(request: PrepareRequest) -> Preparation | None:
    """Whatever can be refused is refused before the lock is taken or a file written."""
    check_output_outside(request.sources, request.directory)
    begun = any((request.directory / name).is_file() for name in (MANIFEST, f"{WORK}/{PLAN}"))
    return None if begun else draft(request)


def _least_bytes(preparation: Preparation | None) -> int:
    """Of the shards still to be made: a token stands for eight bytes of text at most, over a whole corpus."""
    if preparation is None:
        return 0
    text = sum(preparation.shard_bytes(number) for number in preparation.unfinished())
    return text // 8 * (2 if dtype_for(preparation.vocab_size) == "uint16" else 4)


def _remove_leftovers(preparation: Preparation) -> None:
    """Shards half made by processes that were killed."""
    for path in preparation.work.glob(f"*{MAKING}"):
        shutil.rmtree(path, ignore_errors=True)


def make_shards(
    preparation: Preparation, numbers: Sequence[int], workers: int, watcher: PrepareWatcher
) -> None:
    watcher.planned(preparation, numbers, workers)
    workers = min(workers, len(numbers))
    with space_for(preparation.directory):
        if workers > 1:
            _make_in_processes(preparation, numbers, workers, watcher)
            return
        for number in numbers:
            make_shard(preparation, number, watcher.advanced)


def part_of(preparation: Preparation, part: Part) -> list[int]:
    return [number for number in preparation.unfinished() if number % part.of == part.number]


def read_part(text: str) -> Part:
    number, slash, of = text.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and int(number) < int(of)):
        raise UserError(f"--part {text} is not a part", "write it like 0/8, the first of eight")
    return Part(int(number), int(of))


def _make_in_processes(
    preparation: Preparation, numbers: Sequence[int], workers: int, watcher: PrepareWatcher
) -> None:
    counters = CONTEXT.Array("q", 2)
    seen = [0, 0]

    def look() -> None:
        now = counters[:]
        watcher.advanced(now[0] - seen[0], now[1] - seen[1])
        seen[:] = now

    with worker_pool(workers, _begin_worker, preparation, counters) as pool:
        left = {pool.submit(_make_in_worker, number) for number in numbers}
        while left:
            done, left = wait(left, timeout=POLL_S, return_when=FIRST_COMPLETED)
            look()
            for each in done:
                each.result()


_worker: dict[str, Any] = {}


def _begin_worker(preparation: Preparation, counters: Any) -> None:
    def report(read_bytes: int, tokens: int) -> None:
        with counters.get_lock():
            counters[0] += read_bytes
            counters[1] += tokens

    _worker["make"] = lambda number: make_shard(preparation, number, report)


def _make_in_worker(number: int) -> None:
    _worker["make"](number)


def _finish(request: PrepareRequest, preparation: Preparation) -> None:
    records = [_record(preparation, number) for number in range(len(preparation.shards))]
    directory = preparation.directory
    counts = _count_sources(request, records)
    if not any(record["shard"]["tokens"] for record in records):
        _remove(preparation)
        raise UserError(*_nothing(records, counts))
    limit = BadLimit.parse(request.max_bad)
    for each in counts:
        example = next(iter(each["skipped_examples"]), "")
        limit.refuse(each["source"], each["documents"], each["skipped"] - each["dangling_links"], example)
    publish_file(directory / TOKENIZER, preparation.definition.encode())
    lines = [
        json.dumps({"path": each.path, "bytes": each.size, "mtime_ns": each.mtime_ns})
        for each in preparation.inputs
    ]
    publish_file(directory / INPUTS, "".join(f"{line}\n" for line in lines).encode())
    write_manifest(
        directory,
        [Shard(**record["shard"]) for record in records],
        tokenizer=TOKENIZER,
        vocab_size=preparation.vocab_size,
        eos_id=preparation.eos_id,
        dtype=dtype_for(preparation.vocab_size),
        about=_about(request, preparation, records, counts),
    )


def _count_sources(request: PrepareRequest, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many records of each source were kept and left out, over all shards."""
    counts = [
        {"source": name, "documents": 0, "skipped": 0, "dangling_links": 0, "skipped_examples": []}
        for name in request.sources
    ]
    for record in records:
        for number, (kept, skipped, links, examples) in record["sources"].items():
            count = counts[int(number)]
            count["documents"] += kept
            count["skipped"] += skipped
            count["dangling_links"] += links
            count["skipped_examples"] = [*count["skipped_examples"], *examples][:EXAMPLES]
    return counts


def _nothing(records: list[dict[str, Any]], counts: list[dict[str, Any]]) -> tuple[str, str]:
    empty = sum(record["empty"] for record in records)
    skipped = sum(each["skipped"] for each in counts)
    example = next((example for each in counts for example in each["skipped_examples"]), "")
    return (
        f"the sources hold no text: documents that are empty: {empty}, skipped as bad: {skipped}",
        f"the first bad one: {example}" if example else "check the sources and --column",
    )


def _remove(preparation: Preparation) -> None:
    for number in range(len(preparation.shards)):
        for suffix in (".idx", ".bin"):
            (preparation.directory / f"{preparation.shard_name(number)}{suffix}").unlink(missing_ok=True)
    shutil.rmtree(preparation.work)
    preparation.directory.rmdir()


def _about(
    request: PrepareRequest,
    preparation: Preparation,
    records: list[dict[str, Any]],
    counts: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "source": " ".join(request.sources),
        "sources": list(request.sources),
        "inputs": {
            "file": INPUTS,
            "count": len(preparation.inputs),
            "bytes": sum(each.size for each in preparation.inputs),
            "sha256": inputs_digest(preparation.inputs),
        },
        "settings": preparation.settings,
        "separators": preparation.separators.about(),
        "backend": {
            **preparation.backend._asdict(),
            "shards": dict(Counter(sorted(record["backend"] for record in records))),
            "redone": [record["redone"] for record in records if record["redone"]],
        },
        "spelled_out": {
            mark: sum(record["spelled_out"][mark] for record in records) for mark in ("bos", "eos")
        },
        "empty_documents": sum(record["empty"] for record in records),
        "skipped_records": sum(each["skipped"] for each in counts),
        "skipped_examples": [example for each in counts for example in each["skipped_examples"]][:20],
        "per_source": counts,
    }


def _record(preparation: Preparation, number: int) -> dict[str, Any]:
    try:
        return json.loads(preparation.record_path(number).read_bytes())
    except FileNotFoundError:
        raise UserError(f"shard {number} is not finished", "repeat the command") from None


def _check_same_request(request: PrepareRequest) -> None:
    """Only the same text and settings may find their dataset finished."""
    about = TokenStore.open(request.directory).about
    if "settings" not in about:
        raise UserError(
            f"{request.directory} holds a dataset made otherwise", "prepare into another directory"
        )
    check_same_settings(request, about["settings"])
    check_same_inputs(request, about["inputs"]["sha256"])


def alone(directory: Path, wait: bool = False, shared: bool = False) -> AbstractContextManager[bool]:
    """Hold the lock of a prepare into `directory`; gives whether the file system supports locks.

    The lock is a file beside the directory, which need not exist yet. The parts of a Slurm array share it.
    """
    return files.locked(
        directory.absolute().with_name(f".{directory.absolute().name}.prepare-lock"),
        directory,
        busy="wait for it, or prepare into another directory",
        unwritable="prepare into another directory",
        wait_s=None if wait else 0.0,
        shared=shared,
    )
