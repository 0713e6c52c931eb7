"""Perplexity of stored models: that of transformers, on every layout, per source, beside the checkpoint."""

import json
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import arriero
from arriero.checkpoint.scores import read_evaluations
from arriero.evaluate.perplexity import PerplexityRequest, measure_perplexity
from arriero.evaluate.tasks import TasksRequest

SEQ_LEN = 48


def texts(kind):
    if kind == "short":
        return [f"def f{i}(x):\n    return x + {i}\n" * (1 + i % 4) for i in range(9)]
    return ["import os, sys\n" * (5 + 7 * i) for i in range(4)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    with (folder / "short.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts("short"))
    pq.write_table(pa.table({"text": texts("long")}), folder / "long.parquet")
    return [str(folder / "short.jsonl"), str(folder / "long.parquet")], str(folder / "cache")


@pytest.fixture(scope="module")
def expected(trained):
    """Summed loss and tokens per source, by transformers, one document at a time."""
    model = AutoModelForCausalLM.from_pretrained(trained.run / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(trained.run / "model")
    found = []
    for kind in ("short", "long"):
        total = count = 0
        for text in texts(kind):
            ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
            for begin in range(0, len(ids) - 1, SEQ_LEN):
                part = torch.tensor(ids[begin : begin + SEQ_LEN + 1])
                with torch.no_grad():
                    logits = model(part[None, :-1]).logits[0]
                total += torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum").item()
                count += len(part) - 1
        found.append((count, total / count))
    return found


@pytest.mark.parametrize(
    ("kind", "nproc", "layout"),
    [
        ("run", 1, []),
        ("meta", 1, []),
        ("hf", 2, ["parallel.dp_shard=2"]),
        ("hf", 2, ["parallel.tp=2"]),
        ("checkpoint", 4, ["parallel.pp=2", "parallel.cp=2"]),
    ],
)
def test_every_format_and_layout_has_the_loss_of_transformers(
    command, trained, sources, expected, kind, nproc, layout, tmp_path
):
    data, cache = sources
    known = {"run": trained.run, "hf": trained.run / "model"}
    path = known.get(kind, trained.run / "checkpoints" / "step-00000012")
    if kind == "meta":
        path = tmp_path / "meta"
        command("ckpt", "convert", trained.run / "model", path, "--to", "meta")
    sets = ["run.device=cpu", *layout]
    request = PerplexityRequest(str(path), data, SEQ_LEN, cache=cache, sets=sets)
    found = measure_perplexity(request, nproc).to_dict()
    assert [row["source"] for row in found["sources"]] == data
    assert [row["tokens"] for row in found["sources"]] == [count for count, _ in expected]
    assert [row["loss"] for row in found["sources"]] == pytest.approx(
        [mean for _, mean in expected], rel=2e-6
    )
    together = sum(count * mean for count, mean in expected) / sum(count for count, _ in expected)
    assert found["loss"] == pytest.approx(together, rel=2e-6)


def test_without_data_it_is_the_held_out_loss_of_the_run(command, trained):
    result = command("eval", "perplexity", trained.run, "--json", "--nproc", 1, "--set", "run.device=cpu")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["loss"] == pytest.approx(trained.eval_loss, rel=1e-6)


def test_the_result_is_stored_beside_the_checkpoint_and_listed(command, trained, sources):
    data, cache = sources
    arguments = ["eval", "perplexity", trained.run, "--data", data[0], "--cache", cache, "--seq-len", "32"]
    printed = command(*arguments, "--nproc", 1, "--set", "run.device=cpu")
    assert printed.returncode == 0, printed.stderr
    checkpoint = trained.run / "checkpoints" / "step-00000012"
    (stored,) = [e for e in read_evaluations(checkpoint) if e.settings["seq_len"] == 32]
    value = stored.scores[f"perplexity {data[0]}"]
    assert f"{value:,.3f}" in printed.stdout
    assert f"{value:.4g}" in command("ckpt", "list", trained.run).stdout
    rows = json.loads(command("ckpt", "list", trained.run, "--json").stdout)["checkpoints"]
    assert [row["valid"] for row in rows] == [True, True]
    assert stored.scores in [each["scores"] for each in rows[-1]["evaluations"]]
    assert command("ckpt", "verify", trained.run).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["MODEL"], "is not a checkpoint of a run"),
        (["RUN", "--seq-len", "8"], "need --data"),
        (["RUN", "--data", "absent.jsonl"], "absent.jsonl"),
        (["absent", "--data", "x"], "absent does not exist"),
    ],
)
def test_a_mistake_ends_in_one_line(command, trained, arguments, words):
    paths = {"RUN": trained.run, "MODEL": trained.run / "model"}
    options = ["--nproc", 1, "--set", "run.device=cpu"]
    result = command("eval", "perplexity", *(paths.get(each, each) for each in arguments), *options)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_data_of_another_tokenizer_is_refused(command, trained, synthetic_cache):
    other = next(synthetic_cache.glob("synthetic-*"))
    result = command("eval", "perplexity", trained.run, "--data", other, "--nproc", 1)
    assert result.returncode == 2
    assert "another tokenizer" in result.stderr


