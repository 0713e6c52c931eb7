"""Turn text into a prepared dataset: one or many processes make the shards, the manifest is written last."""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from arriero.data.prepare.planning import (
    PLAN,
    TOKENIZER,
    Preparation,
    PrepareRequest,
    begin_or_resume,
    check_same_inputs,
    check_same_settings,
    draft,
    inputs_digest,
)
from arriero.data.prepare.shard import MAKING, make_shard
from arriero.data.store.loss_mask import MASK
from arriero.data.store.manifest import MANIFEST, WORK, write_manifest
from arriero.data.store.shards import DTYPES, Shard, dtype_for
from arriero.data.store.store import TokenStore
from arriero.data.text.readers import EXAMPLES, BadLimit
from arriero.data.text.sources import check_output_outside
from arriero.data.tokens.marked import chat_separators
from arriero.data.workers import CONTEXT, worker_pool
from arriero.errors import UserError
from arriero.files import locked, publish_file, space_for

INPUTS = "inputs.jsonl"
CHAT_TEMPLATE = "chat_template.jinja"
POLL_S = 0.2


class PrepareWatcher:
    """Receives the progress of a prepare. The methods do nothing; a caller that shows it overrides them."""

    def planned(self, preparation: Preparation, todo: Sequence[int], workers: int) -> None: ...

    def advanced(self, read_bytes: int, tokens: int) -> None: ...


def prepare(request: PrepareRequest, workers: int, watcher: PrepareWatcher, wait: bool = False) -> TokenStore:
    """Make, resume or find the dataset of a request and open it.

    Where another process is preparing the same directory, `wait` for it instead of raising UserError.
    """
    drafted = _draft_unless_begun(request)
    directory = request.directory
    if (directory / MANIFEST).is_file() and not (directory / WORK).exists():
        _check_same_request(request)
        return TokenStore.open(directory)
    with space_for(directory, _least_bytes(drafted)), prepare_lock(directory, wait) as has_lock:
        if (directory / MANIFEST).is_file():
            _check_same_request(request)
        else:
            preparation = begin_or_resume(request, drafted)
            if has_lock:
                for left in preparation.work.glob(f"*{MAKING}"):  # by processes that were killed
                    shutil.rmtree(left, ignore_errors=True)
            make_shards(preparation, preparation.unfinished(), workers, watcher)
            _finish(request, preparation)
        shutil.rmtree(directory / WORK, ignore_errors=True)
    return TokenStore.open(directory)


def plan_for_slurm(request: PrepareRequest) -> Preparation:
    """Write the plan of a prepare into its directory, for any number of processes to share."""
    drafted = _draft_unless_begun(request)
    with prepare_lock(request.directory):
        if (request.directory / MANIFEST).is_file():
            _check_same_request(request)
            raise UserError(f"{request.directory} is prepared already", "there is nothing to submit")
        return begin_or_resume(request, drafted)


def prepare_lock(directory: Path, wait: bool = False, shared: bool = False) -> AbstractContextManager[bool]:
    """Lock a prepare into `directory` with a file beside it. The parts of a Slurm array share the lock."""
    whole = directory.absolute()
    return locked(
        whole.with_name(f".{whole.name}.prepare-lock"),
        directory,
        unwritable="prepare into another directory",
        busy="wait for it, or prepare into another directory",
        wait_s=None if wait else 0.0,
        shared=shared,
    )


def _draft_unless_begun(request: PrepareRequest) -> Preparation | None:
    """Raise every error that can be found before the lock is taken or a file written."""
    check_output_outside(request.sources, request.directory)
    begun = any((request.directory / name).is_file() for name in (MANIFEST, f"{WORK}/{PLAN}"))
    return None if begun else draft(request)


def _least_bytes(preparation: Preparation | None) -> int:
    """Return the least size of the shards to make: a token stands for at most 8 bytes of text on average."""
    if preparation is None:
        return 0
    text = sum(preparation.shard_bytes(number) for number in preparation.unfinished())
    return text // 8 * DTYPES[dtype_for(preparation.vocab_size)].numpy.itemsize


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


def read_part(text: str) -> tuple[int, int]:
    """Read a part like 3/8: every eighth shard, from shard 3 on."""
    first, slash, step = text.partition("/")
    if not (slash and first.isdecimal() and step.isdecimal() and int(first) < int(step)):
        raise UserError(f"--part {text} is not a part", "write it like 0/8, the first of eight")
    return int(first), int(step)


