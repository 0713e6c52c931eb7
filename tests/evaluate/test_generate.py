"""`arriero generate` continues texts with a model of any format."""

import io
import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from arriero.data.tokens.prompts import prompt_tokenizer

PROMPT = "def add(self, other):\n"


def results(printed):
    assert printed.returncode == 0, printed.stderr
    return json.loads(printed.stdout)["results"]


@pytest.fixture(scope="module")
def expected(trained):
    """What transformers generates from the exported model."""
    model = AutoModelForCausalLM.from_pretrained(trained.run / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(trained.run / "model")
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    return made.tolist(), tokenizer.decode(made, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["run", "checkpoint", "hf", "meta", "dcp", "torch"])
def test_every_format_gives_the_tokens_of_transformers(command, trained, expected, kind, tmp_path):
    path = {"run": trained.run, "checkpoint": trained.run / "checkpoints" / "step-00000012"}.get(kind)
    if path is None:
        path = tmp_path / kind
        command("ckpt", "convert", trained.run / "model", path, "--to", kind)
    (result,) = results(command("generate", path, PROMPT, "--max-tokens", 16, "--device", "cpu", "--json"))
    assert (result["tokens"], result["text"]) == expected
    assert result["ended_by"] == "max tokens"


def test_a_single_prompt_is_printed_with_its_continuation(command, trained, expected):
    printed = command("generate", trained.run, PROMPT, "--max-tokens", 16, "--device", "cpu")
    assert printed.stdout == f"{PROMPT}{expected[1]}\n"
    assert "16 tokens" in printed.stderr


def test_lines_of_standard_input_are_prompts(command, trained, monkeypatch):
    """The batch does not change a result, nor does another prompt."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n\nclass Thing(object):\ndef\n"))
    options = ["--max-tokens", 8, "--temperature", 0.9, "--seed", 3, "--device", "cpu", "--json"]
    together = results(command("generate", trained.run, "--lines", "--batch", 2, *options))
    assert [each["prompt"] for each in together] == ["import os", "class Thing(object):", "def"]
    options[options.index("--seed") + 1] = 5
    assert results(command("generate", trained.run, "def", *options)) == together[2:]


def test_the_end_of_text_ends_the_text(command, trained):
    tokenizer = prompt_tokenizer(trained.run / "model" / "tokenizer.json", {"add_bos_token": False})
    first = results(command("generate", trained.run, PROMPT, "--max-tokens", 6, "--device", "cpu", "--json"))
    ids = first[0]["tokens"]
    generation = trained.run / "model" / "generation_config.json"
    before = generation.read_text()
    try:
        generation.write_text(json.dumps({"eos_token_id": [ids[0], 0]}))
        arguments = [
            "generate",
            trained.run / "model",
            PROMPT,
            "--max-tokens",
            6,
            "--device",
            "cpu",
            "--json",
        ]
        (stopped,) = results(command(*arguments))
        assert stopped["tokens"] == ids[:1] and stopped["ended_by"] == "end of text" and stopped["text"] == ""
        (ignored,) = results(command(*arguments, "--ignore-eos"))
        assert ignored["tokens"] == ids
    finally:
        generation.write_text(before)
    assert tokenizer.eos_ids == {0}


@pytest.mark.parametrize("text", ["naïve façade 🦙🏽 Straße 敏捷的狐狸", "  two  spaces\n\ttab"])
def test_pieces_of_a_stream_add_up_to_the_text(trained, text):
    tokenizer = prompt_tokenizer(trained.run / "model" / "tokenizer.json", {"add_bos_token": False})
    stream = tokenizer.stream(tokenizer.encode("It says: "))
    pieces = [stream.add(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent", "x"], "absent does not exist"),
        (["RUN", "x", "--top-p", 0.9], "need a --temperature above 0"),
        (["RUN", ""], "prompt is empty"),
        (["RUN", "x " * 600], "context of the model"),
        (["RUN", "x", "--tokenizer", "absent.json"], "cannot read tokenizer"),
    ],
)
def test_a_mistake_ends_in_one_line(command, trained, arguments, words):
    result = command("generate", *(trained.run if each == "RUN" else each for each in arguments))
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_closed_standard_input_has_no_prompt(command, trained, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    result = command("generate", trained.run)
    assert (result.returncode, "there is no prompt" in result.stderr) == (2, True)


def test_a_chat_template_may_be_given(command, trained, tmp_path):
    (tmp_path / "chat.jinja").write_text("Q: {{ messages[0].content }} A:")
    options = ("--max-tokens", 8, "--device", "cpu", "--json")
    chat = command("generate", trained.run, "--chat-template", tmp_path / "chat.jinja", "Sort it.", *options)
    (plain,) = results(command("generate", trained.run, "Q: Sort it. A:", *options))
    assert results(chat) == [plain | {"prompt": "Sort it."}]
