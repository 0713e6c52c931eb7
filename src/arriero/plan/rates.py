"""Seconds of operations and collectives on a cluster: measured where they were, else a roofline.

Operations are limited by matmul throughput or by memory bandwidth, collectives by the slowest topology level
that their group crosses. Imports no torch.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from arriero.config.schema import RunConfig
from arriero.plan.hardware import Cluster, Link, Machine, cluster_for, cluster_of_device
from arriero.plan.measured import Measured

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p"]
Precision = Literal["fp32", "bf16", "float8"]

# a matmul computes tiles of its output; the last wave of tiles leaves processors idle
_TILE = (128, 256)
# inner dimension that passes while a tile's pipeline fills and drains, per TFLOP/s of one processor
_INNER = 15
# queries after which attention runs at its full rate
_FULL_ATTENTION = 600
# attention with a document mask skips whole blocks of the mask only, and has another kernel
_DOCUMENT_RATE = 0.4
_SMALL_HEAD_RATE = 0.84
# FlashAttention-1 by FlashAttention-2, and the backward pass of FlashAttention-2 by its forward pass
_FLASH1_RATE, _FLASH_BACKWARD = 0.6, 0.85
# a device that trains for hours is slower than one that repeats a kernel for a moment: heat and power limits
_SUSTAINED = 1.08
_COMPUTE_BOUND = ("linear", "attention", "document_attention", "head_loss")
# a collective before the first byte, and one hop of a ring inside a node and between nodes, in seconds
_LAUNCH = 20e-6
_HOP, _NETWORK_HOP = 1e-6, 2.8e-6
# what collectives reach of a link: inside a node, and of a network adapter
_NODE_LINK, _NETWORK_LINK = 0.8, 0.89
# two levels that a ring crosses slow each other down; with a higher power only the slower one counts
_CROSSING = 4


class Passes(NamedTuple):
    """Seconds of the forward and of the backward pass."""

    forward: float
    backward: float

    def __add__(self, other: "Passes") -> "Passes":  # type: ignore[override]
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def times(self, factor: float) -> "Passes":
        return Passes(factor * self.forward, factor * self.backward)


class Group(NamedTuple):
    """Ranks of a collective: `size` of them, each `stride` devices from the next."""

    size: int
    stride: int = 1


@dataclass
class Rates:
    """The speed of a cluster. `measured` replaces the roofline; `kernel` is the attention kernel.

    "best" is the fastest kernel, but FlashAttention-2 in a ring; "cudnn" is the fastest everywhere.
    `used` collects which kinds of numbers were measured and which were estimated.
    """

    cluster: Cluster
    measured: Measured | None = None
    kernel: Literal["best", "cudnn", "flash2", "flash1"] = "best"
    used: dict[str, set[str]] = field(default_factory=lambda: {"measured": set(), "analytic": set()})
    memo: dict[Any, Any] = field(default_factory=dict)

    def linear(self, tokens: float, inputs: float, outputs: float, precision: Precision) -> Passes:
        """Return the seconds of a linear layer; backward computes the gradients of inputs and weights."""
        if found := self._op("linear", precision, tokens=tokens, inputs=inputs, outputs=outputs):
            return found
        flops = 2 * tokens * inputs * outputs
        forward = self.matmul(flops, tokens, outputs, inputs, precision)
        to_inputs = self.matmul(flops, tokens, inputs, outputs, precision)
        to_weights = self.matmul(flops, inputs, outputs, tokens, precision)
        return Passes(forward, to_inputs + to_weights)

    def matmul(self, flops: float, rows: float, columns: float, inner: float, precision: Precision) -> float:
        """Return the seconds of a matmul of this shape by the roofline."""
        return flops / (self.peak(precision) * self._shape(rows, columns, inner))

    def peak(self, precision: Precision) -> float:
        """Return the FLOP/s that large matmuls reach."""
        device = self.cluster.device
        if device.bf16 is None or precision == "fp32":
            # on GPUs without tf32, a quarter of the bf16 rate is already optimistic
            return 1e12 * device.rates.matmul * (device.fp32 or (device.bf16 or 1) / 8)
        if precision == "float8" and device.fp8 and device.rates.matmul_fp8:
            return 1e12 * device.clock * device.rates.matmul_fp8 * device.fp8
        return 1e12 * device.clock * device.rates.matmul * device.bf16

    def _shape(self, rows: float, columns: float, inner: float) -> float:
        """Return the share of the rate that a matmul of this shape reaches."""
        if (units := self.cluster.device.units) == 1:
            return 1.0
        small, large = _TILE
        waste = []
        for high, wide in ((small, large), (large, small), (small, small)):
            tiles = math.ceil(rows / high) * math.ceil(columns / wide)
            waves = math.ceil(tiles / units) * units * high * wide
            waste.append(rows * columns / waves * (1.0 if high * wide == small * large else 0.88))
        return max(waste) * inner / (inner + _INNER * (self.cluster.device.bf16 or 0.0) / units)

    def attention(
        self,
        batch: float,
        seq_len: float,
        heads: float,
        kv_heads: float,
        head_dim: int,
        precision: Precision,
        attended: float | None = None,
    ) -> Passes:
        """Return the seconds of causal attention; `attended` is the mean document length with a mask."""
        precision = "bf16" if precision == "float8" else precision
        shape = {"batch": batch, "seq_len": seq_len, "heads": heads, "kv_heads": kv_heads}
        shape["head_dim"] = head_dim
        if attended is not None:
            if found := self._op("document_attention", precision, attended=attended, **shape):
                return found
        elif found := self._op("attention", precision, **shape):
            return found
        flops = 2 * batch * seq_len * (attended or seq_len) * heads * head_dim
        return self.fused_attention(flops, 2.5 * flops, seq_len, head_dim, attended is not None)

    def fused_attention(
        self, forward_flops: float, backward_flops: float, seq_len: float, head_dim: int, masked: bool
    ) -> Passes:
        """Return the seconds of a fused attention kernel by the roofline, from its FLOPs."""
        device, rates = self.cluster.device, self.cluster.device.rates
        peak = 1e12 * (device.bf16 or device.fp32 or 1) * device.clock
        peak *= 1.0 if head_dim >= 128 else _SMALL_HEAD_RATE
        peak *= seq_len / (seq_len + _FULL_ATTENTION)
        peak *= _DOCUMENT_RATE if masked else 1.0
        forward, backward = rates.attention, rates.attention_backward
        if self.kernel in ("flash2", "flash1"):
            forward = rates.flash2 * (_FLASH1_RATE if self.kernel == "flash1" else 1.0)
            backward = _FLASH_BACKWARD * forward
        return Passes(forward_flops / (peak * forward), backward_flops / (peak * backward))

    def ring_attention(self, whole: Passes, seq_len: float, ring: int) -> Passes:
        """Return the seconds of attention that a ring computes in chunks, from those of one kernel."""
        own = seq_len / ring
        shorter = (1 + _FULL_ATTENTION / own) / (1 + _FULL_ATTENTION / seq_len)
        if self.kernel != "best":
            return whole.times(shorter)
        rates = self.cluster.device.rates
        forward = max(1.0, rates.attention / rates.flash2)
        backward = max(1.0, rates.attention_backward / (_FLASH_BACKWARD * rates.flash2))
        return Passes(shorter * forward * whole.forward, shorter * backward * whole.backward)

    def bytes(self, count: float) -> float:
        """Return the seconds of kernels that are limited by memory, from the bytes they read and write."""
        return count / (1e12 * self.cluster.device.bandwidth * self.cluster.device.rates.memory)

    def _op(self, op: str, precision: Precision, variant: str = "", **shape: float) -> Passes | None:
        found = self.measured.op(op, precision, variant, **shape) if self.measured else None
        self.used["measured" if found else "analytic"].add(op)
        factor = _SUSTAINED if op in _COMPUTE_BOUND else 1.0
        return Passes(factor * found.forward, factor * found.backward) if found else None

    def op(self, op: str, precision: Precision, variant: str = "", **shape: float) -> Passes | None:
        """Return the measured seconds of an operation, or None."""
        return None if self.measured is None else self._op(op, precision, variant, **shape)

    def has_measured(self, op: str, precision: Precision) -> bool:
        return self.measured is not None and any(
            row.op == op and row.precision == precision for row in self.measured.ops
        )

    def collective(self, kind: Collective, size: float, group: Group) -> float:
        """Return the seconds of a collective; `size` is the whole tensor in bytes, per rank."""
        if group.size < 2 or size <= 0:
            return 0.0
        key = (kind, size, group)
        if key not in self.memo:
            self.memo[key] = self._collective(kind, size, group)
        return self.memo[key]

    def _collective(self, kind: Collective, size: float, group: Group) -> float:
        per_node = self.cluster.devices_per_node
        local = min(group.size, max(1, per_node // group.stride))
        nodes = math.ceil(group.size / local)
        found = self.measured.collective(kind, size, group.size, nodes) if self.measured else None
        self.used["measured" if found else "analytic"].add("collectives")
        if found is not None:
            return found
        return self._latency(kind, group.size, nodes) + size * self._per_byte(kind, group)

    def _latency(self, kind: Collective, ranks: int, nodes: int) -> float:
        hop = _NETWORK_HOP if nodes > 1 else _HOP
        if nodes > 1 and (given := self.cluster.links[-1].latency):
            hop = max(hop, given * 1e-6)
        if kind == "p2p":
            return _LAUNCH / 2 + hop
        if kind == "all_reduce":
            # a tree over nodes, whose messages have more stages than those of a ring
            return _LAUNCH + 2 * math.log2(ranks) * 5 * min(hop, 5e-6)
        return _LAUNCH + (ranks - 1) * min(hop, _NETWORK_HOP)

    def _per_byte(self, kind: Collective, group: Group) -> float:
        """Return seconds per byte of the tensor, from the bandwidth of each level that the group crosses."""
        size, stride = group
        seconds, inside = [], 1
        for link in self.cluster.links:
            reach = size if link.devices is None else min(size, max(1, link.devices // stride))
            if reach > inside:
                bandwidth = 1e9 * link.bandwidth * self._reached(link)
                seconds.append(_share(kind, size, inside, reach) / bandwidth)
            inside = max(inside, reach)
            if inside >= size:
                break
        return sum(each**_CROSSING for each in seconds) ** (1 / _CROSSING)

    def _reached(self, link: Link) -> float:
        within = link.devices is not None and link.devices <= self.cluster.devices_per_node
        return _NODE_LINK if within else _NETWORK_LINK


def ranking_rates(config: RunConfig, machine: Machine, ranks: int) -> Rates:
    """Return the speed by which settings of one layout are compared; that of an H100 for unknown GPUs."""
    cluster = cluster_for(config.run.cluster, machine, ranks)
    return _cached_rates(cluster or cluster_of_device("h100", ranks))


@lru_cache(maxsize=16)
def _cached_rates(cluster: Cluster) -> Rates:
    return Rates(cluster)


def _share(kind: Collective, size: int, inside: int, reach: int) -> float:
    """Return the share of the tensor that each device sends over a level that joins groups of `inside`.

    A ring over all ranks enters and leaves each inner domain once; its members share the traffic. In an
    all-to-all each device sends what is for the other domains.
    """
    if kind == "p2p":
        return 1.0
    if kind == "all_to_all":
        return (reach - inside) / size
    once = (size - 1) / size / inside
    return 2 * once if kind == "all_reduce" else once
