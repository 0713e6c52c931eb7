"""Text to a prepared dataset: shards made by one or many processes, the manifest last."""

import errno
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from arriero.data.prepare.preparation import (
    PLAN,
    TOKENIZER,
    WORK,
    Preparation,
    Request,
    begin_or_resume,
    draft,
    inputs_digest,
    refuse_other_inputs,
    refuse_other_settings,
)
from arriero.data.prepare.shard_making import MAKING, make_shard
from arriero.data.processes import CONTEXT, worker_pool
from arriero.data.store.shards import Shard, dtype_for, room_for, write_durably
from arriero.data.store.store import MANIFEST, TokenStore, write_manifest
from arriero.data.text.readers import EXAMPLES, BadLimit
from arriero.data.text.sources import refuse_output_in
from arriero.errors import UserError

INPUTS = "inputs.jsonl"
POLL_S = 0.2
NO_LOCKS_HERE = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # some parallel file systems are mounted so


class Part(NamedTuple):
    """This process makes every `of`-th shard, from `number` on."""

    number: int
    of: int


class Watcher:
    """Told how a prepare goes on; the caller draws it."""

    def planned(self, preparation: Preparation, todo: Sequence[int], workers: int) -> None: ...

    def advanced(self, read_bytes: int, tokens: int) -> None: ...


def prepare(request: Request, workers: int, watcher: Watcher, wait: bool = False) -> TokenStore:
    """The prepared dataset, whether made now, resumed or found finished.

    Where another process is preparing the same directory, `wait` for it instead of refusing.
    """
    drafted = _draft_unless_begun(request)
    if (request.directory / MANIFEST).is_file() and not (request.directory / WORK).exists():
        _refuse_other_request(request)
        return TokenStore.open(request.directory)
    with room_for(request.directory, _least_bytes(drafted)), alone(request.directory, wait) as locked:
        if not (request.directory / MANIFEST).is_file():
            preparation = begin_or_resume(request, drafted)
            if locked:
                _remove_leftovers(preparation)
            make_shards(preparation, preparation.unfinished(), workers, watcher)
            _finish(request, preparation)
        else:
            _refuse_other_request(request)
        shutil.rmtree(request.directory / WORK, ignore_errors=True)
    return TokenStore.open(request.directory)


def plan(request: Request) -> Preparation:
    """The work ahead, written into the directory for any process to share."""
    drafted = _draft_unless_begun(request)
    with alone(request.directory):
        if (request.directory / MANIFEST).is_file():
            _refuse_other_request(request)
            raise UserError(f"{request.directory} is prepared already", "there is nothing to submit")
        return begin_or_resume(request, drafted)


def _draft_unless_begun(request: Request) -> Preparation | None:
    """Whatever can be refused is refused before the lock is taken or a file written."""
    refuse_output_in(request.sources, request.directory)
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


def make_shards(preparation: Preparation, numbers: Sequence[int], workers: int, watcher: Watcher) -> None:
    watcher.planned(preparation, numbers, workers)
    workers = min(workers, len(numbers))
    with room_for(preparation.directory):
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
    preparation: Preparation, numbers: Sequence[int], workers: int, watcher: Watcher
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


def _finish(request: Request, preparation: Preparation) -> None:
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
    write_durably(directory / TOKENIZER, preparation.definition.encode())
    lines = [
        json.dumps({"path": each.path, "bytes": each.size, "mtime_ns": each.mtime_ns})
        for each in preparation.inputs
    ]
    write_durably(directory / INPUTS, "".join(f"{line}\n" for line in lines).encode())
    write_manifest(
        directory,
        [Shard(**record["shard"]) for record in records],
        tokenizer=TOKENIZER,
        vocab_size=preparation.vocab_size,
        eos_id=preparation.eos_id,
        dtype=dtype_for(preparation.vocab_size),
        about=_about(request, preparation, records, counts),
    )


def _count_sources(request: Request, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
    request: Request, preparation: Preparation, records: list[dict[str, Any]], counts: list[dict[str, Any]]
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


def _refuse_other_request(request: Request) -> None:
    """Only the same text and settings may find their dataset finished."""
    about = TokenStore.open(request.directory).about
    if "settings" not in about:
        raise UserError(
            f"{request.directory} holds a dataset made otherwise", "prepare into another directory"
        )
    refuse_other_settings(request, about["settings"])
    refuse_other_inputs(request, about["inputs"]["sha256"])


@contextmanager
def alone(directory: Path, wait: bool = False, shared: bool = False) -> Iterator[bool]:
    """Hold the lock of a prepare into `directory`; gives whether the file system knows locks.

    The lock is a file beside the directory, which need not exist yet. The parts of a Slurm array share it.
    """
    path = directory.absolute().with_name(f".{directory.absolute().name}.prepare-lock")
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path, directory, wait, shared)
    except OSError as error:
        raise UserError(
            f"cannot write into {directory} ({error.strerror})", "prepare into another directory"
        ) from None
    try:
        yield descriptor is not None
    finally:
        with suppress(OSError):
            if not shared:
                path.unlink()
            for folder in missing:
                folder.rmdir()
        if descriptor is not None:
            os.close(descriptor)


def _locked(path: Path, directory: Path, wait: bool, shared: bool) -> int | None:
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, how if wait else how | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in NO_LOCKS_HERE:
                return None
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise UserError(
                f"another prepare is working in {directory}", "wait for it, or prepare into another directory"
            ) from None
        try:
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)  # its last holder has removed it meanwhile
