"""LoRA: the losses of one process on every layout, adapters that PEFT loads, merging and resuming."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import arriero
from arriero.checkpoint.convert import open_model
from arriero.checkpoint.directory import read_manifest
from arriero.errors import UserError

SMALL = {
    "model.preset": "llama-test",
    "model.vocab_size": 4096,
    "model.layers": 4,
    "data.seq_len": 64,
    "train.batch": "512 tok",
    "train.horizon": "4 steps",
    "optim.lr": 1e-2,
    "schedule.warmup": "1 step",
    "schedule.horizon": "8 steps",
    "checkpoint.every": "2 steps",
    "eval.heldout": False,
    "eval.every": False,
    "observe.log_every": 1,
    "observe.tensorboard": False,
    "observe.sample": False,
    "run.device": "cpu",
}
LORA = {
    "lora.rank": 3,
    "lora.alpha": 5.0,
    "lora.targets": ["blocks.*.attention.q", "blocks.*.attention.o", "blocks.1.ffn.*"],
}


@pytest.fixture(scope="module")
def base(corpus_cache, tmp_path_factory):
    """Train a base model for a few steps."""
    folder = tmp_path_factory.mktemp("base")
    own = {"run.dir": str(folder), "run.name": "base", "data.cache": str(corpus_cache)}
    return arriero.run(arriero.load_config(None, SMALL | own), nproc=1).model


@pytest.fixture
def run(base, corpus_cache, tmp_path):
    def train(name, nproc=1, **more):
        changes = {key.replace("__", "."): value for key, value in more.items()}
        own = {"run.dir": str(tmp_path), "run.name": name, "data.cache": str(corpus_cache)}
        model = {key: value for key, value in SMALL.items() if not key.startswith("model.")}
        start = {"checkpoint.start_from": str(base)}
        arriero.run(arriero.load_config(None, model | start | LORA | own | changes), nproc=nproc)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [(line["loss"], line["grad_norm"]) for line in map(json.loads, lines)]

    return train


def checkpoint(tmp_path, name, step):
    return tmp_path / name / "checkpoints" / f"step-{step:08}"


def logits(path):
    tokens = torch.randint(4096, (2, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return arriero.load_model(path)(tokens), tokens


LAYOUTS = {
    "dp_shard 2": (2, {"parallel__dp_shard": 2}),
    "tp 2": (2, {"parallel__tp": 2}),
    "pp 2": (2, {"parallel__pp": 2}),
    "cp 2": (2, {"parallel__cp": 2}),
    "dp_shard 2 x tp 2": (4, {"parallel__dp_shard": 2, "parallel__tp": 2}),
}


def test_every_layout_has_the_losses_of_one_process_and_a_peft_adapter(run, base, tmp_path):
    expected = run("one")
    assert len(expected) == 4
    for name, (ranks, layout) in LAYOUTS.items():
        found = run(name.replace(" ", "-"), ranks, **layout)
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-5), name
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-4), name
    for name in ("one", "dp_shard-2-x-tp-2"):
        adapter = tmp_path / name / "adapter"
        peer = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter
        )
        merged, tokens = logits(tmp_path / name)
        with torch.no_grad():
            theirs, without = (
                peer.eval()(tokens).logits,
                AutoModelForCausalLM.from_pretrained(base)(tokens).logits,
            )
        assert (theirs - without).abs().max() > 0.01
        for ours in (merged, logits(adapter)[0], logits(tmp_path / name / "model")[0]):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_only_the_adapter_is_trained_and_has_optimizer_state(run, base, tmp_path):
    run("one")
    directory = checkpoint(tmp_path, "one", 4)
    names = read_manifest(directory).tensors
    adapters = [name for name in names if name.startswith("model.") and ".lora_" in name]
    assert len(adapters) == 2 * (4 + 4 + 3)
    moments = {
        name.removeprefix("optim.").rsplit(".", 1)[0] for name in names if name.startswith("optim.blocks")
    }
    assert moments == {name.removeprefix("model.") for name in adapters}
    source, before = open_model(directory), open_model(base)
    assert source.adapter is not None
    for name in before.tensors:
        is_target = name.removesuffix("weight") + "lora_a" in source.adapter.tensors
        assert torch.equal(source.load(name), before.load(name)) != is_target, name


def test_it_resumes_bit_for_bit_with_dropout_and_on_another_layout(run):
    options = {"lora__dropout": 0.2, "memory__activation_checkpointing": "full"}
    straight = run("straight", **options)
    assert straight != run("without", memory__activation_checkpointing="full")
    run("resumed", train__horizon="2 steps", **options)
    assert run("resumed", **options) == straight
    run("moved", train__horizon="2 steps")
    moved = run("moved", 2, parallel__tp=2)
    assert [loss for loss, _ in moved] == pytest.approx([loss for loss, _ in run("plain")], rel=1e-5)


def test_an_adapter_is_converted_and_merged_by_the_command(run, command, tmp_path):
    run("one")
    for arguments in (
        [checkpoint(tmp_path, "one", 4), "adapter", "--to", "peft", "--dtype", "fp32"],
        ["adapter", "meta", "--to", "meta"],
        [checkpoint(tmp_path, "one", 4), "hf", "--to", "hf"],
    ):
        result = command("ckpt", "convert", *arguments)
        assert result.returncode == 0, result.stderr
    expected = logits(tmp_path / "one")[0]
    for name in ("meta", "hf", "adapter"):
        assert torch.allclose(logits(tmp_path / name)[0], expected, rtol=1e-5, atol=1e-6)
    refused = command("ckpt", "convert", "hf", "none", "--to", "peft")
    assert refused.returncode == 2 and "has no adapter" in refused.stderr


def test_a_new_run_starts_from_the_merged_weights(run, tmp_path):
    run("first")
    run("second", checkpoint__start_from=str(tmp_path / "first"), train__horizon="1 step", optim__lr=1e-12)
    merged, again = (
        open_model(checkpoint(tmp_path, "first", 4)),
        open_model(checkpoint(tmp_path, "second", 1)),
    )
    for name in merged.tensors:
        assert torch.allclose(again.load(name), merged.load(name), atol=1e-6), name


def test_an_adapter_of_peft_is_read(base, tmp_path):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    settings = LoraConfig(r=4, lora_alpha=3, target_modules=["k_proj", "gate_proj"], init_lora_weights=False)
    peer = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), settings).eval()
    peer.save_pretrained(tmp_path / "theirs")
    ours, tokens = logits(tmp_path / "theirs")
    with torch.no_grad():
        assert torch.allclose(ours, peer(tokens).logits, rtol=1e-5, atol=1e-5)
    changed = json.loads((tmp_path / "theirs" / "adapter_config.json").read_text()) | {"use_dora": True}
    (tmp_path / "theirs" / "adapter_config.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match="use_dora = True"):
        arriero.load_model(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora__targets": ["blocks.*.attention.x"]}, "matches no linear layer"),
        ({"optim__freeze": ["embedding.*"]}, "only the adapters are trained"),
        ({"precision__float8": "tensorwise"}, "does not work with lora.rank"),
    ],
)
def test_settings_that_cannot_be_are_refused(run, changes, words):
    with pytest.raises(UserError, match=words):
        run("refused", **changes)
