"""Derived settings with their reasons, and all problems of a run at once."""

import sys
from dataclasses import replace

import pytest

from arriero.config.keys import ConfigError
from arriero.config.load import load_run
from arriero.model.presets import expand
from arriero.plan.auto import prediction
from arriero.plan.hardware import Machine, machine_named
from arriero.plan.layout import AXES, Layout
from arriero.plan.memory import usable_bytes
from arriero.plan.resolve import Share, resolve

CPU = Machine("CPU", "cpu", 2**36, 2**36, torch=(2, 13))
H200 = machine_named("h200")
SMALL = [
    "model.preset=llama-test",
    "model.layers=4",
    "model.vocab_size=4096",
    "data.seq_len=64",
    "train.batch=512 tok",
    "schedule.warmup=1 step",
]
LARGE = ["model.preset=llama3.1-8b", "data.seq_len=8192", "train.batch=4194304 tok", "schedule.warmup=1 step"]


def config(*sets, base=SMALL):
    return load_run(None, [*base, *sets], expand).config


def resolved(*sets, ranks=1, machine=CPU, base=SMALL):
    return resolve(config(*sets, base=base), machine, ranks)


def problems(*sets, ranks=1, machine=CPU, base=SMALL):
    with pytest.raises(ConfigError) as caught:
        resolved(*sets, ranks=ranks, machine=machine, base=base)
    return list(caught.value.problems)


def decisions(run):
    return {decision.name: decision.value for decision in run.decisions}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_dp_shard_takes_all_ranks_by_default(ranks):
    assert resolved(ranks=ranks).layout == Layout(dp_shard=ranks)


@pytest.mark.parametrize("axis", AXES)
def test_any_one_degree_may_be_left_open(axis):
    others = {other: 2 for other in AXES if other not in (axis, "dp_shard")}
    sets = [f"parallel.{name}={degree}" for name, degree in (others | {"dp_shard": 1, axis: -1}).items()]
    ranks = 2 ** len(others) * 2
    run = resolved(*sets, "train.batch=4096 tok", ranks=ranks)
    assert run.layout == Layout(**others, **{axis: 2})


DEGREES = [
    (["dp_shard=1", "tp=2"], 3, "parallel", "needs 2 ranks (tp 2), but this run has 3"),
    (["tp=2"], 3, "parallel", "needs a multiple of 2 ranks (tp 2), but this run has 3"),
    (["tp=-1"], 4, "parallel.tp", "parallel.dp_shard and parallel.tp are both -1"),
    (["dp_shard=1", "cp=2", "pp=3"], 1, "parallel", "needs 6 ranks (pp 3 x cp 2), but this run has 1"),
]
DIVISIONS = [
    (["tp=3"], [], "parallel.tp", "model.heads (4) does not divide over tp 3", "divisor of 4"),
    (["tp=4"], [], "parallel.tp", "model.kv_heads (2) does not divide over tp 4", "divisor of 2"),
    (["tp=2"], ["model.ffn=191"], "parallel.tp", "model.ffn (191) does not divide over tp 2", "divisor"),
    (
        ["tp=4"],
        ["model.vocab_size=6", "model.kv_heads=4"],
        "parallel.tp",
        "6 leaves one of tp 4 ranks without a row",
        "smaller tp",
    ),
    (["pp=8"], [], "parallel.pp", "4 layers cannot fill 8 pipeline stages", "parallel.pp"),
    (
        ["cp=2"],
        ["data.seq_len=63", "train.batch=630 tok"],
        "data.seq_len",
        "63 does not divide over cp 2",
        "multiple of 2",
    ),
    (
        ["cp=2", "tp=2"],
        ["data.seq_len=62", "train.batch=620 tok"],
        "data.seq_len",
        "62 does not divide over cp 2 x tp 2",
        "multiple of 4",
    ),
    (
        ["cp=2", "context=ring"],
        ["data.seq_len=62", "train.batch=620 tok"],
        "data.seq_len",
        "cp 2, in two chunks each",
        "multiple of 4",
    ),
    (["dp_shard=9"], [], "train.batch", "8 sequences leaves some of the 9 data-parallel ranks", "raise it"),
    (
        ["dp_shard=4", "dp_replicate=4"],
        [],
        "train.batch",
        "some of the 16 data-parallel ranks",
        "raise it",
    ),
    (
        ["cp=8", "context=ulysses"],
        [],
        "parallel.context",
        "'ulysses' cannot share 4 heads and 2 kv heads over cp 8",
        "'auto'",
    ),
]


