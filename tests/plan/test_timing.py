"""The model of time: collectives, overlap, pipelines."""

import itertools
from dataclasses import replace

import pytest

from arriero.config.fields import ActivationCheckpointing
from arriero.model.family import families, register_model
from arriero.model.llama.family import LLAMA
from arriero.model.presets import load_preset
from arriero.plan.blocks import Work
from arriero.plan.hardware import load_cluster
from arriero.plan.layout import SCHEDULES, Layout
from arriero.plan.rates import Group, Rates
from arriero.plan.timeline import StageTimes, pipeline_seconds, simulate
from arriero.plan.timing import step_time

H100 = load_cluster("8xh100")
WORK = Work(load_preset("llama3-8b"), Layout(dp_shard=64), 8192, 1, 1)

# nodes, devices per node, bandwidth of NCCL for large messages in GB/s: output bytes by time
MEASURED = {
    "all_gather": [
        (1, 8, 386),
        (2, 8, 323),
        (8, 8, 305),
        (16, 8, 286),
        (32, 8, 264),
        (8, 1, 48),
        (32, 1, 46),
    ],
    "reduce_scatter": [(1, 8, 392), (2, 8, 377), (8, 8, 359), (16, 8, 300), (32, 8, 301), (32, 1, 46)],
    "all_reduce": [(1, 8, 212), (2, 8, 193), (16, 8, 130), (32, 8, 130), (8, 1, 26), (32, 1, 24)],
    "all_to_all": [(1, 8, 374), (2, 8, 83), (4, 8, 56), (8, 8, 47), (32, 8, 43)],
}


@pytest.mark.parametrize("kind", MEASURED)
def test_large_collectives_on_h100_nodes_are_within_a_quarter_of_nccl(kind):
    for nodes, local, bandwidth in MEASURED[kind]:
        group = Group(nodes * local, 1 if local > 1 else 8)
        size = 4e9
        predicted = size / Rates(H100).collective(kind, size, group) / 1e9
        assert predicted == pytest.approx(bandwidth, rel=0.25), (nodes, local)


def test_a_gather_over_many_nodes_pays_for_each_hop():
    seconds = Rates(H100).collective("all_gather", 1, Group(256))
    assert 0.4e-3 < seconds < 1.5e-3


def test_communication_is_hidden_until_it_takes_longer_than_the_computation():
    fast = step_time(WORK, Rates(H100))
    links = (H100.links[0], H100.links[1].model_copy(update={"bandwidth": 0.5}))
    slow = step_time(WORK, Rates(H100.model_copy(update={"links": links})))
    assert fast.exposed_seconds < 0.05 * fast.seconds
    assert slow.exposed["fsdp"] > 0.5 * slow.seconds


def test_the_parts_of_a_step_add_up():
    for layout in (Layout(dp_shard=64), Layout(dp_shard=8, tp=8), Layout(dp_replicate=8, dp_shard=8)):
        work = replace(WORK, layout=layout, micro_batches=4)
        time = step_time(work, Rates(H100))
        parts = sum(time.compute.values()) + time.exposed_seconds + time.bubble + time.optimizer + time.host
        assert parts == pytest.approx(time.seconds, rel=0.08)


def test_recomputation_costs_about_a_forward_pass():
    plain = step_time(WORK, Rates(H100)).seconds
    full = step_time(replace(WORK, checkpointing=ActivationCheckpointing("full")), Rates(H100)).seconds
    some = step_time(replace(WORK, checkpointing=ActivationCheckpointing("selective")), Rates(H100)).seconds
    assert 1.2 < full / plain < 1.4
    assert plain < some < full


def test_gathering_once_per_step_saves_communication():
    links = (H100.links[0], H100.links[1].model_copy(update={"bandwidth": 5}))
    rates = Rates(H100.model_copy(update={"links": links}))
    work = replace(WORK, layout=Layout(dp_shard=256), seq_len=2048, micro_batches=8)
    assert step_time(replace(work, reshard=False), rates).seconds < 0.7 * step_time(work, rates).seconds


