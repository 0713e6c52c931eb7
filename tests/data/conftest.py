from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from arriero.data.prepare.builtin import prepare_builtin
from arriero.data.store.manifest import write_manifest
from arriero.data.store.shards import ShardWriter, dtype_for
from arriero.data.store.store import TokenStore
from arriero.data.text.builtin import stdlib_documents
from arriero.data.tokens.llama_tokenizers import LLAMA3_PATTERN
from arriero.data.tokens.tokenizer import train_tokenizer

MakeStore = Callable[..., TokenStore]


def write_store(
    directory: Path, shards: Sequence[Sequence[Sequence[int]]], vocab_size: int = 1000, tokenizer: str = "{}"
) -> TokenStore:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer)
    written = []
    for i, documents in enumerate(shards):
        with ShardWriter(directory, f"{i:05d}", vocab_size) as writer:
            for ids in documents:
                writer.add(np.array(ids, dtype=np.int64))
            written.append(writer.close())
    write_manifest(
        directory,
        written,
        tokenizer="tokenizer.json",
        vocab_size=vocab_size,
        eos_id=0,
        dtype=dtype_for(vocab_size),
        about={"source": "test"},
    )
    return TokenStore.open(directory)


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    count = iter(range(1000))
    return lambda shards, **more: write_store(tmp_path / f"set{next(count)}", shards, **more)


@pytest.fixture(scope="session")
def counting_store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Token k of the dataset is k, in documents of 7 tokens over shards of 210."""
    shards = [
        [range(begin, begin + 7) for begin in range(210 * shard, 210 * (shard + 1), 7)] for shard in range(5)
    ]
    return write_store(tmp_path_factory.mktemp("counting") / "set", shards, vocab_size=2000)


@pytest.fixture(scope="session")
def stdlib_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    prepare_builtin("builtin:stdlib", cache)
    return cache


@pytest.fixture(scope="session")
def three_stores(tmp_path_factory: pytest.TempPathFactory) -> list[TokenStore]:
    """Documents of 0 to 30 tokens, each token of all three datasets a different one."""
    lengths = np.random.default_rng(4).integers(0, 31, (3, 40))
    stores, token = [], 0
    for i, row in enumerate(lengths):
        documents = []
        for length in row.tolist():
            documents.append(range(token, token + length))
            token += length
        stores.append(write_store(tmp_path_factory.mktemp("three") / str(i), [documents], vocab_size=3000))
    return stores


@pytest.fixture(scope="session")
def dataset_writer() -> MakeStore:
    return write_store


@pytest.fixture(scope="session")
def real_texts() -> list[str]:
    return [document.text for document in stdlib_documents()[::12]]


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory, real_texts: list[str]) -> Path:
    """A byte-level BPE with Llama 3's pattern and `<|end_of_text|>`."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(real_texts[:20], 1500, path, split=LLAMA3_PATTERN, end="<|end_of_text|>")
    return path
