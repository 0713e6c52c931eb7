"""Continue texts with a stored model."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from arriero.checkpoint.convert import read_model
from arriero.checkpoint.formats.model_reader import DTYPES, ModelReader
from arriero.data.tokens.prompts import PromptTokenizer
from arriero.model.generation import Sampling, generate
from arriero.model.language_model import LanguageModel
from arriero.ui import byte_progress, make_console

End = Literal["end of text", "max tokens", "context full"]


@dataclass(frozen=True)
class Completion:
    """A continued prompt. `tokens` are the generated ids, the end of text included; `text` is without it."""

    prompt: str
    text: str
    prompt_tokens: int
    tokens: list[int]
    ended_by: End


def load(source: ModelReader, device: torch.device, dtype: str | None) -> LanguageModel:
    """Read a stored model with a progress bar; its dtype is the stored one if none is given."""
    with byte_progress(make_console(as_json=True), f"reading {source.where}", source.nbytes()) as advance:
        return read_model(source, device, DTYPES[dtype] if dtype else None, advance)


def complete(
    model: LanguageModel,
    tokenizer: PromptTokenizer,
    prompts: Sequence[str],
    encoded: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling,
    stop: Collection[int],
    on_text: Callable[[int, str], None] = lambda _row, _text: None,
) -> list[Completion]:
    """Continue encoded prompts together; `on_text` gets the row and each piece of text as it is generated."""
    streams = [tokenizer.stream(ids) for ids in encoded]
    made: list[list[int]] = [[] for _ in prompts]
    texts = ["" for _ in prompts]

    def show(row: int, text: str) -> None:
        if text:
            texts[row] += text
            on_text(row, text)

    for step in generate(model, encoded, max_tokens, sampling, stop):
        for row, token in enumerate(step):
            if token is not None:
                made[row].append(token)
                if token not in stop:
                    show(row, streams[row].add(token))
    for row, stream in enumerate(streams):
        show(row, stream.finish())
    return [
        Completion(prompt, text, len(ids), tokens, _end(tokens, stop, max_tokens))
        for prompt, text, ids, tokens in zip(prompts, texts, encoded, made, strict=True)
    ]


def _end(tokens: Sequence[int], stop: Collection[int], max_tokens: int) -> End:
    if tokens and tokens[-1] in stop:
        return "end of text"
    return "max tokens" if len(tokens) >= max_tokens else "context full"
