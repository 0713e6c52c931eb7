"""Choose what the run file leaves open, so that a run fits in memory and is fast; or say what would fit.

Micro-batch, activation checkpointing, loss chunk, gradient reduction and resharding are chosen together: the
cheapest combination that fits by the memory estimate. A setting of the run file is kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Any, Literal, NamedTuple

from arriero.config.fields import ActivationCheckpointing
from arriero.config.keys import Problem
from arriero.config.schema import RunConfig
from arriero.config.timeline import Timeline, config_of
from arriero.model.spec import flops_per_token, sequence_flops
from arriero.plan.layout import Layout
from arriero.plan.memory import Choices, MemoryEstimate, estimate_memory, usable_bytes
from arriero.plan.rules import Draft
from arriero.units import human_bytes

_CPU_CHUNK = 2048
_CHUNKS = (4096, 1024, 256)
# what a micro-batch costs beside its tokens, as so many tokens
_OVERHEAD_TOKENS = 256
# FLOPs in the time of one byte of memory, of a link inside a node, and of the network
_FLOPS_PER_BYTE = 150.0
_FLOPS_PER_LINK_BYTE, _FLOPS_PER_NETWORK_BYTE = 1600.0, 13000.0
# an addition of gradients reads a sum and a gradient and writes the sum
_ACCUMULATION_BYTES = 10
# the share of the forward pass that selective checkpointing computes again, measured
_SELECTIVE = 0.3
# the last micro-batch of a step has another shape, which is compiled too
_UNEVEN = 1.03
# a plan that is at most this much slower and needs less memory is preferred
_INDIFFERENT = 1.01
_NONE, _SELECTIVE_AC, _ATTENTION, _FULL = (
    ActivationCheckpointing(kind) for kind in ("none", "selective", "attention", "full")
)
_FACTORS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)


class Plan(NamedTuple):
    """A combination of settings, with the micro-batch size of each phase and the predicted peak in bytes."""

    choices: Choices
    micro_batches: tuple[int, ...]
    bytes: int
    cost: float


@dataclass(frozen=True)
class Chooser:
    """`sizes` are the micro-batch sizes that each phase allows, `kept` settings of a run that is resumed."""

    draft: Draft
    sizes: Sequence[Sequence[int]]
    kept: Mapping[str, Any]

    @property
    def usable(self) -> float:
        return usable_bytes(self.draft.machine.memory_free, self.draft.machine.is_gpu)

    def best(self) -> tuple[Plan, bool]:
        """Return the cheapest plan that fits and True, or the smallest one and False."""
        key, given = "memory.loss_chunk", self.draft.config.memory.loss_chunk
        default = loss_chunk(self.draft)
        chunks = [self.kept[key] if given == "auto" and key in self.kept else default]
        if given == "auto" and key not in self.kept and self.draft.machine.is_gpu:
            chunks += [chunk for chunk in _CHUNKS if not default or chunk < default]
        smallest = None
        for chunk in chunks:
            plans = [self._plan(choices, fits=True) for choices in self._combinations(chunk)]
            if fitting := [plan for plan in plans if plan is not None]:
                least = min(plan.cost for plan in fitting)
                near = [plan for plan in fitting if plan.cost <= self._tolerance * least]
                return min(near, key=lambda plan: (plan.bytes, plan.cost)), True
            for choices in self._combinations(chunk):
                plan = self._plan(choices, fits=False)
                if plan and (smallest is None or plan.bytes < smallest.bytes):
                    smallest = plan
        assert smallest is not None
        return smallest, False

    def _combinations(self, chunk: int | Literal[False]) -> Iterator[Choices]:
        for sync, reshard in product(self._syncs(), self._reshards()):
            base = Choices(_NONE, chunk, sync, reshard)
            for checkpointing in self._checkpointings(base):
                yield replace(base, checkpointing=checkpointing)

    def _syncs(self) -> Sequence[Literal["last", "each"]]:
        given = self.draft.config.parallel.sync
        if given != "auto":
            return [given]
        if "parallel.sync" in self.kept:
            return [self.kept["parallel.sync"]]
        layout = self.draft.layout
        return ["last", "each"] if layout.pp == 1 and layout.fsdp > 1 else ["last"]

    def _reshards(self) -> Sequence[bool | int]:
        given, layout = self.draft.config.parallel.reshard, self.draft.layout
        if given != "auto":
            return [{"always": True, "never": False}[given] if isinstance(given, str) else given]
        if layout.pp > 1:
            return [False]
        return [False, True] if layout.uses_fsdp and self.draft.machine.is_gpu else [True]

    def _checkpointings(self, base: Choices) -> Iterator[ActivationCheckpointing]:
        key, given = "memory.activation_checkpointing", self.draft.config.memory.activation_checkpointing
        if given.kind != "auto":
            yield given
            return
        if key in self.kept:
            yield ActivationCheckpointing.parse(self.kept[key])
            return
        yield from (_NONE, _FULL)
        if not (self.draft.splits_backward or self.draft.config.memory.ffn_tile):
            yield from (_SELECTIVE_AC, _ATTENTION)
        # the smallest share of blocks with which each of the smaller micro-batches fits
        for sizes in zip(*(sorted(each)[:3] for each in self.sizes), strict=False):
            if (found := self._fraction(base, sizes)) is not None:
                yield found

    def _fraction(self, base: Choices, sizes: Sequence[int]) -> ActivationCheckpointing | None:
        layers = self.draft.spec.layers

        def at(count: int) -> ActivationCheckpointing:
            return ActivationCheckpointing("fraction", Fraction(count, layers))

        def fits(checkpointing: ActivationCheckpointing) -> bool:
            estimates = self.draft.estimates(replace(base, checkpointing=checkpointing))
            return all(e.bytes(size) <= self.usable for e, size in zip(estimates, sizes, strict=True))

        if layers < 2 or fits(_NONE) or not fits(at(layers - 1)):
            return None
        low, high = 0, layers - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(at(middle)) else (middle, high)
        return at(high)

    def _plan(self, choices: Choices, fits: bool) -> Plan | None:
        """Return the plan with the largest micro-batches that fit, or with the smallest."""
        chosen, peak = [], 0
        estimates = self.draft.estimates(choices)
        for estimate, sizes in zip(estimates, self.sizes, strict=True):
            found = self._largest(estimate, sizes) if fits else min(sizes, key=estimate.bytes)
            if found is None:
                return None
            chosen.append(found)
            peak = max(peak, estimate.bytes(found))
        cost = sum(self._cost(e, choices, size) for e, size in zip(estimates, chosen, strict=True))
        return Plan(choices, tuple(chosen), peak, cost)

    def _largest(self, estimate: MemoryEstimate, sizes: Sequence[int]) -> int | None:
        fitting = [size for size in sizes if estimate.bytes(size) <= self.usable]
        if not fitting:
            return None
        costs = {size: self._cost(estimate, estimate.choices, size) for size in fitting}
        limit = min(costs.values()) * self._tolerance
        return min(size for size, cost in costs.items() if cost <= limit)

    @property
    def _tolerance(self) -> float:
        return _INDIFFERENT if self.draft.machine.is_gpu else 1.0

    def _cost(self, estimate: MemoryEstimate, choices: Choices, micro_batch: int) -> float:
        """Return the time of a step as FLOPs, as far as the choices change it."""
        spec, layout, length = self.draft.spec, self.draft.layout, estimate.config.data.seq_len
        count = -(-estimate.sequences // micro_batch)
        share = layout.tp * layout.pp
        each = flops_per_token(spec, length) / share
        attention = sequence_flops(spec, spec.attended(length)) / share
        matmuls = 2 * spec.layers * spec.block_matmul_parameters / share
        again = recomputed_share(choices.checkpointing, spec.layers, matmuls, attention) * (
            matmuls + attention
        )
        tokens = estimate.sequences * estimate.tokens
        cost = tokens * (each + again) + count * _OVERHEAD_TOKENS * each
        if estimate.sequences % micro_batch:
            cost *= _UNEVEN
        if count > 1:
            cost += count * spec.parameters / share * _ACCUMULATION_BYTES * _FLOPS_PER_BYTE
        if layout.uses_fsdp:
            near = layout.fsdp * layout.tp <= self.draft.machine.devices_per_node
            rate = _FLOPS_PER_LINK_BYTE if near else _FLOPS_PER_NETWORK_BYTE
            moved = 4.0 * spec.parameters / share * (count if choices.sync == "each" else 1)
            moved += 2.0 * spec.parameters / share * count * (2 if choices.reshard is not False else 1)
            # what does not fit beside the computation is waited for, and some of the rest too
            cost += max(moved * rate - tokens * each, 0.0) + 0.1 * moved * rate
        return cost


def recomputed_share(
    checkpointing: ActivationCheckpointing, layers: int, matmuls: float, attention: float
) -> float:
    """Return the share of the blocks' forward pass that is recomputed in the backward pass."""
    blocks = len(checkpointing.blocks(layers)) / layers
    if checkpointing.kind == "selective":
        return _SELECTIVE * matmuls / (matmuls + attention)
    if checkpointing.kind == "attention":
        return matmuls / (matmuls + attention)
    if checkpointing.kind == "budget":
        return 1 - float(checkpointing.amount)
    return blocks