@pytest.mark.parametrize(("degrees", "ranks", "key", "words"), DEGREES)
def test_degrees_that_do_not_multiply_to_the_ranks_are_rejected(degrees, ranks, key, words):
    found = problems(*(f"parallel.{each}" for each in degrees), ranks=ranks)
    assert (found[0].key, found[0].what) == (key, words)


@pytest.mark.parametrize(("degrees", "sets", "key", "words", "todo"), DIVISIONS)
def test_layouts_that_do_not_divide_the_work_are_rejected(degrees, sets, key, words, todo):
    numbers = [each.partition("=")[2] for each in degrees]
    ranks = 1
    for number in filter(str.isdigit, numbers):
        ranks *= int(number)
    shard = [] if any(each.startswith("dp_shard") for each in degrees) else ["parallel.dp_shard=1"]
    found = problems(*(f"parallel.{each}" for each in degrees), *shard, *sets, ranks=ranks)
    match = [problem for problem in found if words in problem.what]
    assert [problem.key for problem in match] == [key]
    assert todo in match[0].todo


SETTINGS = [
    (["parallel.tp=2", "data.packing='none'"], 2, "data.packing", "makes batches of varying width"),
    (["parallel.cp=2", "data.packing='none'"], 2, "data.packing", "makes batches of varying width"),
    (["parallel.pp=2", "data.packing='none'"], 2, "data.packing", "makes batches of varying width"),
    (
        ["parallel.pp=2", "parallel.schedule='zbv'", "precision.compile=true"],
        2,
        "precision.compile",
        "splits the backward pass",
    ),
    (
        ["parallel.pp=2", "parallel.schedule='zbv'", "memory.activation_checkpointing='selective'"],
        2,
        "memory.activation_checkpointing",
        "runs two backward passes",
    ),
    (["train.micro_batch=8"], 2, "train.micro_batch", "cannot be divided into micro-batches of 8"),
    (["parallel.pp=2", "train.micro_batch=8"], 2, "train.micro_batch", "schedule '1f1b' over 2 ranks"),
    (["parallel.pp=2", "parallel.stages_per_rank=2"], 2, "parallel.stages_per_rank", "needs 1 stages"),
    (
        ["parallel.pp=2", "parallel.schedule='interleaved-1f1b'", "parallel.stages_per_rank=1"],
        2,
        "parallel.stages_per_rank",
        "needs two or more stages",
    ),
    (
        ["parallel.pp=2", "parallel.schedule='zbv'", "train.batch=128 tok"],
        2,
        "train.batch",
        "cannot be divided into micro-batches",
    ),
    (["parallel.pp=2", "parallel.sync=each"], 2, "parallel.sync", "not possible in a pipeline"),
    (["parallel.tp=2", "memory.offload_state=true"], 2, "memory.offload_state", "the layout tp 2 has none"),
    (["parallel.reshard=3"], 2, "parallel.reshard", "3 does not divide the 2 ranks"),
    (["parallel.tp=2", "parallel.async_tp=true"], 2, "parallel.async_tp", "tensor-parallel layers on GPUs"),
    (
        ["memory.ffn_tile=8", "memory.activation_checkpointing=selective"],
        1,
        "memory.ffn_tile",
        "recomputes its tiles itself",
    ),
    (
        ["memory.activation_checkpointing=budget:0.5"],
        1,
        "memory.activation_checkpointing",
        "applied by the compiler",
    ),
    (["precision.master=bf16", "precision.compute=fp16"], 1, "precision.master", "compute in bf16"),
    (["run.device=cuda"], 1, "run.device", "is not a GPU"),
    (["precision.float8=tensorwise"], 1, "precision.float8", "this run computes in fp32"),
    (["precision.float8_head=true"], 1, "precision.float8_head", "precision.float8 is 'off'"),
]
FLOAT8 = ["precision.float8=tensorwise", "precision.compute=bf16"]
FLOAT8_SETTINGS = [
    (["precision.compute=fp32"], "precision.float8"),
    (["precision.float8_all_gather=true", "precision.float8=rowwise"], "precision.float8_all_gather"),
    (
        ["precision.float8_all_gather=true", "parallel.dp_shard=1", "parallel.tp=2"],
        "precision.float8_all_gather",
    ),
    (["data.seq_len=120", "train.batch=1200 tok"], "data.seq_len"),
    (["data.seq_len=48", "train.batch=480 tok", "parallel.cp=2"], "data.seq_len"),
    (["data.packing=none"], "data.packing"),
]


