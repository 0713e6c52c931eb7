"""Speculators: what vLLM reads, both stages of training, and the acceptance length."""

import errno
import json
import math
import os
import shutil
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import arriero
from arriero.checkpoint.convert import open_model
from arriero.checkpoint.directory import find_checkpoints
from arriero.cli import app
from arriero.config.schema import SpeculatorSection
from arriero.errors import UserError
from arriero.evaluate.speculator import Acceptance, count_accepted, load_speculator
from arriero.model.family import build_model
from arriero.model.generation import Sampling, generate
from arriero.model.presets import resolve
from arriero.model.speculator.module import Speculator, SpeculatorHead
from arriero.train.model_state import ModelState

SMALL = {
    "data.seq_len": 64,
    "train.batch": "512 tok",
    "train.horizon": "6 steps",
    "schedule.horizon": "6 steps",
    "schedule.warmup": "1 step",
    "eval.heldout": "1k tok",
    "optim.lr": 1e-2,
    "observe.log_every": 1,
    "observe.tensorboard": False,
    "observe.sample": False,
    "run.device": "cpu",
    "data.sources": [{"path": "builtin:synthetic"}],
}
MODEL = {"model.preset": "llama-test", "model.vocab_size": 600, "model.layers": 1}


class VllmSpeculator(nn.Module):
    """The parameters and proposals of vLLM's model_executor/models/mlp_speculator.py, for one process."""

    def __init__(self, config):
        super().__init__()
        count, inner, vocab = (
            config["n_predict"],
            config["inner_dim"] or config["emb_dim"],
            config["vocab_size"],
        )
        own = 1 if config["tie_weights"] else count
        self.config = config
        self.emb = nn.ModuleList(nn.Embedding(vocab, inner) for _ in range(own))
        widths = [config["emb_dim"], *[inner] * (count - 1)][: 2 if config["tie_weights"] else count]
        self.proj = nn.ModuleList(nn.Linear(width, inner, bias=False) for width in widths)
        self.head = nn.ModuleList(nn.Linear(inner, vocab, bias=False) for _ in range(own))
        self.ln = nn.ModuleList(nn.LayerNorm(inner) for _ in range(own))

    def load_weights(self, weights):
        """Take the tensors that have a known name, as vLLM does, and return the names left over."""
        mine = dict(self.named_parameters())
        for name, tensor in weights.items():
            mine.pop(name.replace("speculator.", "")).data.copy_(tensor)
        return mine

    def proposals(self, hidden, tokens):
        count, inner = self.config["n_predict"], self.emb[0].embedding_dim
        state_weight = 0.5 ** (0.5 / count)
        emb_weight = math.sqrt((1 - state_weight**2) * (inner / 2))
        state, found = hidden, []
        if self.config["scale_input"]:
            state = state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + 1e-6) / 2**0.5
        for i in range(count):
            emb, proj, head, ln = (
                part[min(i, len(part) - 1)] for part in (self.emb, self.proj, self.head, self.ln)
            )
            state = proj(state) + emb(tokens) * (emb_weight / state_weight)
            state = state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + 1e-6)
            state = F.gelu(ln.weight * state + ln.bias)
            tokens = head(state).argmax(-1)
            found.append(tokens)
        return torch.stack(found, -1)


@pytest.fixture(scope="module")
def runs(synthetic_cache, tmp_path_factory):
    """Train a base model once; return a function that trains on it."""
    folder = tmp_path_factory.mktemp("runs")

    def trained(name, nproc=1, **sets):
        changes = {key.replace("__", "."): value for key, value in sets.items()}
        own = {"run.name": name, "run.dir": str(folder), "data.cache": str(synthetic_cache)}
        return arriero.run(arriero.load_config(None, SMALL | own | changes), nproc=nproc)

    trained("base", **MODEL)
    trained.folder = folder
    trained.spec = {"checkpoint.start_from": str(folder / "base"), "speculator.n_predict": 3}
    trained("stage1", **trained.spec)
    return trained


