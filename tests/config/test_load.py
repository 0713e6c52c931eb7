import dataclasses
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

import arriero
from arriero.config.fields import to_toml
from arriero.config.keys import ConfigError, all_keys, facts_of, field_at, nearest_key
from arriero.config.load import config_from_toml, load_run
from arriero.config.schema import ModelSection, RunConfig
from arriero.errors import UserError
from arriero.model.presets import expand
from arriero.model.spec import ModelSpec
from arriero.units import Span

RENAMED = {"memory.remat": "memory.activation_checkpointing"}
MINIMAL = """
[model]
preset = "llama-test"
[data]
seq_len = 64
sources = [{ path = "builtin:stdlib" }]
[train]
batch = "1024 tok"
"""


def write(path, text):
    path.write_text(text)
    return path


def rejection(path, sets=()):
    with pytest.raises(UserError) as caught:
        load_run(path, sets, expand)
    return str(caught.value)


def test_embedded_default_needs_no_file():
    loaded = load_run(None, [], expand)
    assert loaded.config.run.name == "demo"
    assert loaded.origin("run.name") == "embedded default"


def test_each_value_has_its_origin(tmp_path):
    write(tmp_path / "base.toml", MINIMAL + "[optim]\nlr = 1e-3\nclip = 2.0\n")
    top = write(tmp_path / "run.toml", 'extends = "base.toml"\n[optim]\nlr = 2e-3\n')
    loaded = load_run(top, ["optim.eps=1e-9"], expand)
    assert (loaded.config.optim.lr, loaded.config.optim.clip, loaded.config.optim.eps) == (2e-3, 2.0, 1e-9)
    assert loaded.origin("optim.lr") == str(top)
    assert loaded.origin("optim.clip") == str(tmp_path / "base.toml")
    assert loaded.origin("optim.eps") == "--set"
    assert loaded.origin("optim.betas") == "default"
    assert loaded.origin("model.dim") == "preset llama-test"


def test_dimension_of_a_preset_can_be_overridden(tmp_path):
    run = write(tmp_path / "run.toml", MINIMAL)
    loaded = load_run(run, ["model.layers=3"], expand)
    assert loaded.config.model.layers == 3
    assert loaded.config.model.dim == load_run(run, [], expand).config.model.dim


def test_set_accepts_toml_values_and_plain_text(tmp_path):
    run = write(tmp_path / "run.toml", MINIMAL)
    sets = ["train.horizon=2h", "run.deterministic=true", "optim.betas=[0.8, 0.9]", "schedule.kind=constant"]
    config = load_run(run, sets, expand).config
    assert config.train.horizon == Span(7200, "s")
    assert config.run.deterministic is True
    assert config.optim.betas == (0.8, 0.9)


def test_all_problems_of_a_file_are_reported_at_once(tmp_path):
    run = write(
        tmp_path / "run.toml",
        """
[model]
preset = "llama3-9b"
[data]
seq_len = "long"
sources = [{ path = "x", wieght = 2 }]
[train]
horzon = "2h"
batch = 4096
[schedule]
kind = "cos"
decay = "5 steps"
[optim]
lr = -1
[obseve]
log_every = 3
""",
    )
    with pytest.raises(ConfigError) as caught:
        load_run(run, ["run.seed=one"], expand)
    text = str(caught.value)
    keys = {problem.key for problem in caught.value.problems}
    assert keys == {
        "model.preset", "data.seq_len",
        "data.sources[0].wieght", "train.horzon", "train.batch", "schedule.kind",
        "optim.lr", "obseve", "run.seed",
    }  # fmt: skip
    assert "did you mean 'llama3-8b'" in text
    assert "did you mean 'train.horizon'" in text
    assert "did you mean 'data.sources.weight'" in text
    assert "did you mean 'observe'" in text
    assert "has no unit" in text
    assert f"{run}: train.horzon" in text
    assert "--set: run.seed" in text
    assert "9 problems" in text


