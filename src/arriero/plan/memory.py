"""What a rank keeps in memory, and how much of a batch fits beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

from arriero.config.schema import RunConfig
from arriero.errors import UserError
from arriero.model.spec import ModelSpec
from arriero.plan.layout import Layout
from arriero.units import human_bytes, human_count

FP32 = 4
_STATE = {"fp32": 4.0, "bf16": 2.0, "int8": 1.02, "float8": 1.02}
_MOMENTS = {"adamw": 2, "muon": 1, "sgd": 1}


@dataclass(frozen=True)
class MicroBatch:
    sequences: int
    reason: str


@dataclass(frozen=True)
class Need:
    """Bytes on one rank: what is always there, and what each sequence of a micro-batch adds."""

    state: int
    per_sequence: int


def need_of(config: RunConfig, spec: ModelSpec, layout: Layout, compute_bytes: int) -> Need:
    logits = min(config.memory.loss_chunk or config.data.seq_len, config.data.seq_len) * _logit_bytes(
        spec, compute_bytes
    )
    tokens = config.data.seq_len // layout.cp
    per_token = activation_bytes_per_token(config, spec, compute_bytes) // layout.tp
    return Need(state_bytes(config, spec, layout, compute_bytes) + logits // layout.tp, tokens * per_token)


def state_bytes(config: RunConfig, spec: ModelSpec, layout: Layout, compute_bytes: int) -> int:
    """Weights, gradients and moments; with fp32 masters beside a bf16 model also its weights and a passing
    gradient, and where FSDP gathers, the gathered weights."""
    master = 2 if config.precision.master == "bf16" else FP32
    moments = _MOMENTS[config.optim.name] * _STATE[config.optim.state]
    here = spec.parameters / (layout.pp * layout.tp)
    held = here / layout.fsdp * (2 * master + moments)
    if layout.fsdp * layout.dp_replicate > 1:
        keeps = config.parallel.reshard == "never" or (config.parallel.reshard == "auto" and layout.pp > 1)
        gathered = here if keeps else 2 * (spec.block_parameters + spec.embedding_parameters) / layout.tp
        return round(held + gathered * (compute_bytes + FP32))
    working = 2 * compute_bytes if compute_bytes < master else 0
    return round(held + here * working)


def activation_bytes_per_token(config: RunConfig, spec: ModelSpec, compute_bytes: int) -> int:
    """Kept for backward by an uncompiled model: an upper estimate. In a pipeline each rank has fewer blocks
    and as many more micro-batches under way."""
    query, kv = spec.attention_width, spec.kv_heads * spec.head_dim
    block = compute_bytes * (8 * spec.dim + 3 * query + 4 * kv + 4 * spec.ffn) + FP32 * 4 * spec.dim
    remat = config.memory.remat
    recomputed = len(remat.blocks(spec.layers))
    kept = block / 2 if remat.kind == "selective" else compute_bytes * spec.dim
    if config.memory.offload_activations:
        return round(2 * block)
    return round((spec.layers - recomputed) * block + recomputed * kept + (block if recomputed else 0))


def _logit_bytes(spec: ModelSpec, compute_bytes: int) -> int:
    return spec.vocab_size * (2 * compute_bytes + 2 * FP32)


def micro_batch_that_fits(need: Need, spec: ModelSpec, allowed: Sequence[int], memory: int) -> MicroBatch:
    """The largest allowed one that fits in nine tenths of the memory; the smallest if none seems to."""
    if need.state > memory:
        raise UserError(
            f"training {human_count(spec.parameters)} parameters needs {human_bytes(need.state)} a rank for "
            f"weights, gradients and optimizer, and {human_bytes(memory)} are free",
            "shard it over more ranks, choose a smaller model, or a device with more memory",
        )
    room = int(0.9 * memory) - need.state
    fitting = [n for n in allowed if n * need.per_sequence <= room]
    sizes = [human_bytes(n) for n in (need.state, need.per_sequence, memory)]
    arithmetic = f"{sizes[0]} of state, {sizes[1]} per sequence, {sizes[2]} free"
    reason = arithmetic if fitting else f"even {min(allowed)} may not fit: {arithmetic}"
    return MicroBatch(max(fitting, default=min(allowed)), reason)
