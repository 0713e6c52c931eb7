"""Datasets of random tokens with a tokenizer that has exactly their ids."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import tokenizers
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from arriero.data.store.manifest import write_manifest
from arriero.data.store.shards import ShardWriter, document_lengths, dtype_for, read_index
from arriero.data.store.store import TokenStore

EOS = 0
SMALL, LARGE = 1000, 70_000


@cache
def tokenizer_json(vocab_size: int) -> str:
    vocabulary = {"<|end|>": EOS} | {f"w{i}": i for i in range(1, vocab_size)}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="w1"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return inner.to_str()


def make_dataset(
    directory: Path, shards: Sequence[Sequence[Sequence[int]]], vocab_size: int = SMALL
) -> TokenStore:
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text(tokenizer_json(vocab_size))
    written = []
    for number, documents in enumerate(shards):
        with ShardWriter(directory, f"{number:05d}", vocab_size) as writer:
            for ids in documents:
                writer.add(np.array(ids, dtype=np.int64), text_bytes=3 * len(ids))
            written.append(writer.close())
    write_manifest(
        directory,
        written,
        tokenizer="tokenizer.json",
        vocab_size=vocab_size,
        eos_id=EOS,
        dtype=dtype_for(vocab_size),
        about={"source": "a test"},
    )
    return TokenStore.open(directory)


def tokenizer_file(directory: Path, vocab_size: int = SMALL) -> Path:
    path = directory / f"tokenizer-{vocab_size}.json"
    if not path.exists():
        path.write_text(tokenizer_json(vocab_size))
    return path


def documents_of(store: TokenStore) -> list[list[list[int]]]:
    """Per shard its documents, read through the index."""
    shards, begin = [], 0
    for shard in range(store.shards):
        documents = []
        for length in document_lengths(read_index(store.shard_path(shard, ".idx"))).tolist():
            documents.append(store.read(begin, length).tolist())
            begin += length
        shards.append(documents)
    assert begin == store.tokens
    return shards


def _huge(seed: int, vocab_size: int) -> list[int]:
    ids = np.random.default_rng(seed).integers(1, vocab_size, 70_000 + seed)
    return [*ids.tolist(), EOS]


def corpora(vocab_size: int, all_end: bool = False) -> st.SearchStrategy[list[list[list[int]]]]:
    """Shards of documents: empty, of one token, with and without EOS, and now and then a huge one."""
    ids = st.integers(1, vocab_size - 1)
    ended = st.lists(ids, min_size=1, max_size=8).map(lambda some: [*some, EOS])
    huge = st.integers(0, 3).map(lambda seed: _huge(seed, vocab_size))
    odd = st.one_of(st.just([]), st.just([EOS]), ids.map(lambda one: [one]), st.lists(ids, max_size=3), huge)
    document = ended if all_end else st.one_of(ended, ended, odd)
    return st.lists(st.lists(document, max_size=6).filter(_separated_once), min_size=1, max_size=3)


def _separated_once(documents: list[list[int]]) -> bool:
    """Half of the documents being EOS alone is what a doubled separator looks like."""
    return len(documents) < 4 or 2 * documents.count([EOS]) < len(documents)