def loss_chunk(draft: Draft) -> int | Literal[False]:
    """Return the number of tokens whose logits are computed at once, if the memory has room for them.

    Few large matmuls are faster than many. The size follows from the total memory of a GPU, not from the free
    memory: a resumed run must sum in the same order.
    """
    given = draft.config.memory.loss_chunk
    if given != "auto":
        return given
    if not draft.machine.is_gpu:
        return _CPU_CHUNK
    cast = 2 if draft.config.precision.float8_head else 0
    bytes_each = draft.spec.vocab_size * (draft.element + cast)
    fitting = draft.machine.memory_total // 16 * draft.layout.tp // bytes_each
    return max(_CHUNKS[-1], 1 << max(fitting, 1).bit_length() - 1)


def refusal(draft: Draft, smallest: Plan, estimates: Sequence[MemoryEstimate]) -> Problem:
    """Say why a run cannot fit, on how many devices it would, and which settings would make it fit here."""
    free = draft.machine.memory_free
    estimate = max(
        zip(estimates, smallest.micro_batches, strict=True), key=lambda pair: pair[0].bytes(pair[1])
    )
    parts = estimate[0].parts(estimate[1])
    listed = ", ".join(f"{name} {human_bytes(size)}" for name, size in parts.items() if size > 0.01 * free)
    what = (
        f"a rank needs {human_bytes(smallest.bytes)} at the least ({listed}), "
        f"and {human_bytes(free)} are free"
    )
    todo = [f"set {text}, which needs {human_bytes(size)}" for text, size in _alternatives(draft)]
    if ranks := _ranks_that_fit(draft):
        todo.insert(0, f"start {ranks} ranks, on which it fits with parallel.dp_shard or cp")
    return Problem("memory", what, "; or ".join(todo[:4]) or "choose a smaller model or a larger device")


