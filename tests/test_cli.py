import json
import os
import re
import subprocess
import sys

import pytest
import typer

from arriero.cli import app
from arriero.model.presets import preset_names

TINY = [
    "--set", "model.preset=llama-test", "--set", "model.vocab_size=4096", "--set", "data.seq_len=64",
    "--set", "train.batch=512 tok", "--set", "train.horizon=4 steps", "--set", "eval.heldout=2k tok",
    "--set", "eval.every=2 steps", "--set", "schedule.warmup=1 step", "--set", "run.device=cpu",
]  # fmt: skip


VERBS = (
    *("train", "init", "data", "plan", "bench", "ckpt", "eval", "generate", "replay"),
    *("launch", "doctor", "fed", "runs", "status", "report", "config"),
)


def test_help_lists_every_verb_and_no_other(command):
    text = command("--help").stdout
    assert sorted(re.findall(r"^│ ([a-z]+) ", text, flags=re.MULTILINE)) == sorted(VERBS)


@pytest.fixture(scope="module")
def trained(forked_arriero, corpus_cache, tmp_path_factory):
    """Train the tiny model once; return what was printed and the run directory."""
    folder = tmp_path_factory.mktemp("trained")
    result = forked_arriero("train", *TINY, "--set", f"data.cache='{corpus_cache}'", cwd=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout, folder / "runs" / "demo"


def test_training_prints_its_settings_and_its_result(trained):
    printed, run = trained
    for words in (
        "parameters",
        "micro-batch",
        "validation loss",
        "training loss",
        "tok/s",
        "runs/demo",
        "sample from the model",
    ):
        assert words in printed
    exported = json.loads((run / "model/config.json").read_text())
    assert exported["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.slow
def test_transformers_computes_the_reported_loss_from_the_exported_model(trained, corpus_cache):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from arriero.data.order.shuffle import split_heldout
    from arriero.data.store.store import TokenStore

    _, run = trained
    reported = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["eval_loss"]
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    store = TokenStore.open(next(corpus_cache.glob("stdlib-*")))
    tokens = store.read(split_heldout(store, 2000)[1].start, split_heldout(store, 2000)[1].__len__())
    windows = (len(tokens) - 1) // 64
    x = torch.tensor(tokens[: windows * 64].astype("int64")).view(windows, 64)
    y = torch.tensor(tokens[1 : windows * 64 + 1].astype("int64"))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y)
    assert loss.item() == pytest.approx(reported, rel=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert tokenizer.decode(tokenizer("import os\n").input_ids) == "import os\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "absent.toml"], "no run file absent.toml"),
        (["train", "--set", "model.preset=llama9"], "no model preset 'llama9'"),
        (["train", "--set", "optim.lrr=1"], "did you mean 'optim.lr'"),
        (["train", "--set", "run.device=cuda"], "sees no GPU"),
        (["train", "--set", "data.sources=[{path='nowhere'}]"], "nowhere"),
        (["train", "--set", "data.sources=[{path='builtin:web'}]"], "builtin:stdlib"),
        (["train", "--set", "parallel.tp=2"], "2 ranks"),
        (["train", "--set", "data.cache=/dev/null/x"], "data.cache"),
        (["train", "--set", "model.preset=llama3.1-405b"], "choose a smaller model"),
        (["config", "explain", "train.bach"], "did you mean 'train.batch'"),
    ],
)
def test_a_mistake_ends_in_one_line_and_exit_code_2(command, arguments, words, tmp_path):
    result = command(*arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["x" * 300, "text.txt/below", "loop", "absent\udcff", "", "/dev/null"])
@pytest.mark.parametrize(
    "verb", [["ckpt", "list"], ["ckpt", "verify"], ["data", "verify"], ["config", "show"]]
)
def test_an_odd_path_ends_without_a_traceback(command, verb, path, tmp_path):
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "loop").symlink_to("loop")
    result = command(*verb, path)
    assert result.returncode in (1, 2)
    assert "Traceback" not in result.stderr
    assert result.stdout + result.stderr


