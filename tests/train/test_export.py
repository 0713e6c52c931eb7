"""The exported model has the tokens of training and the same bytes in every layout, and is never partial."""

import json
import re
import resource
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, processors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from arriero.checkpoint.convert import convert, open_model
from arriero.checkpoint.formats.hf_directory import write_hf
from arriero.checkpoint.formats.model_reader import ModelReader, WriteOptions
from arriero.checkpoint.ranks import Ranks
from arriero.data.order.streams import build_streams, forecast
from arriero.data.prepare.planning import PrepareRequest
from arriero.data.prepare.prepare import PrepareWatcher, prepare
from arriero.data.tokens.tokenizer import separators_of, train_tokenizer
from arriero.data.workers import no_progress
from arriero.errors import UserError
from arriero.model.family import build_model
from arriero.model.name_maps import own_tensors
from arriero.model.spec import ModelSpec
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import process_group, world_from
from arriero.train.build import arrange, build
from arriero.train.finish import Gather, check_export, export_hf, export_model
from arriero.train.model_state import adapter_settings, parameter_decisions
from checkpoint.running import Runs

TEXTS = [f"The {i}th llama carries {i * 7} kilograms of salt over the pass; the end." for i in range(60)]
SPEC = ModelSpec.from_dict(
    {"vocab_size": 600, "dim": 16, "layers": 1, "heads": 2, "ffn": 32, "max_seq_len": 64}
)
SMALL = ["model.vocab_size=1024", "train.horizon=2 steps", "checkpoint.background=false"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    train_tokenizer(TEXTS, 400, folder / "plain.json", end="<|end_of_text|>")
    inner = Tokenizer.from_file(str(folder / "plain.json"))
    inner.add_special_tokens(["<|begin_of_text|>"])
    bos = "<|begin_of_text|>", inner.token_to_id("<|begin_of_text|>")
    template = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    inner.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    inner.save(str(folder / "llama3.json"))
    sentencepiece_model(folder)
    return folder


def sentencepiece_model(folder):
    import sentencepiece

    (folder / "text").write_text("\n".join(TEXTS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )


def dataset(kept, directory, tokenizer, **separators):
    request = PrepareRequest((str(kept / "text.jsonl"),), directory, kept / tokenizer, **separators)
    return prepare(request, 1, PrepareWatcher())


def documents(store):
    starts = [*store.document_starts(0, store.tokens).tolist(), store.tokens]
    return [store.read(a, b - a).tolist() for a, b in pairwise(starts)]


def source_of(store, spec=SPEC):
    state = build_model(spec).state_dict()
    return ModelReader(
        "memory",
        "a model",
        spec,
        own_tensors(spec),
        state.__getitem__,
        {"tokenizer.json": store.tokenizer_path},
        separators_of(store).token_ids(),
    )


@pytest.mark.parametrize(
    ("tokenizer", "separators"),
    [
        ("llama3.json", {}),
        ("llama3.json", {"bos": "auto"}),
        ("llama3.json", {"bos": "<|end_of_text|>", "eos": "none"}),
        ("llama3.json", {"eos": "none"}),
        ("plain.json", {"eos": "the", "bos": "lama"}),
        ("tokenizer.model", {"bos": "auto"}),
        ("tokenizer.model", {}),
    ],
    ids=str,
)
def test_the_exported_tokenizer_encodes_a_text_as_training_did(kept, tmp_path, tokenizer, separators):
    if tokenizer == "plain.json":
        vocabulary = Tokenizer.from_file(str(kept / tokenizer)).get_vocab()
        # documents must not begin or end with the separators that prepare adds
        inside = [t for t in vocabulary if t.isalpha() and len(t) > 2 and not TEXTS[0].startswith(t)]
        words = sorted(inside, key=lambda token: (len(token), token))
        separators = {"bos": words[0], "eos": words[1]}
    store = dataset(kept, tmp_path / "set", tokenizer, **separators)
    marks = separators_of(store)
    (tmp_path / "out").mkdir()
    write_hf(source_of(store), tmp_path / "out", WriteOptions())
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    ended = 1 if marks.eos else 0
    found = {tuple(loaded(text)["input_ids"]) for text in TEXTS}
    assert found == {tuple(ids[: len(ids) - ended]) for ids in documents(store)}
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.eos_token_id == (marks.eos.id if marks.eos else None)
    assert config.bos_token_id == (marks.bos.id if marks.bos else None)
    if tokenizer != "plain.json":
        assert loaded.eos_token_id == config.eos_token_id and loaded.bos_token_id == config.bos_token_id


def test_imported_tokens_show_how_their_documents_begin(kept, tmp_path):
    store = dataset(kept, tmp_path / "set", "llama3.json", bos="auto")
    del store.about["separators"]
    marks = separators_of(store)
    assert (marks.bos.token, marks.eos.token) == ("<|begin_of_text|>", "<|end_of_text|>")
    plain = dataset(kept, tmp_path / "plain", "llama3.json")
    del plain.about["separators"]
    assert separators_of(plain).bos is None


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path, tmp_path)


def on(path):
    return f"data.sources=[{{path='{path}'}}]"


@pytest.mark.parametrize("eos", ["none", "plain entry"])
def test_a_run_exports_whatever_ends_its_documents_and_conversion_repeats_it(kept, runs, tmp_path, eos):
    inner = Tokenizer.from_file(str(kept / "plain.json"))
    eos = "none" if eos == "none" else next(t for t in inner.get_vocab() if t.isalpha() and len(t) > 3)
    store = dataset(kept, tmp_path / "set", "plain.json", eos=eos)
    result = runs.train("run", *SMALL, on(store.directory))
    model, saved = tmp_path / "run" / "model", tmp_path / "run" / "checkpoints" / "step-00000002"
    assert ("export", str(model)) in result["decisions"]
    config = json.loads((model / "config.json").read_text())
    assert config["eos_token_id"] == (None if eos == "none" else inner.token_to_id(eos))
    assert AutoModelForCausalLM.from_pretrained(model, local_files_only=True).dtype == torch.float32
    source = open_model(saved)
    assert not source.remarks
    convert(source, tmp_path / "again", "hf")
    # a run also records its training, which a checkpoint alone does not know
    files = sorted(path.name for path in model.iterdir() if path.name != "training.json")
    assert files == sorted(path.name for path in (tmp_path / "again").iterdir())
    assert all((model / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in files)
    state = saved / "state.json"
    state.write_text(json.dumps({k: v for k, v in json.loads(state.read_text()).items() if k != "token_ids"}))
    older = open_model(saved)
    assert "did not record token ids" in older.remarks[0]
    convert(older, tmp_path / "older", "hf")


def test_requirements_of_the_export_are_checked_before_the_first_step(kept, runs, tmp_path, monkeypatch):
    store = dataset(kept, tmp_path / "set", "plain.json")
    (tmp_path / "run").mkdir()
    config = runs.config("run", *SMALL, on(store.directory))
    session = build(arrange(config, world_from()), no_progress)
    session.data.loader.close()
    (tmp_path / "run" / "model").write_text("in the way")
    with pytest.raises(UserError, match="model is in the way"):
        build(arrange(config, world_from()), no_progress)
    (tmp_path / "run" / "model").unlink()
    (tmp_path / "run" / "adapter").write_text("in the way")
    adapted = runs.config("run", *SMALL, on(store.directory), "lora.rank=2")
    with pytest.raises(UserError, match="adapter is in the way"):
        check_export(adapted, session.spec, session.data.tokenizer, session.data.separators)
    stored = parameter_decisions(adapted.optim, session.spec, adapter_settings(adapted), "compute")[0].reason
    assert stored.endswith("are frozen and stored in the precision of the computation")
    free = 4 * session.spec.parameters - 1
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"total": 1 << 40, "free": free}))
    with pytest.raises(UserError, match=r"the model needs .*checkpoint\.export = false"):
        build(arrange(runs.config("run", *SMALL, on(store.directory), "checkpoint.every=false",
                                  "checkpoint.at_end=false"), world_from()), no_progress)  # fmt: skip


