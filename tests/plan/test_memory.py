from dataclasses import replace

import pytest

from arriero.config.load import load_run
from arriero.model.presets import expand, load_preset
from arriero.plan.hardware import Machine
from arriero.plan.layout import Layout
from arriero.plan.memory import (
    MemoryEstimate,
    estimate_memory,
    largest_that_fits,
    loss_chunk,
    state_bytes,
)

LAYOUT = Layout()
SPEC = load_preset("llama-demo")
ESTIMATE = MemoryEstimate(
    state=1000, per_sequence=100, logits_per_token=0, tokens=1, chunk=None, sequences=12
)
DIVISORS = [1, 2, 3, 4, 6, 12]


def config(*sets):
    return load_run(None, list(sets), expand).config


@pytest.mark.parametrize(("room_for", "chosen"), [(12, 12), (11, 6), (5, 4), (1, 1)])
def test_largest_micro_batch_that_fits_is_chosen(room_for, chosen):
    memory = int((1000 + 100 * room_for) / 0.9) + 2
    assert largest_that_fits(ESTIMATE, DIVISORS, memory)[0] == chosen


@pytest.mark.parametrize("free", [1001, 1110])
def test_micro_batch_1_is_tried_with_a_warning_if_none_fits(free):
    """1,110 bytes hold the 1,100 that it needs, but not with the margin of a tenth."""
    size, reason = largest_that_fits(ESTIMATE, DIVISORS, free)
    assert size == 1
    assert reason.startswith("even 1 needs more than 90% of the free memory, and may not fit: ")


def test_state_bytes_per_parameter_follow_the_precisions():
    assert state_bytes(config(), SPEC, Layout(), 4) == 16 * SPEC.parameters
    assert state_bytes(config(), SPEC, Layout(), 2) == 14 * SPEC.parameters
    pure = config("precision.master=bf16", "optim.state=bf16")
    assert state_bytes(pure, SPEC, Layout(), 2) == 8 * SPEC.parameters


def test_each_parallel_axis_reduces_the_memory_of_a_rank():
    spec = load_preset("llama3-8b")
    alone = estimate_memory(config(), spec, Layout(), 2)
    for layout in (Layout(dp_shard=8), Layout(tp=8), Layout(pp=8)):
        assert estimate_memory(config(), spec, layout, 2).state < alone.state / 4, layout
    for layout in (Layout(cp=8), Layout(tp=8)):
        assert estimate_memory(config(), spec, layout, 2).per_sequence <= alone.per_sequence / 8, layout


def test_activation_checkpointing_reduces_activations():
    kinds = ["none", "selective", "fraction:3/4", "full"]
    sizes = [
        estimate_memory(config(f"memory.activation_checkpointing={k}"), SPEC, Layout(), 2).per_sequence
        for k in kinds
    ]
    deep = replace(SPEC, layers=40)
    deeper = [
        estimate_memory(config(f"memory.activation_checkpointing={k}"), deep, Layout(), 2).per_sequence
        for k in kinds
    ]
    assert sorted(sizes, reverse=True) == sizes
    assert sorted(deeper, reverse=True) == deeper


def test_accumulated_gradients_are_counted():
    spec, layout = load_preset("llama3-8b"), Layout(dp_shard=8)
    last, each = (
        estimate_memory(config(f"parallel.sync={kind}"), spec, layout, 2) for kind in ("last", "each")
    )
    assert last.bytes(1) - each.bytes(1) == 4 * spec.parameters
    assert last.bytes(last.sequences) == each.bytes(each.sequences)


def test_offloaded_state_is_not_counted():
    spec, layout = load_preset("llama3-8b"), Layout(dp_shard=8)
    here, away = (
        state_bytes(config(f"memory.offload_state={w}"), spec, layout, 2) for w in ("false", "true")
    )
    assert here - away == 16 * spec.parameters // 8


def test_logits_are_counted_for_one_chunk_or_for_all_tokens():
    spec = load_preset("llama3-8b")
    chunked, whole = (estimate_memory(config(), spec, Layout(), 2, chunk) for chunk in (512, False))
    assert whole.bytes(4) - chunked.bytes(4) == (4 * whole.tokens - 512) * whole.logits_per_token


def test_gpipe_holds_the_activations_of_the_whole_batch():
    gpipe, usual = (
        estimate_memory(config(f"parallel.schedule={name}"), SPEC, Layout(pp=2), 2)
        for name in ("gpipe", "1f1b")
    )
    assert gpipe.bytes(1) > usual.bytes(1)
    assert gpipe.bytes(1) - gpipe.state > gpipe.per_sequence * gpipe.sequences / 2


def test_loss_chunk_has_its_logits_in_a_sixteenth_of_a_gpus_memory():
    spec = load_preset("llama3.1-8b")
    gpu, cpu = (Machine("device", kind, 2**30, 2**30) for kind in ("cuda", "cpu"))

    def chunk(gib, layout=LAYOUT, *sets):
        return loss_chunk(config(*sets), spec, layout, 2, replace(gpu, memory_total=gib << 30))[0]

    assert [chunk(gib) for gib in (139, 80, 24, 0)] == [32768, 16384, 4096, 256]
    assert chunk(24, Layout(tp=4)) == 16384
    assert loss_chunk(config(), spec, Layout(), 4, cpu)[0] == 2048
    assert chunk(1 << 10, LAYOUT, "memory.loss_chunk=77") == 77


def test_cpu_needs_memory_to_unpack_8_bit_optimizer_state():
    many, few = (
        config("optim.state=int8"),
        config("optim.state=int8", "memory.activation_checkpointing=full", "data.seq_len=8"),
    )
    spec = load_preset("llama3.2-1b")
    need = estimate_memory(few, spec, Layout(), 4)
    assert need.bytes(1) - need.state == 64 * spec.vocab_size * spec.dim
    assert estimate_memory(few, spec, Layout(dp_shard=4), 4).update == need.update // 4
    assert estimate_memory(few, spec, Layout(), 4, on_gpu=True).update == 0
    assert estimate_memory(many, spec, Layout(), 4).bytes(64) > need.bytes(64)


def test_float8_head_keeps_weight_and_gradient_by_rows_and_by_columns():
    spec = load_preset("llama3.1-8b")
    plain = estimate_memory(config("precision.float8=tensorwise"), spec, Layout(), 2)
    head = estimate_memory(
        config("precision.float8=tensorwise", "precision.float8_head=true"), spec, Layout(), 2
    )
    assert head.head_cast == 2 * spec.vocab_size * spec.dim and plain.head_cast == 0
    assert head.logits_per_token - plain.logits_per_token == 2 * spec.vocab_size
