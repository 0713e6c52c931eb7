"""The house rules that a machine can check."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "arriero"

# A room may import from its own floor and from those below it.
FLOORS = [
    {"units", "errors", "events", "interrupt", "ui", "__version__"},
    {"config", "kernels"},
    {"model", "data", "plan"},
    {"parallel", "checkpoint"},
    {"train"},
    {"bench", "launch", "federate", "report"},
    {"cli", "__main__"},
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(p for p in SOURCE.rglob("*.py") if p.relative_to(SOURCE).parts != ("__init__.py",))


def room_of(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    here = FLOOR_OF[room_of(path)]
    for name in imports_of(path):
        if name.startswith("arriero."):
            room = name.split(".")[1]
            assert FLOOR_OF[room] <= here, f"{path} imports {name} from a floor above"


def test_the_ground_floor_stands_alone():
    for room in FLOORS[0] - {"__version__"}:
        assert not [n for n in imports_of(SOURCE / f"{room}.py") if n.startswith("arriero")]


@pytest.mark.parametrize("path", sorted((SOURCE / "model").rglob("*.py")), ids=lambda p: p.name)
def test_the_model_knows_nothing_of_distribution(path):
    assert "distributed" not in path.read_text()


def test_planning_and_the_command_table_do_not_load_torch(python):
    """`arriero --help` answers at once; only work that needs torch pays for its import."""
    result = python("-c", "import sys, arriero.cli, arriero.plan.hardware; sys.exit('torch' in sys.modules)")
    assert result.returncode == 0, result.stderr


def test_kernels_know_torch_and_triton_alone():
    for path in (SOURCE / "kernels").rglob("*.py"):
        for name in imports_of(path):
            assert not name.startswith("arriero.") or name.startswith("arriero.kernels"), (path, name)
