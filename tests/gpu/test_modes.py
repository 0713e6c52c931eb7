"""Every mode that is faster or smaller on a GPU trains what the fp32 reference trains on it."""

import pytest

from arriero.bench.cases import BF16, BF16_WEIGHTS, FLOAT8, FP32, STATES, Case, axes
from arriero.bench.parity import Parity

pytestmark = pytest.mark.gpu

BF = {"precision.compute": "bf16"}
COMPILED = {"precision.compile": True}
FLOAT8_HEAD = {"precision.float8": "tensorwise", "precision.float8_head": True}
# kernels are for what is judged, not for what it is judged by
PLAIN = {"precision.kernels": False}
MODES = {
    "compiled": (COMPILED, FP32),
    "compiled bf16": (COMPILED | BF, BF16),
    "float8 tensorwise, compiled": (COMPILED | BF | {"precision.float8": "tensorwise"}, FLOAT8),
    "float8 rowwise, compiled": (COMPILED | BF | {"precision.float8": "rowwise"}, FLOAT8),
    "full activation checkpointing, compiled": (COMPILED | {"memory.activation_checkpointing": "full"}, FP32),
    "selective activation checkpointing, compiled": (
        COMPILED | {"memory.activation_checkpointing": "selective"},
        FP32,
    ),
    "budget activation checkpointing, compiled": (
        COMPILED | {"memory.activation_checkpointing": "budget:0.3"},
        FP32,
    ),
    "activations in host memory": ({"memory.offload_activations": True}, FP32),
    "bf16 weights": (BF | {"precision.master": "bf16"}, BF16_WEIGHTS),
    "int8 moments": ({"optim.state": "int8"}, STATES["int8"]),
    "float8 with its head, compiled": (COMPILED | BF | FLOAT8_HEAD, FLOAT8),
}
FAMILIES = {"llama": list(MODES), "gpt2": ["compiled", "compiled bf16"]}


@pytest.fixture(scope="module")
def parities(synthetic_cache):
    return {family: Parity(family, synthetic_cache, {"run.device": "cuda"}) for family in FAMILIES}


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, names in FAMILIES.items() for name in names]
)
def test_a_mode_has_the_losses_gradient_and_weights_of_the_reference(parities, family, name):
    sets, tolerance = MODES[name]
    judged = axes() | {"precision.kernels": True} | sets
    verdict = parities[family].compare(Case("one GPU", name, judged, PLAIN, tolerance))
    assert verdict.holds, verdict