@pytest.mark.parametrize("path", ["nowhere/result.json", "."])
@pytest.mark.parametrize("verb", [["step", "--json"], ["parity", "--write"]])
def test_an_unwritable_result_file_is_rejected_before_the_work(command, verb, path):
    result = command("bench", *verb, path)
    assert result.returncode == 2
    assert f"{verb[-1]} {path} " in result.stderr


@pytest.mark.parametrize(
    ("verb", "now"),
    [
        ("bench costs", "make bench-costs"),
        ("bench page", "arriero bench compare RESULTS... --write PAGE"),
        ("data bench", "make bench-data"),
    ],
)
def test_a_moved_verb_is_answered_by_its_new_name(command, verb, now):
    result = command(*verb.split(), "--json", "x", "argument")
    assert result.returncode == 2
    assert f"`arriero {verb}` is now `{now}`" in result.stderr


def test_an_argument_that_is_not_utf8_is_rejected(command):
    for arguments in (["ckpt", "list", "run\udcff"], ["train", "--set", "run.name=\udcff"]):
        result = command(*arguments)
        assert result.returncode == 2
        assert "is not valid UTF-8" in result.stderr


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--lr", "3e-4"], "there is no option --lr; write --set optim.lr=VALUE"),
        (["--training.steps=3"], "write --set train.horizon=3"),
        (["--tensor-model-parallel-size", "2"], "write --set parallel.tp=VALUE"),
        (["--optim.lr=1e-3"], "write --set optim.lr=1e-3"),
        (["--gradient_accumulation_steps=4"], "set train.micro_batch"),
    ],
)
def test_a_key_given_as_an_option_is_answered_with_set(command, option, words):
    result = command("train", *option)
    assert result.returncode == 2
    assert words in result.stderr


def test_debug_shows_the_traceback(arriero):
    for arguments in (["train", "absent.toml", "--debug"], ["--debug", "train", "absent.toml"]):
        result = arriero(*arguments)
        assert "Traceback" in result.stderr
        assert "no run file absent.toml" in result.stderr


def verbs(group=None, words=()):
    """Yield every verb as its words, by walking the command table."""
    group = typer.main.get_command(app) if group is None else group
    for name, each in group.commands.items():
        if hasattr(each, "commands"):
            yield from verbs(each, (*words, name))
        elif not each.hidden:  # hidden verbs only name the place where they moved
            yield (*words, name)


@pytest.mark.parametrize("verb", [(), ("data",), *verbs()], ids=" ".join)
def test_every_verb_has_help_under_both_names(command, verb):
    short, long = command(*verb, "-h"), command(*verb, "--help")
    assert (short.returncode, short.stdout) == (0, long.stdout)
    assert "Usage: arriero" in short.stdout
    assert len(verb) == 0 or verb == ("data",) or "Example: arriero" in short.stdout


def test_the_version_is_printed(command):
    from arriero import __version__

    assert command("--version").stdout.startswith(f"arriero {__version__} (torch ")


def test_quiet_prints_nothing_but_errors_and_json(command):
    for arguments in (["--quiet", "config", "models"], ["config", "explain", "train", "--quiet"]):
        assert command(*arguments).stdout == ""
    assert json.loads(command("config", "models", "--json", "--quiet").stdout)["models"]
    failed = command("train", "absent.toml", "--quiet")
    assert failed.returncode == 2
    assert "no run file absent.toml" in failed.stderr
    assert command("config", "models").stdout
    assert "--quiet" in command("train", "--", "--quiet").stderr


@pytest.mark.slow
def test_quiet_training_prints_nothing(arriero, corpus_cache, tmp_path):
    where = ["--set", f"data.cache='{corpus_cache}'", "--set", "checkpoint.export=false"]
    result = arriero("train", *TINY, *where, "--quiet")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert (tmp_path / "runs" / "demo" / "metrics.jsonl").exists()


def test_tables_in_a_file_are_wide(command, monkeypatch):
    monkeypatch.delenv("COLUMNS")
    heading = command("config", "models").stdout.splitlines()[0]
    assert len(heading) > 100
    assert heading.split()[-3:] == ["what", "it", "is"]


