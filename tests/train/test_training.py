import contextlib
import io
import json
import math
import re
import signal
import time
import tomllib

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from arriero.checkpoint import manager
from arriero.checkpoint.formats.hf_directory import load_hf
from arriero.config.load import load_run
from arriero.data.order.ledger import read_ledger
from arriero.data.order.loader import IGNORED, Batch
from arriero.errors import UserError
from arriero.events import LineFile
from arriero.interrupt import Interrupted, Requests
from arriero.model.presets import expand
from arriero.model.spec import flops_per_token
from arriero.parallel.world import World
from arriero.train.build import arrange, build, model_options
from arriero.train.commands import ConsoleProgress
from arriero.train.finish import sample
from arriero.train.hooks import Hook
from arriero.train.loop import train
from arriero.train.metrics import StepMetrics
from arriero.ui import Console

BASE = [
    "model.preset=llama-test",
    "model.vocab_size=4096",
    "data.seq_len=64",
    "train.batch=512 tok",
    "train.horizon=6 steps",
    "schedule.warmup=2 steps",
    "eval.heldout=2k tok",
    "eval.every=3 steps",
    "observe.log_every=1",
    "run.device=cpu",
]


@pytest.fixture
def session(tmp_path, corpus_cache):
    def make(*sets, name="run", hooks=()):
        where = [f"run.name={name}", f"run.dir='{tmp_path}'", f"data.cache='{corpus_cache}'"]
        config = load_run(None, [*BASE, *where, *sets], expand).config
        return build(arrange(config, World()), lambda *_: None, hooks)

    return make


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(run):
    train(run)
    return [line["loss"] for line in lines(run.run_dir / "metrics.jsonl")]


LEARN = ("train.horizon=120 steps", "optim.lr=1e-2", "observe.log_every=10", "eval.every=60 steps")


def test_training_starts_at_a_uniform_guess_and_learns(session):
    run = session("model.tied=true", *LEARN)
    outcome = train(run)
    assert outcome.first_eval_loss == pytest.approx(math.log(4096), rel=0.02)
    assert outcome.last_eval_loss < 0.8 * outcome.first_eval_loss
    assert outcome.last_loss < 0.8 * outcome.first_loss


def test_gpt2_learns_too(session):
    run = session("model.preset=gpt2-test", *LEARN)
    outcome = train(run)
    assert outcome.last_eval_loss < 0.8 * outcome.first_eval_loss


def test_a_deterministic_run_repeats_bit_by_bit(session):
    first = losses(session("run.deterministic=true", name="a"))
    assert torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    second = losses(session("run.deterministic=true", name="b"))
    torch.use_deterministic_algorithms(False)
    assert first == second
    assert losses(session("run.seed=2", name="c")) != first


def test_the_z_loss_moves_the_weights_and_stays_out_of_the_reported_losses(session):
    plain = losses(session(name="plain"))
    pulled = losses(session("train.z_loss=0.5", "memory.loss_chunk=100", name="pulled"))
    assert pulled[0] == pytest.approx(plain[0], rel=1e-6)
    assert abs(pulled[-1] - plain[-1]) > 1e-4


@pytest.mark.parametrize("mask", ["false", "true"])
def test_the_micro_batch_does_not_change_the_losses(session, mask):
    sets = [f"data.document_mask={mask}"]
    whole = losses(session("train.micro_batch=8", *sets, name="whole"))
    for size in (1, 4):
        assert losses(session(f"train.micro_batch={size}", *sets, name=f"by-{size}")) == pytest.approx(
            whole, rel=1e-5
        )


def test_every_token_weighs_the_same_however_labels_fall(session):
    """A micro-batch with few labels must not count as much as one with many."""
    run = session("train.micro_batch=1")
    batch = next(run.data.loader)
    labels = batch.labels_BT.clone()
    labels[0, 5:] = IGNORED
    labels[3] = IGNORED
    uneven = Batch(batch.first_sample, batch.tokens_BT, labels)
    mean = run.passes.gradients(uneven)
    gradients = [p.grad.clone() for p in run.model.parts[0].parameters()]
    run.model.parts[0].zero_grad()
    logits = run.model.parts[0](batch.tokens_BT).flatten(0, 1)
    reference = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)
    reference.backward()
    run.data.loader.close()
    assert mean.item() == pytest.approx(reference.item(), rel=1e-6)
    for ours, parameter in zip(gradients, run.model.parts[0].parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-6)