def test_a_replaced_tokenizer_is_rejected_when_the_dataset_is_opened(kept, runs, arriero, tmp_path):
    store = dataset(kept, tmp_path / "set", "plain.json")
    config = runs.config("run", *SMALL, on(store.directory))
    build_streams(config, no_progress)
    changed = store.tokenizer_path.read_text().replace("<|end_of_text|>", "<|end_of_test|>")
    store.tokenizer_path.write_text(changed)
    with pytest.raises(UserError, match=r"tokenizer\.json is not the tokenizer this dataset was made with"):
        build_streams(config, no_progress)
    result = arriero("data", "export", store.directory, "megatron", tmp_path / "out")
    assert result.returncode == 2 and "is not the tokenizer" in result.stderr


def test_a_vocabulary_far_larger_than_the_tokenizers_causes_a_remark(kept, runs, tmp_path):
    store = dataset(kept, tmp_path / "set", "plain.json")
    other = dataset(kept, tmp_path / "other", "plain.json", eos="none")
    streams = build_streams(runs.config("run", *SMALL, on(store.directory)), no_progress)
    assert not forecast(streams, 2, 2 * store.vocab_size)[0].remarks
    [remark] = forecast(streams, 2, 30 * store.vocab_size)[0].remarks
    assert re.search(r"tokenizer has 400 ids, and model\.vocab_size is 12,000", remark)
    both = f"data.sources=[{{path='{store.directory}'}}, {{path='{other.directory}'}}]"
    second = forecast(build_streams(runs.config("run", *SMALL, both), no_progress), 2, 400)[1]
    assert "BOS none, EOS none" in second.remarks[-1]