@pytest.mark.parametrize(("sets", "ranks", "key", "words"), SETTINGS)
def test_settings_that_exclude_each_other_are_rejected(sets, ranks, key, words):
    found = problems(*sets, ranks=ranks)
    assert [problem.key for problem in found] == [key]
    assert words in found[0].what
    assert found[0].todo


@pytest.mark.parametrize(("sets", "key"), FLOAT8_SETTINGS)
def test_settings_that_float8_excludes_are_rejected(sets, key):
    found = problems(*FLOAT8, *sets, ranks=2)
    assert [problem.key for problem in found] == [key]


@pytest.mark.parametrize(("name", "rejected"), [("h100", False), ("a100-80", True), ("mi300x", True)])
def test_float8_head_is_rejected_on_gpus_without_kernels_for_it(name, rejected):
    sets = [*FLOAT8, "precision.float8_head=true"]
    machine = machine_named(name)
    if rejected:
        assert machine.name in problems(*sets, machine=machine)[0].what
    else:
        assert resolved(*sets, machine=machine).compute == "bf16"


@pytest.mark.parametrize(
    ("name", "torch", "rejected"), [("zbv", (2, 11), True), ("zbv", (2, 13), False), ("1f1b", (2, 11), False)]
)
def test_v_shaped_schedules_need_a_recent_torch_on_a_cpu(name, torch, rejected):
    sets, machine = ["parallel.pp=2", f"parallel.schedule='{name}'"], replace(CPU, torch=torch)
    if rejected:
        assert (
            "needs torch 2.13 on a CPU, and this is 2.11" in problems(*sets, ranks=2, machine=machine)[0].what
        )
    else:
        assert resolved(*sets, ranks=2, machine=machine).layout.pp == 2


def test_gpus_of_another_kind_than_run_device_are_rejected():
    assert "is a GPU" in problems("run.device=cpu", machine=H200)[0].what


def test_all_problems_are_reported_at_once():
    found = problems(
        "parallel.tp=3",
        "parallel.reshard=5",
        "precision.float8=rowwise",
        "memory.activation_checkpointing=budget:0.1",
        ranks=64,
    )
    assert {problem.key for problem in found} == {
        "parallel",
        "parallel.tp",
        "parallel.reshard",
        "precision.float8",
        "memory.activation_checkpointing",
        "data.seq_len",
    }
    assert [p.what for p in found if p.key == "parallel.tp"] == [
        "model.heads (4) does not divide over tp 3",
        "model.kv_heads (2) does not divide over tp 3",
    ]


def test_phases_have_their_own_problems():
    phases = ["{at='5 steps', batch='64 tok'}", "{at='9 steps', seq_len=32}", "{at='20 steps', seq_len=2}"]
    found = problems(f"data.phases=[{', '.join(phases)}]", "parallel.cp=4", "parallel.dp_shard=2", ranks=8)
    assert [problem.key for problem in found] == ["data.phases[2].seq_len", "data.phases[0].batch"]


