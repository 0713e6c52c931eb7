"""Data for supervised fine-tuning: prompt templates and chats, and the tokens that the loss includes."""

import json
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

import arriero
from arriero.data.store.loss_mask import LossMask
from arriero.data.text.formats import BadRecord, ChatTemplate, MarkedText, PromptTemplate, read_chat_template

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}{% else %}"
    "{% generation %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "user", "content": " What is naïve? "},
    {"role": "assistant", "content": "A llama 🦙 of 敏捷.\n"},
    {"role": "user", "content": "And\n\nthen?"},
    {"role": "assistant", "content": "\n\tThe end"},
]


@pytest.fixture(scope="module")
def tokenizer(corpus_cache, tmp_path_factory):
    """The built-in tokenizer with tokens for chats, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    definition = json.loads((next(corpus_cache.glob("stdlib-*")) / "tokenizer.json").read_text())
    for number, name in enumerate(("<|begin|>", "<|im_start|>", "<|im_end|>"), 4096):
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        definition["added_tokens"].append({"id": number, "content": name, "special": True, **plain})
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|im_end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": CHATML}))
    return folder


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def documents(directory):
    """Return the ids of each document, and those that the loss includes."""
    dataset = arriero.open_dataset(directory)
    mask, at, found = LossMask(dataset.store), 0, []
    for ids in dataset:
        included = mask.read(at, len(ids))
        found.append((ids.tolist(), ids[included].tolist()))
        at += len(ids)
    return found


def test_chats_have_the_ids_of_transformers_and_the_loss_of_the_assistant(command, tokenizer, tmp_path):
    peer = AutoTokenizer.from_pretrained(tokenizer)
    chats = [
        CHAT[: 2 + 2 * (i % 2)] + [{"role": "user", "content": str(i)}] * (i % 3 == 0) for i in range(20)
    ]
    write(tmp_path / "chat.jsonl", [{"messages": chat} for chat in chats])
    result = command(
        "data", "prepare", tmp_path / "chat.jsonl", "-o", "d", "--tokenizer", tokenizer, "--chat"
    )
    assert result.returncode == 0, result.stderr
    expected = {tuple(peer.apply_chat_template(chat)["input_ids"]) for chat in chats}
    found = documents(tmp_path / "d")
    assert {tuple(ids) for ids, _ in found} == expected
    turns = {"A llama 🦙 of 敏捷.<|im_end|>\n", "A llama 🦙 of 敏捷.<|im_end|>\nThe end<|im_end|>\n"}
    assert {peer.decode(included) for _, included in found} == turns
    assert command("data", "verify", tmp_path / "d").returncode == 0
    assert (tmp_path / "d" / "chat_template.jinja").read_text() == CHATML


def test_a_template_with_generation_tags_and_parquet(command, tokenizer, tmp_path):
    (tmp_path / "llama2.jinja").write_text(LLAMA2)
    pq.write_table(pa.table({"turns": [CHAT, CHAT[:2]]}), tmp_path / "chat.parquet")
    options = ["--chat-template", tmp_path / "llama2.jinja", "--column", "turns"]
    result = command(
        "data", "prepare", tmp_path / "chat.parquet", "-o", "d", "--tokenizer", tokenizer, *options
    )
    assert result.returncode == 0, result.stderr
    peer = AutoTokenizer.from_pretrained(tokenizer)
    included = {peer.decode(ids) for _, ids in documents(tmp_path / "d")}
    first = " A llama 🦙 of 敏捷.\n <|im_end|>"
    assert included == {first, f"{first} \n\tThe end <|im_end|>"}


def test_templates_by_source_exclude_the_prompt(command, tokenizer, tmp_path):
    write(tmp_path / "qa.jsonl", [{"question": f"{i}+1", "answer": f"it is {i + 1}"} for i in range(9)])
    write(tmp_path / "it.jsonl", [{"text": f"Il numero {i} è {{bello}}."} for i in range(9)])
    write(tmp_path / "plain.jsonl", [{"text": f"plain {i}"} for i in range(3)])
    templates = ["qa.jsonl=Q: {question} = {{}}\nA: {answer} ok", "it.jsonl=Scrivi un documento: {text}"]
    options = [word for each in templates for word in ("--template", each)]
    sources = ["qa.jsonl", "it.jsonl", "plain.jsonl"]
    result = command(
        "data", "prepare", *sources, "-o", "d", "--tokenizer", tokenizer, *options, "--eos", "<|im_end|>"
    )
    assert result.returncode == 0, result.stderr
    peer = AutoTokenizer.from_pretrained(tokenizer)
    found = {(peer.decode(ids), peer.decode(included)) for ids, included in documents(tmp_path / "d")}
    end = "<|im_end|>"
    expected = {(f"Q: {i}+1 = {{}}\nA: it is {i + 1} ok{end}", f"it is {i + 1} ok{end}") for i in range(9)}
    italian = [f"Il numero {i} è {{bello}}.{end}" for i in range(9)]
    expected |= {(f"Scrivi un documento: {text}", text) for text in italian}
    expected |= {(f"plain {i}{end}", f"plain {i}{end}") for i in range(3)}
    assert found == expected


def test_a_killed_prepare_resumes_with_the_same_masks(tokenizer, tmp_path, forked_arriero):
    """Four shards of one megabyte; the first process is killed when a shard is finished."""
    record = {"question": "why? " * 60, "answer": "because. " * 30}
    write(tmp_path / "qa.jsonl", [record | {"number": i} for i in range(6000)])
    command = [
        "data",
        "prepare",
        "qa.jsonl",
        "--tokenizer",
        str(tokenizer),
        "--shard-size",
        "1MB",
        "--eos",
        "none",
    ]
    command += ["--template", "{question}{answer}", "-o"]
    straight = forked_arriero(*command, "straight", cwd=tmp_path)
    assert straight.returncode == 0, straight.stderr
    child = subprocess.Popen(
        [sys.executable, "-m", "arriero", *command, "killed"], cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    while not list((tmp_path / "killed" / ".prepare").glob("0000*.json")) and child.poll() is None:
        pass
    child.send_signal(signal.SIGKILL)
    child.wait()
    again = forked_arriero(*command, "killed", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    names = sorted(path.name for path in (tmp_path / "straight").iterdir())
    assert sum(name.endswith(".mask") for name in names) >= 2
    for name in names:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"text": "x"}, "no field 'messages'"),
        ({"messages": []}, "not a list of messages"),
        ({"messages": [{"role": "user"}]}, "no 'content'"),
        ({"messages": CHAT[:1]}, "no message has the role 'assistant'"),
        (
            {"messages": [{"role": "assistant", "content": "x<|im_end|>y"}]},
            "spells the special token <|im_end|>",
        ),
    ],
)
def test_a_bad_chat_is_named_or_skipped(command, tokenizer, tmp_path, record, words):
    write(tmp_path / "chat.jsonl", [{"messages": CHAT}, record, {"messages": CHAT}])
    arguments = ["data", "prepare", "chat.jsonl", "--tokenizer", tokenizer, "--chat", "-o"]
    failed = command(*arguments, "d")
    assert failed.returncode == 2
    assert "line 2" in failed.stderr and words in failed.stderr
    assert command(*arguments, "e", "--skip-bad").returncode == 0
    assert len(documents(tmp_path / "e")) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--template", "no field"], "names no field"),
        (["--template", "{"], "cannot be read"),
        (["--template", "{question}"], "no field 'question'"),
        (["--chat", "--bos", "auto"], "--chat excludes"),
        (["--chat-template", "absent.jinja"], "absent.jinja cannot be read"),
    ],
)
def test_a_mistake_ends_in_one_line(command, tokenizer, tmp_path, options, words):
    write(tmp_path / "text.jsonl", [{"text": "x"}])
    result = command("data", "prepare", "text.jsonl", "-o", "d", "--tokenizer", tokenizer, *options)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_template_that_rewrites_earlier_turns_is_refused():
    template = ChatTemplate("{% for m in messages %}{{ loop.revindex }}{{ m['content'] }}{% endfor %}")
    with pytest.raises(BadRecord, match="changes earlier turns"):
        template.text({"messages": CHAT})


def test_a_chat_template_has_no_access_to_the_interpreter():
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% include '/etc/passwd' %}"):
        with pytest.raises(BadRecord):
            ChatTemplate(attack + "{{ messages[0].content }}").text({"messages": CHAT})


def test_parts_of_a_text_add_up_to_it():
    text = PromptTemplate("a {x} b {y} c").text({"x": "1", "y": "2"})
    assert list(text.parts()) == [("a 1 b ", False), ("2 c", True)]
    assert PromptTemplate("a {x} b {y} c").text({"x": "1", "y": ""}) == ""
    assert list(MarkedText.of("abcd", [(1, 2)]).parts()) == [("a", False), ("b", True), ("cd", False)]


def test_a_tokenizer_may_hold_several_templates(tmp_path):
    named = [{"name": "default", "template": "one"}, {"name": "tools", "template": "two"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_chat_template(tmp_path).template == "one"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert read_chat_template(tmp_path).template == "three"
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert read_chat_template(tmp_path).bos == ""
