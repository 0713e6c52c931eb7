"""A new tokenizer out of some text."""

import errno
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from arriero.data.prepare.division import divide
from arriero.data.store.shards import room_for, write_durably
from arriero.data.text.readers import BadLimit, BadRecords, read_piece
from arriero.data.text.sources import Input, TextSources
from arriero.data.tokens.tokenizer import END, Tokenizer, load_tokenizer
from arriero.errors import UserError

SMALLEST_VOCAB = 257
LARGEST_VOCAB = 2**24


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, path: Path, *, split: str | None = None, end: str = END
) -> Tokenizer:
    """A byte-level BPE, so that any text can be encoded, with `end` as the end of a document.

    `split` is the pattern that cuts text into words before merging; without it GPT-2's.
    """
    if vocab_size < SMALLEST_VOCAB:
        raise UserError(
            f"a vocabulary of {vocab_size} is too small",
            f"{SMALLEST_VOCAB} holds every byte and the end token",
        )
    if vocab_size > LARGEST_VOCAB:
        raise UserError(
            f"a vocabulary of {vocab_size:,} is too large",
            f"the largest is {LARGEST_VOCAB:,}; 128,000 is common",
        )
    _refuse_unwritable(path, 40 * vocab_size)
    inner = tokenizers.Tokenizer(models.BPE(ignore_merges=split is not None))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split is not None:
        words = pre_tokenizers.Split(tokenizers.Regex(split), "isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    some = False

    def seen() -> Iterator[str]:
        nonlocal some
        for text in texts:
            some = some or bool(text)
            yield text

    inner.train_from_iterator(seen(), trainer)
    if not some:
        raise UserError("there is no text to learn a tokenizer from", "check the sources and --column")
    with room_for(path):
        write_durably(path, inner.to_str(pretty=True).encode())
    return load_tokenizer(path, end)


def _refuse_unwritable(path: Path, size: int) -> None:
    """Also where so many bytes do not fit, which a quota tells only when they are written."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(bytes(size))
            return
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror})", "choose another place") from None


def sample_texts(
    text: TextSources,
    inputs: list[Input],
    limit_bytes: int,
    bad: dict[int, BadRecords],
    max_bad: BadLimit,
    seed: int = 1,
) -> Iterator[str]:
    """Documents from all over the sources until `limit_bytes` of text; `bad` counts them by source."""
    pieces = [piece for shard in divide(inputs, limit_bytes, seed) for piece in shard]
    taken = 0
    for piece in pieces:
        files = inputs[piece.first : piece.first + piece.files]
        each = bad.setdefault(files[0].source, BadRecords(text.skip_bad))
        for batch in read_piece(files, piece.begin, piece.end, text.column_of(files[0]), each):
            each.kept += len(batch.texts)
            yield from batch.texts
            taken += batch.text_bytes
            if taken >= limit_bytes:
                break
        if taken >= limit_bytes:
            break
    for number, each in bad.items():
        max_bad.refuse(text.names[number], each.kept, each.count - each.links, "".join(each.examples[:1]))
