"""Text to a prepared dataset: shards made by one or many processes, the manifest last."""

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, NamedTuple

from arriero.data.prepare.preparation import (
    TOKENIZER,
    WORK,
    Preparation,
    Request,
    begin_or_resume,
    inputs_digest,
    refuse_other_inputs,
    refuse_other_settings,
)
from arriero.data.prepare.shard_making import make_shard
from arriero.data.store.shards import Shard, dtype_for, write_durably
from arriero.data.store.store import MANIFEST, TokenStore, write_manifest
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

    def planned(self, preparation: Preparation, todo: Sequence[int]) -> None: ...

    def advanced(self, read_bytes: int, tokens: int) -> None: ...


def prepare(request: Request, workers: int, watcher: Watcher) -> TokenStore:
    """The prepared dataset, whether made now, resumed or found finished."""
    if (request.directory / MANIFEST).is_file():
        return _already_prepared(request)
    preparation = plan(request)
    with _alone(request.directory / WORK):
        make_shards(preparation, preparation.unfinished(), workers, watcher)
        _finish(request, preparation)
    shutil.rmtree(request.directory / WORK)
    return TokenStore.open(request.directory)


def plan(request: Request) -> Preparation:
    """The work ahead, written into the directory for any process to share."""
    if (request.directory / MANIFEST).is_file():
        _already_prepared(request)
        raise UserError(f"{request.directory} is prepared already", "there is nothing to submit")
    return begin_or_resume(request)


def make_shards(preparation: Preparation, numbers: Sequence[int], workers: int, watcher: Watcher) -> None:
    watcher.planned(preparation, numbers)
    workers = min(workers, len(numbers))
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
    context = multiprocessing.get_context("spawn")
    counters = context.Array("q", 2)
    seen = [0, 0]

    def look() -> None:
        now = counters[:]
        watcher.advanced(now[0] - seen[0], now[1] - seen[1])
        seen[:] = now

    with ProcessPoolExecutor(workers, context, _begin_worker, (preparation, counters)) as pool:
        left = {pool.submit(_make_in_worker, number) for number in numbers}
        try:
            while left:
                done, left = wait(left, timeout=POLL_S, return_when=FIRST_COMPLETED)
                look()
                for each in done:
                    each.result()
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed", "repeat the command; with fewer --workers if memory ran out"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_worker: dict[str, Any] = {}


def _begin_worker(preparation: Preparation, counters: Any) -> None:
    """A worker ends when its parent does, also when that was killed without warning."""

    def report(read_bytes: int, tokens: int) -> None:
        with counters.get_lock():
            counters[0] += read_bytes
            counters[1] += tokens

    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    _worker["make"] = lambda number: make_shard(preparation, number, report)


def _end_with(sentinel: int) -> None:
    wait_for([sentinel])
    os._exit(1)


def _make_in_worker(number: int) -> None:
    _worker["make"](number)


def _finish(request: Request, preparation: Preparation) -> None:
    records = [_record(preparation, number) for number in range(len(preparation.shards))]
    directory = preparation.directory
    if not any(record["shard"]["tokens"] for record in records):
        _remove(preparation)
        raise UserError(*_nothing(records))
    write_durably(directory / TOKENIZER, preparation.definition.encode())
    lines = [
        json.dumps({"path": path, "bytes": size, "mtime_ns": mtime})
        for _, _, path, size, mtime in preparation.inputs
    ]
    write_durably(directory / INPUTS, "".join(f"{line}\n" for line in lines).encode())
    write_manifest(
        directory,
        [Shard(**record["shard"]) for record in records],
        tokenizer=TOKENIZER,
        vocab_size=preparation.vocab_size,
        eos_id=preparation.eos_id,
        dtype=dtype_for(preparation.vocab_size),
        about=_about(request, preparation, records),
    )


def _nothing(records: list[dict[str, Any]]) -> tuple[str, str]:
    empty, skipped = (sum(record[name] for record in records) for name in ("empty", "skipped"))
    example = next((each for record in records for each in record["skipped_examples"]), "")
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


def _about(request: Request, preparation: Preparation, records: list[dict[str, Any]]) -> dict[str, Any]:
    examples = [example for record in records for example in record["skipped_examples"]]
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
            "shards": {name: used.count(name) for name in sorted(set(used))}
            if (used := [record["backend"] for record in records])
            else {},
        },
        "spelled_out": {
            mark: sum(record["spelled_out"][mark] for record in records) for mark in ("bos", "eos")
        },
        "empty_documents": sum(record["empty"] for record in records),
        "skipped_records": sum(record["skipped"] for record in records),
        "skipped_examples": examples[:20],
    }


def _record(preparation: Preparation, number: int) -> dict[str, Any]:
    try:
        return json.loads(preparation.record_path(number).read_bytes())
    except FileNotFoundError:
        raise UserError(f"shard {number} is not finished", "repeat the command") from None


def _already_prepared(request: Request) -> TokenStore:
    store = TokenStore.open(request.directory)
    if "settings" not in store.about:
        raise UserError(
            f"{request.directory} holds a dataset made otherwise", "prepare into another directory"
        )
    refuse_other_settings(request, store.about["settings"])
    refuse_other_inputs(request, store.about["inputs"]["sha256"])
    shutil.rmtree(request.directory / WORK, ignore_errors=True)
    return store


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS_HERE:
                raise UserError(
                    f"another prepare is working in {work.parent}",
                    "wait for it, or prepare into another directory",
                ) from None
        yield
