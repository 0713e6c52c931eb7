"""Warm start: a run takes the dimensions of the model it starts from and may not contradict them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from arriero.checkpoint.convert import convert
from arriero.checkpoint.formats.model_reader import ModelReader
from arriero.config.load import load_run
from arriero.data.prepare.planning import PrepareRequest
from arriero.data.prepare.prepare import PrepareWatcher, prepare
from arriero.data.tokens.tokenizer import same_ids, separators_of, train_tokenizer
from arriero.data.workers import no_progress
from arriero.errors import UserError
from arriero.model.description import model_at
from arriero.model.family import build_model
from arriero.model.name_maps import own_tensors
from arriero.model.presets import expand
from arriero.model.spec import ModelSpec
from arriero.parallel.world import world_from
from arriero.train.build import arrange, build
from checkpoint.running import Runs

TEXTS = [f"{i} llamas and {i % 7} alpacas carry salt, wool and potatoes over the pass." for i in range(80)]
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 32}
SPEC = ModelSpec.from_dict(
    {"vocab_size": 400, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 12, "ffn": 48}
    | {"max_seq_len": 96, "rope_theta": 5e5, "norm_eps": 1e-6, "rope_scaling": SCALING, "tied": True}
)
REST = ["data.seq_len=32", "train.batch=128 tok", "train.horizon=1 step", "schedule.warmup=false"]
REST += ["eval.every=false", "eval.heldout=false", "observe.sample=false", "observe.tensorboard=false"]
REST += ["run.device=cpu", "checkpoint.export=false"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Two tokenizers with a dataset each, and a model of the first one."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for name, texts in (("own", TEXTS), ("other", [text[::-1] for text in TEXTS])):
        train_tokenizer(texts, 350, folder / f"{name}.json", end="<|end_of_text|>")
        prepare(
            PrepareRequest((str(folder / "text.jsonl"),), folder / name, folder / f"{name}.json"),
            1,
            PrepareWatcher(),
        )
    model = build_model(SPEC)
    model.init_weights(3)
    state = model.state_dict()
    tokens = separators_of(prepared(folder / "own")).token_ids()
    extra_files = {"tokenizer.json": folder / "own.json"}
    source = ModelReader("memory", "a model", SPEC, own_tensors(SPEC), state.__getitem__, extra_files, tokens)
    for kind in ("hf", "dcp", "torch"):
        convert(source, folder / "models" / kind, kind)
    return folder


def prepared(directory):
    from arriero.data.store.store import TokenStore

    return TokenStore.open(directory)


def run_file(folder, start, *model, data="own", extra=""):
    path = folder / "run.toml"
    lines = [f"[data]\nsources = [{{ path = '{folder_of(start) / data}' }}]", "[model]", *model]
    path.write_text("\n".join([*lines, f"[checkpoint]\nstart_from = '{start}'", extra]))
    return path


def folder_of(start):
    return next(path for path in Path(start).parents if (path / "own").is_dir())


def loaded(path, *sets):
    return load_run(path, [*REST, *sets], expand)


def spec_in(run):
    return ModelSpec.from_dict(run.config.model.model_dump(exclude={"preset"}))


@pytest.mark.parametrize("kind", ["hf", "dcp", "torch"])
def test_start_from_alone_gives_the_model(kept, tmp_path, kind):
    run = loaded(run_file(tmp_path, kept / "models" / kind))
    assert spec_in(run) == SPEC
    assert run.origin("model.rope_theta") == "checkpoint.start_from"


def test_start_from_with_the_embedded_default_gives_the_model(kept):
    run = load_run(None, [f"checkpoint.start_from='{kept / 'models' / 'hf'}'", "data.seq_len=32"], expand)
    assert spec_in(run) == SPEC and run.config.model.preset is None


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("rope_theta = 10000.0", "rope_theta"),
        ("norm_eps = 1e-5", "norm_eps"),
        ("rope_scaling = false", "rope_scaling"),
        ("rope_scaling = { factor = 4.0 }", "rope_scaling"),
        ("layers = 1", "layers"),
        ("tied = false", "tied"),
        ("preset = 'llama-test'", "heads = 4|dim = 32"),
    ],
)
def test_a_key_that_contradicts_the_model_is_rejected_by_name(kept, tmp_path, line, name):
    start = kept / "models" / "hf"
    with pytest.raises(UserError, match=rf"hf is another model: it has .*({name}).*allow_model_changes"):
        loaded(run_file(tmp_path, start, line))


def test_keys_that_agree_or_are_allowed_are_accepted(kept, tmp_path):
    start = kept / "models" / "hf"
    assert spec_in(loaded(run_file(tmp_path, start, "dim = 32", "heads = 4", "rope_theta = 5e5"))) == SPEC
    allowed = "[checkpoint.load]\nallow_model_changes = ['rope_*', 'max_seq_len']"
    changes = ("rope_theta = 1e6", "rope_scaling = false", "max_seq_len = 1024")
    spec = spec_in(loaded(run_file(tmp_path, start, *changes, extra=allowed)))
    assert (spec.rope_theta, spec.rope_scaling, spec.max_seq_len) == (1e6, None, 1024)


def test_a_resumed_run_does_not_need_the_model_it_started_from(kept, tmp_path):
    shutil.copytree(kept / "models" / "hf", tmp_path / "models")
    sets = [f"run.dir='{tmp_path}'", "run.name=run", f"data.sources=[{{path='{kept / 'own'}'}}]"]
    path = tmp_path / "run.toml"
    path.write_text(f"[checkpoint]\nstart_from = '{tmp_path / 'models'}'")
    build(arrange(loaded(path, *sets).config, world_from()), no_progress).data.loader.close()
    shutil.rmtree(tmp_path / "models")
    assert spec_in(loaded(path, *sets)) == SPEC
    with pytest.raises(UserError, match=r"checkpoint\.start_from: .*models does not exist"):
        loaded(path, *sets, "run.name=another")


def test_another_tokenizer_is_rejected_unless_allowed(kept, tmp_path):
    def session(start, data, *sets):
        where = [f"run.dir='{tmp_path}'", f"run.name={data}"]
        config = loaded(run_file(tmp_path, start, data=data), *where, *sets).config
        return build(arrange(config, world_from()), no_progress)

    start = kept / "models" / "hf"
    with pytest.raises(UserError, match=r"trained with another tokenizer .*allow_other_tokenizer = true"):
        session(start, "other")
    session(start, "other", "checkpoint.load.allow_other_tokenizer=true").data.loader.close()
    own = session(start, "own")
    own.data.loader.close()
    assert torch.equal(own.model.tensors()["blocks.0.ffn.up.weight"], build_weights())


def build_weights():
    model = build_model(SPEC)
    model.init_weights(3)
    return model.state_dict()["blocks.0.ffn.up.weight"]


def test_a_run_as_start_is_compared_with_the_model_and_the_data(kept, tmp_path):
    runs = Runs(tmp_path, tmp_path)
    own, other = (f"data.sources=[{{path='{kept / name}'}}]" for name in ("own", "other"))
    runs.train("first", own, "train.horizon=1 step", "checkpoint.export=false")
    start = f"checkpoint.start_from='{tmp_path / 'first'}'"
    with pytest.raises(UserError, match=r"norm_eps = 1e-05 \(the run: 1e-06\)"):
        runs.config("second", own, start, "model.norm_eps=1e-6")
    with pytest.raises(UserError, match="trained with another tokenizer"):
        build(arrange(runs.config("second", other, start), world_from()), no_progress)


def test_tokenizers_are_compared_by_the_ids_they_give(kept):
    own, other = ((kept / f"{name}.json").read_text() for name in ("own", "other"))
    inner = Tokenizer.from_str(own)
    inner.add_special_tokens(["<|another|>"])
    assert same_ids(own, inner.to_str()) and not same_ids(own, other)
    changed = json.loads(own)
    changed["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    }
    assert not same_ids(own, json.dumps(changed))


def test_the_longest_sequence_follows_the_data_unless_given(tmp_path):
    path = tmp_path / "run.toml"
    shape = "vocab_size = 64\ndim = 32\nlayers = 1\nheads = 2\nffn = 48\n"
    path.write_text(f"[model]\n{shape}[data]\nsources = [{{ path = 'x' }}]")
    run = loaded(path)
    assert run.config.model.max_seq_len == 32 and run.origin("model.max_seq_len") == "data.seq_len"
    assert loaded(path, "model.max_seq_len=64").config.model.max_seq_len == 64


def test_the_model_of_a_run_is_that_of_its_newest_published_checkpoint(kept, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    for name, content in (
        ("step-00000002", None),
        ("step-00000002.damaged", "[mod"),
        ("step-00000004.tmp", ""),
    ):
        (folder / name).mkdir(parents=True)
        text = (kept / "models" / "dcp" / "model.toml").read_text() if content is None else content
        (folder / name / "run.toml").write_text(text)
    assert model_at(tmp_path / "run", {}) == SPEC