@pytest.mark.parametrize(
    ("setting", "place"),
    [
        ("data.sources=[{path=3}]", "--set: data.sources[0].path"),
        ("optim.betas=[0.9, 1.5]", "--set: optim.betas[1]"),
        ("model.preset=llama9", "--set: model.preset"),
        ("model.head_dim=3", "--set: model"),
        ("nonsense.key=1", "--set: nonsense"),
        ("model.rope_scaling.factor=0.5", "--set: model.rope_scaling.factor"),
        ("optim.lr=inf", "--set: optim.lr"),
        (
            f"model.rope_scaling.original_max_seq_len={10**30}",
            "--set: model.rope_scaling.original_max_seq_len",
        ),
        ("train.horizon=1e400 tok", "--set: train.horizon"),
        ("run.seed=99999999999999999999999", "--set: run.seed"),
    ],
)
def test_problem_names_its_key_and_origin(tmp_path, setting, place):
    assert rejection(write(tmp_path / "run.toml", MINIMAL), [setting]).startswith(place)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optim.learning_rate", "optim.lr"),
        ("train.steps", "train.horizon"),
        ("model.hidden_size", "model.dim"),
        ("model.kv_head", "model.kv_heads"),
        ("schedul.kind", "schedule.kind"),
        ("train.bacth", "train.batch"),
        ("learning_rte", "optim.lr"),
        ("data.column", "data.sources.column"),
        ("foo", None),
    ],
)
def test_nearest_key_is_suggested_or_none(key, meant):
    assert nearest_key(key) == meant


def test_typo_in_a_section_does_not_hide_other_problems(tmp_path):
    run = write(tmp_path / "run.toml", MINIMAL + '[run]\nnmae = "x"\n')
    text = rejection(run, ["model.preset=lama3", "model.headz=3", "data.seq_len=100"])
    for words in ("run.nmae", "model.preset", "model.headz", "train.batch"):
        assert words in text


def test_part_of_a_presets_rope_scaling_can_be_changed(tmp_path):
    sets = ["model.preset=llama3.2-1b", "model.rope_scaling.original_max_seq_len=4096"]
    loaded = load_run(write(tmp_path / "run.toml", MINIMAL), sets, expand)
    scaling = loaded.config.model.rope_scaling
    assert (scaling.factor, scaling.original_max_seq_len) == (32.0, 4096)
    assert loaded.origin("model.rope_scaling") == "--set"
    off = load_run(tmp_path / "run.toml", ["model.preset=llama3.2-1b", "model.rope_scaling=false"], expand)
    assert off.config.model.rope_scaling is False


def test_origin_of_a_derived_dimension_is_not_the_preset(tmp_path):
    loaded = load_run(write(tmp_path / "run.toml", MINIMAL), ["model.heads=8"], expand)
    assert loaded.origin("model.head_dim") == "derived"
    assert loaded.origin("model.ffn") == "preset llama-test"


def test_optional_features_can_be_switched_off():
    sets = ["optim.clip=false", "eval.every=false", "eval.heldout=false", "observe.sample=false"]
    config = load_run(None, sets, expand).config
    assert (config.optim.clip, config.eval.heldout, config.observe.sample) == (False, False, False)


OPTIONAL = {
    "train.micro_batch": ("2", "auto"),
    "schedule.warmup": ("3 steps", "auto"),
    "schedule.floor": ("0.5", "auto"),
    "schedule.horizon": ("10 steps", "auto"),
    "parallel.stages_per_rank": ("2", "auto"),
    "model.layers": ("3", "auto"),
    "model.tied": ("true", "auto"),
    "model.rope_scaling": ("{factor=2.0}", "auto"),
    "checkpoint.start_from": ("elsewhere", "false"),
    "checkpoint.resume_from": ("elsewhere", "false"),
}


@pytest.mark.parametrize("key", OPTIONAL)
def test_optional_key_can_be_unset_in_a_file_and_by_set(tmp_path, key):
    value, unset = OPTIONAL[key]
    base = write(tmp_path / "base.toml", MINIMAL)
    untouched = load_run(base, [], expand).config
    changed = load_run(base, [f"{key}={value}"], expand).config
    assert changed != untouched
    written = write(tmp_path / "set.toml", to_toml(changed))
    for word in (unset, "default"):
        assert load_run(base, [f"{key}={value}", f"{key}={word}"], expand).config == untouched
    section, name = key.split(".")
    word = unset if unset == "false" else f'"{unset}"'
    top = write(tmp_path / "top.toml", f'extends = "{written.name}"\n[{section}]\n{name} = {word}\n')
    if section != "model":  # a resolved file holds every dimension itself
        assert load_run(top, [], expand).config == untouched


