"""`arriero init` writes run files that load and can be resolved."""

import tomllib
from pathlib import Path

import pytest

from arriero.model.presets import preset_names


def test_without_answers_it_writes_the_file_of_a_run_that_needs_nothing(command):
    assert command("init").returncode == 0
    assert command("config", "check", "run.toml").returncode == 0
    assert tomllib.loads(Path("run.toml").read_text())["data"]["sources"][0]["path"] == "builtin:stdlib"


@pytest.mark.parametrize("preset", [name for name in preset_names() if "405b" not in name])
def test_every_preset_gives_a_file_that_config_check_accepts(command, preset):
    given = ("--model", preset, "--data", "data/corpus", "--device", "h200", "--nproc", "64")
    made = command("init", *given, "-o", "new.toml")
    assert made.returncode == 0
    checked = command("config", "check", "new.toml", "--device", "h200", "--nproc", "64")
    assert checked.returncode == 0, checked.stderr
    device = next(line.split() for line in checked.stdout.splitlines() if line.startswith("device"))
    assert device in [line.split() for line in made.stdout.splitlines()]


def test_the_values_given_are_in_the_file(command):
    given = ("--model", "llama3.2-1b", "--data", "text.jsonl", "--tokenizer", "tok.json", "--seq-len", "4096")
    assert command("init", *given, "--tokens", "3B tok", "-o", "new.toml").returncode == 0
    written = tomllib.loads(Path("new.toml").read_text())
    assert written["data"]["sources"] == [{"path": "text.jsonl", "tokenizer": "tok.json"}]
    assert (written["data"]["seq_len"], written["train"]["horizon"]) == (4096, "3B tok")


def test_a_small_vocabulary_is_extended_to_that_of_the_data(command, corpus_cache):
    (prepared,) = (path.parent for path in corpus_cache.glob("*/manifest.json"))
    for data in ("builtin:stdlib", str(prepared)):
        assert command("init", "--model", "llama-test", "--data", data, "-o", "new.toml").returncode == 0
        assert tomllib.loads(Path("new.toml").read_text())["model"]["vocab_size"] == 4096
        Path("new.toml").unlink()
    assert command("init", "--model", "llama3.2-1b", "-o", "new.toml").returncode == 0
    assert "vocab_size" not in Path("new.toml").read_text()


def test_quotes_in_an_answer_are_kept_and_the_ranks_are_in_the_command(command):
    odd = 'my "text"\\new.jsonl'
    result = command("init", "--data", odd, "--nproc", "3", "-o", "new.toml")
    assert tomllib.loads(Path("new.toml").read_text())["data"]["sources"] == [{"path": odd}]
    assert result.stdout.splitlines()[-1].endswith("arriero train new.toml --nproc 3")


def test_a_mistyped_preset_is_answered_with_the_nearest(command):
    assert "did you mean 'llama3.2-1b'?" in command("init", "--model", "llama3.2-1B").stderr


def test_an_existing_file_is_kept_and_the_same_file_may_be_written_twice(command):
    assert [command("init", "-o", "new.toml").returncode for _ in range(2)] == [0, 0]
    Path("run.toml").write_text("# mine")
    assert command("init").returncode == 2
    assert Path("run.toml").read_text() == "# mine"


def test_a_file_that_was_there_stays_when_the_model_does_not_fit_the_device(command):
    given = ("--model", "llama3.1-8b", "--data", "data/corpus", "-o", "new/run.toml")
    assert command("init", *given).returncode == 0
    assert command("init", *given, "--device", "a100-40").returncode == 2
    assert Path("new/run.toml").exists()


def test_text_gets_a_tokenizer_and_the_command_that_makes_it(command):
    Path("text").mkdir()
    Path("text/a.jsonl").write_text('{"text": "one"}')
    result = command("init", "--data", "text", "-o", "new.toml")
    source = tomllib.loads(Path("new.toml").read_text())["data"]["sources"]
    assert source == [{"path": "text", "tokenizer": "tokenizer.json"}]
    assert "arriero data train-tokenizer text -o tokenizer.json" in result.stdout


@pytest.mark.parametrize(
    "given",
    [
        ("--model", "llama9"),
        ("--tokens", "5"),
        ("--tokens", "0 steps"),
        ("--tokens", "1h"),
        ("--model", "llama-demo", "--seq-len", "10**9"),
    ],
)
def test_a_wrong_answer_writes_no_file(command, given):
    assert command("init", *given).returncode == 2
    assert not Path("run.toml").exists()
