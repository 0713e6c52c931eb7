"""Both kinds of `tokenizer.model`, against the libraries that own the formats."""

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.data.tokens.llama_tokenizers import LLAMA3_PATTERN, LLAMA3_SPECIALS
from arriero.data.tokens.tokenizer import load_tokenizer, parsed, read_definition
from arriero.errors import UserError

SPELLED = [
    "</s>",
    "<s> a </s>",
    "<unk>",
    "<|end_of_text|>",
    "a<|begin_of_text|>b",
    "<0x41>",
    "▁▁ x",
    "",
    " ",
    "\n\n",
]
ODD = [
    "e\u0301 ﬁ 中文 🦙🏽 \u200d\u202e",
    "\x00\x01\x7f",
    "1234567 don't  I'LL\r\n\r\n  x",
    "a" * 3000,
    "  two  spaces  ",
]


@pytest.fixture(scope="module")
def ranks_file(tmp_path_factory, tokenizer_file):
    """A Llama 3 style rank file from a BPE trained on real text."""
    inner = parsed(tokenizer_file.read_text())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    byte_of = {chr(b): b for b in printable}
    byte_of |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in printable)}
    special = inner.token_to_id("<|end_of_text|>")
    in_order = sorted((i, token) for token, i in inner.get_vocab().items() if i != special)
    tokens = [bytes(byte_of[c] for c in token) for _, token in in_order]
    path = tmp_path_factory.mktemp("llama3") / "tokenizer.model"
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(tokens)))
    return path


@pytest.fixture(scope="module")
def tiktoken_encoding(ranks_file):
    import tiktoken

    lines = [line.split() for line in ranks_file.read_bytes().splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    specials = {name: len(ranks) + i for i, name in enumerate(LLAMA3_SPECIALS)}
    return tiktoken.Encoding("ours", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=specials)


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory, real_texts):
    """Settings as Llama 2's model has them."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("llama2")
    (folder / "text").write_text("\n".join(real_texts[:20]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=1200,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        character_coverage=0.99995,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


def test_llama3_ranks_give_the_ids_of_tiktoken(ranks_file, tiktoken_encoding, real_texts):
    tokenizer = load_tokenizer(ranks_file)
    texts = [*real_texts, *SPELLED, *ODD]
    assert [tokenizer.encode(text) for text in texts] == [
        tiktoken_encoding.encode_ordinary(text) for text in texts
    ]
    assert (tokenizer.eos, tokenizer.eos_id) == ("<|end_of_text|>", tiktoken_encoding.n_vocab - 255)
    assert tokenizer.vocab_size == tiktoken_encoding.n_vocab
    assert tokenizer.decode(tokenizer.encode(ODD[0])) == ODD[0]


@given(text=st.text(max_size=60))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_llama3_ranks_give_the_ids_of_tiktoken_on_any_text(ranks_file, tiktoken_encoding, text):
    assert load_tokenizer(ranks_file).encode(text) == tiktoken_encoding.encode_ordinary(text)


def test_sentencepiece_gives_the_ids_of_sentencepiece(sentencepiece_file, real_texts):
    import sentencepiece

    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    tokenizer = load_tokenizer(sentencepiece_file)
    texts = [*real_texts, *SPELLED, *ODD]
    assert [tokenizer.encode(text) for text in texts] == [reference.encode(text) for text in texts]
    assert (tokenizer.eos, tokenizer.eos_id) == ("</s>", reference.eos_id())
    assert tokenizer.decode(tokenizer.encode(ODD[0])) == ODD[0]


@given(text=st.text(max_size=60))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_sentencepiece_gives_the_ids_of_sentencepiece_on_any_text(sentencepiece_file, text):
    import sentencepiece

    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    assert load_tokenizer(sentencepiece_file).encode(text) == reference.encode(text)


def test_text_that_spells_a_control_piece_does_not_become_it(sentencepiece_file, ranks_file):
    for path in (sentencepiece_file, ranks_file):
        tokenizer = load_tokenizer(path)
        assert tokenizer.eos_id not in tokenizer.encode(f"a {tokenizer.eos}{tokenizer.eos} b")


def test_a_folder_stands_for_the_tokenizer_in_it(ranks_file):
    assert read_definition(ranks_file.parent) == read_definition(ranks_file)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"IQ== 0\nIQ== x\n", "line 2 is not a base64 token and its rank"),
        (b"IQ== 0\nIg== 2\n", "without gaps"),
        (b"IQ== 0\n", "byte 0 has no token"),
        (b"\x0a\x05\xff", "neither base64 ranks"),
        (b"", "neither base64 ranks"),
    ],
)
def test_a_damaged_model_file_is_rejected(tmp_path, content, complaint):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        read_definition(tmp_path / "tokenizer.model")


def test_a_sentencepiece_model_of_another_kind_is_rejected(tmp_path, real_texts):
    import sentencepiece

    (tmp_path / "text").write_text("\n".join(real_texts[:5]))
    for kind, complaint in (("unigram", "not BPE"), ("bpe", "rewrites text")):
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "text"),
            model_prefix=str(tmp_path / kind),
            model_type=kind,
            vocab_size=400,
            byte_fallback=True,
            minloglevel=2,
        )
        with pytest.raises(UserError, match=complaint):
            read_definition(tmp_path / f"{kind}.model")
