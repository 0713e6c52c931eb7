import json
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.data.prepare import planning as preparation
from arriero.data.prepare.planning import PrepareRequest
from arriero.data.prepare.prepare import PrepareWatcher, prepare
from arriero.data.store.store import TokenStore
from arriero.data.tokens import encoders
from arriero.data.tokens.encoders import CHAIN, choose_encoder, load_encoder
from arriero.data.tokens.llama_tokenizers import from_model_file
from arriero.data.tokens.tokenizer import Encoded, choose_separators
from arriero.errors import UserError

FAST = [name for name in CHAIN if name != "tokenizers"]
SPECIAL = ["<|end_of_text|>", "<|end_of_text|><|end_of_text|>", "a <|end_of_text|> b", " <|end_of_text|>\n"]
ODD = [
    "",
    " ",
    "\n\n\t",
    "\x00",
    "é中🦙\ufeff\u200b",
    "e\u0301 ﬁ",
    "a" * 20_000,
    "ab " * 5000,
    "1234567 don't I'LL\r\n",
]

texts = st.lists(
    st.one_of(
        st.text(max_size=40),
        st.text(alphabet="ab \n\t0é中🦙'\u2019\u0301", max_size=60),
        st.sampled_from(SPECIAL),
        st.integers(1, 3000).map(lambda n: "longword" * n),
    ),
    max_size=6,
)


def documents(encoded):
    ends = np.cumsum(encoded.lengths)
    return [encoded.ids[end - n : end].tolist() for end, n in zip(ends, encoded.lengths, strict=True)]


def reference(definition, strings):
    inner = tokenizers.Tokenizer.from_str(definition)
    inner.encode_special_tokens = True
    return [inner.encode(text, add_special_tokens=False).ids for text in strings]


@pytest.fixture(scope="module")
def definition(tokenizer_file):
    return tokenizer_file.read_text()


@pytest.mark.parametrize("name", CHAIN)
def test_every_backend_gives_the_ids_of_tokenizers(name, definition, real_texts):
    strings = [*real_texts, *SPECIAL, *ODD]
    assert documents(CHAIN[name](definition).encode(strings)) == reference(definition, strings)


@pytest.mark.parametrize("name", CHAIN)
def test_every_backend_gives_the_ids_of_tokenizers_on_any_text(name, definition):
    backend = CHAIN[name](definition)

    @given(texts)
    @settings(max_examples=60, deadline=None, derandomize=True)
    def same(strings):
        assert documents(backend.encode(strings)) == reference(definition, strings)

    same()


@pytest.mark.parametrize("name", CHAIN)
def test_special_strings_stay_text_in_every_backend(name, definition):
    end = tokenizers.Tokenizer.from_str(definition).token_to_id("<|end_of_text|>")
    assert end not in CHAIN[name](definition).encode(SPECIAL).ids


@pytest.mark.parametrize("name", CHAIN)
def test_added_tokens_that_are_not_special_are_still_found(name, definition):
    inner = tokenizers.Tokenizer.from_str(definition)
    inner.add_tokens(["«tool»"])
    assert documents(CHAIN[name](inner.to_str()).encode(["a «tool» b"])) == reference(
        inner.to_str(), ["a «tool» b"]
    )
    assert inner.token_to_id("«tool»") in CHAIN[name](inner.to_str()).encode(["a «tool» b"]).ids


def test_the_first_encoder_that_agrees_is_used(definition, real_texts):
    choice = choose_encoder(definition, real_texts[:3])
    assert choice.used == "gigatoken"
    assert choice.tried == [{"name": "gigatoken", "outcome": "equal to tokenizers"}]