@pytest.mark.parametrize(
    "settings",
    [
        {"n_predict": 3},
        {"n_predict": 5, "inner_dim": 24, "tie_weights": True, "scale_input": True},
        {"n_predict": 1, "inner_dim": 40},
        {"n_predict": 2, "tie_weights": True},
    ],
)
def test_proposals_are_those_of_vllm(settings, runs):
    name = "-".join(str(value) for value in settings.values())
    sets = {f"speculator.{key}": value for key, value in settings.items()}
    runs(name, **runs.spec | sets | {"train.horizon": "1 step"})
    directory = runs.folder / name / "model"
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["MLPSpeculatorPreTrainedModel"]
    assert config["model_type"] == "mlp_speculator" and config["n_predict"] == settings["n_predict"]
    assert len(config["top_k_tokens_per_head"]) == config["n_predict"]
    reader = VllmSpeculator(config)
    assert reader.load_weights(load_file(directory / "model.safetensors")) == {}
    base = arriero.load_model(runs.folder / "base")
    ours = load_speculator(directory, SpeculatorSection(**settings), base)
    torch.manual_seed(1)
    hidden, tokens = torch.randn(7, 9, base.spec.dim), torch.randint(600, (7, 9))
    with torch.no_grad():
        assert torch.equal(ours.propose(hidden, tokens), reader.proposals(hidden, tokens))


def test_the_loss_of_each_head_is_that_of_the_tokens_it_may_know():
    spec = resolve("llama-test", {"layers": 1, "vocab_size": 50})
    model = build_model(spec)
    model.head = SpeculatorHead.of(model.head, SpeculatorSection(n_predict=3), spec)
    model.init_weights(1)
    torch.manual_seed(2)
    hidden, labels = torch.randn(2, 12, spec.dim), torch.randint(50, (2, 12))
    labels[0, 4] = labels[1, :3] = -100
    expected, own = 0.0, model.head.speculator
    for row in range(2):
        for t in range(12):
            state = hidden[row, t]
            for i in range(3):
                ahead = labels[row, t : t + i + 2]
                if len(ahead) < i + 2 or (ahead == -100).any():
                    break
                state = own.step(i, state, ahead[-2])
                expected += F.cross_entropy(F.linear(state, own.weight(i)), ahead[-1])
    assert torch.allclose(model.head(hidden, labels), expected / 3, rtol=1e-5)


def test_the_base_model_is_frozen_and_has_no_optimizer_state(runs):
    before, after = (arriero.load_model(runs.folder / name).state_dict() for name in ("base", "stage1"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    saved = find_checkpoints(runs.folder / "stage1")[-1]
    sizes = {name: math.prod(shape) for name, (_, shape) in saved.manifest.tensors.items()}
    assert any("exp_avg" in name for name in sizes)
    assert all(".speculator." in name for name, size in sizes.items() if size > 1)


def test_a_base_model_is_found_where_it_moved_to_and_refused_if_changed_or_gone(runs):
    runs("alone", **MODEL | {"train.horizon": "1 step", "run.seed": 5})
    where = runs.folder / "downloaded"
    shutil.copytree(runs.folder / "alone" / "model", where)
    changed = runs.spec | {"checkpoint.start_from": str(where)}
    runs("on-alone", **changed | {"train.horizon": "2 steps"})
    where.rename(moved := runs.folder / "elsewhere")
    with pytest.raises(UserError, match="model holds another model"):
        runs("on-alone", **changed | {"checkpoint.start_from": str(runs.folder / "base" / "model")})
    changed |= {"checkpoint.start_from": str(moved)}
    runs("on-alone", **changed | {"train.horizon": "3 steps"})
    weights = moved / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match="is not the one that the speculator"):
        runs("on-alone", **changed)
    saved = find_checkpoints(runs.folder / "on-alone")[-1].directory
    with pytest.raises(UserError, match="is not the one that the speculator"):
        open_model(saved)
    (saved / "base.json").write_text("{}")
    with pytest.raises(UserError, match="is damaged: it has no path and checksum"):
        open_model(saved)


@pytest.mark.parametrize("kept_by", ["hard links", "copies"])
@pytest.mark.parametrize("base", ["parent", "parent/model"])
def test_a_speculator_is_resumed_after_its_base_was_deleted_by_the_run_it_is_from(
    runs, base, kept_by, monkeypatch
):
    if kept_by == "copies":
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EXDEV, "another file system")))
    where = f"{base}-{kept_by}".replace("parent", "").replace("/", "").replace(" ", "-")
    parent, name = f"parent{where}", f"spec{where}"
    few = {"checkpoint.keep": 1, "train.horizon": "2 steps"}
    runs(parent, **MODEL | few)
    sets = runs.spec | {"checkpoint.start_from": str(runs.folder / base.replace("parent", parent))}
    runs(name, **sets | few)
    before = arriero.load_model(runs.folder / name).state_dict()
    runs(parent, **MODEL | few | {"train.horizon": "4 steps"})
    resumed = runs(name, **sets | few | {"train.horizon": "4 steps"})
    assert sorted(resumed.losses) == [3, 4]
    # the base is also found after the run directory itself was moved and the other run is gone
    shutil.rmtree(runs.folder / parent)
    (runs.folder / name).rename(runs.folder / f"moved{where}")
    after = arriero.load_model(runs.folder / f"moved{where}").state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert sorted(runs(f"moved{where}", **runs.spec | few | {"train.horizon": "5 steps"}).losses) == [5]


