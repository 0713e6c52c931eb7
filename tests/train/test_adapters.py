"""Prefix tuning, LLaMA-Adapter and quantised base weights: what PEFT computes, on every layout."""

import json

import pytest
import torch
from peft import AdaptionPromptConfig, PeftModel, PrefixTuningConfig, get_peft_model
from torch._subclasses import FakeTensor, FakeTensorMode
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import arriero
from arriero.checkpoint.convert import open_model
from arriero.checkpoint.directory import read_manifest
from arriero.errors import UserError
from arriero.federate.aggregation import aggregate_models
from arriero.model.generation import Sampling, generate
from arriero.model.quantized import pack, unpack
from train.test_lora import LORA, SMALL, base, checkpoint, logits, run  # noqa: F401


@pytest.fixture(scope="module")
def wide(corpus_cache, tmp_path_factory):
    """Train a model for a step whose rows have several blocks on each of two ranks."""
    own = {"run.dir": str(tmp_path_factory.mktemp("wide")), "run.name": "wide", "train.horizon": "1 step"}
    sizes = {"model.dim": 128, "model.head_dim": 64, "model.heads": 2, "model.kv_heads": 2, "model.ffn": 256}
    own |= {"data.cache": str(corpus_cache)} | sizes
    return arriero.run(arriero.load_config(None, SMALL | own), nproc=1).model


NO_LORA = {"lora__rank": False}
KINDS = {
    "prefix": {"prefix__tokens": 5},
    "llama_adapter": {"llama_adapter__tokens": 3, "llama_adapter__layers": 3},
}
GROUPED = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96, "intermediate_size": 100}
SIZES = {"vocab_size": 97, "num_hidden_layers": 3, "max_position_embeddings": 64}
PEFT = {
    # functions, because PEFT completes a config in place
    "prefix": lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "llama_adapter": lambda: AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=2),
}


