"""A run from its run file to the proof of its ledger, as a user meets it."""

import json
import shutil

import numpy as np
import pytest

from arriero.config.fields import toml_value
from arriero.config.load import load_run
from arriero.data.commands.runs import show
from arriero.data.order.ledger import Audit, read_ledger
from arriero.data.order.streams import build_streams, forecast
from arriero.data.tokens.tokenizer import train_tokenizer
from arriero.errors import UserError
from arriero.model.presets import expand
from arriero.parallel.world import World
from arriero.train.build import arrange, build
from arriero.train.hooks import Hook
from arriero.train.loop import train

RUN = """
[run]
name = "mixed"
dir = "{here}/runs"
device = "cpu"

[model]
preset = "llama-test"
vocab_size = 320

[data]
seq_len = 32
packing = "bestfit"
document_mask = true
cache = "{here}/cache"
sources = [
  {{ path = "{here}/songs", weight = 3, prompt = "Sing: " }},
  {{ path = "{here}/sums", weight = 1, max_epochs = 6 }},
]

[[data.phases]]
at = "4 steps"
sources = [{{ path = "{here}/sums", max_epochs = 6 }}]

[train]
batch = "256 tok"
horizon = "6 steps"

[schedule]
kind = "constant"

[observe]
log_every = 2
tensorboard = false
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, dataset_writer):
    here = tmp_path_factory.mktemp("look")
    songs = [f"the llama number {i} walks over the mountain" for i in range(40)]
    sums = [f"{i} + {i} = {2 * i}" for i in range(300)]
    tokenizer = train_tokenizer(songs + sums, 320, here / "tokenizer.json")
    for name, texts in (("songs", songs), ("sums", sums)):
        documents = [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]
        dataset_writer(here / name, [documents], 320, (here / "tokenizer.json").read_text())
    return here


@pytest.fixture
def run_file(prepared, tmp_path):
    for name in ("songs", "sums"):
        shutil.copytree(prepared / name, tmp_path / name)
    (tmp_path / "run.toml").write_text(RUN.format(here=tmp_path))
    return tmp_path / "run.toml"


def session(run_file, *sets, hooks=()):
    return build(arrange(load_run(run_file, sets, expand).config, World()), lambda *_: None, hooks)


def test_a_run_on_phases_and_prompts_is_shown_and_proved(arriero, run_file, tmp_path):
    trained = arriero("train", run_file)
    assert trained.returncode == 0, trained.stderr
    for words in ("songs", "sums", "75.0%", "25.0%", "first repeat", "never", "100.0% from step 5 on"):
        assert words in trained.stdout
    run = tmp_path / "runs" / "mixed"

    proved = arriero("data", "audit", run, "--checksums")
    assert proved.returncode == 0, proved.stdout + proved.stderr
    assert "holds: 48 samples in 6 steps" in proved.stdout

    shown = arriero("data", "show", "mixed", "--step", "1", "--sample", "2")
    assert shown.returncode == 0, shown.stderr
    assert "step 1: samples 0 to 7, 8 sequences of 32 tokens, packing bestfit" in shown.stdout
    beyond = arriero("data", "show", "run.toml", "--step", "81234")
    assert beyond.returncode == 2
    assert "sums has been read 6 times, its max_epochs" in beyond.stderr


def shown(capsys, run, step, sample=0):
    show(run, step, sample)
    return capsys.readouterr().out


def test_the_past_and_the_future_of_a_run_are_shown(run_file, tmp_path, capsys):
    of_the_file = shown(capsys, run_file, 1, 2)
    run = session(run_file)
    train(run)
    assert shown(capsys, run.run_dir, 1, 2) == of_the_file
    assert any("⟦Sing: ⟧the llama number" in shown(capsys, run.run_dir, 1, k) for k in range(8))
    later = shown(capsys, run.run_dir, 20)
    assert "samples 152 to 159" in later
    assert "songs" not in later
    assert "next document" in later
    with pytest.raises(UserError, match="a step has 8 sequences, and --sample is 8"):
        show(run.run_dir, 1, 8)
    with pytest.raises(UserError, match=r"holds no run\.toml"):
        show(tmp_path / "songs", 1, 0)


def test_a_step_and_the_audit_are_printed_as_one_json_object(run_file, command, capsys):
    run = session(run_file)
    train(run)
    text = json.loads(command("data", "show", run.run_dir, "--step", 2, "--sample", 3, "--json").stdout)
    assert (text["step"], text["first_sample"], len(text["samples"])) == (2, 8, 8)
    sample = text["sample"]
    assert len(sample["tokens"]) == len(sample["labels"]) <= 32
    assert sample["text"].splitlines()[0][:10] in shown(capsys, run.run_dir, 2, 3).replace("⟦", "").replace(
        "⟧", ""
    )
    proved = json.loads(command("data", "audit", run.run_dir, "--json").stdout)
    assert (proved["holds"], proved["samples"], proved["steps"]) == (True, 48, 6)
    assert sum(source["samples_seen"] for source in proved["sources"]) == 48
    ledger = run.run_dir / "ledger.json"
    ledger.write_text(ledger.read_text().replace('"end": 48', '"end": 40'))
    bad = command("data", "audit", run.run_dir, "--json")
    assert bad.returncode == 1
    assert "samples 0 to 40" in json.loads(bad.stdout)["problems"][0]


def test_what_is_shown_is_what_the_model_was_given(run_file):
    class Keep(Hook):
        def on_step(self, session, step, tokens):
            seen.append(session.data.loader.state()["sample"])

    seen = []
    run = session(run_file, hooks=[Keep()])
    train(run)
    assert seen == [8, 16, 24, 32, 40, 48]
    ledger = read_ledger(run.run_dir)
    assert (ledger.samples, ledger.batch_sequences, len(ledger.stretches)) == (48, 8, 1)
    content = json.loads((run.run_dir / "ledger.json").read_text())
    drawn = run.data.stream.locate(np.arange(48)).source
    assert [s["samples"] for s in content["sources"]] == np.bincount(drawn).tolist()
    assert (drawn[32:] == 1).all()
    shutil.rmtree(run.run_dir / "checkpoints")
    train(session(run_file, "checkpoint.start_over=true"))
    audit = Audit(read_ledger(run.run_dir), run.data.stream)
    audit.run(lambda *_: None)
    assert (audit.problems, audit.discarded) == ([], 48)


def test_the_ledger_of_a_failed_run_claims_only_what_a_checkpoint_keeps(run_file):
    class Trip(Hook):
        def on_step(self, session, step, tokens):
            if step == 5:
                raise RuntimeError("power")

    run = session(run_file, "checkpoint.every=3 steps", hooks=[Trip()])
    with pytest.raises(RuntimeError, match="power"):
        train(run)
    assert read_ledger(run.run_dir).samples == 24


def test_tampering_is_found(arriero, run_file, tmp_path, dataset_writer):
    run = session(run_file)
    train(run)
    path = run.run_dir / "ledger.json"
    good = path.read_text()
    path.write_text(good.replace('"end": 48', '"end": 40'))
    short = arriero("data", "audit", run.run_dir)
    assert short.returncode == 1
    assert "wrong: samples 0 to 40 were not the ones the order prescribes" in short.stdout
    path.write_text(good.replace('"samples": 48', '"samples": 17', 1))
    stated = arriero("data", "audit", run.run_dir)
    assert stated.returncode == 1
    assert "the ledger states 17 samples, and its stretches end at 48" in stated.stdout
    path.write_text(good)

    shard = tmp_path / "sums" / "00000.bin"
    content = bytearray(shard.read_bytes())
    content[10] ^= 1
    shard.write_bytes(content)
    assert arriero("data", "audit", run.run_dir).returncode == 0
    flipped = arriero("data", "audit", run.run_dir, "--checksums")
    assert flipped.returncode == 1
    assert "sums/00000.bin: its checksum differs" in flipped.stdout
    shard.rename(shard.with_suffix(".gone"))
    for more in ([], ["--checksums"]):
        missing = arriero("data", "audit", run.run_dir, *more)
        assert missing.returncode == 1
        assert "sums/00000.bin: No such file" in missing.stdout

    dataset_writer(
        tmp_path / "sums", [[range(1, 9)] * 90], 320, (tmp_path / "sums/tokenizer.json").read_text()
    )
    other = arriero("data", "audit", run.run_dir)
    assert other.returncode == 1
    assert "sums has changed since the run began (fingerprint" in other.stdout
    with pytest.raises(UserError, match="sums has changed since the run began"):
        session(run_file)


def test_data_that_was_moved_can_be_pointed_out(arriero, run_file, tmp_path):
    run = session(run_file)
    train(run)
    (tmp_path / "sums").rename(tmp_path / "moved")
    lost = arriero("data", "audit", run.run_dir)
    assert lost.returncode == 2
    data = json.loads(run.config.data.model_dump_json(exclude_none=True).replace("/sums", "/moved"))
    sets = [f"data.{key}={toml_value(data[key])}" for key in ("sources", "phases")]
    found = arriero("data", "audit", run.run_dir, *(word for each in sets for word in ("--set", each)))
    assert found.returncode == 0, found.stdout + found.stderr


def test_too_much_repetition_is_rejected_before_the_run_with_its_step(run_file, tmp_path):
    streams = build_streams(load_run(run_file, [], expand).config, lambda *_: None)
    limit = 6 * streams.train.counts[1]
    before = [int(streams.train.drawn(8 * step)[1]) for step in range(1, 901)]
    step = 1 + next(i for i, drawn in enumerate(before) if drawn > limit)
    with pytest.raises(UserError, match=rf"sums would be read more than 6 times.*from step {step} of 900 on"):
        session(run_file, "train.horizon=900 steps")
    assert not (tmp_path / "runs").exists()
    located = streams.train.locate(np.arange(400))
    for i, outlook in enumerate(forecast(streams, 50)):
        repeats = np.flatnonzero((located.source == i) & (located.epoch == 1))
        assert outlook.first_repeat == repeats[0] // 8 + 1
        drawn = np.count_nonzero(located.source == i)
        assert outlook.epochs == pytest.approx(drawn / streams.train.counts[i])
    assert [outlook.first_repeat for outlook in forecast(streams, 2)] == [None, None]
    assert forecast(streams, None)[0].epochs is None


def test_bad_data_sections_are_rejected_in_words(run_file):
    for sets, words in (
        (["data.packing=concat"], "data.sources[0].prompt: a prompt precedes a document"),
        (["data.phases=[{at='0 steps', sources=[{path='x'}]}]"], "data.phases[0].at"),
        (
            ["data.phases=[{at='9 steps', sources=[{path='x'}]}, {at='100 tok', sources=[{path='x'}]}]"],
            "'100 tok' is step 1, not after step 9",
        ),
        (["data.sources=[{path='x', weight=0}]"], "data.sources[0].weight"),
        (["data.sources=[{path='x', weight=nan}]"], "data.sources[0].weight"),
        (["data.sources=[{path='songz'}]"], "songz/manifest.json does not exist"),
        (["data.sources=[{path='songs', prompt=''}]"], ""),
    ):
        with pytest.raises(UserError) as caught:
            session(run_file, *sets)
        assert words in str(caught.value)


@pytest.mark.parametrize("packing", ["concat", "bestfit", "none"])
@pytest.mark.parametrize("preset", ["llama-test", "gpt2-test"])
def test_every_packing_trains(run_file, packing, preset):
    sources = f"data.sources=[{{path='{run_file.parent}/songs'}}]"
    sets = [f"data.packing={packing}", f"model.preset={preset}", sources, "data.phases=[]"]
    run = session(run_file, *sets, "train.horizon=40 steps", "optim.lr=1e-2", "eval.heldout=60 tok")
    outcome = train(run)
    assert outcome.last_loss < 0.7 * outcome.first_loss
    assert outcome.last_eval_loss < outcome.first_eval_loss
    assert run.data.loader.read().slots >= run.data.loader.read().real_tokens > 0
