"""What a rank keeps in memory, and how much of a batch fits beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from arriero.config.schema import RunConfig
from arriero.model.spec import ModelSpec
from arriero.plan.hardware import Machine
from arriero.plan.layout import Layout
from arriero.units import human_bytes

FP32 = 4
_STATE = {"fp32": 4.0, "bf16": 2.0, "int8": 1.02, "float8": 1.02}
_EIGHT_BITS = ("int8", "float8")
# bytes an element: both moments, their update and its roundings in fp32, and the indices of codes
_UNPACKED = 64
_MOMENTS = {"adamw": 2, "muon": 1, "sgd": 1}
_CPU_CHUNK = 2048
_LEAST_CHUNK = 256
# the share of free memory that a run may fill by the estimate
_USABLE = 0.9
_ALL_IN_FLIGHT = ("gpipe", "looped-bfs")


@dataclass(frozen=True)
class MicroBatch:
    sequences: int
    reason: str


@dataclass(frozen=True)
class Need:
    """Bytes on one rank. `accumulated` are sums of gradients that wait for the last micro-batch;
    `head_sum` is that of the head over several chunks, `head_cast` its weight in float8. `in_flight` is how
    many micro-batches' activations a rank holds, for each stage's share of the blocks; `update` is what the
    optimizer needs for itself, when they are gone."""

    state: int
    per_sequence: int
    logits_per_token: int
    tokens: int
    chunk: int | None
    sequences: int
    accumulated: int = 0
    head_sum: int = 0
    head_cast: int = 0
    update: int = 0
    in_flight: float = 1.0
    holds_all: bool = False

    def bytes(self, micro_batch: int) -> int:
        tokens = micro_batch * self.tokens
        logits = min(tokens, self.chunk or tokens) * self.logits_per_token + self.head_cast
        if tokens > (self.chunk or tokens):
            logits += self.head_sum
        held = self.sequences if self.holds_all else micro_batch
        waiting = self.accumulated if micro_batch < self.sequences else 0
        passing = waiting + logits + round(held * self.per_sequence * self.in_flight)
        return self.state + max(passing, self.update)

    def fits(self, micro_batch: int, memory: int) -> bool:
        return self.bytes(micro_batch) <= _USABLE * memory


def loss_chunk(
    config: RunConfig, spec: ModelSpec, layout: Layout, compute_bytes: int, machine: Machine
) -> tuple[int | Literal[False], str]:
    """Return the tokens whose logits are computed at once, and the reason.

    Few large matmuls are faster than many. The size follows from the total memory of a GPU, not from the free
    memory: a resumed run must sum in the same order.
    """
    if config.memory.loss_chunk != "auto":
        return config.memory.loss_chunk, "as configured"
    if not machine.is_gpu:
        return _CPU_CHUNK, "logits that fit in the processor's cache"
    bytes_each = spec.vocab_size * (compute_bytes + _cast_bytes(config))
    fitting = machine.memory_total // 16 * layout.tp // bytes_each
    return max(_LEAST_CHUNK, 1 << max(fitting, 1).bit_length() - 1), "logits in a sixteenth of the memory"


def need_of(
    config: RunConfig,
    spec: ModelSpec,
    layout: Layout,
    compute_bytes: int,
    chunk: int | Literal[False] = _CPU_CHUNK,
    on_gpu: bool = False,
) -> Need:
    tokens = config.data.seq_len // layout.cp
    holds_all = layout.pp > 1 and config.parallel.schedule in _ALL_IN_FLIGHT
    spread = layout.fsdp * layout.dp_replicate > 1
    cast = _cast_bytes(config)
    # the product of one chunk stands beside the sum
    beside = FP32 + (compute_bytes if cast else 0)
    # unsharded, or beside gradients of fewer bits
    sums = config.parallel.sync == "last" if spread else compute_bytes < _master_bytes(config)
    return Need(
        state=state_bytes(config, spec, layout, compute_bytes),
        per_sequence=tokens * activation_bytes_per_token(config, spec, compute_bytes) // layout.tp,
        # a GPU computes their slope in their place
        logits_per_token=spec.vocab_size * (compute_bytes + cast + (0 if on_gpu else FP32)) // layout.tp,
        head_sum=spec.embedding_parameters * beside // layout.tp,
        head_cast=spec.embedding_parameters * cast // layout.tp,
        update=_update_bytes(config, spec, layout, on_gpu),
        tokens=tokens,
        chunk=chunk or None,
        sequences=layout.rows(config.train.batch.amount // config.data.seq_len),
        accumulated=spec.parameters * FP32 // (layout.pp * layout.tp) if sums else 0,
        in_flight=1 / layout.pp if holds_all else 1.0,
        holds_all=holds_all,
    )


def state_bytes(config: RunConfig, spec: ModelSpec, layout: Layout, compute_bytes: int) -> int:
    """Weights, gradients and moments, unless they live in host memory; where FSDP gathers, also the gathered
    weights. A model in bf16 beside fp32 masters has the upper halves of them, and gradients in bf16."""
    master = _master_bytes(config)
    moments = _MOMENTS[config.optim.name] * _STATE[config.optim.state]
    here = spec.parameters / (layout.pp * layout.tp)
    if layout.fsdp * layout.dp_replicate > 1:
        held = here / layout.fsdp * (2 * master + moments)
        keeps = config.parallel.reshard == "never" or (config.parallel.reshard == "auto" and layout.pp > 1)
        unsharded = here if keeps else 2 * (spec.block_parameters + spec.embedding_parameters) / layout.tp
        return round((0 if config.memory.offload_state else held) + unsharded * (compute_bytes + FP32))
    shadow = compute_bytes if config.precision.compute == "fp16" else 0
    return round(here * (master + shadow + min(compute_bytes, master) + moments))


def _cast_bytes(config: RunConfig) -> int:
    """Of an element in float8: one by rows and one by columns."""
    return 2 if config.precision.float8_head else 0


def _update_bytes(config: RunConfig, spec: ModelSpec, layout: Layout, on_gpu: bool) -> int:
    """A GPU's kernels need nothing; elsewhere moments in eight bits are unpacked, one parameter at a time."""
    if on_gpu or config.optim.state not in _EIGHT_BITS:
        return 0
    largest = max(spec.embedding_parameters, spec.dim * spec.ffn)
    return _UNPACKED * largest // (layout.tp * layout.fsdp)