@pytest.mark.parametrize("degrees", [(1, 1, 1, 1, 1), (2, 2, 2, 2, 2), (4, 1, 1, 1, 1), (1, 1, 1, 4, 2)])
def test_layouts_that_divide_the_work_are_accepted(degrees):
    layout = Layout(*degrees)
    sets = [f"parallel.{axis}={degree}" for axis, degree in zip(AXES, degrees, strict=True)]
    assert resolved(*sets, "train.batch=4096 tok", ranks=layout.ranks).layout == layout


def test_vocabulary_need_not_divide():
    assert resolved("parallel.tp=2", "model.vocab_size=4097", ranks=2).layout.tp == 2


@pytest.mark.parametrize(
    ("machine", "sets", "compute"),
    [
        (CPU, [], "fp32"),
        (CPU, ["precision.compute=bf16"], "bf16"),
        (CPU, ["precision.compute=fp16"], "fp16"),
        (CPU, ["precision.master=bf16"], "bf16"),
        (H200, [], "bf16"),
        (replace(H200, bf16=False), [], "fp32"),
    ],
)
def test_compute_precision_follows_the_device_unless_set(machine, sets, compute):
    assert resolved(*sets, machine=machine).compute == compute


def test_bf16_is_rejected_where_the_device_lacks_it():
    old = replace(H200, bf16=False)
    for sets in (["precision.compute=bf16"], ["precision.master=bf16"]):
        assert [p.key for p in problems(*sets, machine=old)] == ["precision.compute"]


@pytest.mark.parametrize(
    ("model", "machine", "compiled"),
    [("llama3.2-1b", H200, True), ("llama-demo", H200, False), ("llama3.2-1b", CPU, False)],
)
def test_blocks_are_compiled_on_gpus_unless_they_are_tiny(model, machine, compiled):
    assert resolved(machine=machine, base=[f"model.preset={model}"]).compiled is compiled


def test_split_backward_passes_are_not_compiled():
    sets = ["parallel.pp=2", "parallel.schedule='zbv'", "memory.activation_checkpointing='full'"]
    one_block = ["model.preset=llama3.2-1b", "schedule.warmup=1 step"]
    assert resolved(*sets, ranks=2, machine=H200, base=one_block).compiled is False


def test_ranks_of_a_v_shaped_schedule_hold_both_arms():
    run = resolved("parallel.pp=2", "parallel.schedule='zbv'", ranks=2)
    assert [[list(stage) for stage in run.stages_of(rank)] for rank in range(2)] == [[[0], [3]], [[1], [2]]]


def test_decisions_name_the_layout_and_its_stages():
    run = resolved("parallel.pp=2", "parallel.cp=2", ranks=4)
    found = decisions(run)
    assert found["layout"] == "pp 2 x cp 2"
    assert found["context parallel"] == "Ulysses 2"
    assert found["stages"] == "3 | 1 blocks"
    assert (run.ulysses, run.ring) == (2, 1)


def test_a_model_that_cannot_fit_is_rejected():
    small = machine_named("a100-40")
    found = problems(base=LARGE, machine=small)
    assert [p.key for p in found] == ["memory"]
    assert found[0].what.startswith("a rank needs ") and "are free" in found[0].what
    assert found[0].todo.startswith("start 4 ranks, on which it fits with parallel.tp = 4")
    planned = resolved("parallel=auto", base=LARGE, machine=small, ranks=4)
    assert planned.predicted_bytes < small.memory_free
    assert resolved(base=LARGE, machine=small, ranks=64).shares[0].sequences == 8


def test_every_phase_has_its_micro_batch_and_gradient_accumulation():
    run = resolved("data.phases=[{at='5 steps', batch='2048 tok'}]", "train.micro_batch=4", ranks=2)
    assert run.shares == (Share(4, 4), Share(16, 4))
    assert [share.gradient_accumulation for share in run.shares] == [1, 4]
    assert decisions(run)["from step 6"].startswith("2048 tok per step in sequences of 64")


