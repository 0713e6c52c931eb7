"""Predict the time of a training step from its operations, its collectives and what the runtime overlaps.

Weights are gathered while the block before computes, and gradients are reduced while the next block's
backward runs (FSDP). Collectives of tensor parallelism and Ulysses are in line with the computation; a ring
of context parallelism sends keys while attention computes. Imports no torch.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from arriero.model.spec import flops_per_token
from arriero.plan.blocks import BlockTime, EndTime, Work, block_time, end_time, host_time
from arriero.plan.rates import Group, Passes, Rates
from arriero.plan.timeline import StageTimes, held_stages, pipeline_seconds

# collectives take processors and memory bandwidth from the computation that hides them
_INTERFERENCE = 0.12
# a step in addition to its kernels: loss across ranks, clipping, metrics
_STEP = 2e-3
_HOST_BANDWIDTH = 50e9
# 8-bit states are unpacked, rounded and scaled: arithmetic worth this many bytes per parameter
_UNPACKING = 70
_EIGHT_BITS = ("int8", "float8")


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, with what they consist of. `compute` and `exposed` are by name.

    `exposed` is communication that no computation hides, `bubble` is waiting in a pipeline.
    """

    seconds: float
    compute: dict[str, float]
    exposed: dict[str, float]
    bubble: float
    optimizer: float
    host: float
    tokens: float
    flops: float
    devices: int
    peak: float | None
    stages: tuple[StageTimes, ...] = field(default=())

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and device."""
        return self.tokens / self.seconds / self.devices

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation by the causal formula."""
        return self.flops * self.tokens_per_s / self.peak if self.peak else None

    @property
    def exposed_seconds(self) -> float:
        return sum(self.exposed.values())


def step_time(work: Work, rates: Rates) -> StepTime:
    """Return the predicted time of one step and its parts."""
    return _compose(work, rates, *_parts(work, rates))


def block_seconds(work: Work, rates: Rates) -> float:
    """Return the mean time of a block for one micro-batch, without what FSDP adds."""
    block, _, _ = _parts(work, rates)
    return sum(block.compute + block.tensor + block.context)


def _parts(work: Work, rates: Rates) -> tuple[BlockTime, EndTime, Passes]:
    """Return the times of a block, of the ends and of the host, which many layouts share."""
    key = (work.spec, work.layout.tp, work.layout.cp, work.ulysses, work.ring, work.seq_len, work.micro_batch)
    key += (work.checkpointing, work.compiled, work.precision, work.attended, work.ffn_tile)
    key += (work.fused_kernels, work.float8_head, work.async_tp, work.layout.uses_fsdp)
    key += (work.layout.fsdp if work.float8_gather else 1,)
    if key not in rates.memo:
        rates.memo[key] = block_time(work, rates), end_time(work, rates), host_time(work)
    return rates.memo[key]


class _Traffic(NamedTuple):
    """Seconds of one collective of FSDP over the weights of a block, and over those of embedding and head."""

    gather: float
    scatter: float
    replicas: float
    copies: float


def _traffic(work: Work, rates: Rates, parameters: float) -> _Traffic:
    layout = work.layout
    if not layout.uses_fsdp:
        return _Traffic(0.0, 0.0, 0.0, 0.0)
    here, shards = parameters / layout.tp, Group(layout.fsdp, layout.tp)
    weight = 1 if work.float8_gather else work.compute_bytes
    replicas = Group(layout.dp_replicate, layout.tp * layout.fsdp)
    return _Traffic(
        rates.collective("all_gather", here * weight, shards),
        rates.collective("reduce_scatter", here * work.reduce_bytes, shards),
        rates.collective("all_reduce", here / layout.fsdp * work.reduce_bytes, replicas),
        rates.bytes(here * 2 * weight) if layout.fsdp > 1 else 0.0,
    )


class _Chunk(NamedTuple):
    """One pass over the blocks of a stage: its seconds, and how many of them are exposed communication."""

    seconds: float
    exposed: float
    host: float


