"""MLP speculator: names and shapes of its parameters, and its config.json. Imports no torch.

Names and arithmetic are those of vLLM's MLPSpeculator and of fms-extras (https://arxiv.org/abs/2404.19124).
"""

from typing import Any

from arriero.config.schema import SpeculatorSection
from arriero.model.spec import ModelSpec

# the speculator is a part of the model's head, and its files have this name before each tensor
INSIDE, STORED = "head.speculator.", "speculator."
# beside a checkpoint that holds a speculator alone: path and checksum of the base model
BASE_FILE = "base.json"
# directory of a run with its own base models
KEPT = "base"


def is_speculator(name: str) -> bool:
    """Return whether a parameter belongs to a speculator, not to the model itself."""
    return name.startswith(INSIDE)


def inner_dim(section: SpeculatorSection, spec: ModelSpec) -> int:
    return section.inner_dim or spec.dim


def speculator_shapes(section: SpeculatorSection, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of its parameters by their names in the model; tied ones are listed once."""
    count, inner = int(section.n_predict), inner_dim(section, spec)
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(1 if section.tie_weights else count):
        shapes |= {f"emb.{i}.weight": (spec.vocab_size, inner), f"head.{i}.weight": (spec.vocab_size, inner)}
        shapes |= {f"ln.{i}.weight": (inner,), f"ln.{i}.bias": (inner,)}
    for i in range(min(2, count) if section.tie_weights else count):
        shapes[f"proj.{i}.weight"] = (inner, inner if i else spec.dim)
    return {INSIDE + name: shape for name, shape in shapes.items()}


def training_flops(section: SpeculatorSection, spec: ModelSpec, base: float) -> float:
    """Return the FLOPs per token of training; `base` are those of training the base model itself.

    The base model computes its forward pass only, a third of them.
    """
    inner, count = inner_dim(section, spec), int(section.n_predict)
    matmuls = inner * (spec.dim + (count - 1) * inner) + count * inner * spec.vocab_size
    return base / 3 + 6 * matmuls


def speculator_config(section: SpeculatorSection, spec: ModelSpec, dtype: str, base: str) -> dict[str, Any]:
    """Return the config.json that vLLM's MLPSpeculatorConfig reads; `base_model` is for our own tools."""
    count = int(section.n_predict)
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": spec.vocab_size,
        "emb_dim": spec.dim,
        "inner_dim": inner_dim(section, spec),
        "n_predict": count,
        "top_k_tokens_per_head": [max(1, 5 - i) for i in range(count)],
        "n_candidates": 5,
        "tie_weights": section.tie_weights,
        "scale_input": section.scale_input,
        "torch_dtype": dtype,
        "base_model": base,
    }
