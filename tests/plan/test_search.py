"""The search for layouts: what it keeps, what it rejects and why."""

import itertools
from functools import cache

import pytest

from arriero.config.load import load_run
from arriero.errors import UserError
from arriero.model.family import families
from arriero.model.presets import expand
from arriero.plan.advice import Question, fewest_devices
from arriero.plan.hardware import load_cluster, machine_named
from arriero.plan.resolve import resolve
from arriero.plan.search import plan_run

H100 = load_cluster("8xh100")
LARGE = ("model.preset=llama3-70b", "data.seq_len=8192", "train.batch=4194304 tok")
SMALL = ("model.preset=llama3.2-1b", "data.seq_len=8192", "train.batch=524288 tok")


def config(*sets):
    return load_run(None, list(sets), expand).config


@cache
def large_plan(keep=None):
    """The plan of the large model on 64 devices; without `keep` with all candidates."""
    return plan_run(config(*LARGE), H100, 64, keep=keep)


def test_ten_thousand_candidates_are_considered_for_70b_on_1024_devices():
    plan = plan_run(config(*LARGE, "train.batch=8388608 tok"), H100, 1024, keep=5)
    assert plan.considered >= 10_000
    assert len(plan.candidates) == 5
    speeds = [each.time.tokens_per_s for each in plan.candidates]
    assert speeds[0] >= 0.97 * max(speeds)


def test_every_candidate_is_accepted_by_resolve_and_fits():
    plan = large_plan()
    for candidate in plan.candidates[:30]:
        resolved = plan.resolved(candidate)
        assert resolved.layout == candidate.choice.layout
        assert resolved.micro_batch == candidate.choice.micro_batch
        assert resolved.predicted_bytes <= candidate.free


def test_a_plan_and_a_run_choose_the_same_settings_for_one_layout():
    """`arriero plan` and `arriero config check` may not disagree."""
    given = ("model.preset=llama3.1-8b", "parallel.dp_replicate=2", "parallel.dp_shard=8")
    run = config(*LARGE, *given)
    best = plan_run(run, load_cluster("8xh200"), 16, keep=1).best
    resolved = resolve(run, machine_named("h200"), 16)
    assert resolved.predicted_bytes == best.memory
    for key, value in resolved.open_settings.items():
        assert str(best.choice.keys.get(key, value)) in str(value), key


def test_keys_that_the_run_file_sets_are_kept():
    given = ("parallel.tp=4", "train.micro_batch=2", "memory.activation_checkpointing=full")
    plan = plan_run(config(*LARGE, *given), H100, 64, keep=20)
    for candidate in plan.candidates:
        choice = candidate.choice
        assert (choice.layout.tp, choice.micro_batch, str(choice.checkpointing)) == (4, 2, "full")


def test_constraints_limit_the_candidates():
    plan = plan_run(config(*LARGE), H100, 64, fix={"tp": 8}, most={"pp": 2}, exclude=("cp", "selective"))
    assert plan.candidates
    for candidate in plan.candidates:
        layout = candidate.choice.layout
        assert (layout.tp, layout.cp) == (8, 1)
        assert layout.pp <= 2
        assert candidate.choice.checkpointing.kind != "selective"


@pytest.mark.parametrize(
    ("sets", "fix", "most", "message"),
    [
        ((), {"tp": 8}, {"tp": 4}, "--fix tp=8 and --max tp=4"),
        (("parallel.tp=4",), {"tp": 8}, {}, "parallel.tp = 4 and --fix tp=8"),
        ((), {"pp": 16, "tp": 8}, {}, "--fix pp=16 and --fix tp=8"),
        ((), {"tp": 3}, {}, "--fix tp=3 is not possible with 64 devices"),
    ],
)
def test_contradicting_constraints_are_named(sets, fix, most, message):
    with pytest.raises(UserError, match=message):
        plan_run(config(*LARGE, *sets), H100, 64, fix=fix, most=most)


def test_rejections_have_reasons_and_examples():
    plan = large_plan(keep=3)
    reasons = " | ".join(each.reason for each in plan.rejections)
    assert "needs more memory than" in reasons
    assert "tp over more than the 8 devices of a node" in reasons
    assert plan.considered == sum(each.count for each in plan.rejections) + len(large_plan().candidates)
    assert all(each.count > 0 and each.example for each in plan.rejections)


def test_a_small_model_stays_data_parallel():
    best = plan_run(config(*SMALL), H100, 64, keep=1).best.choice
    assert (best.layout.tp, best.layout.cp, best.layout.pp) == (1, 1, 1)
    assert best.checkpointing.kind == "none"


def test_nothing_fits_leaves_no_candidates():
    plan = plan_run(config(*LARGE), H100, 1)
    assert not plan.candidates
    assert plan.rejections


def test_blocks_too_small_to_compile_are_planned_uncompiled():
    sets = ("model.preset=llama-demo", "data.seq_len=256", "train.batch=65536 tok")
    plan = plan_run(config(*sets), H100, 8, keep=5)
    assert all(each.work.compiled is plan.resolved(each).compiled is False for each in plan.candidates)


def test_the_smallest_number_of_devices_is_found_between_powers_of_two():
    question = Question(config(*LARGE, "data.seq_len=4096"), H100, exclude=("pp", "cp", "tp"))
    found = fewest_devices(question, 1)
    assert found.devices == 24
    assert question.fitting(24) and not question.fitting(16)


@pytest.mark.parametrize("compiled", ["true", "false"])
@pytest.mark.parametrize("family", families())
def test_every_family_can_be_planned(family, compiled):
    small = (f"model.preset={family}-test", "data.seq_len=64", "train.batch=4096 tok")
    sets = (*small, f"precision.compile={compiled}")
    plan = plan_run(config(*sets), H100, 8, keep=3)
    assert all(each.memory > 0 and each.time.seconds > 0 for each in plan.candidates)
    assert {each.choice.layout.ranks for each in plan.candidates} == {8}


def test_a_single_device_grows_to_nodes_of_its_type():
    found = fewest_devices(Question(config(*LARGE), load_cluster("h200")), 1)
    assert found.devices % 8 == 0


def test_faster_candidates_come_first():
    seconds = [each.time.seconds for each in large_plan().candidates[:40]]
    assert all(b >= 0.999 * a for a, b in itertools.pairwise(seconds))


def test_a_memory_limit_is_respected():
    limit = 30 * 2**30
    plan = plan_run(config(*LARGE), H100, 256, memory_limit=limit, keep=3)
    assert plan.candidates
    assert all(each.memory <= limit for each in plan.candidates)


def test_the_same_question_has_the_same_answer():
    first, again = large_plan().candidates, large_plan(keep=3).candidates
    assert [each.choice for each in first[:3]] == [each.choice for each in again]