def _master_bytes(config: RunConfig) -> int:
    return 2 if config.precision.master == "bf16" else FP32


def activation_bytes_per_token(config: RunConfig, spec: ModelSpec, compute_bytes: int) -> int:
    """Kept for backward by an uncompiled model: an upper estimate. In a pipeline each rank has fewer blocks
    and as many more micro-batches under way."""
    query, kv = spec.attention_width, spec.kv_heads * spec.head_dim
    ffn = 0 if config.memory.ffn_tile else 4 * spec.ffn
    block = compute_bytes * (8 * spec.dim + 3 * query + 4 * kv + ffn) + FP32 * 4 * spec.dim
    checkpointing = config.memory.activation_checkpointing
    recomputed = len(checkpointing.blocks(spec.layers))
    kept = block / 2 if checkpointing.kind == "selective" else compute_bytes * spec.dim
    if checkpointing.kind == "attention":
        kept += compute_bytes * query + FP32 * spec.heads
    every = (spec.layers - recomputed) * block + recomputed * kept + (block if recomputed else 0)
    away = float(config.memory.offload_activations)
    return round((1 - away) * every + (2 * block if away else 0))


def micro_batch_that_fits(need: Need, allowed: Sequence[int], memory: int) -> MicroBatch:
    """Return the largest micro-batch that fits in 90 % of the memory, or the smallest if none does."""
    fitting = [n for n in allowed if need.fits(n, memory)]
    chosen = max(fitting, default=min(allowed))
    sizes = [human_bytes(n) for n in (need.state, need.bytes(chosen), memory)]
    arithmetic = f"{sizes[0]} of state, {sizes[1]} in all, {sizes[2]} free"
    return MicroBatch(chosen, arithmetic if fitting else f"even {chosen} may not fit: {arithmetic}")
