"""Every mode that is faster or smaller on a GPU trains what the fp32 reference trains on it."""

import pytest

from arriero.bench.cases import BF16, BF16_WEIGHTS, FLOAT8, FP32, STATES, Case, layout
from arriero.bench.parity import Parity

pytestmark = pytest.mark.gpu

BF = {"precision.compute": "bf16"}
COMPILED = {"precision.compile": True}
MODES = {
    "compiled": (COMPILED, FP32),
    "compiled bf16": (COMPILED | BF, BF16),
    "float8 tensorwise, compiled": (COMPILED | BF | {"precision.float8": "tensorwise"}, FLOAT8),
    "float8 rowwise, compiled": (COMPILED | BF | {"precision.float8": "rowwise"}, FLOAT8),
    "remat full, compiled": (COMPILED | {"memory.remat": "full"}, FP32),
    "remat selective, compiled": (COMPILED | {"memory.remat": "selective"}, FP32),
    "remat budget, compiled": (COMPILED | {"memory.remat": "budget:0.3"}, FP32),
    "activations in host memory": ({"memory.offload_activations": True}, FP32),
    "bf16 weights": (BF | {"precision.master": "bf16"}, BF16_WEIGHTS),
    "int8 moments": ({"optim.state": "int8"}, STATES["int8"]),
}


@pytest.fixture(scope="module")
def parity(synthetic_cache):
    return Parity("llama", synthetic_cache, {"run.device": "cuda"})


@pytest.mark.parametrize("name", MODES)
def test_a_mode_has_the_losses_gradient_and_weights_of_the_reference(parity, name):
    sets, tolerance = MODES[name]
    verdict = parity.judge(Case("one GPU", name, layout() | sets, tolerance=tolerance))
    assert verdict.holds, verdict