def test_least_memory_of_all_ranks_decides():
    free = 24 * 2**30
    run = resolved(
        "data.seq_len=2048", "parallel.sync=each", base=LARGE, ranks=64, machine=machine_named("a100-80")
    )
    least = run.with_least_memory(free, free)
    assert least.micro_batch < run.micro_batch
    machine = replace(run.machine, memory_free=free, memory_total=free)
    assert least.shares == resolve(run.config, machine, 64).shares
    reasons = {decision.name: decision.reason for decision in least.decisions}
    assert reasons["micro-batch"] == "the rank with the least free memory decides"
    assert reasons["compute"] == "NVIDIA A100-SXM4-80GB supports bf16"
    assert run.with_least_memory(run.machine.memory_free, run.machine.memory_total) is run


AUTO = [*LARGE, "memory.activation_checkpointing=auto", "optim.state=bf16", "precision.master=bf16"]


def test_the_default_is_nearly_as_fast_as_settings_just_above_the_memory_limit():
    base = ["model.preset=llama3.1-8b", "data.seq_len=8192", "train.batch=65536 tok"]
    default = resolved(machine=H200, base=base)
    tuned = resolved(
        "train.micro_batch=1", "memory.activation_checkpointing=selective", machine=H200, base=base
    )
    assert str(default.activation_checkpointing) == "attention:7/32+selective"
    assert default.predicted_bytes <= usable_bytes(H200.memory_free, True) < tuned.predicted_bytes
    fast, fastest = (prediction(each)["tokens_per_s_per_device"] for each in (default, tuned))
    assert fast > 0.97 * fastest


@pytest.mark.parametrize(
    ("seq_len", "chosen"), [(8192, "none"), (32768, "selective"), (131072, "full:3/8+attention")]
)
def test_auto_takes_the_least_activation_checkpointing_that_fits(seq_len, chosen):
    run = resolved(f"data.seq_len={seq_len}", machine=H200, base=AUTO)
    assert decisions(run)["activation checkpointing"] == chosen
    assert str(run.activation_checkpointing) == str(run.memory.activation_checkpointing) == chosen
    assert str(run.config.memory.activation_checkpointing) == "auto"
    assert run.predicted_bytes < H200.memory_free


@pytest.mark.parametrize(("sets", "reason"), [((), "not needed"), (("full",), "as configured")])
def test_decision_tells_a_derived_value_from_a_setting(sets, reason):
    run = resolved(*(f"memory.activation_checkpointing={kind}" for kind in sets))
    assert {each.name: each.reason for each in run.decisions}["activation checkpointing"] == reason


def test_auto_skips_selective_where_it_is_not_possible():
    run = resolved("data.seq_len=32768", "memory.ffn_tile=4096", machine=H200, base=AUTO)
    assert str(run.activation_checkpointing) in ("none", "full")


def instructions(work):
    """Return the result of `work` and the number of Python instructions that it executes."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return work(), count
    finally:
        sys.settrace(before)


def test_resolving_takes_as_much_work_for_128_times_as_many_ranks():
    def config(sequences):
        sets = [
            "model.preset=llama3.1-405b",
            "data.seq_len=8192",
            f"train.batch={8192 * sequences} tok",
            "schedule.warmup=1 step",
            "parallel.pp=16",
            "parallel.tp=8",
        ]
        return load_run(None, sets, expand).config

    # both shard the weights, so both have the same settings to choose from
    small, large = config(2**14), config(2**21)
    # warm caches, which the first call fills
    for run, ranks in ((small, 256), (large, 32768)):
        resolve(run, H200, ranks)
    _, few = instructions(lambda: resolve(small, H200, 256))
    run, many = instructions(lambda: resolve(large, H200, 32768))
    assert many < 1.5 * few
    assert run.layout == Layout(pp=16, dp_shard=256, tp=8)
    assert len(run.stages) == 16


def test_resolving_and_checking_do_not_load_torch(python):
    script = """
import sys
from arriero.config.load import load_run
from arriero.model.presets import expand
from arriero.plan.hardware import machine_named
from arriero.plan.resolve import resolve
resolve(load_run(None, ["train.batch=65536 tok"], expand).config, machine_named("h200"), 64)
sys.exit("torch" in sys.modules)
"""
    result = python("-c", script)
    assert result.returncode == 0, result.stderr
