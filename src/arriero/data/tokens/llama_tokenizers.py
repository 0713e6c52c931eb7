"""Convert the two kinds of `tokenizer.model` in Llama checkpoints to a `tokenizer.json`.

Llama 3: lines of base64 token and rank, as tiktoken reads them.
Llama 2: a sentencepiece model, BPE with byte fallback.
"""

import base64
import binascii
import re
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIALS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
)
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s*\Z")


def from_model_file(raw: bytes) -> tokenizers.Tokenizer:
    """Convert a `tokenizer.model`; raise ValueError if it is neither kind."""
    if _RANK_LINE.match(raw.partition(b"\n")[0]):
        return _from_ranks(_parse_ranks(raw))
    return _from_sentencepiece(_parse_sentencepiece(raw))


def _parse_ranks(raw: bytes) -> dict[bytes, int]:
    ranks = {}
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"line {number} is not a base64 token and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("the ranks are not 0, 1, 2, ... without gaps")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"byte {missing[0]} has no token")
    return ranks


def _from_ranks(ranks: dict[bytes, int]) -> tokenizers.Tokenizer:
    spelling = _byte_spelling()

    def spelled(token: bytes) -> str:
        return "".join(spelling[byte] for byte in token)

    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in halves if left in ranks and right in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(spelled(left), spelled(right)) for left, right in known]
    vocab = {spelled(token): rank for token, rank in ranks.items()}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in LLAMA3_SPECIALS])
    return inner


def _byte_spelling() -> list[str]:
    """Return the printable character that stands for each byte in byte-level BPE."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    spelling = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in spelling)
    spelling |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [spelling[byte] for byte in range(256)]


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BPE_MODEL = 2


class _Piece(NamedTuple):
    text: str
    score: float
    kind: int


class _SentencePiece(NamedTuple):
    pieces: list[_Piece]
    model_type: int
    charsmap: bytes
    dummy_prefix: bool
    squeezes_spaces: bool


def _parse_sentencepiece(raw: bytes) -> _SentencePiece:
    try:
        fields = list(_fields(raw))
        trainer = dict(field for number, body in fields if number == 2 for field in _fields(body))
        normalizer = dict(field for number, body in fields if number == 3 for field in _fields(body))
        pieces = [_piece(dict(_fields(body))) for number, body in fields if number == 1]
    except (AttributeError, LookupError, struct.error, TypeError, ValueError):
        raise ValueError("neither base64 ranks (Llama 3) nor a sentencepiece model (Llama 2)") from None
    if not pieces:
        raise ValueError("neither base64 ranks (Llama 3) nor a sentencepiece model (Llama 2)")
    return _SentencePiece(
        pieces,
        model_type=trainer.get(3, 1),
        charsmap=normalizer.get(2, b""),
        dummy_prefix=bool(normalizer.get(3, 1)),
        squeezes_spaces=bool(normalizer.get(4, 1)),
    )


def _piece(fields: dict) -> _Piece:
    return _Piece(fields[1].decode(), struct.unpack("<f", fields.get(2, bytes(4)))[0], fields.get(3, NORMAL))


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the (number, value) pairs of a protobuf message."""
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(raw, at)
        else:
            size, at = _varint(raw, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
            value, at = raw[at : at + size], at + size
            if at > len(raw):
                raise ValueError("a field runs past the end")
        yield number, value


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _from_sentencepiece(model: _SentencePiece) -> tokenizers.Tokenizer:
    if model.model_type != BPE_MODEL or not any(piece.kind == BYTE for piece in model.pieces):
        raise ValueError("a sentencepiece model, but not BPE with byte fallback as Llama 2 has")
    if model.charsmap or model.squeezes_spaces:
        raise ValueError("a sentencepiece model that rewrites text before encoding, unlike Llama 2's")
    vocab = {piece.text: number for number, piece in enumerate(model.pieces)}
    unknown = next((piece.text for piece in model.pieces if piece.kind == UNKNOWN), None)
    inner = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab, merges=_merges(model.pieces), unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    prefix = [normalizers.Prepend("▁")] if model.dummy_prefix else []
    inner.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if model.dummy_prefix else []
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    for piece in model.pieces:
        if piece.kind in (UNKNOWN, CONTROL):
            inner.add_special_tokens([AddedToken(piece.text, special=True, normalized=False)])
        elif piece.kind == USER_DEFINED:
            inner.add_tokens([AddedToken(piece.text, special=False, normalized=False)])
    return inner


def _merges(pieces: list[_Piece]) -> list[tuple[str, str]]:
    """Return merges, best score first, without control pieces, which text must not become."""
    scores = {piece.text: piece.score for piece in pieces if piece.kind == NORMAL}
    merges = [
        (score, text[:cut], text[cut:])
        for text, score in scores.items()
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    merges.sort(key=lambda merge: (-merge[0], len(merge[1]), len(merge[2])))
    return [(left, right) for _, left, right in merges]