LAYOUTS = {
    "dp_shard 2": (2, ["parallel.dp_shard=2"]),
    "tp 2 x pp 2": (4, ["parallel.dp_shard=1", "parallel.tp=2", "parallel.pp=2"]),
    "2 copies of tp 2": (4, ["parallel.dp_replicate=2", "parallel.dp_shard=1", "parallel.tp=2"]),
}


def test_every_layout_exports_the_bytes_of_one_process(corpus_cache, tmp_path):
    """The first weights do not depend on the layout. Tied, so that two stages hold the one table."""
    runs = Runs(tmp_path, corpus_cache)

    def exported(name, sets, ranks):
        config = runs.config(name, "model.tied=true", *sets)

        def work():
            world = world_from()
            plan = arrange(config, world)
            with process_group(world, plan.device.torch_device):
                session = build(plan, no_progress)
                assert export_model(session) == tmp_path / name / "model"
                session.data.loader.close()

        run_ranks(work, ranks, leader_prints=False)
        files = {path.name: path.read_bytes() for path in (tmp_path / name / "model").iterdir()}
        # names the run and its layout
        del files["training.json"]
        return files

    expected = exported("one", [], 1)
    assert "model.safetensors" in expected
    for name, (ranks, sets) in LAYOUTS.items():
        assert exported(name.replace(" ", "-"), sets, ranks) == expected, name


LARGE = ModelSpec.from_dict(
    {"vocab_size": 4096, "dim": 512, "layers": 10, "heads": 8, "ffn": 2048, "max_seq_len": 64}
)


def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def test_export_is_streamed_stoppable_and_replaces_the_old_model_only_when_complete(tmp_path):
    """Two ranks hold half of 180 MB each."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "old").write_text("")
    tensors = own_tensors(LARGE)

    def untouched():
        return [path.name for path in tmp_path.iterdir()] == ["model"] and (directory / "old").exists()

    def work():
        torch.set_num_threads(1)
        world = world_from()
        with process_group(world, torch.device("cpu")):
            mesh = init_device_mesh("cpu", (2,))
            held = {
                name: distribute_tensor(torch.zeros(t.shape), mesh, [Shard(0)]) for name, t in tensors.items()
            }
            ranks = Ranks(world.rank, world.size)

            def export(stop=lambda: False):
                gather = Gather(tensors, held, ranks, stop)
                source = ModelReader("memory", "a model", LARGE, tensors, gather.tensor)
                return export_hf(source, gather, directory, WriteOptions(shard_bytes=40 * 10**6))

            asked = iter([False] * 20 + [True] * 1000)
            assert not export(lambda: world.rank == 1 and next(asked))
            assert world.rank == 1 or untouched()
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10**7, hard))
            with pytest.raises(UserError, match=r"cannot be written to .*File too large"):
                export()
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert world.rank == 1 or untouched()
            Path("/proc/self/clear_refs").write_text("5")
            before = resident("VmRSS")
            assert export()
            return resident("VmHWM") - before

    grown = run_ranks(work, 2, leader_prints=False)
    whole = sum(t.nbytes for t in tensors.values())
    assert whole > 170e6 and grown < whole / 4, f"{grown / 1e6:.0f} of {whole / 1e6:.0f} MB"
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and not (directory / "old").exists()
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 3 and all(path.stat().st_size < 42e6 for path in files)
    assert open_model(directory).spec == LARGE


def test_an_interrupted_replacement_is_undone_by_the_next_export(tmp_path):
    """Killed between the two renames: the old model is under another name."""
    (tmp_path / "model.old.tmp").mkdir()
    (tmp_path / "model.old.tmp" / "old").write_text("")
    tensors = own_tensors(SPEC)
    state = build_model(SPEC).state_dict()
    gather = Gather(tensors, state, Ranks(), iter([False, False, True]).__next__)
    source = ModelReader("memory", "a model", SPEC, tensors, gather.tensor)
    assert not export_hf(source, gather, tmp_path / "model")
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "old"]