def test_an_encoder_with_other_ids_or_none_is_left_and_the_reason_kept(definition, real_texts, monkeypatch):
    class OneIdOff(encoders.TokenizersEncoder):
        def encode(self, strings):
            ids, lengths = super().encode(strings)
            ids[-1] += 1
            return Encoded(ids, lengths)

    def absent(_):
        raise ImportError("no wheel for this machine")

    encoders.cached_encoder.cache_clear()
    monkeypatch.setitem(CHAIN, "gigatoken", absent)
    monkeypatch.setitem(CHAIN, "fastokens", OneIdOff)
    choice = choose_encoder(definition, real_texts[:3])
    assert choice.used == "tokenizers"
    outcomes = {each["name"]: each["outcome"] for each in choice.tried}
    assert outcomes["gigatoken"] == "ImportError: no wheel for this machine"
    assert "differ from those of tokenizers" in outcomes["fastokens"]
    assert load_encoder("gigatoken", definition)[0] == "tokenizers"
    encoders.cached_encoder.cache_clear()


def test_without_the_fast_encoders_the_ids_are_the_same_and_a_hint_is_printed(
    tmp_path, tokenizer_file, real_texts, command, monkeypatch
):
    source = write_texts(tmp_path / "a.jsonl", real_texts[:20])
    arguments = ["data", "prepare", source, "--tokenizer", tokenizer_file, "-o"]
    fast = command(*arguments, tmp_path / "fast")
    encoders.cached_encoder.cache_clear()
    for name in FAST:
        monkeypatch.setitem(sys.modules, name, None)
    slow = command(*arguments, tmp_path / "slow")
    encoders.cached_encoder.cache_clear()
    assert fast.returncode == slow.returncode == 0, slow.stderr
    stores = [TokenStore.open(tmp_path / name) for name in ("fast", "slow")]
    assert stores[0].fingerprint == stores[1].fingerprint
    assert [store.about["backend"]["used"] for store in stores] == ["gigatoken", "tokenizers"]
    assert "arriero[fast]" not in fast.stdout
    assert slow.stdout.count("pip install 'arriero[fast]'") == 1
    assert "gigatoken: not installed; fastokens: not installed" in slow.stdout


