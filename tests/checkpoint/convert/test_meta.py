"""Meta's layout: published params.json files, shards cut and merged by the rules of Llama 2 and 3."""

import base64
import json
import shutil
from dataclasses import replace

import pytest
import torch
from judges import logits_of
from models import BASE, LLAMA3, SCALED, equal, in_memory, model_of
from safetensors.torch import load_file
from transformers import AutoTokenizer

from arriero.checkpoint.convert import convert, open_model
from arriero.checkpoint.formats.model_reader import WriteOptions
from arriero.errors import UserError
from arriero.model.description import model_at
from arriero.model.llama.meta_names import ffn_width, meta_params, rule_of, spec_from_params
from arriero.model.presets import load_preset, preset_names
from arriero.model.spec import ModelSpec

TOKENS = torch.randint(0, 96, (1, 24), generator=torch.Generator().manual_seed(3))
POSITIONS = torch.arange(24)[None] * 200
SHARDED = {
    "llama2": BASE,
    "llama2, 2 kv heads": {**BASE, "kv_heads": 2},
    "llama3": {**BASE, **LLAMA3, "kv_heads": 8, "rope_scaling": {"factor": 8.0, **SCALED}},
    "llama3, 2 kv heads": {**BASE, **LLAMA3, "kv_heads": 2, "rope_scaling": {"factor": 8.0, **SCALED}},
}
SCALED_L31 = {"rope_theta": 500000.0, "use_scaled_rope": True, "vocab_size": 128256, "norm_eps": 1e-05}
# as they lie beside the published weights
PUBLISHED = {
    "llama2-7b": {
        "dim": 4096,
        "multiple_of": 256,
        "n_heads": 32,
        "n_layers": 32,
        "norm_eps": 1e-05,
        "vocab_size": -1,
    },
    "llama2-13b": {
        "dim": 5120,
        "multiple_of": 256,
        "n_heads": 40,
        "n_layers": 40,
        "norm_eps": 1e-05,
        "vocab_size": -1,
    },
    "llama2-70b": {
        "dim": 8192,
        "multiple_of": 4096,
        "ffn_dim_multiplier": 1.3,
        "n_heads": 64,
        "n_kv_heads": 8,
        "n_layers": 80,
        "norm_eps": 1e-05,
        "vocab_size": -1,
    },
    "llama3-8b": {
        "dim": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 8,
        "vocab_size": 128256,
        "multiple_of": 1024,
        "ffn_dim_multiplier": 1.3,
        "norm_eps": 1e-05,
        "rope_theta": 500000.0,
    },
    "llama3.1-8b": {
        "dim": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 8,
        "multiple_of": 1024,
        "ffn_dim_multiplier": 1.3,
        **SCALED_L31,
    },
    "llama3.1-70b": {
        "dim": 8192,
        "n_layers": 80,
        "n_heads": 64,
        "n_kv_heads": 8,
        "multiple_of": 4096,
        "ffn_dim_multiplier": 1.3,
        **SCALED_L31,
    },
    "llama3.1-405b": {
        "dim": 16384,
        "n_layers": 126,
        "n_heads": 128,
        "n_kv_heads": 8,
        "multiple_of": 4096,
        "ffn_dim_multiplier": 1.2,
        **SCALED_L31,
    },
    "llama3.2-1b": {
        "dim": 2048,
        "n_layers": 16,
        "n_heads": 32,
        "n_kv_heads": 8,
        "multiple_of": 256,
        "ffn_dim_multiplier": 1.5,
        **SCALED_L31,
    },
    "llama3.2-3b": {
        "dim": 3072,
        "n_layers": 28,
        "n_heads": 24,
        "n_kv_heads": 8,
        "multiple_of": 256,
        "ffn_dim_multiplier": 1.0,
        **SCALED_L31,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_params_are_the_presets(name):
    preset = load_preset(name)
    read = spec_from_params(PUBLISHED[name], preset.vocab_size, preset.tied)
    assert {**read.to_dict(), "nominal_params": 0} == {**preset.to_dict(), "nominal_params": 0}
    assert rule_of(preset) == ("llama2" if name.startswith("llama2") else "llama3")
    if preset.vocab_size == PUBLISHED[name]["vocab_size"]:
        assert {"ffn_dim_multiplier": 1.0, **meta_params(preset, "llama3")} == PUBLISHED[name]


@pytest.mark.parametrize("ffn", [1, 7, 97, 1000, 4000, 11008, 12288, 28672, 53248])
@pytest.mark.parametrize("dim", [64, 100, 4096, 5000])
def test_any_width_can_be_written_as_multiple_and_multiplier(dim, ffn):
    spec = ModelSpec.from_dict({**BASE, "dim": dim, "heads": 2, "ffn": ffn})
    params = meta_params(spec, "llama2")
    assert ffn_width(dim, params["multiple_of"], params.get("ffn_dim_multiplier")) == ffn


def test_every_llama_preset_survives_params_json():
    for name in preset_names():
        spec = load_preset(name)
        if spec.family != "llama" or spec.head_dim * spec.heads != spec.dim:
            continue
        back = spec_from_params(
            json.loads(json.dumps(meta_params(spec, rule_of(spec)))), spec.vocab_size, spec.tied
        )
        lost = {"nominal_params": 0, "max_seq_len": 0}
        assert {**back.to_dict(), **lost} == {**spec.to_dict(), **lost}, name


def cut_by_hand(state, name, count, generation):
    """The rule of each tensor, written down once more: all shards of one of Meta's tensors."""
    if name == "tok_embeddings.weight":
        return state.tensor_split(count, 1 if generation == "llama2" else 0)
    if "norm" in name:
        return [state] * count
    return state.tensor_split(count, 1 if name.split(".")[-2] in ("wo", "w2") else 0)


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("name", SHARDED)
def test_shards_have_the_layout_of_metas_code_and_merge_again(name, shards, folder):
    spec = ModelSpec.from_dict(SHARDED[name])
    source = in_memory(spec)
    convert(source, folder / "one", "meta")
    convert(source, folder / "cut", "meta", WriteOptions(model_parallel=shards))
    files = sorted((folder / "cut").glob("consolidated.*.pth"))
    assert [path.name for path in files] == [f"consolidated.{i:02d}.pth" for i in range(shards)]
    whole = torch.load(folder / "one" / "consolidated.00.pth", weights_only=True)
    pieces = [torch.load(path, weights_only=True) for path in files]
    for key, tensor in whole.items():
        if shards > spec.kv_heads and key.endswith(("wk.weight", "wv.weight")):
            heads = tensor.unflatten(0, (spec.kv_heads, -1))
            wanted = [heads[i * spec.kv_heads // shards] for i in range(shards)]
        else:
            wanted = cut_by_hand(tensor, key, shards, name[:6])
        assert all(torch.equal(p[key], w) for p, w in zip(pieces, wanted, strict=True)), key
    with torch.no_grad():
        logits = model_of(spec)(TOKENS, POSITIONS)
    assert (logits_of("meta", folder / "cut", TOKENS, POSITIONS) - logits).abs().max() < 2e-4
    assert open_model(folder / "cut").spec == spec and equal(open_model(folder / "cut"), source)


def test_meta_directories_are_read_without_model_toml(folder):
    """No model.toml, -1 for the vocabulary, the frequencies of Llama 2's files beside the weights."""
    spec = ModelSpec.from_dict(BASE)
    convert(in_memory(spec), folder / "llama2", "meta", WriteOptions(model_parallel=2))
    (folder / "llama2" / "model.toml").unlink()
    params = json.loads((folder / "llama2" / "params.json").read_text())
    del params["n_kv_heads"]
    (folder / "llama2" / "params.json").write_text(json.dumps({**params, "vocab_size": -1}))
    for path in (folder / "llama2").glob("*.pth"):
        torch.save({**torch.load(path), "rope.freqs": torch.ones(4)}, path)
    assert open_model(folder / "llama2").spec == spec and equal(
        open_model(folder / "llama2"), in_memory(spec)
    )
    for tied, factor in ((True, 32.0), (False, 8.0)):
        spec = ModelSpec.from_dict(
            {**BASE, **LLAMA3, "tied": tied, "rope_scaling": {"factor": factor, **SCALED}}
        )
        place = folder / f"llama3-{factor}"
        convert(in_memory(spec), place, "meta", WriteOptions(model_parallel=4))
        (place / "model.toml").unlink()
        assert open_model(place).spec == spec and equal(open_model(place), in_memory(spec))


def test_the_rule_can_be_chosen(folder):
    spec = ModelSpec.from_dict(BASE)
    for rule, shape in (("llama2", (96, 32)), ("llama3", (48, 64))):
        convert(in_memory(spec), folder / rule, "meta", WriteOptions(model_parallel=2, meta_rule=rule))
        shard = torch.load(folder / rule / "consolidated.01.pth", weights_only=True)
        assert shard["tok_embeddings.weight"].shape == shape
        assert equal(open_model(folder / rule), in_memory(spec))


def test_shards_that_do_not_divide_the_model_are_rejected(folder):
    with pytest.raises(
        UserError, match="3 model-parallel shards do not divide heads 8, ffn 176, dim 64, kv_heads 8"
    ):
        convert(in_memory(ModelSpec.from_dict(BASE)), folder / "out", "meta", WriteOptions(model_parallel=3))


def test_a_missing_shard_is_named(folder):
    convert(in_memory(ModelSpec.from_dict(BASE)), folder / "out", "meta", WriteOptions(model_parallel=4))
    (folder / "out" / "consolidated.02.pth").unlink()
    with pytest.raises(UserError, match=r"lacks consolidated\.02\.pth"):
        open_model(folder / "out")


def test_params_that_contradict_the_description_are_rejected(folder):
    convert(in_memory(ModelSpec.from_dict(BASE)), folder / "out", "meta")
    path = folder / "out" / "params.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 5e5}))
    with pytest.raises(UserError, match="different models"):
        open_model(folder / "out")


MISTRAL = {
    "dim": 4096,
    "n_layers": 32,
    "head_dim": 128,
    "hidden_dim": 14336,
    "n_heads": 32,
    "n_kv_heads": 8,
    "norm_eps": 1e-05,
}
# as they lie beside the published weights
MISTRALS = {
    "mistral-7b": {**MISTRAL, "sliding_window": 4096, "vocab_size": 32000},
    "mistral-7b-v0.3": {**MISTRAL, "vocab_size": 32768, "rope_theta": 1000000.0},
}


@pytest.mark.parametrize("name", MISTRALS)
def test_params_of_mistral_are_the_presets(name):
    preset = load_preset(name)
    read = spec_from_params(MISTRALS[name], preset.vocab_size, tied=False)
    assert replace(read, max_seq_len=preset.max_seq_len, nominal_params=preset.nominal_params) == preset
    assert meta_params(preset, rule_of(preset)) == {"rope_theta": 10000.0, **MISTRALS[name]}


@pytest.mark.parametrize("window", [None, 24])
def test_mistral_is_written_as_one_safetensors_file_and_read_again(window, folder):
    shape = {"family": "mistral", "kv_heads": 2, "head_dim": 12, "rope_theta": 1e5, "sliding_window": window}
    spec = ModelSpec.from_dict({**BASE, **shape})
    convert(in_memory(spec), folder / "own", "meta")
    expected = model_of(spec)(TOKENS, POSITIONS).detach()
    assert (logits_of("meta", folder / "own", TOKENS, POSITIONS) - expected).abs().max() < 1e-4
    (folder / "own" / "model.toml").unlink()
    read = open_model(folder / "own")
    assert read.spec == replace(spec, max_seq_len=32768) and equal(read, in_memory(spec))
    # older files are Meta's
    torch.save(load_file(folder / "own" / "consolidated.safetensors"), folder / "own" / "consolidated.00.pth")
    (folder / "own" / "consolidated.safetensors").unlink()
    assert equal(open_model(folder / "own"), in_memory(spec))
    convert(open_model(folder / "own"), folder / "hf", "hf")
    assert (logits_of("hf", folder / "hf", TOKENS, POSITIONS) - expected).abs().max() < 1e-4
    with pytest.raises(UserError, match="one file"):
        convert(in_memory(spec), folder / "two", "meta", WriteOptions(model_parallel=2))


def test_a_directory_of_mistral_with_both_forms_has_the_context_of_config_json(folder):
    spec = ModelSpec.from_dict({**BASE, "family": "mistral", "kv_heads": 2, "max_seq_len": 131072})
    for kind in ("meta", "hf"):
        convert(in_memory(spec), folder / kind, kind)
    for name in ("params.json", "consolidated.safetensors"):
        shutil.copy(folder / "meta" / name, folder / "hf" / name)
    assert model_at(folder / "hf", {}) == open_model(folder / "hf").spec == spec
    (folder / "hf" / "consolidated.safetensors").rename(folder / "weights")
    assert equal(open_model(folder / "hf"), in_memory(spec))
    (folder / "hf" / "model.safetensors").unlink()
    (folder / "weights").rename(folder / "hf" / "consolidated.safetensors")
    read = open_model(folder / "hf")
    assert (read.format, read.spec) == ("meta", spec) and equal(read, in_memory(spec))


def test_vision_models_are_rejected():
    with pytest.raises(UserError, match="vision_chunk_size"):
        spec_from_params({**PUBLISHED["llama3.1-8b"], "vision_chunk_size": 448}, 128256, False)


def test_metas_tokenizer_becomes_one_that_transformers_reads(folder):
    """And puts the beginning before a text, as Meta's code does."""
    spec = ModelSpec.from_dict({**BASE, "vocab_size": 512})
    convert(in_memory(spec), folder / "meta", "meta")
    ranks = b"".join(base64.b64encode(bytes([b])) + b" %d\n" % b for b in range(256))
    (folder / "meta" / "tokenizer.model").write_bytes(ranks)
    convert(open_model(folder / "meta"), folder / "hf", "hf")
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf", local_files_only=True)
    assert tokenizer("hi")["input_ids"] == [256, ord("h"), ord("i")]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin_of_text|>", "<|end_of_text|>")
    config = json.loads((folder / "hf" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (256, 257)
    assert (folder / "hf" / "tokenizer.model").read_bytes() == ranks
