"""The memory estimate: what it counts, and how close it is to runs measured on one GPU."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from arriero.config.fields import ActivationCheckpointing
from arriero.config.load import load_run
from arriero.model.costs import Mode
from arriero.model.presets import expand, load_preset
from arriero.plan.choose import loss_chunk
from arriero.plan.hardware import Machine, machine_named
from arriero.plan.layout import Layout, in_flight
from arriero.plan.memory import Choices, estimate_memory
from arriero.plan.resolve import resolve
from arriero.plan.rules import Draft

FILES = [Path(__file__).parent / "measured" / f"{name}.toml" for name in ("h200", "h200-defaults")]
MEASURED = [row for file in FILES for row in tomllib.loads(file.read_text(encoding="utf-8"))["rows"]]
GPU = Mode(compiled=True, element=2, fused_qkv=True)
SHARDED = Mode(compiled=True, element=2)
SPEC = load_preset("llama3.1-8b")
GIB = 2**30
ALONE = Layout()


def config(*sets):
    return load_run(
        None, ["model.preset=llama3.1-8b", "data.seq_len=8192", "train.batch=65536 tok", *sets], expand
    ).config


def estimate(*sets, layout=ALONE, kind="none", spec=SPEC, mode=GPU, **choices):
    made = Choices(ActivationCheckpointing.parse(kind), choices.pop("chunk", 8192), **choices)
    return estimate_memory(config(*sets), spec, layout, made, mode)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: row["name"])
def test_measured_peak_is_within_the_stated_bounds(row):
    """The prediction is within 5 % of the measured peak, and at most 2 % below it."""
    machine = replace(machine_named("h200"), memory_free=1 << 60)
    run = resolve(load_run(None, row["set"], expand).config, machine, 1)
    assert 0.98 <= run.predicted_bytes / GIB / row["gib"] <= 1.05


def test_state_bytes_per_parameter_follow_the_precisions():
    """Masters, gradients and two moments: 14 bytes with fp32 masters beside bf16, 16 in fp32, 8 in bf16."""
    assert estimate().state == 14 * SPEC.parameters
    assert estimate(mode=Mode(True, 4)).state == 16 * SPEC.parameters
    assert estimate("precision.master=bf16", "optim.state=bf16").state == 8 * SPEC.parameters
    assert estimate("optim.name=sgd").state == 6 * SPEC.parameters


def test_each_parallel_axis_reduces_the_memory_of_a_rank():
    alone = estimate()
    for layout in (Layout(dp_shard=8), Layout(tp=8), Layout(pp=8)):
        assert estimate(layout=layout).state < alone.state / 4, layout
    for layout in (Layout(cp=8), Layout(tp=8)):
        kept, less = (each.parts(1)["activations"] for each in (alone, estimate(layout=layout)))
        assert less < kept / 4, layout


def test_activation_checkpointing_reduces_activations():
    kinds = ["none", "selective:1/2", "selective", "attention:1/4+selective", "attention", "full"]
    sizes = [estimate(kind=kind).bytes(1) for kind in kinds]
    assert sorted(sizes, reverse=True) == sizes


def test_loss_chunk_has_its_logits_in_a_sixteenth_of_a_gpus_memory():
    gpu, cpu = (Machine("device", kind, 2**30, 2**30, torch=(2, 13)) for kind in ("cuda", "cpu"))

    def chunk(gib, *sets, layout=ALONE, machine=gpu):
        machine = replace(machine, memory_total=gib << 30)
        return loss_chunk(Draft.of(config(*sets), machine, SPEC, layout))

    assert [chunk(gib) for gib in (139, 80, 24, 0)] == [32768, 16384, 4096, 256]
    assert chunk(24, layout=Layout(tp=4)) == 16384
    assert chunk(24, machine=cpu) == 2048
    assert chunk(1 << 10, "memory.loss_chunk=77") == 77
    run = resolve(config("memory.loss_chunk=77", "train.batch=8192 tok"), machine_named("h200"), 1)
    assert run.loss_chunk == 77


def test_whole_gradients_wait_for_the_last_micro_batch_unless_each_is_reduced():
    layout = Layout(dp_shard=8)
    batch = ("train.batch=4194304 tok",)
    last, each = (
        estimate(*batch, layout=layout, mode=SHARDED, sync=sync, kind="full") for sync in ("last", "each")
    )
    assert last.bytes(1) - each.bytes(1) > 3 * SPEC.parameters
    assert last.bytes(last.sequences) == each.bytes(each.sequences)


def test_gradient_accumulation_adds_fp32_sums_beside_a_bf16_model():
    once, often = estimate("train.batch=8192 tok"), estimate()
    difference = often.bytes(1) - once.bytes(1)
    assert difference == pytest.approx(4 * SPEC.parameters, rel=0.01)


def test_frozen_parameters_have_neither_gradient_nor_optimizer_state():
    ends = 2 * SPEC.embedding_parameters
    frozen = estimate("optim.freeze=['embedding.*', 'head.*']")
    assert estimate().state - frozen.state == 10 * ends
    blocks = estimate("optim.freeze=['blocks.0.*', 'blocks.7.*']")
    assert estimate().state - blocks.state == 10 * 2 * SPEC.block_parameters


def test_offloaded_state_is_not_counted():
    layout = Layout(dp_shard=8)
    here, away = (estimate(f"memory.offload_state={w}", layout=layout) for w in ("false", "true"))
    assert here.state == 16 * SPEC.parameters // 8 and away.state == 0


def test_kept_gathered_weights_are_counted():
    layout = Layout(dp_shard=8)
    freed, kept = (estimate(layout=layout, reshard=reshard, kind="full") for reshard in (True, False))
    assert kept.bytes(1) - freed.bytes(1) > SPEC.parameters


def test_logits_are_counted_for_one_chunk_or_for_all_tokens():
    shallow = replace(SPEC, layers=2)
    chunked, whole = (estimate(chunk=chunk, spec=shallow).parts(8)["loss"] for chunk in (8192, False))
    # several chunks are summed in fp32
    sums = 2 * SPEC.embedding_parameters
    assert whole - chunked == 7 * 8192 * SPEC.vocab_size * 2 - sums


@pytest.mark.parametrize(
    ("schedule", "per_rank", "held"),
    [
        ("gpipe", 1, [16, 16, 16, 16]),
        ("1f1b", 1, [4, 3, 2, 1]),
        ("interleaved-1f1b", 2, [5.5, 4.5, 3.5, 2.5]),
        ("looped-bfs", 2, [16, 16, 16, 16]),
        ("zbv", 2, [4.5, 4.5, 4.5, 4.5]),
    ],
)
def test_pipeline_ranks_hold_the_micro_batches_of_their_schedule(schedule, per_rank, held):
    assert [in_flight(schedule, rank, 4, per_rank, 16) for rank in range(4)] == held


def test_first_pipeline_rank_holds_most_activations():
    sets = ("parallel.schedule=gpipe", "train.batch=131072 tok")
    gpipe, usual = estimate(*sets, layout=Layout(pp=4)), estimate(*sets[1:], layout=Layout(pp=4))
    assert gpipe.parts(1)["activations"] > 3.5 * usual.parts(1)["activations"]


def test_cpu_needs_memory_to_unpack_8_bit_optimizer_state():
    spec, cpu = load_preset("llama3.2-1b"), Mode(compiled=False, element=4, on_gpu=False)
    sets = ("optim.state=int8", "data.seq_len=8", "train.batch=8 tok")
    need = estimate(*sets, spec=spec, mode=cpu, kind="full")
    assert need.bytes(1) - need.state == 64 * spec.vocab_size * spec.dim
    sharded = estimate(*sets, spec=spec, mode=cpu, kind="full", layout=Layout(dp_shard=4))
    # a shard needs a quarter of it; then the gradients of the vocabulary, which are whole, need more
    quarter = need.parts(1)["working memory"] // 4
    assert sharded.bytes(1) > sharded.state + quarter
    assert "working memory" not in sharded.parts(1)


def test_float8_head_keeps_weight_and_gradient_by_rows_and_by_columns():
    sets = ("precision.float8=tensorwise", "train.batch=32768 tok")
    plain, head = (
        estimate(*sets, f"precision.float8_head={on}", chunk=32768, spec=replace(SPEC, layers=2))
        for on in ("false", "true")
    )
    added = head.parts(4)["loss"] - plain.parts(4)["loss"]
    assert added >= 2 * SPEC.vocab_size * 32768 + 2 * SPEC.embedding_parameters


def test_parts_sum_to_the_predicted_bytes():
    need = estimate()
    assert sum(need.parts(2).values()) == need.bytes(2)
    assert {"weights", "optimizer state", "gradients", "activations", "loss"} <= need.parts(2).keys()
