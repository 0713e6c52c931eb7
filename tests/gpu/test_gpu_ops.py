"""`bench ops` runs the kernels of training on a GPU, and finds each of them in the cache afterwards."""

import pytest

from arriero import cli
from arriero.plan.measured import OPS, MeasuredFile
from gpu.alone import alone

pytestmark = pytest.mark.gpu


def test_every_operation_is_measured_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("ARRIERO_CACHE", str(tmp_path / "cache"))
    sets = ("model.preset=llama-test", "model.dim=256", "model.head_dim=64", "model.ffn=512")
    given = [word for each in sets for word in ("--set", each)]
    options = ["--tokens", "256", "--seq-lens", "256", "--documents", "64", "--seconds", "0.001"]

    def measured():
        out = tmp_path / "ops.json"
        command = ["bench", "ops", *given, *options, "--precisions", "bf16,float8", "--out", str(out)]
        cli.app(command, standalone_mode=False)
        return MeasuredFile.read(out)

    found = alone(measured)
    assert {row.op for row in found.ops if row.precision == "bf16"} == set(OPS)
    assert {row.op for row in found.ops if row.precision == "float8"} == {"linear", "block"}
    assert found.versions["triton"]
    assert "CPU" not in found.device
