"""Every format to every other: the same weights, the same logits, judged by readers that are not ours."""

import itertools
import json

import pytest
import torch
from judges import logits_of
from models import BASE, SPECS, equal, in_memory, model_of, spec_of, tokenizer_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from arriero.checkpoint.convert import convert, open_model
from arriero.checkpoint.formats.model_reader import WriteOptions
from arriero.errors import UserError
from arriero.model.spec import ModelSpec

FORMATS = ("hf", "meta", "dcp", "torch")
TOKENS = torch.randint(0, 96, (1, 32), generator=torch.Generator().manual_seed(3))
POSITIONS = torch.arange(32)[None] * 250


def formats_of(name):
    return [kind for kind in FORMATS if name != "gpt2" or kind != "meta"]


@pytest.fixture(scope="module")
def originals(memory):
    """Each model in each format, and its logits."""
    made = {}
    for number, name in enumerate(SPECS):
        spec, place = spec_of(name), memory / f"model{number}"
        for kind in formats_of(name):
            convert(in_memory(spec), place / kind, kind)
        with torch.no_grad():
            made[name] = place, model_of(spec)(TOKENS, POSITIONS)
    return made


@pytest.mark.parametrize("name", SPECS)
def test_every_direction_keeps_weights_and_logits(name, originals, folder):
    start, logits = originals[name]
    assert logits.std() > 0.5
    for first, end in itertools.product(formats_of(name), repeat=2):
        target = folder / f"{first}-{end}"
        convert(open_model(start / first), target, end)
        back = open_model(target)
        assert (back.format, back.spec) == (end, spec_of(name)), (first, end)
        assert equal(back, in_memory(spec_of(name))), (first, end)
        judged = logits_of(end, target, TOKENS, POSITIONS)
        assert (judged - logits).abs().max() < 2e-4, (first, end)


def test_the_logits_would_show_a_lost_theta_scaling_or_rotary_order(originals):
    """What the test above relies on."""
    _, logits = originals["llama3"]
    spec = spec_of("llama3")
    for change in ({"rope_theta": 1e4}, {"rope_scaling": None}):
        other = model_of(ModelSpec(**{**vars(spec), **change}))
        with torch.no_grad():
            assert (other(TOKENS, POSITIONS) - logits).abs().max() > 0.05
    swapped = model_of(spec)
    with torch.no_grad():
        q = swapped.blocks["0"].attention.q.weight
        q.copy_(q.unflatten(0, (8, 2, 4)).transpose(1, 2).flatten(0, 2).clone())
        assert (swapped(TOKENS, POSITIONS) - logits).abs().max() > 0.05


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_conversion_may_change_the_type(kind, dtype, originals, folder):
    start, _ = originals["llama2"]
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    convert(open_model(start / "dcp"), folder / "out", kind, WriteOptions(dtype=wanted))
    back, source = open_model(folder / "out"), in_memory(spec_of("llama2"))
    assert {t.dtype for t in back.tensors.values()} == {wanted}
    assert all(torch.equal(back.load(n), source.load(n).to(wanted)) for n in source.tensors)


@pytest.mark.parametrize("kind", FORMATS)
def test_numbers_too_large_for_fp16_are_rejected(kind, folder):
    source = in_memory(spec_of("llama2"))
    source.load("norm.weight")[3] = 1e6
    with pytest.raises(UserError, match=r"norm\.weight .*too large for fp16"):
        convert(source, folder / "out", kind, WriteOptions(dtype=torch.float16))
    assert not list(folder.iterdir())