def test_bf16_computes_in_bf16_and_updates_fp32(session):
    run = session("precision.compute=bf16", "optim.lr=1e-3", name="bf16")
    assert {p.dtype for p in run.model.parts[0].parameters()} == {torch.bfloat16}
    assert {w.dtype for w in run.model.tensors().values()} == {torch.float32}
    assert losses(run) == pytest.approx(losses(session("optim.lr=1e-3", name="fp32")), rel=0.01)


def test_small_updates_are_not_lost_in_bf16(session):
    """Steps far below bf16's resolution add up in the fp32 masters."""
    run = session("precision.compute=bf16", "optim.lr=1e-6", "optim.weight_decay=0", "train.horizon=6 steps")
    before = {n: w.clone() for n, w in run.model.tensors().items()}
    train(run)
    moved = [(w != before[n]).float().mean().item() for n, w in run.model.tensors().items() if w.ndim > 1]
    assert min(moved) > 0.2


def test_norms_and_biases_are_not_decayed(session):
    run = session("model.preset=gpt2-test", "optim.weight_decay=0.5")
    run.data.loader.close()
    before = {name: weight.clone() for name, weight in run.model.tensors().items()}
    for parameter in run.model.parts[0].parameters():
        parameter.grad = torch.zeros_like(parameter)
    run.optimizer.step(lr=0.1)
    for name, weight in run.model.tensors().items():
        torch.testing.assert_close(weight, before[name] * (0.95 if weight.ndim > 1 else 1.0))


def test_gradients_are_clipped_to_the_global_norm(session):
    run = session("optim.name=sgd", "optim.weight_decay=0", "optim.clip=0.01")
    batch = next(run.data.loader)
    run.passes.gradients(batch)
    norm = torch.stack([p.grad.norm() for p in run.model.parts[0].parameters()]).norm()
    before = {name: weight.clone() for name, weight in run.model.tensors().items()}
    reported = run.optimizer.step(1.0)
    run.data.loader.close()
    assert reported.item() == pytest.approx(norm.item(), rel=1e-5)
    moved = [(weight - before[name]).norm() for name, weight in run.model.tensors().items()]
    assert torch.stack(moved).norm().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    "sets",
    [
        ["precision.master=bf16", "optim.state=int8"],
        ["precision.compute=fp16"],
        ["optim.state=float8"],
    ],
    ids=lambda sets: "+".join(sets),
)
def test_other_precisions_learn_as_fp32_does(session, sets):
    usual = ["optim.lr=1e-3", "eval.heldout=false", "eval.every=false"]
    reference = losses(session(*usual, name="reference"))
    assert losses(session(*usual, *sets, name="run")) == pytest.approx(reference, rel=0.01)


def test_muon_learns_faster_than_adamw(session):
    usual = ["train.horizon=25 steps", "optim.lr=1e-2", "eval.every=false"]
    adamw, muon = (train(session(*usual, f"optim.name={name}", name=name)) for name in ("adamw", "muon"))
    assert muon.last_eval_loss < adamw.last_eval_loss - 0.1


