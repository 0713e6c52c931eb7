"""Generation with the key-value cache: the tokens of transformers, any batch, any family."""

from dataclasses import replace

import pytest
import torch

from arriero.errors import UserError
from arriero.model import family as registry
from arriero.model.family import families
from arriero.model.generation import Sampling, generate, why_not_cached
from arriero.model.layers import Attention
from arriero.model.llama.family import LLAMA
from arriero.model.llama.module import Llama
from model.test_hf_names import SHAPES, lively, spec_of, theirs

GREEDY = Sampling()


def prompts_of(lengths, vocabulary=97):
    numbers = torch.Generator().manual_seed(5)
    return [torch.randint(vocabulary, (n,), generator=numbers).tolist() for n in lengths]


def continued(model, prompts, tokens, sampling=GREEDY, stop=()):
    steps = list(generate(model, prompts, tokens, sampling, stop))
    return [[token for token in row if token is not None] for row in zip(*steps, strict=True)]


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_decoding_gives_the_tokens_of_transformers(shape):
    """Prompts of one, seven and 33 tokens are continued together; transformers continues each alone."""
    spec = spec_of(shape)
    model = lively(spec)
    peer, prompts = theirs(spec, model), prompts_of((1, 7, 33))
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = [peer.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    assert continued(model, prompts, 24) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_every_built_in_family_is_cached(shape):
    assert why_not_cached(lively(spec_of(shape))) is None


def test_the_cache_gives_the_logits_of_the_whole_text():
    model = lively(spec_of("gqa"))
    prompt = prompts_of((9,))[0]
    for token in continued(model, [prompt], 12)[0]:
        with torch.no_grad():
            assert int(model(torch.tensor([prompt]))[0, -1].argmax()) == token
        prompt = [*prompt, token]


@pytest.mark.parametrize("shape", ["gqa", "gpt2", "diffllama", "mamba2", "bamba"])
def test_a_prompt_that_fills_the_context_ends_and_the_others_continue(shape):
    model = lively(replace(spec_of(shape), max_seq_len=16))
    long, short = prompts_of((14, 3))
    together = continued(model, [long, short], 10)
    assert together == [continued(model, [each], 10)[0] for each in (long, short)]
    assert [len(row) for row in together] == [2, 10]


@pytest.mark.parametrize("shape", ["gqa", "gpt2"])
def test_a_prompt_that_has_ended_is_not_computed_any_more(shape, monkeypatch):
    """The long prompt fills the context first; the short one then has many more tokens left."""
    model, seen = lively(replace(spec_of(shape), max_seq_len=32)), []
    embed = type(model).embed

    def recorded(self, tokens_BT, positions):
        seen.append((tokens_BT.shape[0], int(positions.max())))
        return embed(self, tokens_BT, positions)

    monkeypatch.setattr(type(model), "embed", recorded)
    long, short = prompts_of((30, 2))
    together = continued(model, [long, short], 25)
    assert [len(row) for row in together] == [2, 25]
    assert max(position for _, position in seen) < 32
    assert [rows for rows, _ in seen] == [1, 1, 2, *[1] * 23]
    assert together[1] == continued(model, [short], 25)[0]


def test_a_prompt_that_ended_cannot_stop_the_others_by_nan():
    """The embedding of the token that ends a prompt is NaN: whoever reads it computes NaN."""
    model = lively(spec_of("gqa"))
    prompts = prompts_of((4, 6))
    rows = continued(model, prompts, 12)
    elsewhere = {*prompts[0], *prompts[1], *rows[1]}
    last = next(token for token in rows[0] if token not in elsewhere)
    model.embedding.weight.data[last] = torch.nan
    ended = rows[0][: rows[0].index(last) + 1]
    assert continued(model, prompts, 12, stop=(last,)) == [ended, rows[1]]


def test_training_mode_and_attention_are_restored():
    model = lively(spec_of("gqa"))
    before = [block.attention.core for block in model.blocks.values()]
    steps = generate(model, prompts_of((3,)), 5, GREEDY)
    next(steps)
    steps.close()
    assert [block.attention.core for block in model.blocks.values()] == before


def test_a_prompt_ends_at_a_stop_token_and_the_others_continue():
    model = lively(spec_of("gqa"))
    prompts = prompts_of((4, 6))
    first, second = continued(model, prompts, 20)
    stop = first[3]
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in (first, second)]
    assert len(cut[0]) <= 4
    assert continued(model, prompts, 20, stop=(stop,)) == cut