def test_a_run_whose_checkpoints_held_the_base_model_stays_resumable(runs, monkeypatch):
    few = {"checkpoint.every": "2 steps", "checkpoint.keep": 2}
    with monkeypatch.context() as older:
        older.setattr(ModelState, "stored", ModelState.tensors)
        older.setattr(ModelState, "base", property(lambda _: None, lambda *_: None), raising=False)
        runs("older", **runs.spec | few | {"train.horizon": "2 steps"})
    folder = runs.folder / "older"
    shutil.rmtree(folder / "base")
    assert not (find_checkpoints(folder)[0].directory / "base.json").exists()
    runs("older", **runs.spec | few)
    assert [saved.step for saved in find_checkpoints(folder)] == [4, 6]
    resumed = runs("older", **runs.spec | few | {"train.horizon": "8 steps"})
    straight = runs("newer", **runs.spec | {"train.horizon": "8 steps"})
    assert [resumed.losses[step] for step in (7, 8)] == [straight.losses[step] for step in (7, 8)]


def test_shards_and_a_resumed_run_have_the_losses_of_one_process(runs):
    straight = runs("straight", **runs.spec)
    sharded = runs("sharded", nproc=2, **runs.spec | {"parallel.dp_shard": 2})
    assert list(sharded.losses.values()) == pytest.approx(list(straight.losses.values()), rel=1e-5)
    runs("resumed", **runs.spec | {"train.horizon": "3 steps"})
    resumed = runs("resumed", **runs.spec)
    assert [resumed.losses[step] for step in (4, 5, 6)] == [straight.losses[step] for step in (4, 5, 6)]
    files = [
        load_file(runs.folder / name / "model" / "model.safetensors") for name in ("straight", "resumed")
    ]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


