import pytest

from arriero.errors import UserError
from arriero.model.presets import load_preset
from arriero.plan.memory import activation_bytes_per_token, micro_batch_that_fits, state_bytes

SPEC = load_preset("llama-demo")


def memory_for(sequences, seq_len=128):
    need = state_bytes(SPEC, 4) + sequences * seq_len * activation_bytes_per_token(SPEC, 4)
    return int(need / 0.9) + 2


@pytest.mark.parametrize(("room_for", "chosen"), [(12, 12), (11, 6), (5, 4), (1, 1)])
def test_the_largest_divisor_that_fits_is_taken(room_for, chosen):
    assert micro_batch_that_fits(SPEC, 128, 12, 4, memory_for(room_for)).sequences == chosen


def test_a_sequence_that_seems_not_to_fit_is_tried_with_a_warning():
    fits = micro_batch_that_fits(SPEC, 128, 12, 4, state_bytes(SPEC, 4) + 1)
    assert fits.sequences == 1
    assert "even one may not fit" in fits.reason


def test_a_state_that_cannot_fit_is_refused_before_anything_is_allocated():
    with pytest.raises(UserError, match=r"8.03B parameters needs 1\d\d.\d GiB .* 24.0 GiB are free"):
        micro_batch_that_fits(load_preset("llama3-8b"), 128, 12, 4, 24 * 2**30)


def test_bf16_compute_keeps_fp32_state_and_its_own_weights():
    assert state_bytes(SPEC, 4) == 16 * SPEC.parameters
    assert state_bytes(SPEC, 2) == 20 * SPEC.parameters
