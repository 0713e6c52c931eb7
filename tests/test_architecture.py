"""Check the import order of the packages and what each package may know."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "arriero"

# A package may import from its own layer and from those before it.
LAYERS = [
    {"units", "errors", "__version__"},
    {"events", "files", "interrupt", "ui"},
    {"config", "kernels"},
    {"slurm"},
    {"model", "data", "plan"},
    {"parallel", "checkpoint"},
    {"train"},
    {"bench", "launch", "federate", "report", "evaluate"},
    {"cli", "__main__"},
]
LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages}
# The Python API in arriero/__init__.py imports packages of every layer, lazily.
FILES = sorted(p for p in SOURCE.rglob("*.py") if p.relative_to(SOURCE).parts != ("__init__.py",))


# names of Meta's two ways to split a checkpoint, an option of `ckpt convert`
META_RULES = ("llama2", "llama3")


def package_of(path):
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
    layer = LAYER_OF[package_of(path)]
    for name in imports_of(path):
        if name.startswith("arriero."):
            package = name.split(".")[1]
            assert LAYER_OF[package] <= layer, f"{path} imports {name} from a later layer"


def test_units_and_errors_import_nothing_of_arriero():
    for module in LAYERS[0] - {"__version__"}:
        assert not [n for n in imports_of(SOURCE / f"{module}.py") if n.startswith("arriero")]


@pytest.mark.parametrize("path", sorted((SOURCE / "model").rglob("*.py")), ids=lambda p: p.name)
def test_model_code_does_not_mention_distribution(path):
    assert "distributed" not in path.read_text()


def test_planning_and_the_command_table_do_not_import_torch(python):
    """`arriero --help` starts fast: only verbs that need torch import it."""
    result = python("-c", "import sys, arriero.cli, arriero.plan.hardware; sys.exit('torch' in sys.modules)")
    assert result.returncode == 0, result.stderr


def test_every_module_of_the_planner_works_without_torch(python):
    """A Llama is planned where torch cannot be imported at all."""
    script = """
import importlib, pkgutil, sys
sys.modules["torch"] = None
import arriero.plan
for module in pkgutil.iter_modules(arriero.plan.__path__):
    importlib.import_module(f"arriero.plan.{module.name}")
from arriero.config.load import load_run
from arriero.model.presets import expand
from arriero.plan.hardware import load_cluster
from arriero.plan.search import plan_run
sets = ["model.preset=llama3.1-8b", "data.seq_len=8192", "train.batch=1048576 tok"]
assert plan_run(load_run(None, sets, expand).config, load_cluster("8xh100"), 8, keep=1).candidates
"""
    result = python("-c", script)
    assert result.returncode == 0, result.stderr


def test_kernels_import_torch_and_triton_only():
    for path in (SOURCE / "kernels").rglob("*.py"):
        for name in imports_of(path):
            assert not name.startswith("arriero.") or name.startswith("arriero.kernels"), (path, name)


def test_no_package_but_model_knows_a_family_by_name():
    """Neither an import nor an identifier nor a string names a family, presets in examples aside."""
    families = {path.parent.name for path in (SOURCE / "model").glob("*/family.py")} | {"bamba"}
    assert {"llama", "gpt2", "qwen", "mistral"} <= families
    named = re.compile(rf"^({'|'.join(families)})[0-9]*$", re.IGNORECASE)
    for package in ("train", "parallel", "checkpoint", "plan"):
        for path in (SOURCE / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                words = [getattr(node, key, "") for key in ("id", "attr", "name", "value")]
                if isinstance(node, ast.ImportFrom):
                    words += (node.module or "").split(".")
                found = [word for word in words if isinstance(word, str) and named.match(word)]
                assert not found or found[0] in META_RULES, f"{path} knows {found[0]}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_only_the_ui_imports_rich(path):
    if path.name != "ui.py":
        assert not [name for name in imports_of(path) if name.split(".")[0] == "rich"]


def test_tests_import_no_private_names():
    for path in sorted((SOURCE.parents[1] / "tests").rglob("*.py")):
        for name in imports_of(path):
            private = [part for part in name.split(".") if part.startswith("_") and not part.startswith("__")]
            assert not (name.startswith("arriero.") and private), f"{path.name} imports {name}"