def test_tables_on_a_narrow_terminal_keep_their_words(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.rstrip() for line in command("launch", "sites").stdout.splitlines()[:-1]]
    assert max(map(len, lines)) <= 80
    assert "marenostrum5" in lines
    assert any("partition: boost_usr_prod" in line for line in lines)


def test_help_fills_the_terminal_and_flags_have_no_type(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = command("plan", "--help").stdout
    assert "activation checkpointing" in " ".join(shown.split())
    assert "bool" not in shown
    paragraph = shown[shown.index("Keys that") : shown.index("Example")].strip().splitlines()
    assert all(len(line.rstrip()) > 60 for line in paragraph[:-1])


def test_models_are_listed_as_json(command):
    listed = json.loads(command("config", "models", "--json").stdout)["models"]
    assert [each["preset"] for each in listed] == list(preset_names())
    llama = next(each for each in listed if each["preset"] == "llama3-8b")
    assert llama["parameters"] == 8_030_261_248
    assert llama["bf16_bytes"] == 2 * llama["parameters"]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("arriero ck", ["ckpt"]),
        ("arriero data tr", ["train-tokenizer", "trace"]),
        ("arriero config explain optim.b", ["optim.betas"]),
        ("arriero train --set train.ba", ["train.batch="]),
        ("arriero ckpt list --js", ["--json"]),
    ],
)
def test_the_shell_completes_verbs_options_and_keys(line, offered):
    script = os.path.join(os.path.dirname(sys.executable), "arriero")  # noqa: PTH118, PTH120
    words = {
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
        "_ARRIERO_COMPLETE": "complete_bash",
    }
    result = subprocess.run([script], env=os.environ | words, capture_output=True, text=True)
    assert result.stdout.split() == offered


def test_the_completion_script_is_shown(command, monkeypatch):
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("zsh", "/bin/zsh"))
    assert "_ARRIERO_COMPLETE=complete_zsh" in command("--show-completion").stdout


def test_config_show_prints_a_valid_run_file(command, tmp_path):
    text = command("config", "show", "--set", "optim.lr=0.5").stdout
    assert "# --set" in text
    assert "# preset llama-demo" in text
    (tmp_path / "again.toml").write_text(text)
    again = command("config", "show", "again.toml").stdout
    assert [line.split("#")[0].rstrip() for line in again.splitlines()] == [
        line.split("#")[0].rstrip() for line in text.splitlines()
    ]


def test_config_schema_is_a_json_schema(command):
    schema = json.loads(command("config", "schema").stdout)
    assert "train" in schema["properties"]
    assert "extends" in schema["properties"]
    assert schema["$defs"]["TrainSection"]["properties"]["batch"]["default"] == "524288 tok"
    assert "required" not in json.dumps(schema)
    assert "null" not in json.dumps(schema)


def test_explain_shows_type_default_and_names_in_other_trainers(command):
    assert '"cosine"' in command("config", "explain", "schedule.kind").stdout
    text = command("config", "explain", "train.micro_batch").stdout
    for words in ('integer > 0 or "auto"', "default", "per_device_train_batch_size"):
        assert words in text
    assert '"4M tok"' in command("config", "explain", "train.batch").stdout
    assert "text" in command("config", "explain", "data.sources[0].path").stdout
    assert "builds on" in command("config", "explain", "extends").stdout
    assert "optim.lr  Peak learning rate" in command("config", "explain", "learning_rate").stdout
    assert "parallel.dp_shard" in command("config", "explain", "fsdp").stdout


def test_explain_lists_the_keys_of_a_section_with_type_and_default(command):
    text = command("config", "explain", "train").stdout
    row = next(line for line in text.splitlines() if line.startswith("train.z_loss"))
    assert "number >= 0" in row
    assert "0.0" in row
    sources = command("config", "explain", "data.sources").stdout
    assert "list of table" in sources
    assert "data.sources.weight" in sources


def test_models_lists_every_preset_with_its_size(command):
    text = command("config", "models").stdout
    assert "llama3.1-405b" in text
    assert "405.853 B" in text