def test_keys_have_facts_where_the_source_is_not_installed(tmp_path):
    """As in an installation by `compileall -b`, which has no .py files."""
    package = tmp_path / "arriero"
    shutil.copytree(Path(arriero.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("schema", "keys"):
        source = package / "config" / f"{name}.py"
        py_compile.compile(str(source), str(source.with_suffix(".pyc")), f"absent/{name}.py")
        source.unlink()
    code = "from arriero.config.keys import facts_of; print(facts_of('optim.lr'))"
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "default='0.0003', meaning=''" in result.stdout, result.stderr


@pytest.mark.parametrize("key", [key for key in all_keys(RunConfig) if "." in key and "sources" not in key])
def test_documented_default_of_every_key_is_accepted(tmp_path, key):
    """What docs/config.md shows as the default is accepted and changes nothing."""
    default = facts_of(key).default
    if default in ("", "required") or key.startswith(
        ("data.phases.", "optim.groups.", "model.rope_scaling.")
    ):
        return
    base = write(tmp_path / "base.toml", MINIMAL)
    outcomes = []
    for word in ("default", default):
        try:
            outcomes.append(load_run(base, [f"{key}={word}"], expand).config)
        except UserError as error:  # the defaults of some keys do not go with the tiny model of MINIMAL
            outcomes.append(str(error).partition(": ")[2])
    assert outcomes[0] == outcomes[1]


def test_section_can_be_restored_to_its_defaults(tmp_path):
    base = write(tmp_path / "base.toml", MINIMAL + "[optim]\nlr = 1.0\nclip = 2.0\n")
    loaded = load_run(base, ["optim=default", "optim.eps=1e-9"], expand)
    assert (loaded.config.optim.lr, loaded.config.optim.clip, loaded.config.optim.eps) == (3e-4, 1.0, 1e-9)
    assert loaded.origin("optim.lr") == "default"
    assert load_run(base, ["run.name='default'"], expand).config.run.name == "default"
    assert "did you mean 'optim.lr'" in rejection(base, ["optim.lrr=default"])
    assert "data.sources: is missing" in rejection(base, ["data.sources=default"])


def test_zero_is_no_warm_up_and_no_interval():
    for word in ("false", "0 steps", "0 tok"):
        warmup = load_run(None, [f"schedule.warmup={word}"], expand).config.schedule.warmup
        assert warmup.in_tokens(1000) == 0
    off = load_run(None, ["eval.every=0 steps", "checkpoint.every=0 steps", "eval.heldout=0 tok"], expand)
    assert (off.config.eval.every, off.config.checkpoint.every, off.config.eval.heldout) == (False,) * 3
    assert "must be more than zero" in str(rejection_of_default("train.horizon=0 steps"))


def rejection_of_default(*sets):
    return rejection(None, sets)


ELSEWHERE = {
    "activation_checkpointing": "memory.activation_checkpointing",
    "activation_checkpoint.mode": "memory.activation_checkpointing",
    "gradient_checkpointing": "memory.activation_checkpointing",
    "learning_rate": "optim.lr",
    "training.local_batch_size": "train.micro_batch",
    "training.global_batch_size": "train.batch",
    "training.seq_len": "data.seq_len",
    "parallelism.tensor_parallel_degree": "parallel.tp",
    "parallel.tensor_parallel_degree": "parallel.tp",
    "tensor-model-parallel-size": "parallel.tp",
    "lr_scheduler.warmup_steps": "schedule.warmup",
    "checkpoint.interval": "checkpoint.every",
    "eval.interval": "eval.every",
    "train.max_tokens": "train.horizon",
    "grad_clip_thresh": "optim.clip",
    "compile.enable": "precision.compile",
    "save_total_limit": "checkpoint.keep",
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_name_of_another_trainer_is_answered_with_the_key_here(name):
    assert f"{name}: unknown key; the key here is '{ELSEWHERE[name]}'" in rejection(None, [f"{name}=1"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gradient_accumulation_steps", "set train.micro_batch"),
        ("train.gradient_accumulation_steps", "set train.micro_batch"),
        ("per_device_train_batch_size", "train.batch"),
        ("fsdp", "parallel.dp_shard"),
        ("parallel.fsdp", "parallel.dp_shard"),
        ("parallelism.expert_parallel_degree", "not supported"),
    ],
)
def test_setting_without_a_single_key_is_answered_with_advice(name, words):
    assert words in rejection(None, [f"{name}=8"])


def test_value_in_place_of_a_section_is_answered_with_its_key():
    for name, key in {
        "optim": "optim.name",
        "precision": "precision.compute",
        "model": "model.preset",
    }.items():
        words = f"{name}: \"x\" is not accepted; it should be a table; this is '{key}' here"
        assert words in rejection(None, [f"{name}=x"])


def test_run_file_of_another_trainer_is_answered_key_by_key(tmp_path):
    titan = "[training]\nlocal_batch_size = 8\nsteps = 100\n[optimizer]\nlr = 1e-3\nname = 'AdamW'\n"
    text = rejection(write(tmp_path / "titan.toml", titan + "qqq = 1\n"))
    for words in (
        "training.local_batch_size: unknown key; the key here is 'train.micro_batch'",
        "training.steps: unknown key; the key here is 'train.horizon'",
        "optimizer.lr: unknown key; the key here is 'optim.lr'",
        "optimizer.name: unknown key; the key here is 'optim.name'",
        "optimizer.qqq: unknown key; the sections are run, model",
    ):
        assert words in text


def test_every_alias_and_renamed_key_names_an_existing_key():
    tables = tomllib.loads(files("arriero.config").joinpath("aliases.toml").read_text())
    answers, renamed = tables.pop("answers"), tables.pop("renamed")
    assert not [key for key in renamed.values() if field_at(RunConfig, key) is None]
    assert not [key for key in renamed if field_at(RunConfig, key)]
    assert not [key for key in tables if field_at(RunConfig, key) is None]
    for text in answers.values():
        for key in re.findall(r"\b[a-z_]+\.[a-z_.]+[a-z]", text.replace("metrics.jsonl", "")):
            assert field_at(RunConfig, key) is not None, key
    assert not [name for name in answers if field_at(RunConfig, name)]


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000, "{a=" * 5000, "1e99999999 tok", "\x00"])
def test_absurd_value_is_rejected_in_a_sentence(tmp_path, value):
    for key in ("run.seed", "train.batch", "optim.lr"):
        assert rejection(None, [f"{key}={value}"]).startswith(f"--set: {key}")
    (tmp_path / "run.toml").write_text(f"[run]\nseed = {value}\n")
    assert str(tmp_path) in rejection(tmp_path / "run.toml")


def test_set_cannot_contain_a_second_key(tmp_path):
    assert "run.name" in rejection(write(tmp_path / "run.toml", MINIMAL), ["run.name='a'\nseed=3"])


def test_key_in_the_wrong_section_is_found(tmp_path):
    run = write(tmp_path / "run.toml", MINIMAL + "[run]\nlr = 1e-3\n")
    assert "the key here is 'optim.lr'" in rejection(run)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["data.seq_len=4096", "train.batch=4096 tok"], "longer than the model allows"),
        (["train.batch=1000 tok"], "'960 tok' or '1024 tok'"),
        (["train.batch=64e15 tok"], "use at most 4,194,304 sequences"),
        (["data.phases=[{at='5 steps', batch='1000 tok'}]"], "data.phases[0].batch"),
        (["data.phases=[{at='5 steps', seq_len=100}]"], "data.phases[0].seq_len"),
        (["data.phases=[{at='5 steps', seq_len=4096}]"], "longer than the model allows"),
        (["data.phases=[{at='5 steps'}]"], "changes nothing"),
        (["data.packing=bestfit", "data.phases=[{at='5 steps', seq_len=32}]"], "for one sequence length"),
        (["train.horizon=1h"], "schedule.horizon"),
        (["eval.every=10 steps"], "nothing held out"),
        (["schedule.kind=linear", "schedule.decay=10 steps"], "has no meaning for 'linear'"),
        (["optim.momentum=0.9"], "has no meaning for 'adamw'"),
        (["model.heads=3"], "head"),
        (["model.dim=true"], "model.dim"),
        (["run.name=../elsewhere"], "run.name"),
        (["train.batch=2h"], "wrong unit"),
        (["run.seed"], "not an assignment"),
        (["data.sources=[{path='a', weight=0.9}, {path='b', weight=0.2}]"], "sum to 1.1"),
        (["data.phases=[{at='2k steps', sources=[{path='a'}]}]"], "not before train.horizon"),
        (["data=3"], "data"),
    ],
)
def test_contradicting_settings_are_rejected(tmp_path, sets, words):
    assert words in rejection(write(tmp_path / "run.toml", MINIMAL), sets)