def test_the_run_reports_the_held_out_loss_of_each_source_on_every_layout(trained, corpus_cache, tmp_path):
    """Two sources, evaluated every 1,024 tokens; the overall loss counts each token once."""
    tokenizer = str(trained.run / "model" / "tokenizer.json")
    many = tmp_path / "many.jsonl"
    with many.open("w") as file:
        file.writelines(
            json.dumps({"text": text * (1 + i % 5)}) + "\n" for i in range(40) for text in texts("short")
        )
    own = {
        "run.dir": str(tmp_path),
        "data.cache": str(corpus_cache),
        "data.sources": [{"path": "builtin:stdlib"}, {"path": str(many), "tokenizer": tokenizer}],
        "train.horizon": "3 steps",
        "eval.heldout": "1k tok",
        "eval.every": "1024 tok",
        "checkpoint.export": False,
        "checkpoint.load.allow_other_tokenizer": True,
    }
    lines = {}
    for name, nproc, layout in (("one", 1, {}), ("tp", 2, {"parallel.tp": 2}), ("pp", 2, {"parallel.pp": 2})):
        arriero.run(
            arriero.load_config(None, trained.settings | own | layout | {"run.name": name}), nproc=nproc
        )
        found = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        lines[name] = {line["step"]: line for line in found if "eval_loss" in line}
    assert list(lines["one"]) == [1, 2, 3]
    for step, line in lines["one"].items():
        several = line["eval_losses"]
        assert list(several) == ["builtin:stdlib", str(many)]
        assert min(several.values()) < line["eval_loss"] < max(several.values())
        for name in ("tp", "pp"):
            assert lines[name][step]["eval_losses"] == pytest.approx(several, rel=1e-5)


def test_evaluations_that_may_differ_have_their_own_results():
    requests = [
        PerplexityRequest("m", ["a"]),
        PerplexityRequest("m", ["a"], column="body"),
        PerplexityRequest("m", ["a"], tokenizer=Path("t.json")),
        PerplexityRequest("m", ["a"], sets=["precision.compute=bf16"]),
        TasksRequest("m", ["a"]),
        TasksRequest("m", ["a"], include=Path("tasks")),
        TasksRequest("m", ["a"], dtype="bf16"),
    ]
    known = [request.settings() for request in requests]
    assert all(one != other for i, one in enumerate(known) for other in known[:i])
    moved = PerplexityRequest("m", ["a"], sets=["run.device=cuda", "parallel.tp=2"])
    assert moved.settings() == known[0]


def test_a_signal_ends_an_evaluation_without_a_traceback(command, trained, monkeypatch):
    stop = signal.SIGTERM
    monkeypatch.setattr("arriero.evaluate.perplexity._measure", lambda *_: signal.raise_signal(stop))
    result = command("eval", "perplexity", trained.run)
    assert (result.returncode, result.stdout, result.stderr) == (128 + stop, "", "")
