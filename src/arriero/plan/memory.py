"""How much of a batch fits on a device at once."""

from dataclasses import dataclass

from arriero.errors import UserError
from arriero.model.spec import ModelSpec
from arriero.units import human_bytes, human_count

FP32 = 4


@dataclass(frozen=True)
class MicroBatch:
    sequences: int
    reason: str


def state_bytes(spec: ModelSpec, compute_bytes: int) -> int:
    """fp32 weights, gradients and two moments; bf16 compute adds its own weights and a passing gradient."""
    working = 2 * compute_bytes if compute_bytes != FP32 else 0
    return spec.parameters * (4 * FP32 + working)


def activation_bytes_per_token(spec: ModelSpec, compute_bytes: int) -> int:
    """Kept for backward by an uncompiled model without recomputation: an upper estimate."""
    query, kv = spec.attention_width, spec.kv_heads * spec.head_dim
    block = compute_bytes * (8 * spec.dim + 3 * query + 4 * kv + 4 * spec.ffn) + FP32 * 4 * spec.dim
    logits = spec.vocab_size * (2 * compute_bytes + 2 * FP32)
    return spec.layers * block + logits


def micro_batch_that_fits(
    spec: ModelSpec, seq_len: int, sequences: int, compute_bytes: int, memory: int
) -> MicroBatch:
    """The largest divisor of the batch that fits in nine tenths of the memory; 1 if nothing seems to."""
    state = state_bytes(spec, compute_bytes)
    if state > memory:
        raise UserError(
            f"training {human_count(spec.parameters)} parameters needs {human_bytes(state)} for weights, "
            f"gradients and optimizer, and {human_bytes(memory)} are free",
            "choose a smaller model, or a device with more memory",
        )
    per_sequence = seq_len * activation_bytes_per_token(spec, compute_bytes)
    room = int(0.9 * memory) - state
    fitting = [n for n in range(1, sequences + 1) if sequences % n == 0 and n * per_sequence <= room]
    sizes = [human_bytes(n) for n in (state, per_sequence, memory)]
    arithmetic = f"{sizes[0]} of state, {sizes[1]} per sequence, {sizes[2]} free"
    reason = arithmetic if fitting else f"even one may not fit: {arithmetic}"
    return MicroBatch(max(fitting, default=1), reason)
