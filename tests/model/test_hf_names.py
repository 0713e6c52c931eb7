import json
from copy import deepcopy

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from arriero.checkpoint.formats.hf_directory import load_hf, open_hf, write_hf
from arriero.checkpoint.formats.model_reader import DEFAULT_OPTIONS, ModelReader
from arriero.errors import UserError
from arriero.model.family import build_model
from arriero.model.name_maps import hf_config, hf_names, own_from_hf, spec_from_hf, to_hf
from arriero.model.presets import load_preset, preset_names
from arriero.model.spec import ModelSpec

SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 32}
YARN = {**SCALING, "type": "yarn", "high_freq_factor": 32.0}
BASE = {"vocab_size": 97, "layers": 2, "ffn": 88, "max_seq_len": 512}
SHAPES = {
    "mha": {"dim": 64, "heads": 4},
    "gqa": {"dim": 64, "heads": 4, "kv_heads": 2},
    "mqa": {"dim": 64, "heads": 4, "kv_heads": 1},
    "three heads": {"dim": 48, "heads": 3},
    "five heads, one kv": {"dim": 80, "heads": 5, "kv_heads": 1},
    "wide heads": {"dim": 64, "heads": 4, "kv_heads": 2, "head_dim": 24},
    "tied": {"dim": 64, "heads": 4, "kv_heads": 2, "tied": True},
    "theta": {"dim": 64, "heads": 4, "rope_theta": 5e5, "norm_eps": 1e-6},
    "scaled rope": {"dim": 64, "heads": 4, "kv_heads": 2, "rope_scaling": SCALING},
    "gpt2": {"family": "gpt2", "dim": 64, "heads": 4},
    "gpt2, three heads": {"family": "gpt2", "dim": 48, "heads": 3, "tied": False},
    "mistral": {"family": "mistral", "dim": 64, "heads": 4, "kv_heads": 2, "sliding_window": 17},
    "mistral, wide heads": {
        "family": "mistral",
        "dim": 40,
        "heads": 5,
        "kv_heads": 1,
        "head_dim": 24,
        "tied": True,
        "sliding_window": 3,
    },
    "mistral, no window": {"family": "mistral", "dim": 64, "heads": 4, "kv_heads": 2},
    "qwen2": {"family": "qwen2", "dim": 48, "heads": 3, "kv_heads": 1, "tied": True},
    "qwen2, late windows": {
        "family": "qwen2",
        "dim": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 24,
        "layers": 3,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "diffllama": {"family": "diffllama", "dim": 64, "heads": 4, "tied": True},
    "diffllama, six heads": {
        "family": "diffllama",
        "dim": 40,
        "heads": 12,
        "kv_heads": 6,
        "head_dim": 18,
        "layers": 3,
    },
    "qwen3": {"family": "qwen3", "dim": 64, "heads": 6, "kv_heads": 3, "head_dim": 18},
    "qwen3, windows": {
        "family": "qwen3",
        "dim": 64,
        "heads": 4,
        "kv_heads": 2,
        "tied": True,
        "sliding_window": 33,
    },
    "qwen3, alternating windows, yarn": {
        "family": "qwen3",
        "dim": 36,
        "heads": 3,
        "kv_heads": 1,
        "layers": 3,
        "sliding_window": 5,
        "extra": {"window_layers": (0, 2)},
        "rope_scaling": YARN,
    },
    "qwen2, yarn": {
        "family": "qwen2",
        "dim": 64,
        "heads": 4,
        "rope_scaling": {**YARN, "attention_factor": 1.3, "truncate": False},
    },
    "mistral, linear": {
        "family": "mistral",
        "dim": 36,
        "heads": 3,
        "rope_scaling": {**SCALING, "type": "linear"},
    },
    "diffllama, dynamic": {
        "family": "diffllama",
        "dim": 36,
        "heads": 2,
        "rope_scaling": {**SCALING, "type": "dynamic"},
    },
    "mamba2": {"family": "mamba2", "ffn": 0, "dim": 48, "heads": 6, "head_dim": 16, "extra": {"state": 10}},
    "mamba2, groups": {
        "family": "mamba2",
        "ffn": 0,
        "dim": 24,
        "heads": 9,
        "head_dim": 8,
        "tied": True,
        "extra": {"groups": 3, "state": 5, "conv": 3, "bias": True, "conv_bias": False, "chunk": 16},
    },
    "mamba2, limited steps": {
        "family": "mamba2",
        "ffn": 0,
        "dim": 28,
        "heads": 7,
        "head_dim": 8,
        "extra": {"state": 7, "conv": 2, "chunk": 40, "dt_limits": (0.0, 0.3)},
    },
    "bamba": {
        "family": "bamba",
        "dim": 48,
        "heads": 6,
        "kv_heads": 2,
        "layers": 3,
        "extra": {"ssm_head_dim": 8, "state": 10, "chunk": 16, "attention_layers": (1,)},
    },
    "bamba, groups": {
        "family": "bamba",
        "dim": 40,
        "heads": 5,
        "kv_heads": 1,
        "head_dim": 12,
        "tied": True,
        "rope_theta": 5e3,
        "extra": {
            "ssm_heads": 15,
            "ssm_head_dim": 8,
            "groups": 5,
            "state": 6,
            "conv": 2,
            "bias": True,
            "conv_bias": False,
            "attention_layers": (0,),
        },
    },
    "bamba, scaled rope": {
        "family": "bamba",
        "dim": 32,
        "heads": 2,
        "rope_scaling": SCALING,
        "extra": {"ssm_head_dim": 8, "state": 10, "attention_layers": (0,)},
    },
}


def spec_of(shape):
    return ModelSpec.from_dict({**BASE, **SHAPES[shape]})


def lively(spec):
    """Weights large enough for attention to matter, norms and biases away from ones and zeros."""
    model = build_model(spec)
    model.init_weights(1)
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    return model.eval()


def from_hf(state, spec):
    """Convert back, as a checkpoint in Hugging Face's format is read."""
    found = hf_names(state, spec)
    own = {name: rule.of(lambda theirs: state[found[theirs]]) for name, rule in own_from_hf(spec).items()}
    return own | ({"head.weight": own["embedding.weight"]} if spec.tied else {})


def save_hf(directory, state, spec, **more):
    state = {name: t for name, t in state.items() if not (spec.tied and name == "head.weight")}
    tensors = {name: t.to("meta") for name, t in state.items()}
    directory.mkdir(exist_ok=True)
    write_hf(
        ModelReader("memory", "a model", spec, tensors, state.__getitem__, **more), directory, DEFAULT_OPTIONS
    )


def theirs(spec, model=None):
    config = AutoConfig.for_model(**hf_config(spec, torch.float32))
    config._attn_implementation = "eager"
    peer = AutoModelForCausalLM.from_config(config).eval()
    if model is not None:
        missing, unexpected = peer.load_state_dict(to_hf(model.state_dict(), spec), strict=False)
        assert not unexpected and set(missing) <= ({"lm_head.weight"} if spec.tied else set())
        peer.tie_weights()
    return peer


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(shape):
    spec = spec_of(shape)
    model = lively(spec)
    tokens = torch.randint(0, spec.vocab_size, (2, 96), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ours, peers = model(tokens), theirs(spec, model)(tokens).logits
    assert peers.std() > 0.5
    assert (ours - peers).abs().max() <= 1e-5


@pytest.mark.parametrize("shape", ["gqa", "scaled rope"])
def test_logits_equal_transformers_at_far_positions(shape):
    spec = spec_of(shape)
    model = lively(spec)
    tokens = torch.randint(0, spec.vocab_size, (1, 32), generator=torch.Generator().manual_seed(3))
    positions = (torch.arange(32) * 15)[None]
    with torch.no_grad():
        ours, peers = model(tokens, positions), theirs(spec, model)(tokens, position_ids=positions).logits
    assert (ours - peers).abs().max() <= 1e-5


def test_rope_scaling_changes_the_tested_logits():
    plain, scaled = lively(spec_of("gqa")), lively(spec_of("scaled rope"))
    tokens = torch.arange(96)[None]
    with torch.no_grad():
        assert (plain(tokens) - scaled(tokens)).abs().max() > 1e-2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_converted_and_back_bit_for_bit(shape, dtype):
    spec = spec_of(shape)
    ours = lively(spec).to(dtype).state_dict()
    back = from_hf(to_hf(ours, spec), spec)
    assert back.keys() == ours.keys() and all(torch.equal(back[k], ours[k]) for k in ours)
    hf = theirs(spec).to(dtype).state_dict()
    again = to_hf(from_hf(hf, spec), spec)
    assert again.keys() == hf.keys() - ({"lm_head.weight"} if spec.tied else set())
    assert all(torch.equal(again[k], hf[k]) for k in again)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_written_to_config_json_and_read_back(name):
    spec = load_preset(name)
    config = json.loads(json.dumps(hf_config(spec)))
    back = spec_from_hf(config)
    assert {**back.to_dict(), "nominal_params": 0} == {**spec.to_dict(), "nominal_params": 0}
    assert spec_from_hf(AutoConfig.for_model(**config).to_dict()) == back


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_written_to_config_json_and_read_back(shape):
    spec = spec_of(shape)
    config = hf_config(spec)
    assert spec_from_hf(config) == spec == spec_from_hf(AutoConfig.for_model(**config).to_dict())


def test_old_and_new_rope_keys_are_read():
    config = hf_config(load_preset("llama3.1-8b"))
    old = {k: v for k, v in config.items() if k != "rope_parameters"}
    new = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
    assert spec_from_hf(old) == spec_from_hf(new)
    assert spec_from_hf(new).rope_theta == 5e5
    with pytest.raises(UserError, match="longrope"):
        spec_from_hf({**old, "rope_scaling": {"type": "longrope", "factor": 2.0}})


@pytest.mark.parametrize(
    "more",
    [
        {"mscale": 1.0, "mscale_all_dim": 0.7},
        {"attention_factor": 1.2, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
        {"original_max_position_embeddings": 64},
    ],
)
def test_every_way_to_write_yarn_gives_the_frequencies_of_transformers(more):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    plain = {k: v for k, v in hf_config(spec_of("qwen2")).items() if not k.startswith("rope_")}
    config = AutoConfig.for_model(**plain, rope_parameters=rope | more)
    peer, spec = AutoModelForCausalLM.from_config(config), spec_from_hf(config.to_dict())
    theirs_cos, theirs_sin = peer.model.rotary_emb(torch.ones(1), torch.arange(512)[None])
    for ours, found in zip(
        build_model(spec).rope(torch.arange(512)[None]), (theirs_cos, theirs_sin), strict=True
    ):
        assert (ours[0, :, 0] - found[0, :, : ours.shape[-1]]).abs().max() <= 1e-5
    assert spec_from_hf(hf_config(spec)) == spec


@pytest.mark.parametrize("shape", ["mamba2", "bamba"])
def test_a_config_that_transformers_saved_is_read(shape, tmp_path):
    """It stores the infinite limit of step sizes as an object."""
    spec = spec_of(shape)
    AutoConfig.for_model(**hf_config(spec)).save_pretrained(tmp_path)
    assert spec_from_hf(json.loads((tmp_path / "config.json").read_text())).extra == spec.extra


@pytest.mark.parametrize(
    ("preset", "changed", "named"),
    [
        ("llama-test", {"model_type": "mamba"}, "model_type is 'mamba'"),
        ("llama-test", {"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe'"),
        ("llama-test", {"attention_bias": True}, "attention_bias"),
        ("mistral-7b", {"vision_config": {"hidden_size": 8}}, "vision_config"),
        ("qwen3-0.6b", {"num_experts": 8}, "num_experts = 8"),
        ("qwen2.5-0.5b", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama-test", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30"),
        *(
            (name, {"attention_dropout": 0.1}, "attention_dropout = 0.1")
            for name in ("llama-test", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b", "diffllama-3b", "bamba-9b")
        ),
    ],
)
def test_other_architectures_are_refused(preset, changed, named):
    with pytest.raises(UserError, match=named):
        spec_from_hf({**hf_config(load_preset(preset)), **changed})


@pytest.mark.parametrize(
    "name", ["llama3.1-8b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b", "bamba-9b", "mamba2-130m"]
)
def test_keys_that_are_missing_have_the_defaults_of_transformers(name):
    config = hf_config(load_preset(name))
    for key in config.keys() - {"model_type"}:
        less = {k: v for k, v in config.items() if k != key}
        try:
            found, theirs = spec_from_hf(less), AutoConfig.for_model(**less).to_dict()
        except (UserError, ValueError):
            continue
        assert found == spec_from_hf(theirs), key


def test_a_stored_head_must_be_the_embedding_that_it_is_tied_to(tmp_path):
    spec = spec_of("tied")
    model = lively(spec)
    save_hf(tmp_path, model.state_dict(), spec)
    state, rows = to_hf(model.state_dict(), spec), (slice(3, 9), slice(0, 64))
    state["lm_head.weight"] = model.embedding.weight.detach().clone()
    save_file(state, tmp_path / "model.safetensors")
    assert torch.equal(load_hf(tmp_path)[0]["embedding.weight"], state["lm_head.weight"])
    state["lm_head.weight"][5, 2] += 1.0
    save_file(state, tmp_path / "model.safetensors")
    source = open_hf(tmp_path)
    for read in (source.load, lambda name: source.read_slice(name, rows)):
        with pytest.raises(UserError, match=r"tie_word_embeddings = true, and lm_head\.weight is not"):
            read("embedding.weight")
    save_file({**state, "lm_head.weight": torch.zeros(96, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight is 96x64, not 97x64"):
        open_hf(tmp_path)


def test_gpt2_files_without_the_transformer_prefix_are_read():
    spec = spec_of("gpt2")
    ours = lively(spec).state_dict()
    bare = {name.removeprefix("transformer."): t for name, t in to_hf(ours, spec).items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)  # the causal mask that early files stored
    back = from_hf(bare, spec)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], ours[name]) for name in ours)


def test_tensors_that_do_not_fit_are_listed(tmp_path):
    spec = spec_of("gqa")
    model = lively(spec)
    save_hf(tmp_path, model.state_dict(), spec)
    state = to_hf(model.state_dict(), spec)
    state["model.extra.weight"] = state.pop("model.norm.weight")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match=r"1 missing \(model.norm.weight\); 1 unexpected \(model.extra.weight\)"
    ):
        load_hf(tmp_path)
    with pytest.raises(UserError, match="missing"):
        to_hf({}, spec)


@pytest.mark.parametrize("shape", ["gqa", "tied", "scaled rope", "gpt2", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_directory_loads_in_transformers(shape, dtype, tmp_path):
    spec = spec_of(shape)
    model = lively(spec).to(dtype)
    save_hf(tmp_path, model.state_dict(), spec)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True, dtype="auto").eval()
    assert peer.dtype == dtype
    state, read = load_hf(tmp_path)
    assert read == spec
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    tokens = torch.arange(90)[None]
    with torch.no_grad():
        difference = (model.float()(tokens) - peer.float()(tokens).logits).abs().max()
    assert difference <= 1e-5


def test_the_tokenizer_is_saved_with_the_model(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "source.json"))
    spec = spec_of("gqa")
    state = lively(spec).state_dict()
    extra_files = {"tokenizer.json": tmp_path / "source.json"}
    save_hf(tmp_path / "out", state, spec, extra_files=extra_files, tokens={"eos_token_id": 3})
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert loaded("a b b")["input_ids"] == [0, 1, 1]
    assert (loaded.eos_token, loaded.eos_token_id) == ("<end>", 3)
    assert AutoConfig.from_pretrained(tmp_path / "out").eos_token_id == 3


def test_a_sharded_model_is_read(tmp_path):
    spec = spec_of("gqa")
    model = lively(spec)
    save_hf(tmp_path / "whole", model.state_dict(), spec)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", local_files_only=True)
    peer.save_pretrained(tmp_path / "pieces", max_shard_size="50KB")
    assert len(list((tmp_path / "pieces").glob("*.safetensors"))) > 1
    state, read = load_hf(tmp_path / "pieces")
    assert read == spec and all(torch.equal(state[k], v) for k, v in model.state_dict().items())


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        load_hf(tmp_path)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("rope", "refused"),
    [
        ({"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_theta": 5e5}, None),
        ({"rope_scaling": {**LLAMA3, "rope_theta": 5e5}}, None),
        (
            {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}},
            None,
        ),
        ({"rope_scaling": None, "rope_parameters": PLAIN}, None),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": PLAIN, "rope_theta": 5e5},
            "rope_scaling = .*rope_param",
        ),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
            "rope_scaling = .*rope_p",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": PLAIN}, "contradicts itself"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, None),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, None),
        ({"rope_parameters": {"rope_type": "yarn", "factor": -4.0}}, "positive"),
        ({"rope_parameters": {"full_attention": PLAIN}}, "per type of layer"),
        ({"rope_parameters": PLAIN, "rope_theta": 1e4}, r"rope_theta = 10000\.0, and 500000\.0"),
        ({"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": "yarn"}, "not a table"),
    ],
)
def test_rope_is_read_as_transformers_reads_it_or_is_an_error(rope, refused):
    config = {k: v for k, v in hf_config(load_preset("llama-test")).items() if not k.startswith("rope_")}
    if refused:
        with pytest.raises(UserError, match=refused):
            spec_from_hf(config | rope)
        return
    spec, applied = (
        spec_from_hf(config | rope),
        AutoConfig.for_model(**config, **deepcopy(rope)).rope_parameters,
    )
    assert spec.rope_theta == applied["rope_theta"]
    assert (spec.rope_scaling is not None) == (applied["rope_type"] != "default")
    if spec.rope_scaling is not None:
        assert (spec.rope_scaling.type, spec.rope_scaling.factor) == (applied["rope_type"], applied["factor"])
    if spec.rope_scaling is not None and spec.rope_scaling.type != "linear":
        original = applied.get("original_max_position_embeddings", spec.max_seq_len)
        assert spec.rope_scaling.original_max_seq_len == original


def test_an_invalid_config_is_reported_with_its_file_and_keys(tmp_path):
    spec = spec_of("gqa")
    save_hf(tmp_path, lively(spec).state_dict(), spec)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config["torch_dtype"] == config["dtype"] == "float32"
    path.write_text(json.dumps({**config, "hidden_size": "wide", "num_key_value_heads": 3}))
    with pytest.raises(
        UserError, match=r"config\.json: .*hidden_size must be .*num_key_value_heads 3"
    ) as found:
        load_hf(tmp_path)
    assert "[model]" not in str(found.value)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", "", 7, None, ["a"], "a\\b"])
def test_an_index_may_only_name_files_in_its_directory(tmp_path, name):
    spec = spec_of("gqa")
    save_hf(tmp_path, lively(spec).state_dict(), spec)
    index = {"weight_map": {"model.norm.weight": name, "lm_head.weight": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        UserError, match=r"index\.json places model\.norm\.weight in .*not the name of a file"
    ):
        load_hf(tmp_path)


@pytest.mark.parametrize("shards", [1, 2])
def test_directories_with_pytorch_model_bin_are_read(tmp_path, shards):
    spec = spec_of("gqa")
    model = lively(spec)
    save_hf(tmp_path, model.state_dict(), spec)
    (tmp_path / "model.safetensors").unlink()
    state = to_hf(model.state_dict(), spec)
    files = [f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin" for i in range(shards)]
    places = {name: files[i % shards] for i, name in enumerate(state)}
    for file in files:
        torch.save({name: t for name, t in state.items() if places[name] == file}, tmp_path / file)
    if shards == 1:
        (tmp_path / files[0]).rename(tmp_path / "pytorch_model.bin")
    else:
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    read, found = load_hf(tmp_path)
    assert found == spec and all(torch.equal(read[name], t) for name, t in model.state_dict().items())