def test_a_ring_computes_attention_in_chunks_with_flashattention_2():
    long = replace(WORK, layout=Layout(dp_shard=8, cp=8), seq_len=131072)
    rates, device = Rates(H100), H100.device.rates
    heads, ring = (step_time(replace(long, **{way: 8}), rates) for way in ("ulysses", "ring"))
    slower = ring.compute["attention"] / heads.compute["attention"]
    assert slower == pytest.approx(device.attention / device.flash2, rel=0.15)
    everywhere = step_time(replace(long, ring=8), Rates(H100, kernel="cudnn"))
    assert everywhere.compute["attention"] == pytest.approx(heads.compute["attention"], rel=0.05)
    # merges and sums of short chunks are not hidden
    short = step_time(replace(long, ring=8, seq_len=8192), rates)
    assert short.exposed["cp"] / short.seconds > 2 * ring.exposed["cp"] / ring.seconds


def test_gradients_summed_by_their_matmul_cost_no_pass_over_memory():
    work = replace(WORK, micro_batches=8)
    apart, fused = (step_time(replace(work, fused_sums=fused), Rates(H100)) for fused in (False, True))
    assert apart.seconds - fused.seconds == pytest.approx(apart.compute["gradients"])
    assert "gradients" not in fused.compute


def test_weights_gathered_in_float8_are_cast_by_shards():
    work = replace(WORK, precision="float8", seq_len=1024)
    whole, shards = (step_time(replace(work, float8_gather=each), Rates(H100)) for each in (False, True))
    assert shards.compute["elementwise"] < 0.6 * whole.compute["elementwise"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "count"), [(2, 8), (4, 16), (8, 32)])
def test_the_closed_form_of_a_pipeline_agrees_with_its_simulation(schedule, ranks, count):
    per_rank = SCHEDULES[schedule].stages_per_rank
    stage = StageTimes(1 / per_rank, 2 / per_rank, 1 / per_rank, 2 / per_rank, 0.01, 0, 0)
    stages = [stage] * (ranks * per_rank)
    slots = simulate(schedule, stages, ranks, per_rank, count)
    passes = 3 if SCHEDULES[schedule].splits_backward else 2
    assert len(slots) == passes * len(stages) * count
    whole, bubble = pipeline_seconds(schedule, stages, ranks, per_rank, count)
    assert whole == pytest.approx(max(slot.end for slot in slots), rel=0.1)
    assert whole - bubble >= 3 * count


def test_a_rank_computes_one_thing_at_a_time_and_in_the_order_of_the_data():
    stage = StageTimes(1.0, 2.0, 1.0, 2.0, 0.1, 0, 0)
    slots = simulate("interleaved-1f1b", [stage] * 8, 4, 2, 8)
    for rank in range(4):
        own = sorted((slot for slot in slots if slot.rank == rank), key=lambda slot: slot.start)
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(own))
    ends = {(slot.kind, slot.stage, slot.micro_batch): slot.end for slot in slots}
    starts = {(slot.kind, slot.stage, slot.micro_batch): slot.start for slot in slots}
    for stage_number in range(1, 8):
        for micro in range(8):
            assert ends["forward", stage_number - 1, micro] <= starts["forward", stage_number, micro]
            assert ends["backward", stage_number, micro] <= starts["backward", stage_number - 1, micro]


def test_uneven_stages_wait_for_the_slowest():
    fast, slow = (StageTimes(t, 2 * t, t, 2 * t, 0.0, 0, 0) for t in (1.0, 2.0))
    even, _ = pipeline_seconds("1f1b", [fast] * 4, 4, 1, 32)
    uneven, _ = pipeline_seconds("1f1b", [fast, fast, slow, fast], 4, 1, 32)
    assert uneven > 1.8 * even


def test_the_block_of_a_registered_family_is_traced_and_takes_as_long():
    mine = replace(LLAMA, name="mine", block_memory=None, presets=None)
    register_model(mine)
    try:
        known = step_time(WORK, Rates(H100)).seconds
        other = replace(WORK, spec=replace(WORK.spec, family="mine"))
        assert step_time(other, Rates(H100)).seconds == pytest.approx(known, rel=0.05)
    finally:
        del families()["mine"]