def test_a_second_stage_on_the_models_own_text_continues_the_first_and_is_accepted_more(
    runs, synthetic_cache
):
    cli, where = CliRunner(), runs.folder
    prompts = ["--data", "builtin:synthetic", "--cache", str(synthetic_cache), "--prompt-tokens", "8"]
    made = ["data", "generate", str(where / "base"), "-o", str(where / "own"), "--prompts", "60"]
    result = cli.invoke(app, [*made, *prompts, "--max-tokens", "24", "--temperature", "0"])
    assert result.exit_code == 0, result.output
    dataset = arriero.open_dataset(where / "own")
    assert len(dataset) == 60 and min(map(len, dataset)) > 8
    data = {"data.sources": [{"path": str(where / "own")}], "data.packing": "bestfit", "eval.heldout": False}
    data |= {"eval.every": False, "data.document_mask": True}
    stage2 = runs("stage2", **runs.spec | data | {"checkpoint.start_from": str(where / "stage1")})
    fresh = runs("fresh", **runs.spec | data)
    assert stage2.losses[1] != pytest.approx(fresh.losses[1], rel=1e-2)

    def length(name):
        asked = ["eval", "speculator", str(where / name), *prompts, "--prompts", "12", "--max-tokens", "24"]
        result = cli.invoke(app, [*asked, "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["acceptance_length"]

    assert 1.0 <= length("stage1") < length("stage2") <= 4.0


def test_the_acceptance_length_is_that_of_speculative_decoding():
    """The replay of one forward pass against decoding step by step with verification."""
    spec = resolve("llama-test", {"layers": 1, "vocab_size": 5})
    model = build_model(spec)
    model.init_weights(1)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    speculator = Speculator(SpeculatorSection(n_predict=2), spec)
    prompt, most = [1, 2, 3, 0], 40
    own = [step[0] for step in generate(model, [prompt], most, Sampling())]
    text, steps = list(prompt), 0
    while len(text) < len(prompt) + most:
        with torch.no_grad():
            hidden = model.hidden(torch.tensor([text]))[0, -1]
            sure = int(F.linear(hidden, model.head.weight).argmax())
            proposed = speculator.propose(hidden, torch.tensor(sure)).tolist()
            logits = model(torch.tensor([[*text, sure, *proposed]]))[0]
        text.append(sure)
        steps += 1
        for token in proposed:
            if int(logits[len(text) - 1].argmax()) != token or len(text) == len(prompt) + most:
                break
            text.append(token)
    assert text == prompt + own
    total = Acceptance(0, [0, 0])
    count_accepted(model, speculator, prompt, own, total)
    assert total.steps == steps and total.length == pytest.approx(most / steps)
    assert 0 < total.accepted[0] < steps


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        ({"parallel.tp": 2}, "parallel.tp.*data parallelism"),
        ({"lora.rank": 4}, "lora.rank: does not work with speculator.n_predict"),
        ({"prefix.tokens": 4}, "prefix.tokens: does not work with speculator.n_predict"),
        ({"llama_adapter.tokens": 4}, "llama_adapter.tokens: does not work with speculator.n_predict"),
        ({"precision.base_weights": "int8"}, "precision.base_weights: 'int8' is for frozen weights"),
        ({"speculator.n_predict": 1, "speculator.tie_weights": True}, "needs two heads"),
        ({"checkpoint.start_from": None}, "there is none"),
    ],
)
def test_settings_that_a_speculator_excludes_are_refused(sets, problem):
    given = {"speculator.n_predict": 3, "checkpoint.start_from": "base", **MODEL, **sets}
    given = {key: value for key, value in (SMALL | given).items() if value is not None}
    with pytest.raises(UserError, match=problem):
        arriero.load_config(None, given)


def test_an_export_that_cannot_be_written_is_an_error_of_the_user_on_all_ranks(runs):
    blocked, sets = runs.folder / "blocked", runs.spec | {"train.horizon": "1 step"}
    runs("blocked", **sets)
    (blocked / "model").rename(blocked / "moved")
    (blocked / "model").write_text("")
    with pytest.raises(UserError, match="model is in the way"):
        runs("blocked", **sets)
    (blocked / "model").unlink()
    (blocked / "model.tmp").write_text("")
    with pytest.raises(UserError, match="the model cannot be written to"):
        runs("blocked", nproc=2, **sets | {"parallel.dp_shard": 2})


def test_what_is_no_speculator_is_refused(runs, tmp_path):
    result = CliRunner().invoke(app, ["eval", "speculator", str(runs.folder / "base"), "--data", "x"])
    assert isinstance(result.exception, UserError) and "mlp_speculator" in str(result.exception)
    result = CliRunner().invoke(app, ["eval", "speculator", str(tmp_path), "--data", "x"])
    assert isinstance(result.exception, UserError) and "holds no speculator" in str(result.exception)