def test_a_run_directory_holds_what_outside_tools_rely_on(session):
    run = session()
    train(run)
    metrics = lines(run.run_dir / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    keys = {
        "step",
        "tokens",
        "loss",
        "grad_norm",
        "lr",
        "tokens_per_s",
        "step_s",
        "data_wait",
        "peak_mem_gib",
        "mfu",
    }
    assert all(keys <= m.keys() for m in metrics)
    assert [m["step"] for m in metrics if "eval_loss" in m] == [3, 6]
    assert [m["tokens"] for m in metrics] == [512 * (i + 1) for i in range(6)]
    assert all(m["mfu"] is None and 0 <= m["data_wait"] <= 1 for m in metrics)
    events = lines(run.run_dir / "events.jsonl")
    assert [e["event"] for e in events] == ["start", "evaluation", "evaluation", "evaluation", "save", "end"]
    assert tomllib.loads((run.run_dir / "run.toml").read_text())["train"]["horizon"] == "6 steps"
    board = EventAccumulator(str(run.run_dir / "tensorboard"))
    board.Reload()
    assert [s.step for s in board.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [s.step for s in board.Scalars("eval_loss")] == [0, 3, 6]


def test_a_fault_is_recorded_and_not_swallowed(session):
    class Trip(Hook):
        def on_step(self, session, step, tokens):
            if step == 2:
                raise RuntimeError("the cable came loose")

    run = session(hooks=[Trip()])
    with pytest.raises(RuntimeError, match="cable"):
        train(run)
    last = lines(run.run_dir / "events.jsonl")[-1]
    assert (last["event"], last["step"], last["message"]) == ("fault", 2, "the cable came loose")


def poisoned(run, steps):
    """Let the gradients of these steps overflow, as a bad batch does."""
    gradients, taken = run.passes.gradients, iter(range(1, 1000))

    def overflow(*given):
        loss = gradients(*given)
        if next(taken) in steps:
            next(run.model.parts[0].parameters()).grad[0] = float("inf")
        return loss

    run.passes.gradients = overflow


def test_updates_with_gradients_that_are_not_finite_are_skipped_counted_and_recorded(session):
    run = session("observe.log_every=2", "eval.heldout=false", "eval.every=false")
    poisoned(run, [2, 3])
    train(run)
    assert run.optimizer.steps == 4
    assert all(weight.isfinite().all() for weight in run.model.tensors().values())
    metrics = lines(run.run_dir / "metrics.jsonl")
    assert [(m["step"], m["skipped"]) for m in metrics] == [(1, 0), (2, 1), (4, 2), (6, 2)]
    assert metrics[1]["grad_norm"] is None
    skips = [e for e in lines(run.run_dir / "events.jsonl") if e["event"] == "skip"]
    assert [(e["step"], e["updates"]) for e in skips] == [(2, 1), (4, 1)]


def test_more_skips_in_a_row_than_allowed_stop_the_run(session):
    run = session("optim.max_skips=2", "train.horizon=50 steps")
    poisoned(run, [1, 3, 4, 6, 7, 8])
    with pytest.raises(UserError, match=r"3 updates in a row were skipped up to step 8.*optim.lr="):
        train(run)
    assert lines(run.run_dir / "metrics.jsonl")[-1]["skipped"] == 6


def test_the_error_about_skips_names_a_checkpoint_that_was_still_being_written(session, monkeypatch):
    run = session("optim.max_skips=1", "checkpoint.every=2 steps", "train.horizon=50 steps")
    poisoned(run, [3, 4])
    publish = manager.publish

    def slowly(*given):
        time.sleep(1.0)
        return publish(*given)

    monkeypatch.setattr(manager, "publish", slowly)
    with pytest.raises(UserError, match=r"resume from the checkpoint of step 2 with a lower learning rate"):
        train(run)


def test_a_loss_that_stays_not_finite_stops_the_run(session):
    run = session("optim.lr=1e30", "optim.clip=1e30", "schedule.kind=constant", "train.horizon=50 steps")
    with pytest.raises(UserError, match=r"21 updates in a row were skipped up to step \d+.*--set optim.lr"):
        train(run)


def test_a_run_of_skipped_updates_alone_is_no_success(session):
    run = session("train.horizon=2 steps")
    poisoned(run, [1, 2])
    with pytest.raises(UserError, match="2 updates in a row were skipped"):
        train(run)


def test_a_checkpoint_is_continued_with_another_learning_rate_as_the_refusal_says(session):
    train(session("checkpoint.every=4 steps", "schedule.kind=constant"))
    with pytest.raises(UserError, match="different run") as refused:
        session("optim.lr=1e-5", "schedule.kind=constant", "train.horizon=8 steps")
    command = re.search(r"--set run.name=NAME --set (checkpoint.resume_from=.*)", str(refused.value))
    fork = session(command[1], "optim.lr=1e-5", "schedule.kind=constant", "train.horizon=8 steps", name="b")
    assert train(fork).steps == 8
    metrics = lines(fork.run_dir / "metrics.jsonl")
    assert [(m["step"], m["lr"]) for m in metrics] == [(7, 1e-5), (8, 1e-5)]


def test_a_fork_whose_horizon_is_past_is_refused_and_leaves_nothing(session, tmp_path):
    train(session())
    with pytest.raises(UserError, match=r"is at step 6, and train.horizon is '3 steps'"):
        session(f"checkpoint.resume_from='{tmp_path / 'run'}'", "train.horizon=3 steps", name="b")
    assert not (tmp_path / "b").exists()


def test_rates_that_differ_in_late_digits_are_printed_apart(session):
    usual = ["schedule.kind=cosine", "schedule.floor=0.9999999"]
    train(session(*usual))
    with pytest.raises(UserError, match="of the peak learning rate") as refused:
        session(*usual, "train.horizon=9 steps")
    was, now = re.search(r"had (\S+) of .* would have (\S+) with", str(refused.value)).groups()
    assert was != now


def test_a_warm_up_longer_than_the_run_is_pointed_out(session):
    run = session("schedule.warmup=12 steps")
    run.data.loader.close()
    assert [d.reason for d in run.record.decisions if d.name == "warm-up"] == [
        "longer than the run: the learning rate ends at 50% of optim.lr"
    ]


def test_the_run_file_is_published_whole_and_only_when_it_changes(session, tmp_path):
    """A kill while it is first written leaves nothing that would be taken for a run."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml.tmp").write_text("[run")
    train(session())
    before = (tmp_path / "run" / "run.toml").stat()
    session().data.loader.close()
    assert (tmp_path / "run" / "run.toml").stat().st_ino == before.st_ino
    session("observe.log_every=2").data.loader.close()
    assert (tmp_path / "run" / "run.toml").stat().st_ino != before.st_ino
    assert not (tmp_path / "run" / "run.toml.tmp").exists()


def fill(disk):
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))


def test_a_full_disk_does_not_stop_training_and_nothing_is_lost_when_there_is_room_again(
    session, small_disk, capsys
):
    class Disk(Hook):
        def on_metrics(self, session, metrics):
            if metrics.step == 3:
                fill(small_disk)
            if metrics.step == 32:
                (small_disk / "filler").unlink()

    unsaved = ["checkpoint.every=false", "checkpoint.at_end=false", "checkpoint.export=false"]
    run = session(
        f"run.dir='{small_disk}'", *unsaved, "train.horizon=36 steps", "eval.every=30 steps", hooks=[Disk()]
    )
    train(run)
    assert [line["step"] for line in lines(run.run_dir / "metrics.jsonl")] == list(range(1, 37))
    assert [line["event"] for line in lines(run.run_dir / "events.jsonl")][-1] == "end"
    assert read_ledger(run.run_dir).samples == 36 * 8
    board = EventAccumulator(str(run.run_dir / "tensorboard"))
    board.Reload()
    assert [s.step for s in board.Scalars("loss")] == list(range(1, 37))
    printed = capsys.readouterr().err
    assert printed.count("metrics.jsonl cannot be written (No space left on device)") == 1
    assert printed.count("metrics.jsonl is written again") == 1


def test_a_disk_that_stays_full_does_not_stop_training_either(session, small_disk, capsys):
    class Disk(Hook):
        def on_start(self, session):
            fill(small_disk)

    unsaved = ["checkpoint.every=false", "checkpoint.at_end=false", "checkpoint.export=false"]
    assert train(session(f"run.dir='{small_disk}'", *unsaved, hooks=[Disk()])).steps == 6
    assert "of metrics.jsonl are lost" in capsys.readouterr().err.replace(f"{small_disk}/run/", "")


def test_half_a_line_left_by_a_kill_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    LineFile(path).line({"step": 2, "loss": float("nan")})
    assert path.read_text().splitlines()[2:] == ['{"step": 2, "loss": null}']


def test_the_ledger_is_written_when_a_checkpoint_is_in_place_and_not_at_logged_steps(session):
    seen = []

    class Look(Hook):
        def on_metrics(self, session, metrics):
            session.record.saver.wait(session)
            seen.append(read_ledger(session.run_dir).samples // 8)

    train(session("checkpoint.every=4 steps", hooks=[Look()]))
    assert seen == [0, 0, 0, 4, 4, 6]


def test_a_modified_preset_is_not_shown_as_the_preset(session):
    for sets, shown in (([], "vocab_size 4096"), (["model.layers=1"], "layers 1")):
        run = session(*sets, "train.horizon=1 step", "checkpoint.export=false", name=f"run{len(sets)}")
        run.data.loader.close()
        output = io.StringIO()
        ConsoleProgress(Console(file=output, width=200)).on_start(run)
        row = next(line for line in output.getvalue().splitlines() if line.startswith("model "))
        assert "llama-test, modified" in row
        assert shown in row


def test_the_progress_line_fits_a_hundred_columns(session):
    run = session("train.horizon=1000000 steps")
    run.data.loader.close()
    output = io.StringIO()
    progress = ConsoleProgress(Console(file=output, width=100))
    progress.on_start(run)
    numbers = {"loss": 3.21, "grad_norm": 0.84, "lr": 3e-4, "tokens_per_s": 123_456.0, "step_s": 4.0}
    numbers |= {"data_wait": 0.0, "peak_mem_gib": 71.3, "mfu": 0.412}
    progress.on_metrics(run, StepMetrics(step=1, tokens=512, **numbers))
    line = output.getvalue().splitlines()[-1]
    assert line.split("  ")[-7:] == [
        "loss 3.210", "lr 3.0e-04", "norm 0.84", "123k tok/s", "MFU 41%", "71.3 GiB", "ETA 46.3 d",
    ]  # fmt: skip
    assert len(line) <= 100


def test_a_wall_time_horizon_ends_the_run_and_still_evaluates(session):
    run = session(
        "train.horizon=2s", "schedule.kind=constant", "eval.every=100 steps", "observe.log_every=1000"
    )
    outcome = train(run)
    assert outcome.steps > 1
    assert lines(run.run_dir / "metrics.jsonl")[-1]["eval_loss"] == outcome.last_eval_loss


def test_a_resumed_run_keeps_its_precision(session):
    train(session("precision.compute=bf16", "optim.state=bf16"))
    with pytest.raises(UserError, match=r'precision\.compute was "bf16", is "auto"'):
        session("optim.state=bf16")
    # an open key takes the value of the run
    assert session("precision.compute=bf16", "optim.state=auto").config.optim.state == "bf16"


def test_the_same_run_may_be_repeated_and_a_different_one_is_refused(session):
    train(session())
    train(session())
    with pytest.raises(UserError, match=r"already holds a different run \(optim.lr was 0.00\d+, is 0.5\)"):
        session("optim.lr=0.5")


def test_a_directory_with_other_files_is_refused(session, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="holds files but no run"):
        session()


def test_a_refused_run_leaves_nothing_behind(session, tmp_path):
    for sets in (
        ["model.vocab_size=4000"],
        ["parallel.tp=2"],
        ["eval.heldout=1T tok"],
        ["data.sources=[{path='gone'}]"],
    ):
        with pytest.raises(UserError):
            session(*sets)
    assert list(tmp_path.iterdir()) == []


def test_a_compiled_model_trains_the_same(session):
    eager = losses(session("train.horizon=2 steps", name="eager"))
    torch._dynamo.utils.counters.clear()
    compiled = losses(session("train.horizon=2 steps", "precision.compile=true", name="compiled"))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert compiled == pytest.approx(eager, rel=1e-4)


def test_a_text_that_grows_is_continued_without_compiling_anything_more(session):
    run = session("train.horizon=1 steps", "precision.compile=true")
    train(run)
    counts = torch._dynamo.utils.counters["stats"]
    before = counts["unique_graphs"]
    assert before > 0
    assert sample(run, None)
    assert counts["unique_graphs"] == before


@pytest.mark.parametrize(("packing", "vary"), [("concat", False), ("bestfit", False), ("none", True)])
def test_blocks_are_compiled_for_any_width_only_where_widths_vary(packing, vary):
    config = load_run(None, [*BASE, f"data.packing={packing}"], expand).config
    assert model_options(arrange(config, World())).widths_vary is vary


def test_masked_documents_cost_less_and_count_so(session):
    """A masked batch is counted at the mean length of the documents its tokens stand in."""
    run = session()
    run.data.loader.close()
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    whole = Batch(0, tokens, tokens, real_tokens=64)
    positions = torch.cat((torch.arange(16), torch.arange(48)))[None].int()
    cut = Batch(0, tokens, tokens, positions, positions, real_tokens=64)
    attended = (16 * 16 + 48 * 48) / 64
    assert run.flops(whole) == 64 * flops_per_token(run.spec, 64)
    assert run.flops(cut) == pytest.approx(64 * flops_per_token(run.spec, 64, attended=attended))


def test_a_model_that_transformers_refuses_is_still_saved_whole(session):
    run = session("model.heads=5", "model.kv_heads=1", "model.head_dim=16")
    outcome = train(run)
    state, spec = load_hf(outcome.model)
    assert spec.to_dict() == run.spec.to_dict()
    assert all(torch.equal(state[name], weight) for name, weight in run.model.tensors().items())


def test_a_run_may_leave_no_model(session):
    run = session("checkpoint.export=false", "checkpoint.at_end=false")
    assert train(run).model is None
    assert not (run.run_dir / "model").exists()
    assert lines(run.run_dir / "events.jsonl")[-1]["model"] is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_recorded_and_ends_the_run(session, number):
    class Stop(Hook):
        def on_step(self, session, step, tokens):
            if step == 3:
                signal.raise_signal(number)

    run = session(hooks=[Stop()])
    with pytest.raises(Interrupted), Requests():
        train(run)
    last = lines(run.run_dir / "events.jsonl")[-1]
    assert (last["event"], last["signal"], last["step"]) == ("signal", number.name, 3)


def test_a_hook_that_fails_while_a_fault_is_printed_does_not_silence_the_others(session):
    class Broken(Hook):
        def on_step(self, session, step, tokens):
            raise RuntimeError("first")

        def on_fault(self, session, step, error):
            raise RuntimeError("second")

    heard = []

    class Listener(Hook):
        def on_fault(self, session, step, error):
            heard.append(str(error))

    with pytest.raises(RuntimeError, match="first"):
        train(session(hooks=[Broken(), Listener()]))
    assert heard == ["first"]


def test_paths_and_logging_may_change_between_restarts(session, corpus_cache, tmp_path):
    first = train(session("train.horizon=3 steps", "schedule.kind=constant"))
    moved = tmp_path / "elsewhere"
    moved.symlink_to(corpus_cache)
    changed = [f"data.cache='{moved}'", "observe.log_every=2", "observe.sample='x'"]
    run = session(*changed, "schedule.kind=constant")
    assert (first.steps, train(run).steps) == (3, 6)
    assert [line["step"] for line in lines(run.run_dir / "metrics.jsonl")] == [1, 2, 3, 4, 6]


def test_a_wall_time_run_ends_well_where_its_data_may_not_be_read_again(session):
    sets = ["train.horizon=1h", "schedule.kind=constant", "eval.every=1h"]
    run = session(*sets, "data.sources=[{path='builtin:stdlib', max_epochs=0.002}]")
    outcome = train(run)
    assert outcome.steps == run.data.max_steps
    assert 5 < outcome.steps < 20
    assert lines(run.run_dir / "events.jsonl")[-1]["event"] == "end"


def test_a_wall_time_run_that_may_not_take_one_step_is_refused(session, tmp_path):
    with pytest.raises(UserError, match="from step 1 on; raise its max_epochs"):
        session(
            "train.horizon=1h",
            "schedule.kind=constant",
            "data.sources=[{path='builtin:stdlib', max_epochs=0.00001}]",
        )
    assert list(tmp_path.iterdir()) == []
