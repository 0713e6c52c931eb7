"""Only the same work is compared, and a difference within the spread is none."""

import pytest

from arriero.bench.result import StepResult, Timing, compare_results, compare_timings
from arriero.errors import UserError


def steps(*milliseconds, warmup=1):
    return Timing.of(milliseconds, 512, warmup, 1.0)


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (steps(100, 101, 102, 103), steps(50, 51, 52, 53), "the second is faster"),
        (steps(50, 51, 52, 53), steps(100, 101, 102, 103), "the first is faster"),
        (steps(90, 100, 110, 120), steps(85, 95, 105, 115), "no difference beyond the spread"),
    ],
)
def test_a_difference_is_one_only_beyond_the_quartiles(first, second, verdict):
    found = compare_timings(first, second)
    assert found.verdict == verdict
    assert found.least <= found.ratio <= found.most
    assert found.ratio == pytest.approx(first.median_ms / second.median_ms)


@pytest.mark.parametrize(
    ("first", "why"),
    [(steps(100), "one step has no spread"), (steps(100, 101, 102, warmup=0), "blocks are compiled")],
)
def test_what_has_no_spread_or_no_warm_up_is_not_called_faster(first, why):
    for found in (compare_timings(first, steps(50, 51, 52)), compare_timings(steps(50, 51, 52), first)):
        assert "undecided" in found.verdict and why in found.verdict


def test_different_work_is_refused_and_named(measured):
    result = StepResult.read(measured)
    other = result.work.model_copy(
        update={"float8": "tensorwise", "seq_len": 128, "model": result.work.model | {"layers": 9}}
    )
    with pytest.raises(UserError) as refused:
        compare_results(result, result.model_copy(update={"work": other}))
    for words in ("float8 is off and tensorwise", "seq_len is 64 and 128", "model.layers is 2 and 9"):
        assert words in str(refused.value)


def test_another_layout_or_mode_of_the_same_work_is_compare_timings(arriero, measured, tmp_path):
    result = StepResult.read(measured)
    other = result.model_copy(
        update={"layout": "dp_shard 2", "mode": "fp32, compiled", "timing": steps(1, 1, 1)}
    )
    other.write(tmp_path / "other.json")
    shown = arriero("bench", "compare", measured, "other.json")
    assert shown.returncode == 0, shown.stderr
    assert "the second is faster" in shown.stdout
    assert "dp_shard 2" in shown.stdout


def test_the_command_refuses_with_one_sentence(arriero, measured, tmp_path):
    result = StepResult.read(measured)
    work = result.work.model_copy(update={"tokens_per_step": 1024})
    result.model_copy(update={"work": work}).write(tmp_path / "other.json")
    refused = arriero("bench", "compare", measured, "other.json")
    assert refused.returncode == 2
    assert "tokens_per_step is 512 and 1024" in refused.stderr
    assert refused.stdout == ""