def test_unreadable_file_is_named(tmp_path):
    assert "no run file" in rejection(tmp_path / "absent.toml")
    broken = write(tmp_path / "broken.toml", "[run\nname=3")
    assert f"{broken} is not valid TOML (" in rejection(broken)
    assert "line 1" in rejection(broken)
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'[run]\nname = "\xe9"')
    assert "cannot be read" in rejection(latin)
    assert "cannot be read" in rejection(tmp_path)


def test_files_that_extend_each_other_are_rejected(tmp_path):
    write(tmp_path / "a.toml", 'extends = "b.toml"')
    b = write(tmp_path / "b.toml", 'extends = "a.toml"')
    assert "extends itself" in rejection(b)
    assert "no run file" in rejection(write(tmp_path / "c.toml", 'extends = "gone.toml"'))
    assert "not a file name" in rejection(write(tmp_path / "d.toml", "extends = 3"))


def test_written_config_reads_back_equal(tmp_path):
    sets = ["model.rope_scaling={factor=8.0}", "data.sources=[{path='a\"b', weight=0.25}, {path='c'}]"]
    config = load_run(write(tmp_path / "run.toml", MINIMAL), sets, expand).config
    resolved = write(tmp_path / "resolved.toml", to_toml(config))
    assert config_from_toml(resolved) == config
    assert tomllib.loads(resolved.read_text())["train"]["batch"] == "1024 tok"


