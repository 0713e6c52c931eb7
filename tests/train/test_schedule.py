import pytest

from arriero.config.schema import DataSection, PhaseSection, ScheduleSection, SourceSection, TrainSection
from arriero.config.timeline import Timeline
from arriero.train.schedule import make_shape
from arriero.units import Span

BATCH = 1000


def shape(steps, **schedule):
    train = TrainSection(batch=Span(BATCH, "tok"), horizon=Span(steps, "steps"))
    data = DataSection(sources=[SourceSection(path="x")], seq_len=10)
    return make_shape(ScheduleSection(**schedule), train, Timeline(data, train))


def rates(s, steps):
    return [s.at(step * BATCH, BATCH) for step in range(steps)]


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0), (1, 0.001), (500, 0.4375), (1000, 0.75), (5e5, 0.55), (1e6, 0.1)]
)
def test_fms_shape_equals_its_published_points(step, rate):
    s = shape(10**6, kind="fms")
    assert s.at(int(step) * BATCH, BATCH) == pytest.approx(rate, abs=5e-6 if step > 1000 else 5e-7)


@pytest.mark.parametrize(("step", "rate"), [(0, 0.001996), (499, 0.998004), (500, 1.0), (250_000, 0.500501)])
def test_frontier_shape_equals_its_published_points(step, rate):
    s = shape(500_000, kind="frontier", warmup="500 steps")
    assert s.at(step * BATCH, BATCH) == pytest.approx(rate, abs=5e-7)


def test_fms_annealing_is_linear_to_zero():
    s = shape(100, kind="fms-annealing")
    assert [s.at(step * BATCH, BATCH) for step in (0, 50, 100)] == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_warmup_rises_in_equal_steps_and_never_starts_at_zero(kind):
    first = rates(shape(100, kind=kind, warmup="10 steps", floor=1.0), 10)
    assert first == pytest.approx([0.1 * (i + 1) for i in range(10)])


@pytest.mark.parametrize(("kind", "floor"), [("linear", 0.0), ("cosine", 0.1), ("wsd", 0.0)])
def test_the_last_step_is_at_the_floor(kind, floor):
    assert rates(shape(100, kind=kind, warmup="10 steps"), 100)[-1] == pytest.approx(floor)
    assert rates(shape(100, kind=kind, floor=0.25), 100)[-1] == pytest.approx(0.25)


def test_wsd_is_stable_until_its_decay():
    r = rates(shape(100, kind="wsd", warmup="10 steps", decay="20 steps"), 100)
    assert r[9:80] == [1.0] * 71
    assert r[80:] == pytest.approx([(19 - i) / 20 for i in range(20)])


def test_cosine_passes_its_middle_half_way():
    r = rates(shape(101, kind="cosine", warmup="1 step", floor=0.0), 101)
    assert r[50] == pytest.approx(0.5)


def test_the_shape_does_not_change_when_steps_are_given_as_tokens():
    by_steps = shape(100, kind="cosine", warmup="10 steps")
    by_tokens = shape(100, kind="cosine", warmup="10k tok", horizon="100k tok")
    assert by_steps == by_tokens


def test_training_beyond_the_shape_stays_at_the_floor():
    for kind in ("linear", "cosine", "wsd", "frontier", "fms", "fms-annealing"):
        s = shape(10, kind=kind, floor=0.1, warmup="2 steps")
        assert s.at(50 * BATCH, BATCH) == pytest.approx(0.1)


def test_steps_tokens_and_samples_follow_the_phases():
    """100 steps of 10 sequences of 10, then 20 sequences, then 5 sequences of 40."""
    phases = [PhaseSection(at="100 steps", batch="200 tok"), PhaseSection(at="50k tok", seq_len=40)]
    data = DataSection(sources=[SourceSection(path="x")], seq_len=10, phases=phases)
    timeline = Timeline(data, TrainSection(batch="100 tok", horizon="1M tok"))
    assert [(p.step, p.tokens, p.sample, p.sequences) for p in timeline.phases] == [
        (0, 0, 0, 10),
        (100, 10_000, 1000, 20),
        (300, 50_000, 5000, 5),
    ]
    tokens = sample = 0
    for step in range(400):
        phase = timeline.at(step)
        assert timeline.tokens_after(step) == tokens
        assert timeline.samples_after(step) == sample
        assert timeline.at_sample(sample) == timeline.at_sample(sample + phase.sequences - 1) == phase
        assert timeline.steps_before(sample) == timeline.steps_before(sample + phase.sequences - 1) == step
        assert timeline.steps_of(Span(tokens, "tok")) == step
        assert timeline.steps_of(Span(tokens + 1, "tok")) == step + 1
        tokens, sample = tokens + phase.batch, sample + phase.sequences


def test_a_schedule_in_steps_follows_growing_batches():
    data = DataSection(
        sources=[SourceSection(path="x")], seq_len=10, phases=[PhaseSection(at="10 steps", batch="300 tok")]
    )
    train = TrainSection(batch="100 tok", horizon="30 steps")
    timeline = Timeline(data, train)
    shape = make_shape(ScheduleSection(kind="wsd", warmup="12 steps", decay="5 steps"), train, timeline)
    rates = [shape.at(timeline.tokens_after(n), timeline.at(n).batch) for n in range(30)]
    assert shape.warmup == 10 * 100 + 2 * 300 and shape.horizon == 1000 + 20 * 300
    assert rates[9] == pytest.approx(1000 / 1600) and rates[11] == rates[24] == 1.0
    assert rates[25:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])