def randomised(model):
    """Give the trained parameters random values; a gate of zero would hide the prompts."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    return model.eval()


def peft_model(folder, kind, family="llama"):
    torch.manual_seed(0)
    if family == "llama":
        made = LlamaForCausalLM(LlamaConfig(**SIZES, **GROUPED))
    else:
        made = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_head=4, n_layer=2, n_positions=64))
    made.save_pretrained(folder / "base")
    loaded = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    model = randomised(get_peft_model(loaded, PEFT[kind]()))
    model.save_pretrained(folder / "adapter")
    return model


@pytest.mark.parametrize(
    ("kind", "family"), [("prefix", "llama"), ("prefix", "gpt2"), ("llama_adapter", "llama")]
)
def test_an_adapter_of_peft_has_its_logits_and_tokens(kind, family, tmp_path, command):
    peer = peft_model(tmp_path, kind, family)
    ours = arriero.load_model(tmp_path / "adapter")
    numbers = torch.Generator().manual_seed(3)
    tokens = torch.randint(97, (3, 30), generator=numbers)
    with torch.no_grad():
        expected, without = peer(input_ids=tokens).logits, peer.get_base_model()(tokens).logits
        assert torch.allclose(ours(tokens), expected, rtol=1e-4, atol=1e-5)
    if kind == "prefix":
        assert (expected - without).abs().max() > 0.01
    prompts = [tokens[0, :9].tolist(), tokens[1, :2].tolist()]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    theirs = [peer.generate(input_ids=torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    steps = list(generate(ours, prompts, 12, Sampling()))
    assert [list(row) for row in zip(*steps, strict=True)] == theirs

    assert command("ckpt", "convert", "adapter", "again", "--to", "peft").returncode == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    again = PeftModel.from_pretrained(loaded, tmp_path / "again").eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=tokens).logits, expected)
    refused = command("ckpt", "convert", "adapter", "merged", "--to", "hf")
    assert refused.returncode == 2 and "cannot be merged into weights" in refused.stderr


LAYOUTS = {
    "prefix": [(2, {"parallel__tp": 2}), (2, {"parallel__pp": 2, "parallel__dp_shard": 1})],
    "llama_adapter": [(2, {"parallel__cp": 2}), (4, {"parallel__dp_shard": 2, "parallel__tp": 2})],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_has_the_losses_of_one_process_and_peft_its_logits(kind, run, base, tmp_path):  # noqa: F811
    options = NO_LORA | KINDS[kind]
    expected = run("one", **options)
    for i, (ranks, layout) in enumerate(LAYOUTS[kind]):
        found = run(f"layout-{i}", ranks, **options, **layout)
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-5), layout
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-4), layout
    adapter = tmp_path / "layout-1" / "adapter"
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peer = PeftModel.from_pretrained(loaded, adapter).eval()
    ours, tokens = logits(tmp_path / "layout-1")
    with torch.no_grad():
        assert torch.allclose(ours, peer(input_ids=tokens).logits, rtol=1e-4, atol=1e-4)
        assert (ours - logits(base)[0]).abs().max() > 0.01
    run("moved", train__horizon="2 steps", **options)
    moved = run("moved", 2, parallel__dp_shard=2, **options)
    assert [loss for loss, _ in moved] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert not (tmp_path / "moved" / "model").exists()


def test_documents_of_a_row_all_see_the_prefix(tmp_path):
    peft_model(tmp_path, "prefix")
    model, numbers = arriero.load_model(tmp_path / "adapter"), torch.Generator().manual_seed(3)
    one, two = (torch.randint(97, (1, n), generator=numbers) for n in (11, 20))
    positions = torch.cat((torch.arange(11), torch.arange(20)))[None]
    documents = torch.tensor([[0] * 11 + [1] * 20])
    with torch.no_grad():
        together = model(torch.cat((one, two), dim=1), positions, documents)
        alone = torch.cat((model(one), model(two)), dim=1)
    assert torch.allclose(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("shape", [(7, 100), (64, 64), (130, 257), (3, 1)])
def test_quantised_weights_are_near_the_weights_and_quantise_to_themselves(kind, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    packed = pack(weight, kind)
    found = unpack(packed, shape[1])
    assert torch.equal(pack(found, kind), packed)
    assert (found - weight).norm() <= {"int8": 0.01, "nf4": 0.12}[kind] * weight.norm()
    assert torch.equal(unpack(pack(torch.zeros(shape), kind), shape[1]), torch.zeros(shape))
    # any rows are quantised alike, so that shards of a weight are shards of its stored form
    assert torch.equal(pack(weight[1:], kind), packed[1:])


def test_a_traced_quantisation_leaves_nothing_for_real_ones():
    weight = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    with FakeTensorMode() as fake:
        assert isinstance(unpack(pack(fake.from_tensor(weight), "nf4"), 64), FakeTensor)
    assert not isinstance(unpack(pack(weight, "nf4"), 64), FakeTensor)


QUANTISED = {
    "int8": [(2, {"parallel__tp": 2}), (2, {"parallel__cp": 2})],
    "nf4": [(4, {"parallel__dp_shard": 2, "parallel__tp": 2}), (2, {"parallel__pp": 2})],
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_have_the_losses_of_one_process_on_every_layout(kind, run, wide, tmp_path):  # noqa: F811
    options = {"precision__base_weights": kind, "checkpoint__start_from": str(wide)}
    options |= {"memory__activation_checkpointing": "full" if kind == "nf4" else "none"}
    expected = run("one", **options)
    for i, (ranks, layout) in enumerate(QUANTISED[kind]):
        found = run(f"layout-{i}", ranks, **options, **layout)
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-5), layout
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-4), layout
    one, split = (open_model(checkpoint(tmp_path, name, 4)) for name in ("one", "layout-0"))
    # layers without an adapter
    for name in ("blocks.0.ffn.up.weight", "blocks.3.ffn.down.weight"):
        frozen = open_model(wide).load(name)
        assert torch.equal(one.load(name), unpack(pack(frozen, kind), frozen.shape[1]))
        assert torch.equal(split.load(name), one.load(name))
    # the other half of the steps in one process
    run("moved", *QUANTISED[kind][0][:1], train__horizon="2 steps", **options, **QUANTISED[kind][0][1])
    moved = run("moved", **options)
    assert [loss for loss, _ in moved] == pytest.approx([loss for loss, _ in expected], rel=1e-5)


def test_an_adapter_beside_quantised_weights_is_merged_into_the_dequantised_ones(run, base, tmp_path):  # noqa: F811
    plain = run("plain")
    options = {"precision__base_weights": "nf4", "memory__activation_checkpointing": "full"}
    expected = run("one", **options)
    assert [loss for loss, _ in expected] != [loss for loss, _ in plain]
    assert [loss for loss, _ in expected] == pytest.approx([loss for loss, _ in plain], rel=0.03)
    stored = read_manifest(checkpoint(tmp_path, "one", 4)).tensors
    assert "model.blocks.0.ffn.up.packed" in stored and "model.blocks.0.ffn.up.weight" not in stored
    saved, before = open_model(checkpoint(tmp_path, "one", 4)), open_model(base)
    frozen = "blocks.0.ffn.up.weight"
    assert torch.equal(
        saved.load(frozen), unpack(pack(before.load(frozen), "nf4"), before.load(frozen).shape[1])
    )
    ours = logits(tmp_path / "one")[0]
    assert torch.allclose(logits(tmp_path / "one" / "model")[0], ours, atol=1e-5)
    peer = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "one" / "adapter")
    assert peer.peft_config["default"].r == LORA["lora.rank"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefix__tokens": 5}, "cannot be combined with lora.rank"),
        (NO_LORA | {"prefix__tokens": 5, "parallel__cp": 2}, "does not work with context parallelism"),
        (NO_LORA | {"prefix__tokens": 10**6}, "exceed the model's context"),
        (NO_LORA | {"llama_adapter__tokens": 5, "llama_adapter__layers": 5}, "the model has 4 blocks"),
        (NO_LORA | {"precision__base_weights": "nf4"}, "the run has no adapter"),
        (
            {"precision__base_weights": "int8", "parallel__tp": 2},
            "tp 2 divides the 64 columns of attention.o into parts of 32",
        ),
    ],
)
def test_adapters_that_cannot_be_are_refused(run, changes, words):  # noqa: F811
    with pytest.raises(UserError, match=words):
        run("refused", 2 if any("parallel" in key for key in changes) else 1, **changes)


def test_a_run_without_the_adapter_cannot_start_from_one_that_is_not_merged(run, tmp_path):  # noqa: F811
    run("first", **NO_LORA, **KINDS["prefix"])
    with pytest.raises(UserError, match=r"prefix tuning .* cannot be merged into weights"):
        run("second", checkpoint__start_from=str(tmp_path / "first"))
    lines = run("third", checkpoint__start_from=str(tmp_path / "first"), **NO_LORA, **KINDS["prefix"])
    first = json.loads((tmp_path / "first" / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert lines[0][0] < first


def test_the_planner_fits_an_8b_model_with_an_adapter_into_24_gib(command):
    changes = ["model.preset=llama3.1-8b", "data.sources=builtin:stdlib", "data.seq_len=2048", "lora.rank=16"]
    sets = [part for change in [*changes, "train.batch='16384 tok'"] for part in ("--set", change)]
    card = ["--cluster", "8xh200", "--gpus", "1", "--memory-limit", "24GiB"]
    planned = command("plan", *sets, "--set", "precision.base_weights=nf4", *card)
    assert planned.returncode == 0, planned.stderr
    assert command("plan", *sets, *card).returncode == 1


@pytest.mark.parametrize("kind", PEFT)
def test_adapters_of_sites_are_aggregated(kind, tmp_path):
    sites = []
    for site in ("one", "two"):
        (tmp_path / site).mkdir()
        model = peft_model(tmp_path / site, kind)
        if site == "two":
            for parameter in model.parameters():
                parameter.data.mul_(3.0 if parameter.requires_grad else 1.0)
            model.save_pretrained(tmp_path / site / "adapter")
        sites.append(open_model(tmp_path / site / "adapter"))
    folders = [tmp_path / site / "adapter" for site in ("one", "two")]
    aggregate_models(folders, tmp_path / "mean", None, None, {"name": "fedavg", "lr": 1.0, "momentum": 0.0})
    found = open_model(tmp_path / "mean").adapter
    assert found is not None and sites[0].adapter is not None
    for name in found.tensors:
        assert torch.allclose(found.load(name), 2 * sites[0].adapter.load(name)), name