def _overlapped(blocks: float, compute: float, floor: float, traffic: float) -> _Chunk:
    """Blocks that compute while the next weights are gathered, or the last gradients reduced."""
    busy = max(compute, floor)
    hidden = min(traffic, busy)
    each = max(busy + _INTERFERENCE * hidden, traffic)
    return _Chunk(blocks * each, blocks * (each - busy), blocks * (busy - compute))


def _compose(work: Work, rates: Rates, block: BlockTime, ends: EndTime, host: Passes) -> StepTime:
    spec, layout = work.spec, work.layout
    stages = work.stages or (spec.layers,)
    in_block = _traffic(work, rates, spec.block_parameters)
    in_table = _traffic(work, rates, spec.embedding_parameters)
    serial = block.tensor + block.context
    compute = block.compute + serial
    last, made = len(stages) - 1, {}
    for i, count in enumerate(stages):
        kind = (count, i == 0, i == last)
        if kind not in made:
            made[kind] = _stage(work, rates, i, count, len(stages), compute, ends, host, in_block, in_table)
    times = [made[count, i == 0, i == last] for i, count in enumerate(stages)]
    per_rank = len(stages) // layout.pp
    seconds, bubble = pipeline_seconds(work.schedule, times, layout.pp, per_rank, work.micro_batches)
    # the rank whose work lasts longest
    each = {kind: stage.busy(work.micro_batches) for kind, stage in made.items()}
    busy = [each[count, i == 0, i == last] for i, count in enumerate(stages)]
    ranks = held_stages(work.schedule, layout.pp, per_rank)
    busiest = max(ranks, key=lambda held: (sum(busy[s] for s in held), held))
    blocks = sum(stages[s] for s in busiest) * work.micro_batches
    optimizer = _optimizer(work, rates, sum(times[s].parameters for s in busiest))
    exposed = {
        "fsdp": sum(times[s].exposed(work.micro_batches) for s in busiest),
        "tp": blocks * (block.tensor.forward + block.tensor.backward),
        "cp": blocks * (block.context.forward + block.context.backward),
        "pp": sum(times[s].sent for s in busiest) * work.micro_batches,
    }
    has_head = len(stages) - 1 in busiest
    parts = {
        "matmul": blocks * (block.matmul.forward + block.matmul.backward),
        "attention": blocks * (block.attention.forward + block.attention.backward),
        "elementwise": blocks * (block.elementwise.forward + block.elementwise.backward),
        "recompute": blocks * block.recompute,
        "head and loss": work.micro_batches * (ends.head.forward + ends.head.backward) if has_head else 0.0,
        "gradients": sum(times[s].accumulate for s in busiest),
    }
    offload = _offloaded(work, seconds)
    device = rates.cluster.device
    return StepTime(
        seconds=seconds + optimizer + offload + _STEP,
        compute={name: value for name, value in parts.items() if value},
        exposed={name: value for name, value in (*exposed.items(), ("offload", offload)) if value > 0},
        bubble=bubble,
        optimizer=optimizer,
        host=sum(times[s].host(work.micro_batches) for s in busiest) + _STEP,
        tokens=work.tokens_per_step,
        flops=flops_per_token(spec, work.seq_len, attended=work.visible),
        devices=layout.ranks,
        peak=device.bf16 * 1e12 if device.bf16 and work.precision != "fp32" else None,
        stages=tuple(times),
    )


