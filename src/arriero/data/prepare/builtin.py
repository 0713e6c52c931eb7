"""Prepare the text that a run file names, once, into `data.cache`, with the same `prepare` as the command."""

import os
import platform
import random
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from glob import has_magic
from pathlib import Path

from arriero.data.prepare.planning import Preparation, PrepareRequest, identity_of
from arriero.data.prepare.prepare import PrepareWatcher, prepare, prepare_lock
from arriero.data.store.manifest import MANIFEST
from arriero.data.store.store import TokenStore, check_finished
from arriero.data.text.builtin import DEFAULT_BYTES, markov_text, stdlib_documents
from arriero.data.text.hub import local_model
from arriero.data.text.sources import NAMED, STDLIB, SYNTHETIC, check_output_outside
from arriero.data.tokens.tokenizer import train_tokenizer
from arriero.data.workers import ProgressCallback, no_progress
from arriero.errors import UserError

VOCAB_SIZE = 4096
TRAINING_CHARS = 4_000_000
SHUFFLE_SEED = 1
TEXT = "text"
_CACHE = "set data.cache to a directory"


BUILTINS = {
    STDLIB: lambda: [document.text for document in stdlib_documents()],
    SYNTHETIC: lambda: list(markov_text().documents(0, round(DEFAULT_BYTES / markov_text().document_bytes))),
}


def dataset_of(
    path: str,
    tokenizer: str | None = None,
    column: str | None = None,
    cache: Path = Path("data"),
    progress: ProgressCallback = no_progress,
    template: str | None = None,
    chat: bool | str = False,
) -> Path:
    """Return the prepared dataset of a source in a run file; prepare text with `tokenizer` first.

    `chat` is whether records are chats, or the file of their chat template.
    """
    if path.startswith("builtin:") and tokenizer is None:
        return prepare_builtin(path, cache, progress)
    is_named = path.startswith(NAMED)
    if not is_named and (Path(path) / MANIFEST).exists():
        if not (tokenizer or column or template or chat):
            return Path(path)
        todo = "remove tokenizer, column, template and chat, which are for text"
        raise UserError(f"{path} is a prepared dataset", todo)
    if not is_named:
        check_finished(Path(path))
    if tokenizer is None:
        if not is_named and not Path(path).exists() and not has_magic(path):
            return Path(path)  # the error of opening it names what is missing
        raise UserError(
            f"{path} is not a prepared dataset ({MANIFEST} does not exist); as text it needs a tokenizer",
            f'write {{ path = "{path}", tokenizer = "tokenizer.json" }}; '
            f"`arriero data train-tokenizer {path} -o tokenizer.json` makes one",
        )
    try:
        how = PrepareRequest(
            (path,),
            cache,
            local_model(tokenizer, weights=False),
            column,
            templates=(("", template),) if template else (),
            chat=Path(chat) if isinstance(chat, str) else None if chat else False,
        )
        return _prepare_text(path, how, cache, progress)
    except UserError as error:
        if "--" not in error.todo:
            raise
        todo = f"{error.todo}: an option of `arriero data prepare`, whose output may be the source instead"
        raise UserError(error.what, todo) from None


def _prepare_text(path: str, request: PrepareRequest, cache: Path, progress: ProgressCallback) -> Path:
    """Prepare text into a directory named by a hash of the text and the tokenizer, so changes are noticed."""
    check_output_outside((path,), cache, "data.cache", f"{_CACHE} outside of the source")
    progress("reading the inputs", 0, 1)
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", path.removeprefix("builtin:")).strip("-.")[-40:] or TEXT
    target = cache / TEXT / f"{name}-{identity_of(request)[:16]}"
    progress("reading the inputs", 1, 1)
    _check_writable(target)
    workers = len(os.sched_getaffinity(0))
    prepare(replace(request, directory=target), workers, _ReportingWatcher(progress), wait=True)
    return target


class _ReportingWatcher(PrepareWatcher):
    def __init__(self, progress: ProgressCallback) -> None:
        self._progress = progress
        self._done, self._total = 0, 1

    def planned(self, preparation: Preparation, todo: Sequence[int], workers: int) -> None:
        self._total = max(1, sum(preparation.shard_bytes(number) for number in todo))
        self._progress("tokenising", 0, self._total)

    def advanced(self, read_bytes: int, tokens: int) -> None:
        self._done += read_bytes
        self._progress("tokenising", min(self._done, self._total), self._total)


def prepare_builtin(name: str, cache: Path, progress: ProgressCallback = no_progress) -> Path:
    """Return the directory of a built-in dataset with its own tokenizer; prepare it if necessary."""
    if name not in BUILTINS:
        raise UserError(f"'{name}' is not a built-in dataset", f"choose one of {', '.join(BUILTINS)}")
    python = ".".join(platform.python_version_tuple()[:2])
    target = Path(cache) / f"{name.removeprefix('builtin:')}-py{python}-v{VOCAB_SIZE}"
    if _is_usable(target):
        return target
    _check_writable(target)
    with (
        prepare_lock(target.with_name(f"{target.name}-making"), wait=True),
        tempfile.TemporaryDirectory(prefix="arriero-") as folder,
    ):
        if not _is_usable(target):
            shutil.rmtree(target, ignore_errors=True)  # damaged, or left by a process that was killed
            tokenizer = Path(folder) / "tokenizer.json"
            progress("reading", 0, 1)
            texts = _sample(BUILTINS[name]())
            progress("reading", 1, 1)
            progress("training the tokenizer", 0, 1)
            train_tokenizer(texts, VOCAB_SIZE, tokenizer)
            progress("training the tokenizer", 1, 1)
            prepare(PrepareRequest((name,), target, tokenizer), 1, _ReportingWatcher(progress), wait=True)
    return target


def _sample(texts: Sequence[str]) -> list[str]:
    sample, chars = [], 0
    for text in random.Random(SHUFFLE_SEED).sample(texts, len(texts)):
        if chars >= TRAINING_CHARS:
            break
        sample.append(text)
        chars += len(text)
    return sample


def _check_writable(target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            return
    except OSError as error:
        raise UserError(f"cannot write {target} ({error.strerror})", f"{_CACHE} you may write") from None


def _is_usable(directory: Path) -> bool:
    try:
        store = TokenStore.open(directory)
        store.document_starts(0, store.tokens)
        is_whole = next(store.shard_size_problems(), None) is None
        return is_whole and store.tokens > 0 and store.tokenizer_path.is_file()
    except UserError:
        return False
