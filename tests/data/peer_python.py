"""Peers that are not dependencies run in their own interpreter, or their tests are skipped with a reason."""

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest


@cache
def _has(python: str, modules: tuple[str, ...]) -> bool:
    code = "import sys; from importlib.util import find_spec as f; sys.exit(not all(map(f, sys.argv[1:])))"
    return subprocess.run([python, "-c", code, *modules], capture_output=True).returncode == 0


def peer_python(*modules: str) -> str:
    for python in filter(None, (os.environ.get("ARRIERO_PEERS_PYTHON"), sys.executable)):
        if _has(python, modules):
            return python
    pytest.skip(
        f"no interpreter with {', '.join(modules)}: install the 'peers' extra or set ARRIERO_PEERS_PYTHON"
    )


def ask_peer(python: str, code: str, *arguments: object) -> Any:
    """What the peer's code prints last, as JSON."""
    result = subprocess.run(
        [python, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