def _stage(
    work: Work,
    rates: Rates,
    index: int,
    blocks: int,
    stages: int,
    compute: Passes,
    ends: EndTime,
    host: Passes,
    in_block: _Traffic,
    in_table: _Traffic,
) -> StageTimes:
    """Return the times of one pipeline stage for one micro-batch, and what the first and the last one add."""
    spec, layout = work.spec, work.layout
    first, last = index == 0, index == stages - 1
    tables = (first and not (spec.tied and last and stages == 1)) + last
    own = Passes(0.0, 0.0)
    own += ends.embedding if first else Passes(0.0, 0.0)
    own += ends.head if last else Passes(0.0, 0.0)
    parameters = (blocks * spec.block_parameters + tables * spec.embedding_parameters) / layout.tp
    accumulate = 0.0
    if layout.uses_fsdp:
        # gradients are summed in the dtype of their reduction
        once = work.sync_each or work.micro_batches == 1 or work.fused_sums
        sums = 0 if once else work.micro_batches * (2 * work.reduce_bytes + 2)
        accumulate = rates.bytes(parameters * sums)
    elif work.micro_batches > 1 and work.compute_bytes < work.master_bytes:
        accumulate = rates.bytes(parameters * work.micro_batches * 10)
    quiet = _Traffic(0.0, 0.0, 0.0, 0.0)

    def passes(gathers: bool, regathers: bool, reduces: bool, replicates: bool) -> tuple[_Chunk, _Chunk]:
        block, table = (in_block, in_table) if layout.uses_fsdp else (quiet, quiet)
        ahead = block.gather if gathers else 0.0
        copies = block.copies if gathers else 0.0
        forward = _overlapped(blocks, compute.forward + copies, host.forward, ahead)
        behind = (block.gather if regathers else 0.0) + (block.scatter if reduces else 0.0)
        behind += block.replicas if replicates else 0.0
        copies = (block.copies if regathers else 0.0) + (2 * block.copies if reduces else 0.0)
        backward = _overlapped(blocks, compute.backward + copies, host.backward, behind)
        # nothing hides the first gather and the last reduction; those of tables overlap with blocks
        edge = table.gather if gathers and first else ahead
        tail = (table.scatter if first else block.scatter) if reduces else 0.0
        tail += block.replicas if replicates else 0.0
        return (
            _Chunk(forward.seconds + own.forward + edge, forward.exposed + edge, forward.host),
            _Chunk(backward.seconds + own.backward + tail, backward.exposed + tail, backward.host),
        )

    keeps = not work.reshard
    each = passes(not keeps, not keeps, work.sync_each, False)
    start = passes(True, not keeps, work.sync_each, False)
    end = passes(work.micro_batches == 1 or not keeps, not keeps, True, True)
    sent = 0.0
    if layout.pp > 1 and stages > 1:
        size = work.tokens * spec.dim * work.compute_bytes / layout.tp
        stride = layout.tp * layout.fsdp * layout.dp_replicate
        sent = rates.collective("p2p", size, Group(2, stride))
    return StageTimes(
        forward=each[0].seconds,
        backward=each[1].seconds,
        first_forward=(start[0] if work.micro_batches > 1 else end[0]).seconds,
        last_backward=end[1].seconds,
        sent=sent,
        accumulate=accumulate,
        parameters=parameters,
        waits=(each[0].exposed + each[1].exposed, start[0].exposed, end[1].exposed),
        hosts=each[0].host + each[1].host,
    )


def _optimizer(work: Work, rates: Rates, parameters: float) -> float:
    """Return the seconds of gradient clipping and of the update of this rank's shard."""
    layout = work.layout
    shard = parameters / layout.fsdp
    gradient = work.reduce_bytes if layout.uses_fsdp else min(work.compute_bytes, work.master_bytes)
    if not layout.uses_fsdp and work.micro_batches > 1:
        gradient = work.master_bytes
    if work.offload_state:
        # host memory is slower than the link that moves gradients and weights
        moved = 2 * work.master_bytes + 2 * work.state + gradient
        return 2 * shard * moved / _HOST_BANDWIDTH
    if found := rates.op("optimizer", "bf16", work.optimizer, parameters=shard):
        return found.forward
    copy = work.compute_bytes if not layout.uses_fsdp and work.compute_bytes < work.master_bytes else 0
    moved = 2 * work.master_bytes + 2 * work.state + 2 * gradient + copy
    moved += _UNPACKING if work.state_name in _EIGHT_BITS else 0
    return rates.bytes(shard * moved)


def _offloaded(work: Work, seconds: float) -> float:
    """Return what the step does not hide of activations that are copied to the host and back."""
    if not work.offload_activations:
        return 0.0
    spec = work.spec
    kept = work.compute_bytes * spec.dim * work.tokens / work.layout.tp * spec.layers / work.layout.pp
    kept *= 12 - 11 * work.checkpointed
    moved = 2 * kept * work.offload_activations * work.micro_batches / _HOST_BANDWIDTH
    return max(0.0, moved - 0.8 * seconds)
