"""Tasks of lm-evaluation-harness on a stored model, and the watcher, without a network."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

import arriero as api
from arriero.checkpoint.convert import find_model
from arriero.checkpoint.scores import read_evaluations
from arriero.evaluate.tasks import TasksRequest, harness_model

TASKS = Path(__file__).parent / "tasks"


@pytest.fixture
def task_folder(tmp_path):
    folder = tmp_path / "tasks"
    shutil.copytree(TASKS, folder)
    for path in folder.glob("*.yaml"):
        path.write_text(path.read_text().replace("PATH", str(folder)))
    return folder


@pytest.mark.slow
def test_a_local_task_is_evaluated_and_stored(arriero, trained, task_folder):
    checkpoint = trained.run / "checkpoints" / "step-00000012"
    arguments = ["--tasks", "arriero_python", "--include", task_folder, "--device", "cpu", "--json"]
    result = arriero("eval", "tasks", checkpoint, *arguments)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)["tasks"]
    assert row["task"] == "arriero_python" and row["examples"] == 12
    assert {"acc", "acc_norm"} == set(row["metrics"])
    (stored,) = [each for each in read_evaluations(checkpoint) if each.kind == "tasks"]
    assert stored.scores == {"arriero_python acc": row["metrics"]["acc"]}


def requests(kind, *arguments):
    return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]


TEXTS = [
    ("def add(a, b):", " return a + b"),
    ("", "import os"),
    ("for each in", " range(10):\n    print(each)"),
]


def test_the_harness_gets_the_numbers_of_transformers(trained):
    ours = harness_model(find_model(trained.run), TasksRequest("", [], batch=2, device="cpu"))
    theirs = HFLM(str(trained.run / "model"), device="cpu", batch_size=2)
    scored = requests("loglikelihood", *TEXTS)
    for found, expected in zip(ours.loglikelihood(scored), theirs.loglikelihood(scored), strict=True):
        assert found == (pytest.approx(expected[0], abs=1e-3), expected[1])
    whole = requests("loglikelihood_rolling", *((a + b,) for a, b in TEXTS))
    assert ours.loglikelihood_rolling(whole) == pytest.approx(theirs.loglikelihood_rolling(whole), abs=1e-3)
    asked = requests("generate_until", *((a, {"until": ["\n"], "max_gen_toks": 12}) for a, _ in TEXTS if a))
    assert ours.generate_until(asked) == theirs.generate_until(asked)


def test_samples_of_a_prompt_differ_and_are_drawn_again_alike(trained):
    """A task with repeats asks for the same prompt several times, in batches."""

    def drawn(count, **how):
        model = harness_model(find_model(trained.run), TasksRequest("", [], batch=2, device="cpu"))
        given = {"until": [], "max_gen_toks": 12, "do_sample": True, **how}
        return model.generate_until(requests("generate_until", *[("def add(a, b):", given)] * count))

    samples = drawn(6, temperature=1.0)
    assert len(set(samples)) == 6
    assert drawn(6) == samples
    assert len(set(drawn(4, temperature=0.0))) == 1


ADAPTERS = {"prefix": {"prefix.tokens": 3}, "llama_adapter": {"llama_adapter.tokens": 2}}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_that_are_not_merged_have_the_loss_of_perplexity(
    kind, trained, corpus_cache, tmp_path, command, task_folder
):
    own = {"run.dir": str(tmp_path / "runs"), "data.cache": str(corpus_cache), "train.horizon": "2 steps"}
    own |= {
        "checkpoint.start_from": str(trained.run),
        "optim.lr": 0.1,
        "data.seq_len": 60,
        "train.batch": "960 tok",
    }
    api.run(api.load_config(None, trained.settings | own | ADAPTERS[kind]), nproc=1)
    adapter = tmp_path / "runs" / "tiny" / "adapter"
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "def add(a, b): return a + b"}))
    measured = command("eval", "perplexity", adapter, "--data", "text.jsonl", "--json")
    assert measured.returncode == 0, measured.stderr
    facts = json.loads(measured.stdout)

    model = harness_model(find_model(adapter), TasksRequest("", [], device="cpu"))
    eos = model.tokenizer.eos_token
    ids = tokenizers.Tokenizer.from_file(str(trained.run / "model" / "tokenizer.json")).encode("def").ids
    (found,) = model.loglikelihood(requests("loglikelihood", ("def", f" add(a, b): return a + b{eos}")))
    assert len(ids) == 1 and -found[0] == pytest.approx(facts["loss"] * facts["tokens"], rel=1e-4)
    arguments = [
        "--tasks",
        "arriero_python",
        "--include",
        task_folder,
        "--limit",
        2,
        "--device",
        "cpu",
        "--json",
    ]
    result = command("eval", "tasks", tmp_path / "runs" / "tiny", *arguments)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["tasks"][0]["examples"] == 2


def test_the_watcher_evaluates_each_checkpoint_once(command, trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained.run, run)
    for old in run.rglob("evaluation-*.json"):
        old.unlink()
    watch = ["eval", "watch", run, "--device", "cpu", "--poll", "0.1", "--json"]
    first = command(*watch)
    assert first.returncode == 0, first.stderr
    rows = [json.loads(line) for line in first.stdout.splitlines()]
    assert [row["step"] for row in rows] == [6, 12]
    assert command(*watch).stdout == ""
    assert "nothing to evaluate" in command(*watch[:-1]).stdout
    shutil.copytree(run / "checkpoints" / "step-00000012", run / "checkpoints" / "step-00000013")
    damaged = run / "checkpoints" / "step-00000006"
    next(damaged.glob("evaluation-*.json")).unlink()
    weights = next(damaged.glob("*.distcp"))
    weights.write_bytes(weights.read_bytes()[:-9])
    second = command(*watch)
    assert second.returncode == 1
    (row,) = [json.loads(line) for line in second.stdout.splitlines()]
    assert row["step"] == 6 and "damaged" in row["problem"]