def test_model_section_and_model_spec_have_the_same_fields():
    of_family = {"nominal_params", "qkv_bias", "qk_norm"}
    own = {field.name for field in dataclasses.fields(ModelSpec)} - of_family
    assert own == ModelSection.model_fields.keys() - {"preset"}


@pytest.mark.parametrize("old", RENAMED)
def test_old_key_in_a_run_file_or_set_is_answered_with_its_new_name(tmp_path, old):
    section, name = old.split(".")
    words = f"{old}: this key is now '{RENAMED[old]}'; rename it"
    assert rejection(None, [f"{old}=full"]) == f"--set: {words}"
    run = write(tmp_path / "run.toml", f"{MINIMAL}[{section}]\n{name} = 'full'\n")
    assert rejection(run) == f"{run}: {words}"


@pytest.mark.parametrize("beside", ["events.jsonl", "manifest.json"])
def test_old_key_in_a_stored_run_file_is_upgraded(tmp_path, beside):
    config = load_run(write(tmp_path / "new.toml", MINIMAL), ["memory.activation_checkpointing=full"], expand)
    text = to_toml(config.config)
    stored = write(tmp_path / "run.toml", text.replace("activation_checkpointing", "remat"))
    assert "remat" in stored.read_text()
    assert config_from_toml(stored) == config.config
    assert "rename it" in rejection(stored)
    (tmp_path / beside).touch()
    assert load_run(stored, [], expand).config == config.config


def test_config_is_frozen():
    config = load_run(None, [], expand).config
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 2


def test_max_seq_len_without_a_preset_is_that_of_the_longest_phase(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        "model = {vocab_size = 4096, dim = 64, layers = 2, heads = 4, ffn = 128}\n"
        "train = {batch = '1024 tok', horizon = '9 steps'}\n"
        "data = {seq_len = 64, sources = ['builtin:stdlib'], phases = [{at = '5 steps', seq_len = 256}]}\n"
    )
    assert load_run(file, [], expand).config.model.max_seq_len == 256
    assert load_run(file, ["data.phases=[]"], expand).config.model.max_seq_len == 64