def test_hugging_face_directories_describe_the_model_and_contain_the_tokenizer(folder):
    tokenizer_file(folder / "tokenizer.json")
    extra_files = {"tokenizer.json": folder / "tokenizer.json"}
    spec = spec_of("llama3, tied")
    convert(in_memory(spec, extra_files=extra_files), folder / "dcp", "dcp")
    for start, end in (("dcp", "meta"), ("meta", "torch"), ("torch", "hf"), ("hf", "dcp2"), ("dcp2", "hf2")):
        convert(open_model(folder / start), folder / end, end.rstrip("2"))
    for end in ("hf", "hf2"):
        config = AutoConfig.from_pretrained(folder / end, local_files_only=True)
        assert config.rope_parameters["rope_theta"] == 5e5 and config.rope_parameters["factor"] == 32.0
        assert config.rope_parameters["original_max_position_embeddings"] == 8192
        assert config.tie_word_embeddings and config.rms_norm_eps == 1e-6 and config.eos_token_id == 3
        tokenizer = AutoTokenizer.from_pretrained(folder / end, local_files_only=True)
        assert tokenizer("b a <|end|>")["input_ids"] == [1, 0, 3] and tokenizer.eos_token == "<|end|>"
        model = AutoModelForCausalLM.from_pretrained(folder / end, local_files_only=True)
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        assert model.generation_config.eos_token_id == 3


def test_token_ids_of_a_hugging_face_config_survive_other_formats(originals, folder):
    start, _ = originals["llama2"]
    convert(open_model(start / "hf"), folder / "hf", "hf")
    config = json.loads((folder / "hf" / "config.json").read_text())
    changed = {**config, "eos_token_id": [5, 7], "bos_token_id": 4}
    (folder / "hf" / "config.json").write_text(json.dumps(changed))
    convert(open_model(folder / "hf"), folder / "meta", "meta")
    convert(open_model(folder / "meta"), folder / "again", "hf")
    assert json.loads((folder / "again" / "config.json").read_text()) == changed


def test_large_models_come_in_shards_with_an_index(originals, folder):
    start, logits = originals["llama2"]
    convert(open_model(start / "torch"), folder / "out", "hf", WriteOptions(shard_bytes=100_000))
    files = sorted((folder / "out").glob("*.safetensors"))
    assert len(files) > 2 and all(path.stat().st_size < 110_000 for path in files)
    index = json.loads((folder / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == spec_of("llama2").parameters * 4
    assert (logits_of("hf", folder / "out", TOKENS, POSITIONS) - logits).abs().max() < 2e-4
    assert equal(open_model(folder / "out"), in_memory(spec_of("llama2")))


def test_a_checkpoint_of_training_is_read_without_its_optimizer(folder):
    import torch.distributed.checkpoint as dcp

    from arriero.config.fields import to_toml
    from arriero.config.load import load_run
    from arriero.model.presets import expand

    sets = ["model.rope_theta=20000.0", "model.rope_scaling=false"]
    config = load_run(None, sets, expand).config
    spec = ModelSpec.from_dict(config.model.model_dump(exclude={"preset", "rope_scaling"}))
    model = model_of(spec)
    state = {f"model.{name}": t for name, t in model.state_dict().items()}
    state |= {f"optim.{name}.exp_avg": torch.ones_like(t) for name, t in model.state_dict().items()}
    dcp.save({**state, "step": 7}, checkpoint_id=folder / "step-00000007", no_dist=True)
    (folder / "step-00000007" / "run.toml").write_text(to_toml(config))
    source = open_model(folder / "step-00000007")
    assert source.spec == spec and source.spec.tied and "head.weight" not in source.tensors
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in source.state().items())


def test_gpt2_cannot_be_written_in_metas_layout(folder):
    with pytest.raises(UserError, match="'gpt2' has no name map for Meta's format"):
        convert(in_memory(spec_of("gpt2")), folder / "out", "meta")
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({"factor": 4.0, "original_max_seq_len": 2048}, "llama3 by 4 from 2048"),
        ({"type": "yarn"}, "yarn by 8 "),
    ],
)
def test_rope_scaling_that_meta_cannot_express_is_rejected(folder, different, words):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
    spec = ModelSpec.from_dict({**BASE, "rope_scaling": scaling | different})
    with pytest.raises(UserError, match=f"not as {words}"):
        convert(in_memory(spec), folder / "out", "meta")