@pytest.mark.parametrize("shape", ["gqa", "gpt2"])
def test_generation_stops_when_the_context_is_full(shape):
    model = lively(replace(spec_of(shape), max_seq_len=16))
    assert len(continued(model, prompts_of((10,)), 50)[0]) == 6
    with pytest.raises(UserError, match="16 tokens, and the context of the model 16"):
        continued(model, prompts_of((16,)), 1)


def test_sampling_follows_the_probabilities_of_the_model():
    """With 4,000 draws, the frequency of each token is within five standard deviations."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]])
    sampling, generators = Sampling(temperature=0.5), [torch.Generator().manual_seed(0)]
    drawn = torch.tensor([sampling.choose(logits, generators)[0] for _ in range(4000)])
    shares = (logits[0] / 0.5).softmax(-1)
    found = torch.bincount(drawn, minlength=5) / 4000
    assert ((found - shares).abs() <= 5 * (shares * (1 - shares) / 4000).sqrt()).all()


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(1.0, top_k=2), {3, 1}),
        (Sampling(1.0, top_k=1), {3}),
        (Sampling(1.0, top_p=0.5), {3}),
        (Sampling(1.0, top_p=0.75), {3, 1}),
        (Sampling(1.0, top_p=0.0), {3}),
        (Sampling(1.0, top_k=3, top_p=0.9), {3, 1, 0}),
    ],
)
def test_top_k_and_top_p_leave_the_likeliest_tokens(sampling, possible):
    logits = torch.tensor([0.15, 0.22, 0.03, 0.6]).log()[None]
    generators = [torch.Generator().manual_seed(1)]
    assert {sampling.choose(logits, generators)[0] for _ in range(300)} == possible


def test_a_seed_gives_the_same_sample_in_any_batch():
    model = lively(spec_of("gqa"))
    prompts = prompts_of((4, 9))
    together = continued(model, prompts, 15, Sampling(1.0, seed=7))
    assert together == continued(model, prompts, 15, Sampling(1.0, seed=7))
    assert together[1] == continued(model, prompts[1:], 15, Sampling(1.0, seed=8))[0]
    assert together != continued(model, prompts, 15, Sampling(1.0, seed=9))


class OwnAttention(Attention):
    """Attention that reads the last token twice, which a cache of keys and values does not know."""

    def forward(self, x_BTD, rotation, mask):
        return super().forward(x_BTD + x_BTD.roll(1, 1), rotation, mask)


class OwnModel(Llama):
    def __init__(self, spec):
        super().__init__(spec)
        for block in self.blocks.values():
            block.attention = OwnAttention(spec.dim, spec.heads, spec.kv_heads, spec.head_dim, False)


def test_a_family_with_its_own_attention_is_computed_without_the_cache(monkeypatch):
    monkeypatch.setattr(registry, "_registry", dict(families()))
    registry.register_model(replace(LLAMA, name="own", build=OwnModel, presets=None))
    model = lively(replace(spec_of("gqa"), family="own"))
    assert why_not_cached(model) == "the family own has its own attention"
    prompts = prompts_of((3, 8))
    together = continued(model, prompts, 10)
    assert together == [continued(model, [prompt], 10)[0] for prompt in prompts]
    text = prompts[0]
    for token in together[0]:
        with torch.no_grad():
            assert int(model(torch.tensor([text]))[0, -1].argmax()) == token
        text = [*text, token]