def test_a_tokenizer_no_fast_encoder_can_read_falls_back():
    """Words by spaces: neither byte-level nor sentencepiece BPE."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1, "<eos>": 2}, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    choice = choose_encoder(inner.to_str(), ["a b a"])
    assert choice.used == "tokenizers"
    assert [each["name"] for each in choice.tried] == FAST
    assert documents(load_encoder(choice.used, inner.to_str())[1].encode(["a b a"])) == [[0, 1, 0]]


def test_a_sentencepiece_tokenizer_works_with_whatever_is_chosen(tmp_path, real_texts):
    import sentencepiece

    (tmp_path / "text").write_text("\n".join(real_texts[:8]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    definition = from_model_file((tmp_path / "tokenizer.model").read_bytes()).to_str()
    strings = [*real_texts[:12], "</s>", "<s>a</s>", *ODD]
    choice = choose_encoder(definition, strings)
    assert documents(load_encoder(choice.used, definition)[1].encode(strings)) == reference(
        definition, strings
    )
    assert json.loads(definition)["model"]["byte_fallback"]


class DiffersOn(encoders.TokenizersEncoder):
    """An encoder that is right on the check before the work, and wrong on texts with a rare character."""

    def encode(self, strings):
        ids, lengths = super().encode(strings)
        ends = np.cumsum(lengths)
        for text, end in zip(strings, ends, strict=True):
            if "ŋ" in text:
                ids[end - 1] += 1
        return Encoded(ids, lengths)


@pytest.fixture
def faulty_encoder(monkeypatch):
    encoders.cached_encoder.cache_clear()
    monkeypatch.setitem(CHAIN, "gigatoken", DiffersOn)
    yield
    encoders.cached_encoder.cache_clear()


def write_texts(path, strings):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in strings))
    return path


@pytest.mark.usefixtures("faulty_encoder")
def test_a_shard_on_which_the_encoders_differ_is_encoded_again(
    tmp_path, tokenizer_file, real_texts, monkeypatch
):
    monkeypatch.setattr(preparation, "SAMPLE_BYTES", 20_000)
    strings = [text[:2000] for text in real_texts] + [f"rare ŋ {i}" for i in range(2)]
    source = write_texts(tmp_path / "a.jsonl", strings)
    shards = {"shard_bytes": 20_000}
    store = prepare(
        PrepareRequest((str(source),), tmp_path / "set", tokenizer_file, **shards), 1, PrepareWatcher()
    )
    asked = PrepareRequest(
        (str(source),), tmp_path / "reference", tokenizer_file, encoder="tokenizers", **shards
    )
    assert store.fingerprint == prepare(asked, 1, PrepareWatcher()).fingerprint
    backend = store.about["backend"]
    assert backend["used"] == "gigatoken"
    assert 1 <= backend["shards"]["tokenizers"] < store.shards
    assert len(backend["redone"]) == backend["shards"]["tokenizers"]
    assert all(
        "gigatoken gave ids that differ from those of tokenizers" in each for each in backend["redone"]
    )


@pytest.mark.usefixtures("faulty_encoder")
@pytest.mark.parametrize("rare", ["text", "answer"])
def test_a_shard_that_is_encoded_again_has_the_loss_mask_of_its_tokens(
    tmp_path, tokenizer_file, monkeypatch, rare
):
    monkeypatch.setattr(preparation, "SAMPLE_BYTES", 2_000)
    texts, answers = [f"text {i}" * 40 for i in range(100)], [str(2 * i) for i in range(100)]
    (texts if rare == "text" else answers).append("rare ŋ")
    plain = write_texts(tmp_path / "plain.jsonl", texts)
    asked = [json.dumps({"question": f"{i} and {i}?", "answer": each}) for i, each in enumerate(answers)]
    (tmp_path / "asked.jsonl").write_text("\n".join(asked))
    sources = (str(tmp_path / "asked.jsonl"), str(plain))
    templates = ((sources[0], "{question} {answer}"),)
    stores = [
        prepare(
            PrepareRequest(sources, tmp_path / name, tokenizer_file, encoder=name, templates=templates),
            1,
            PrepareWatcher(),
        )
        for name in ("gigatoken", "tokenizers")
    ]
    assert stores[0].about["backend"]["redone"]
    assert stores[0].fingerprint == stores[1].fingerprint


@pytest.mark.parametrize("name", CHAIN)
def test_an_encoder_can_be_forced(tmp_path, tokenizer_file, name):
    source = write_texts(tmp_path / "a.jsonl", ["some text"])
    store = prepare(
        PrepareRequest((str(source),), tmp_path / "set", tokenizer_file, encoder=name), 1, PrepareWatcher()
    )
    assert store.about["backend"]["shards"] == {name: 1}


@pytest.mark.usefixtures("faulty_encoder")
def test_a_forced_encoder_with_other_ids_is_rejected(tmp_path, tokenizer_file):
    source = write_texts(tmp_path / "a.jsonl", ["ŋ"])
    with pytest.raises(
        UserError, match=r"--encoder gigatoken cannot be used .*differ from those of tokenizers"
    ):
        prepare(
            PrepareRequest((str(source),), tmp_path / "set", tokenizer_file, encoder="gigatoken"),
            1,
            PrepareWatcher(),
        )


@pytest.mark.parametrize(
    ("declared", "tokens", "chosen"),
    [
        (None, ["<|end|>", "<|endoftext|>"], "<|endoftext|>"),
        (None, ["<|end|>"], "<|end|>"),
        ("<fin>", ["<|endoftext|>", "<fin>"], "<fin>"),
        ({"content": "<fin>", "special": True}, ["<|endoftext|>", "<fin>"], "<fin>"),
        ("<|im_end|>", ["<|im_end|>", "<|endoftext|>"], "<|endoftext|>"),
        ("<|im_end|>", ["<|im_end|>"], "<|im_end|>"),
        ("<absent>", ["</s>"], "</s>"),
        (7, ["</s>"], "</s>"),
    ],
)
def test_the_end_of_documents_follows_tokenizer_config(tmp_path, declared, tokens, chosen):
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    inner.add_special_tokens(tokens)
    inner.save(str(tmp_path / "tokenizer.json"))
    if declared is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": declared}))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        eos = choose_separators(inner.to_str(), "none", "auto", path).eos
        assert eos is not None
        assert eos.token == chosen