def _least(draft: Draft, config: RunConfig, layout: Layout) -> int:
    """Return the smallest peak of a run with other settings, at micro-batch 1 and full checkpointing."""
    given = config.memory.activation_checkpointing
    checkpointing = _FULL if given.kind == "auto" else given
    chunk = config.memory.loss_chunk
    chunk = _CHUNKS[1] if chunk == "auto" else chunk
    reshard = layout.pp == 1 if config.parallel.reshard == "auto" else config.parallel.reshard != "never"
    sync = "each" if config.parallel.sync == "auto" and layout.pp == 1 else "last"
    sizes = 1 if config.train.micro_batch is None else config.train.micro_batch
    choices = Choices(checkpointing, chunk, sync, reshard)
    found = []
    mode = replace(draft, config=config, layout=layout).mode
    for phase in Timeline.of(config).phases:
        estimate = estimate_memory(config_of(config, phase), draft.spec, layout, choices, mode)
        found.append(estimate.bytes(min(sizes, estimate.sequences)))
    return max(found)


def _ranks_that_fit(draft: Draft) -> int | None:
    """Return the smallest number of ranks on which the run fits, with more sharding."""
    usable = usable_bytes(draft.machine.memory_free, draft.machine.is_gpu)
    sequences = min(phase.sequences for phase in Timeline.of(draft.config).phases)
    for factor in _FACTORS:
        layout = replace(draft.layout, dp_shard=draft.layout.dp_shard * factor)
        if layout.batch > sequences:
            layout = replace(draft.layout, cp=draft.layout.cp * factor)
        if _least(draft, draft.config, layout) <= usable:
            return layout.ranks
    return None


def _alternatives(draft: Draft) -> Iterator[tuple[str, int]]:
    """Yield settings with which the run fits on the same devices, those that change least first."""
    usable = usable_bytes(draft.machine.memory_free, draft.machine.is_gpu)
    auto = ActivationCheckpointing("auto")
    open_memory: dict[str, dict[str, Any]] = {
        "memory": {"activation_checkpointing": auto, "loss_chunk": "auto"},
        "train": {"micro_batch": None},
        "parallel": {"sync": "auto", "reshard": "auto"},
    }
    bf16, pure = {"precision": {"master": "bf16"}}, "precision.master = 'bf16' and optim.state = "
    offload = {"memory": {"activation_checkpointing": auto, "offload_activations": True}}
    tries: list[tuple[str, dict[str, dict[str, Any]]]] = [
        ("train.micro_batch, parallel.sync and the keys of [memory] to 'auto'", open_memory),
        ("memory.offload_activations = true", offload),
        *((f"{pure}'{state}'", {**bf16, "optim": {"state": state}}) for state in ("bf16", "int8")),
    ]
    if draft.layout.uses_fsdp:
        tries.append(("memory.offload_state = true", {"memory": {"offload_state": True}}))
    length = draft.config.data.seq_len // 2
    while length >= 1024:
        tries.append((f"data.seq_len = {length}", {"data": {"seq_len": length}}))
        length //= 2
    for text, updates in tries:
        config = draft.config.model_copy(
            update={
                section: getattr(draft.config, section).model_copy(update=values)
                for section, values in updates.items()
            }
        )
        needed = _least(draft, config, draft.layout)
        if config != draft.config and needed <= usable:
            yield text, needed
            if "seq_len" in text:
                return
