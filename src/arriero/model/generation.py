"""Generate tokens from a model: a key-value cache, sampling, and the decoding loop.

The cache replaces the attention core of each block while tokens are generated; training does not know of it.
Shapes: B prompts, T tokens, H heads, K kv heads, E head dim, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from arriero.errors import UserError
from arriero.model.attention import AttentionCore, Mask, SequenceMixer
from arriero.model.attention_prompts import PrefixCore
from arriero.model.language_model import LanguageModel
from arriero.model.layers import Attention, Block, TiledBlock


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. A temperature of 0 is greedy decoding: the most likely token."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def choose(self, logits_BV: Tensor, generators: Sequence[torch.Generator]) -> list[int]:
        """Return one token per row. Rows have their own generators, so that they do not affect each other."""
        if not logits_BV.isfinite().all():
            raise UserError("the model computes NaN or infinity", "check its weights: arriero ckpt verify")
        if self.temperature == 0.0:
            return logits_BV.argmax(-1).tolist()
        shares_BV = self._shares(logits_BV.float().cpu())
        drawn = (
            torch.multinomial(row, 1, generator=generator)
            for row, generator in zip(shares_BV, generators, strict=True)
        )
        return [int(each) for each in drawn]

    def _shares(self, logits_BV: Tensor) -> Tensor:
        """Return the probabilities after temperature, top-k and top-p, in this order."""
        logits_BV = logits_BV / self.temperature
        if self.top_k is not None and self.top_k < logits_BV.shape[-1]:
            smallest_B1 = logits_BV.topk(self.top_k).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < smallest_B1, -torch.inf)
        if self.top_p is not None and self.top_p < 1.0:
            ordered_BV, index_BV = logits_BV.sort(descending=True)
            before_BV = ordered_BV.softmax(-1).cumsum(-1).roll(1, -1)
            # the most likely token always stays
            before_BV[:, 0] = -1.0
            beyond_BV = torch.zeros_like(before_BV, dtype=torch.bool).scatter(
                -1, index_BV, before_BV >= self.top_p
            )
            logits_BV = logits_BV.masked_fill(beyond_BV, -torch.inf)
        return logits_BV.softmax(-1)


class KVCache:
    """Where the blocks store the keys and values, or the states, of the tokens they are given.

    The next tokens belong to `rows` and are stored from `begin` on; they are a prompt, or one new token each.
    Prompts are stored one row at a time and end at the same place; `visible_B11T` hides what lies before the
    shorter ones, and is None if all have the same length.
    """

    def __init__(self, batch: int, capacity: int) -> None:
        self.batch, self.capacity = batch, capacity
        self.rows, self.begin, self.is_prompt = slice(0, batch), 0, True
        self.visible_B11T: Tensor | None = None
        self.stored: dict[SequenceMixer, list[Tensor]] = {}

    def keep(self, rows: Sequence[int]) -> None:
        """Delete what is stored of all other rows."""
        self.batch = len(rows)
        for tensors in self.stored.values():
            index = torch.tensor(rows, device=tensors[0].device)
            # one at a time, so that only one tensor exists twice
            for i, tensor in enumerate(tensors):
                tensors[i] = tensor[index]


class Exchange(NamedTuple):
    """How ranks exchange parts of sequences: `to_heads` returns whole sequences of some heads for parts of
    sequences of all heads, `to_tokens` the other way round. Tensors are (B, T, heads, width)."""

    to_heads: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    to_tokens: Callable[[Tensor], Tensor]


class RecurrentMixer(SequenceMixer):
    """A mixer whose state has a fixed size: it caches that, one row per prompt. It needs whole sequences,
    but can compute each head alone."""

    def divide_heads(self, exchange: Exchange, part: int, parts: int) -> None:
        """Compute one of `parts` of the heads, for whole sequences that are divided over as many ranks."""
        raise NotImplementedError

    def use_cache(self, cache: KVCache | None) -> None:
        """Keep the states in `cache.stored` between calls; None ends this."""
        raise NotImplementedError


class CachedAttentionCore(AttentionCore):
    """Attention of a whole prompt, or of one new token to itself and to all tokens of its row before it."""

    def __init__(self, cache: KVCache, core: AttentionCore) -> None:
        super().__init__(core.window)
        self._cache, self._core = cache, core

    def forward(self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: Mask) -> Tensor:
        cache, tokens = self._cache, q_BTHE.shape[1]
        if self not in cache.stored:
            cache.stored[self] = self._allocate(k_BTKE)
        begin = cache.begin + self._before
        for stored, new in zip(cache.stored[self], (k_BTKE, v_BTKE), strict=True):
            stored[cache.rows, begin : begin + tokens] = new
        if cache.is_prompt:
            return self._core(q_BTHE, k_BTKE, v_BTKE, None)
        first = 0 if self.window is None else max(0, begin + 1 - self.window)
        keys, values = (stored[cache.rows, first : begin + 1] for stored in cache.stored[self])
        q, k, v = (x.transpose(1, 2) for x in (q_BTHE, keys, values))
        grouped = q.shape[1] != k.shape[1]
        visible = cache.visible_B11T
        if visible is not None:
            visible = F.pad(visible, (self._before, 0), value=True)[..., first:]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=grouped).transpose(1, 2)

    @property
    def _before(self) -> int:
        """The number of trained keys before those of the tokens."""
        return self._core.prefix.k.shape[0] if isinstance(self._core, PrefixCore) else 0

    def _allocate(self, k_BTKE: Tensor) -> list[Tensor]:
        shape = (self._cache.batch, self._before + self._cache.capacity, *k_BTKE.shape[2:])
        # not empty: a hidden value is multiplied by zero, which NaN survives
        stored = [k_BTKE.new_zeros(shape), k_BTKE.new_zeros(shape)]
        if isinstance(self._core, PrefixCore):
            prefix = self._core.prefix_states(self._cache.batch, k_BTKE.dtype)
            for whole, part in zip(stored, prefix, strict=True):
                whole[:, : self._before] = part
        return stored


def why_not_cached(model: LanguageModel) -> str | None:
    """Return why a model cannot use the key-value cache; None if it can.

    Blocks of a family from outside the package may mix tokens in places that the cache does not know.
    """
    blocks = [each for each in model.modules() if isinstance(each, Block)]
    attentions = [each for each in model.modules() if isinstance(each, Attention)]
    mixers = len(attentions) + len(_recurrent(model))
    if len(blocks) != len(model.blocks) or mixers != len(model.blocks):
        return f"the blocks of the family {model.spec.family} are not arriero.model.layers.Block"
    if any(type(block).forward not in (Block.forward, TiledBlock.forward) for block in blocks):
        return f"the blocks of the family {model.spec.family} have their own forward method"
    own = (
        type(a).forward is Attention.forward and type(a.core) in (AttentionCore, PrefixCore)
        for a in attentions
    )
    return None if all(own) else f"the family {model.spec.family} has its own attention"


def _recurrent(model: LanguageModel) -> list[RecurrentMixer]:
    return [each for each in model.modules() if isinstance(each, RecurrentMixer)]


@contextmanager
def _cached(model: LanguageModel, cache: KVCache) -> Iterator[None]:
    attentions = [each for each in model.modules() if isinstance(each, Attention)]
    before = [attention.core for attention in attentions]
    for attention in attentions:
        attention.core = CachedAttentionCore(cache, attention.core)
    for mixer in _recurrent(model):
        mixer.use_cache(cache)
    try:
        yield
    finally:
        for mixer in _recurrent(model):
            mixer.use_cache(None)
        for attention, core in zip(attentions, before, strict=True):
            attention.core = core


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling,
    stop: Collection[int] = (),
) -> Iterator[list[int | None]]:
    """Yield one new token per prompt and step, None for a prompt that has ended.

    A prompt ends after a token of `stop`, after `max_tokens` tokens, or when the model's context is full.
    Prompts of different lengths are padded on the left; their results are the same as alone.
    """
    check_prompts(model, prompts)
    if max_tokens < 1:
        return
    context = model.spec.max_seq_len - model.offset
    left = [min(max_tokens, context - len(prompt)) for prompt in prompts]
    generators = [torch.Generator().manual_seed(sampling.seed + row) for row in range(len(prompts))]
    decoder, live = _Decoder(model, prompts, max(left)), list(range(len(prompts)))
    with decoder.attached():
        logits_BV = decoder.prefill()
        while True:
            chosen = dict(zip(live, sampling.choose(logits_BV, [generators[i] for i in live]), strict=True))
            yield [chosen.get(i) for i in range(len(prompts))]
            going_on = [i for i in live if left[i] > 1 and chosen[i] not in stop]
            if not going_on:
                return
            # prompts that have ended are not computed any more: their context may be full
            decoder.keep([live.index(i) for i in going_on])
            live, left = going_on, [n - 1 for n in left]
            logits_BV = decoder.step([chosen[i] for i in live])


def check_prompts(model: LanguageModel, prompts: Sequence[Sequence[int]]) -> None:
    """Raise UserError for prompts that the model cannot continue."""
    context, vocabulary = model.spec.max_seq_len - model.offset, model.spec.vocab_size
    for prompt in prompts:
        if not prompt:
            raise UserError("the prompt has no tokens", "give a text")
        if len(prompt) >= context:
            what = f"the prompt has {len(prompt):,} tokens, and the context of the model {context:,}"
            raise UserError(what, "shorten the prompt")
        if max(prompt) >= vocabulary:
            what = f"the prompt has token {max(prompt)}, and the vocabulary of the model {vocabulary}"
            raise UserError(what, "give the tokenizer of this model with --tokenizer")


class _Decoder:
    """Computes the logits after the tokens so far: of new tokens only, or of all where there is no cache."""

    def __init__(self, model: LanguageModel, prompts: Sequence[Sequence[int]], new: int) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._rows = [list(prompt) for prompt in prompts]
        self._end = max(map(len, prompts))
        self._padding = [self._end - len(prompt) for prompt in prompts]
        self._cache = KVCache(len(prompts), self._end + new) if why_not_cached(model) is None else None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Replace the attention of the model while tokens are generated."""
        if self._cache is None:
            yield
            return
        with _cached(self._model, self._cache):
            yield

    @torch.no_grad()
    def prefill(self) -> Tensor:
        """Return the logits after the prompts, which are computed one at a time."""
        logits = []
        for row, (prompt, padding) in enumerate(zip(self._rows, self._padding, strict=True)):
            if self._cache is not None:
                self._cache.rows, self._cache.begin = slice(row, row + 1), padding
            logits.append(self._last([prompt], [range(len(prompt))]))
        return torch.cat(logits)

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with these rows alone."""
        if len(rows) == len(self._rows):
            return
        self._rows = [self._rows[i] for i in rows]
        self._padding = [self._padding[i] for i in rows]
        if self._cache is not None:
            self._cache.keep(rows)

    @torch.no_grad()
    def step(self, chosen: Sequence[int]) -> Tensor:
        """Return the logits after one more token per row."""
        for row, token in zip(self._rows, chosen, strict=True):
            row.append(token)
        if self._cache is None:
            return self.prefill()
        cache = self._cache
        cache.rows, cache.begin = slice(0, len(self._rows)), self._end
        self._end, cache.is_prompt = self._end + 1, False
        cache.visible_B11T = None
        if any(self._padding):
            padding_B = torch.tensor(self._padding, device=self._device)
            cache.visible_B11T = (
                torch.arange(self._end, device=self._device) >= padding_B[:, None, None, None]
            )
        return self._last([[token] for token in chosen], [[len(row) - 1] for row in self._rows])

    def _last(self, tokens: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> Tensor:
        tokens_BT, positions_BT = (
            torch.tensor([list(row) for row in rows], device=self._device) for rows in (tokens, positions)
        )
        hidden_BTD = self._model.hidden(tokens_BT, positions_BT)
        assert self._model.head is not None
        return self._model.head(hidden_BTD[:, -1:])[:, -1]
