"""Estimate the memory of a rank, and choose how much of a batch fits beside weights and optimizer state."""

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
# bytes per element: both moments, their update and its rounding in fp32, and the indices of the codes
_UNPACKED = 64
_MOMENTS = {"adamw": 2, "muon": 1, "sgd": 1}
_CPU_CHUNK = 2048
_LEAST_CHUNK = 256
# the share of the free memory that a run may fill by the estimate
_USABLE = 0.9
EXCEEDS = f"needs more than {_USABLE:.0%} of the free memory, and may not fit"
_ALL_IN_FLIGHT = ("gpipe", "looped-bfs")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one rank needs.

    `state` are weights, gradients and optimizer state, `per_sequence` the activations of one sequence.
    `accumulated` are gradients that are summed until the last micro-batch. `head_sum` is the head's gradient,
    summed over chunks; `head_cast` is its weight in float8. `update` is what the optimizer needs when the
    activations are freed. `in_flight` is the share of a micro-batch's activations that a pipeline rank holds;
    with `holds_all` it holds those of all micro-batches.
    """

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
        """Return the peak at a micro-batch size."""
        tokens = micro_batch * self.tokens
        logits = min(tokens, self.chunk or tokens) * self.logits_per_token + self.head_cast
        if tokens > (self.chunk or tokens):
            logits += self.head_sum
        held = self.sequences if self.holds_all else micro_batch
        accumulated = self.accumulated if micro_batch < self.sequences else 0
        activations = round(held * self.per_sequence * self.in_flight)
        return self.state + max(accumulated + logits + activations, self.update)

    def fits(self, micro_batch: int, free: int) -> bool:
        return self.bytes(micro_batch) <= _USABLE * free


def loss_chunk(
    config: RunConfig, spec: ModelSpec, layout: Layout, compute_bytes: int, machine: Machine
) -> tuple[int | Literal[False], str]:
    """Return the number of tokens whose logits are computed at once, and the reason.

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


def estimate_memory(
    config: RunConfig,
    spec: ModelSpec,
    layout: Layout,
    compute_bytes: int,
    chunk: int | Literal[False] = _CPU_CHUNK,
    on_gpu: bool = False,
) -> MemoryEstimate:
    """Estimate the memory of a run of one phase; `compute_bytes` is the size of an activation's element."""
    tokens = config.data.seq_len // layout.cp
    holds_all = layout.pp > 1 and config.parallel.schedule in _ALL_IN_FLIGHT
    cast = _cast_bytes(config)
    # the product of one chunk is held beside the sum
    beside = FP32 + (compute_bytes if cast else 0)
    # gradients are summed unsharded, or beside gradients of lower precision
    sums = compute_bytes < _master_bytes(config)
    if layout.uses_fsdp:
        sums = config.parallel.sync == "last"
    return MemoryEstimate(
        state=state_bytes(config, spec, layout, compute_bytes),
        per_sequence=tokens * activation_bytes_per_token(config, spec, compute_bytes) // layout.tp,
        # a GPU writes the gradient of the logits in their place
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
    """Return the bytes of weights, gradients and optimizer state, unless they are offloaded to CPU.

    FSDP adds the gathered weights. A bf16 model beside fp32 master weights keeps their upper halves, and its
    gradients in bf16.
    """
    master = _master_bytes(config)
    moments = _MOMENTS[config.optim.name] * _STATE[config.optim.state]
    here = spec.parameters / (layout.pp * layout.tp)
    if layout.uses_fsdp:
        held = here / layout.fsdp * (2 * master + moments)
        keeps = config.parallel.reshard == "never" or (config.parallel.reshard == "auto" and layout.pp > 1)
        unsharded = here if keeps else 2 * (spec.block_parameters + spec.embedding_parameters) / layout.tp
        return round((0 if config.memory.offload_state else held) + unsharded * (compute_bytes + FP32))
    copy = compute_bytes if config.precision.compute == "fp16" else 0
    return round(here * (master + copy + min(compute_bytes, master) + moments))


def _cast_bytes(config: RunConfig) -> int:
    """Return the bytes of an element in float8: one copy by rows and one by columns."""
    return 2 if config.precision.float8_head else 0


def _update_bytes(config: RunConfig, spec: ModelSpec, layout: Layout, on_gpu: bool) -> int:
    """A GPU's kernels need no extra memory; a CPU unpacks 8-bit optimizer state, one parameter at a time."""
    if on_gpu or config.optim.state not in _EIGHT_BITS:
        return 0
    largest = max(spec.embedding_parameters, spec.dim * spec.ffn)
    return _UNPACKED * largest // (layout.tp * layout.fsdp)


def _master_bytes(config: RunConfig) -> int:
    return 2 if config.precision.master == "bf16" else FP32


def activation_bytes_per_token(config: RunConfig, spec: ModelSpec, compute_bytes: int) -> int:
    """Return an upper estimate of what an uncompiled model keeps for its backward pass.

    A pipeline rank has fewer blocks, but as many more micro-batches in flight.
    """
    query, kv = spec.attention_width, spec.kv_heads * spec.head_dim
    ffn = 0 if config.memory.ffn_tile else 4 * spec.ffn
    block = compute_bytes * (8 * spec.dim + 3 * query + 4 * kv + ffn) + FP32 * 4 * spec.dim
    checkpointing = config.memory.activation_checkpointing
    recomputed = len(checkpointing.blocks(spec.layers))
    kept = block / 2 if checkpointing.kind == "selective" else compute_bytes * spec.dim
    if checkpointing.kind == "attention":
        kept += compute_bytes * query + FP32 * spec.heads
    every = (spec.layers - recomputed) * block + recomputed * kept + (block if recomputed else 0)
    offloaded = float(config.memory.offload_activations)
    return round((1 - offloaded) * every + (2 * block if offloaded else 0))


def largest_that_fits(estimate: MemoryEstimate, allowed: Sequence[int], free: int) -> tuple[int, str]:
    """Return the largest allowed micro-batch that fits, or the smallest if none does, and the arithmetic."""
    fitting = [n for n in allowed if estimate.fits(n, free)]
    chosen = max(fitting, default=min(allowed))
    sizes = [human_bytes(n) for n in (estimate.state, estimate.bytes(chosen), free)]
    arithmetic = f"{sizes[0]} of state, {sizes[1]} in total, {sizes[2]} free"
    return chosen, arithmetic if fitting else f"even {chosen} {EXCEEDS}: {arithmetic}"
