"""The built-in datasets: made once, without being asked where or how, and kept in a cache."""

import platform
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arriero.data.progress import Progress, silent
from arriero.data.store.shards import Shard, ShardWriter, dtype_for
from arriero.data.store.staging import staged_directory
from arriero.data.store.store import TokenStore, write_manifest
from arriero.data.text.sources import STDLIB, SYNTHETIC, Document, stdlib_documents
from arriero.data.text.synthetic import DEFAULT_BYTES, markov_text
from arriero.data.tokens.tokenizer import Tokenizer
from arriero.data.tokens.training import train_tokenizer
from arriero.errors import UserError


def synthetic_documents() -> list[Document]:
    text = markov_text()
    count = round(DEFAULT_BYTES / text.document_bytes)
    return [Document(str(number), text.document(number)) for number in range(count)]


BUILTINS = {STDLIB: stdlib_documents, SYNTHETIC: synthetic_documents}
VOCAB_SIZE = 4096
TRAINING_CHARS = 4_000_000
SHUFFLE_SEED = 1
DOCUMENTS_PER_CALL = 32


def prepare_builtin(name: str, cache_dir: Path, progress: Progress = silent) -> Path:
    """The directory of the prepared dataset, made now unless it is there already."""
    if name not in BUILTINS:
        raise UserError(f"'{name}' is not a built-in dataset", f"choose one of {', '.join(BUILTINS)}")
    python = ".".join(platform.python_version_tuple()[:2])
    target = Path(cache_dir) / f"{name.removeprefix('builtin:')}-py{python}-v{VOCAB_SIZE}"
    if _usable(target):
        return target
    shutil.rmtree(target, ignore_errors=True)
    try:
        with staged_directory(target, "set data.cache to a directory you may write") as making:
            progress("reading", 0, 1)
            documents = BUILTINS[name]()
            progress("reading", 1, 1)
            about = {"source": name, "python": platform.python_version(), "shuffle_seed": SHUFFLE_SEED}
            _write_dataset(making, documents, about, progress)
    except (UserError, OSError):
        # another process may have finished the same dataset meanwhile
        if not _usable(target):
            raise
    return target


def _write_dataset(
    directory: Path, documents: Sequence[Document], about: dict[str, Any], progress: Progress
) -> None:
    documents = random.Random(SHUFFLE_SEED).sample(documents, len(documents))
    progress("training the tokenizer", 0, 1)
    tokenizer = train_tokenizer(_beginning(documents), VOCAB_SIZE, directory / "tokenizer.json")
    progress("training the tokenizer", 1, 1)
    shard = _write_shard(directory, "00000", documents, tokenizer, progress)
    write_manifest(
        directory,
        [shard],
        tokenizer="tokenizer.json",
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        dtype=dtype_for(tokenizer.vocab_size),
        about=about,
    )


def _write_shard(
    directory: Path, name: str, documents: Sequence[Document], tokenizer: Tokenizer, progress: Progress
) -> Shard:
    with ShardWriter(directory, name, tokenizer.vocab_size) as writer:
        for begin in range(0, len(documents), DOCUMENTS_PER_CALL):
            progress("tokenising", begin, len(documents))
            texts = [document.text for document in documents[begin : begin + DOCUMENTS_PER_CALL]]
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                writer.add(np.array([*ids, tokenizer.eos_id]), text_bytes=len(text.encode()))
        progress("tokenising", len(documents), len(documents))
        return writer.close()


def _beginning(documents: Sequence[Document]) -> list[str]:
    texts, chars = [], 0
    for document in documents:
        if chars >= TRAINING_CHARS:
            break
        texts.append(document.text)
        chars += len(document.text)
    return texts


def _usable(directory: Path) -> bool:
    try:
        store = TokenStore.open(directory)
        store.document_starts(0, store.tokens)
        return store.tokens > 0 and store.tokenizer_path.is_file()
    except UserError:
        return False
