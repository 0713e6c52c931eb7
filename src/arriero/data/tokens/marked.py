"""Token ids of documents with prompts and chats, and which of the tokens the loss includes."""

import json
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import tokenizers

from arriero.data.text.formats import ASSISTANT, ChatTemplate, MarkedText
from arriero.data.tokens.encoders import Encoder
from arriero.data.tokens.tokenizer import Encoded, Separators, SpecialToken


def encode_parts(texts: Sequence[MarkedText], encoder: Encoder) -> tuple[Encoded, np.ndarray]:
    """Encode prompts and completions separately, as a model gets a prompt alone when it generates."""
    parts = [list(text.parts()) for text in texts]
    encoded = encoder.encode([text for document in parts for text, _ in document])
    flags = np.array([included for document in parts for _, included in document], dtype=bool)
    ends = np.cumsum([len(document) for document in parts])
    totals = np.concatenate(([0], np.cumsum(encoded.lengths)))[np.concatenate(([0], ends))]
    return Encoded(encoded.ids, np.diff(totals)), np.repeat(flags, encoded.lengths)


def encode_chats(texts: Sequence[MarkedText], definition: str) -> tuple[Encoded, np.ndarray]:
    """Encode chats with their special tokens; a token is included if it ends in an included part."""
    found = chat_tokenizer(definition).encode_batch(list(texts), add_special_tokens=False)
    masks = []
    for text, encoding in zip(texts, found, strict=True):
        ends = np.array([end for _, end in encoding.offsets], dtype=np.int64)
        masks.append(np.zeros(len(ends), dtype=bool))
        for begin, end in text.included:
            masks[-1] |= (ends > begin) & (ends <= end)
    lengths = np.array([len(mask) for mask in masks], dtype=np.int64)
    ids = [np.array(encoding.ids, dtype=np.uint32) for encoding in found]
    empty = np.empty(0, dtype=np.uint32)
    return Encoded(np.concatenate([empty, *ids]), lengths), np.concatenate([empty.astype(bool), *masks])


@lru_cache(maxsize=1)
def chat_tokenizer(definition: str) -> tokenizers.Tokenizer:
    """Parse a definition so that special tokens in a text are special tokens, and nothing is added to it."""
    document = json.loads(definition)
    document["post_processor"] = document["truncation"] = document["padding"] = None
    return tokenizers.Tokenizer.from_str(json.dumps(document))


def special_tokens(definition: str) -> tuple[str, ...]:
    tokens = chat_tokenizer(definition).get_added_tokens_decoder().values()
    return tuple(token.content for token in tokens if token.special)


def chat_separators(chat: ChatTemplate, definition: str) -> Separators:
    """Return the special tokens that the template puts before a chat and after the assistant's turn."""
    messages = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
    inner = chat_tokenizer(definition)
    special = {i for i, token in inner.get_added_tokens_decoder().items() if token.special}
    ids = inner.encode(chat.render(messages), add_special_tokens=False).ids
    turn = chat.render(messages)[len(chat.render(messages[:1], prompts=True)) :]
    ends = [i for i in inner.encode(turn, add_special_tokens=False).ids if i in special]
    begins = ids[:1] if ids[:1] and inner.id_to_token(ids[0]) == chat.bos else []

    def named(found: list[int]) -> SpecialToken | None:
        return SpecialToken(inner.id_to_token(found[-1]) or "", found[-1]) if found else None

    return Separators(named(begins), named(ends))
