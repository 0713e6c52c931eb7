import json

from arriero.data.store.store import TokenStore
from arriero.data.text.builtin import markov_text

RUN = """
[run]
name = "known"
[model]
preset = "llama-demo"
vocab_size = 576
dim = 64
layers = 1
heads = 2
kv_heads = 1
ffn = 128
[data]
seq_len = 64
sources = [{ path = "builtin:synthetic" }]
[train]
batch = "2048 tok"
horizon = "120 steps"
[optim]
lr = 1e-2
[schedule]
kind = "wsd"
warmup = "10 steps"
[eval]
heldout = "20k tok"
every = "120 steps"
"""


def test_training_approaches_the_entropy_of_the_text_and_goes_no_lower(arriero, tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    done = arriero("train", "run.toml")
    assert done.returncode == 0, done.stderr
    (dataset,) = (tmp_path / "data").iterdir()
    store = TokenStore.open(dataset)
    floor = markov_text().document_nats * store.documents / store.tokens
    lines = [json.loads(line) for line in (tmp_path / "runs/known/metrics.jsonl").read_text().splitlines()]
    (loss,) = [line["eval_loss"] for line in lines if line.get("eval_loss") and line["step"] == 120]
    assert 0.97 * floor < loss < 1.1 * floor