def _make_in_processes(
    preparation: Preparation, numbers: Sequence[int], workers: int, watcher: PrepareWatcher
) -> None:
    counters = CONTEXT.Array("q", 2)
    seen = [0, 0]
    with worker_pool(workers, _start_worker, preparation, counters) as pool:
        left = {pool.submit(_make_in_worker, number) for number in numbers}
        while left:
            done, left = wait(left, timeout=POLL_S, return_when=FIRST_COMPLETED)
            now = counters[:]
            watcher.advanced(now[0] - seen[0], now[1] - seen[1])
            seen = now
            for each in done:
                each.result()


_worker: dict[str, Any] = {}


def _start_worker(preparation: Preparation, counters: Any) -> None:
    def report(read_bytes: int, tokens: int) -> None:
        with counters.get_lock():
            counters[0] += read_bytes
            counters[1] += tokens

    _worker["make"] = lambda number: make_shard(preparation, number, report)


def _make_in_worker(number: int) -> None:
    _worker["make"](number)


def _finish(request: PrepareRequest, preparation: Preparation) -> None:
    """Check the counts of all shards and write the manifest."""
    records = [_record(preparation, number) for number in range(len(preparation.shards))]
    directory = preparation.directory
    counts = _count_sources(request, records)
    if not any(record["shard"]["tokens"] for record in records):
        _remove_output(preparation)
        raise UserError(*_no_text(records, counts))
    limit = BadLimit.parse(request.max_bad)
    for each in counts:
        example = next(iter(each["skipped_examples"]), "")
        limit.check(each["source"], each["documents"], each["skipped"] - each["dangling_links"], example)
    publish_file(directory / TOKENIZER, preparation.definition.encode())
    if (chat := preparation.text.chat) is not None:
        publish_file(directory / CHAT_TEMPLATE, chat.template.encode())
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
        labels=(MASK, [each["mask_sha256"] for each in records]) if preparation.text.masks_loss else None,
    )


def _record(preparation: Preparation, number: int) -> dict[str, Any]:
    path = preparation.record_path(number)
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"shard {number} is not finished", "repeat the command") from None
    except ValueError:
        raise UserError(f"{path} is damaged", "remove it and repeat the command") from None


def _count_sources(request: PrepareRequest, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Count the kept and skipped records of each source over all shards."""
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


def _no_text(records: list[dict[str, Any]], counts: list[dict[str, Any]]) -> tuple[str, str]:
    empty = sum(record["empty"] for record in records)
    skipped = sum(each["skipped"] for each in counts)
    example = next((example for each in counts for example in each["skipped_examples"]), "")
    return (
        f"the sources hold no text: documents that are empty: {empty}, skipped as bad: {skipped}",
        f"the first bad one: {example}" if example else "check the sources and --column",
    )


def _remove_output(preparation: Preparation) -> None:
    for number in range(len(preparation.shards)):
        for suffix in (".idx", ".bin", f".{MASK}"):
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
        "separators": (
            preparation.separators
            if preparation.text.chat is None
            else chat_separators(preparation.text.chat, preparation.definition)
        ).about(),
        "backend": {
            **preparation.backend._asdict(),
            "shards": dict(Counter(sorted(record["backend"] for record in records))),
            "redone": [record["redone"] for record in records if record["redone"]],
        },
        "spelled_out": {
            name: sum(record["spelled_out"][name] for record in records) for name in ("bos", "eos")
        },
        "empty_documents": sum(record["empty"] for record in records),
        "skipped_records": sum(each["skipped"] for each in counts),
        "skipped_examples": [example for each in counts for example in each["skipped_examples"]][:20],
        "per_source": counts,
    }


def _check_same_request(request: PrepareRequest) -> None:
    """Raise UserError if the finished dataset was made from other text or with other settings."""
    about = TokenStore.open(request.directory).about
    if "settings" not in about:
        raise UserError(
            f"{request.directory} holds a dataset that `data prepare` did not make",
            "prepare into another directory",
        )
    check_same_settings(request, about["settings"])
    check_same_inputs(request, about["inputs"]["sha256"])
