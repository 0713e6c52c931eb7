from dataclasses import replace

import pytest

from arriero.config.load import load_run
from arriero.model.presets import expand, load_preset
from arriero.plan.hardware import Machine
from arriero.plan.layout import Layout
from arriero.plan.memory import (
    Need,
    loss_chunk,
    micro_batch_that_fits,
    need_of,
    state_bytes,
)

LAYOUT = Layout()
SPEC = load_preset("llama-demo")
NEED = Need(state=1000, per_sequence=100, logits_per_token=0, tokens=1, chunk=None, sequences=12)
DIVISORS = [1, 2, 3, 4, 6, 12]


def config(*sets):
    return load_run(None, list(sets), expand).config


@pytest.mark.parametrize(("room_for", "chosen"), [(12, 12), (11, 6), (5, 4), (1, 1)])
def test_the_largest_divisor_that_fits_is_taken(room_for, chosen):
    memory = int((1000 + 100 * room_for) / 0.9) + 2
    assert micro_batch_that_fits(NEED, DIVISORS, memory).sequences == chosen


def test_a_sequence_that_seems_not_to_fit_is_tried_with_a_warning():
    fits = micro_batch_that_fits(NEED, DIVISORS, NEED.state + 1)
    assert fits.sequences == 1
    assert "even 1 may not fit" in fits.reason


def test_bf16_compute_keeps_fp32_state_and_its_own_weights():
    assert state_bytes(config(), SPEC, Layout(), 4) == 16 * SPEC.parameters
    assert state_bytes(config(), SPEC, Layout(), 2) == 14 * SPEC.parameters
    pure = config("precision.master=bf16", "optim.state=bf16")
    assert state_bytes(pure, SPEC, Layout(), 2) == 8 * SPEC.parameters


def test_each_kind_of_sharding_lightens_a_rank():
    spec = load_preset("llama3-8b")
    alone = need_of(config(), spec, Layout(), 2)
    for layout in (Layout(dp_shard=8), Layout(tp=8), Layout(pp=8)):
        assert need_of(config(), spec, layout, 2).state < alone.state / 4, layout
    for layout in (Layout(cp=8), Layout(tp=8)):
        assert need_of(config(), spec, layout, 2).per_sequence <= alone.per_sequence / 8, layout


def test_recomputation_keeps_less():
    kinds = ["none", "selective", "fraction:3/4", "full"]
    sizes = [
        need_of(config(f"memory.activation_checkpointing={k}"), SPEC, Layout(), 2).per_sequence for k in kinds
    ]
    deep = replace(SPEC, layers=40)
    deeper = [
        need_of(config(f"memory.activation_checkpointing={k}"), deep, Layout(), 2).per_sequence for k in kinds
    ]
    assert sorted(sizes, reverse=True) == sizes
    assert sorted(deeper, reverse=True) == deeper


def test_gradients_that_wait_for_the_last_micro_batch_count():
    spec, layout = load_preset("llama3-8b"), Layout(dp_shard=8)
    last, each = (need_of(config(f"parallel.sync={kind}"), spec, layout, 2) for kind in ("last", "each"))
    assert last.bytes(1) - each.bytes(1) == 4 * spec.parameters
    assert last.bytes(last.sequences) == each.bytes(each.sequences)


def test_state_in_host_memory_does_not_count_on_the_device():
    spec, layout = load_preset("llama3-8b"), Layout(dp_shard=8)
    here, away = (
        state_bytes(config(f"memory.offload_state={w}"), spec, layout, 2) for w in ("false", "true")
    )
    assert here - away == 16 * spec.parameters // 8


def test_logits_count_for_a_chunk_or_for_all_tokens_at_once():
    spec = load_preset("llama3-8b")
    chunked, whole = (need_of(config(), spec, Layout(), 2, chunk) for chunk in (512, False))
    assert whole.bytes(4) - chunked.bytes(4) == (4 * whole.tokens - 512) * whole.logits_per_token


def test_a_schedule_without_backward_in_between_holds_the_whole_batch():
    gpipe, usual = (
        need_of(config(f"parallel.schedule={name}"), SPEC, Layout(pp=2), 2) for name in ("gpipe", "1f1b")
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


def test_a_cpu_needs_room_to_unpack_moments_of_eight_bits_where_activations_are_few():
    many, few = (
        config("optim.state=int8"),
        config("optim.state=int8", "memory.activation_checkpointing=full", "data.seq_len=8"),
    )
    spec = load_preset("llama3.2-1b")
    need = need_of(few, spec, Layout(), 4)
    assert need.bytes(1) - need.state == 64 * spec.vocab_size * spec.dim
    assert need_of(few, spec, Layout(dp_shard=4), 4).update == need.update // 4
    assert need_of(few, spec, Layout(), 4, on_gpu=True).update == 0
    assert need_of(many, spec, Layout(), 4).bytes(64) > need.bytes(64)


def test_a_float8_head_has_its_weight_and_slope_in_both_layouts():
    spec = load_preset("llama3.1-8b")
    plain = need_of(config("precision.float8=tensorwise"), spec, Layout(), 2)
    head = need_of(config("precision.float8=tensorwise", "precision.float8_head=true"), spec, Layout(), 2)
    assert head.head_cast == 2 * spec.vocab_size * spec.dim and plain.head_cast == 0
    assert head.logits_per_token - plain.logits_per_token == 2 * spec.vocab_size
