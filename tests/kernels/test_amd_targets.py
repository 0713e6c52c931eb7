"""Every Triton kernel compiles for AMD GPUs: MI200 (gfx90a) and MI300 (gfx942). Nothing here runs on one."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TARGETS = ("gfx90a", "gfx942")
SCRIPT = Path(__file__).with_name("amd_targets.py")
SOURCE = Path(__file__).parents[2] / "src"
# beside the packages of the environment, so that nothing else of the suite finds Triton
INSTALLED = Path(sys.prefix) / "triton"


@pytest.mark.slow
def test_all_kernels_compile_for_amd(tmp_path):
    if not INSTALLED.is_dir() and find_spec("triton") is None:
        pytest.skip("needs Triton, which `make test` installs: make .venv/triton")
    paths = [str(SOURCE), *([str(INSTALLED)] if INSTALLED.is_dir() else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, SCRIPT, *TARGETS], env=environment, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    wanted = {f"{kernel} {target}" for kernel in found["kernels"] for target in TARGETS}
    assert len(found["kernels"]) >= 15
    assert set(found["compiled"]) == wanted, "a kernel has no launch in amd_targets.py"
    assert all(size > 0 for sizes in found["compiled"].values() for size in sizes)
