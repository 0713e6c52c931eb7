"""Container definitions, read by a strict checker and by apptainer; the script that builds RCCL's plugin."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from slurm import require_program

REPOSITORY = Path(__file__).parents[2]
DEFINITIONS = sorted((REPOSITORY / "containers").glob("*.def"))
PLUGIN = REPOSITORY / "recipes" / "install_ofi_rccl.sh"
SECTIONS = {"arguments", "files", "labels", "post", "environment", "test", "runscript", "startscript"}
SECTIONS |= {"help", "setup", "pre"}
HEADERS = {"Bootstrap", "From", "Stage", "Fingerprints"}
SHELL = ("post", "environment", "test", "runscript")


def read(text):
    """Return headers and sections of a definition file, and what Apptainer would reject or ignore."""
    headers, sections, problems, now = {}, {}, [], None
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("%"):
            now = line[1:].strip()
            if now not in SECTIONS:
                problems.append(f"line {number}: there is no section %{now}")
            if now in sections:
                problems.append(f"line {number}: a second section %{now}")
            sections[now] = []
        elif now is not None:
            sections[now].append(line)
        elif line.strip() and not line.startswith("#"):
            name, colon, value = line.partition(":")
            if name not in HEADERS or not colon or not value.strip():
                problems.append(f"line {number}: '{line}' is no header")
            headers[name] = value.strip()
    return headers, sections, problems


def problems_of(text, root=REPOSITORY):
    headers, sections, problems = read(text)
    if headers.get("Bootstrap") != "docker":
        problems.append("Bootstrap is missing or not docker")
    if not re.fullmatch(r"[\w./-]+:[\w.{} -]+", headers.get("From", "")) or headers["From"].endswith(
        "latest"
    ):
        problems.append("From needs an image with a version")
    for line in filter(str.strip, sections.get("files", [])):
        source, *target = line.split()
        if not (root / source).exists():
            problems.append(f"%files: there is no {source}")
        if len(target) != 1 or not target[0].startswith("/"):
            problems.append(f"%files: {source} needs an absolute target")
    declared = {line.split("=")[0].strip() for line in sections.get("arguments", []) if "=" in line}
    used = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", text))
    problems += [f"{{{{ {name} }}}} is not in %arguments" for name in sorted(used - declared)]
    problems += [f"%arguments: {name} is not used" for name in sorted(declared - used)]
    if "set -e" not in "\n".join(sections.get("post", [])):
        problems.append("%post continues after an error: it needs set -e")
    for name in SHELL:
        script = "\n".join(sections.get(name, []))
        if said := subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True).stderr:
            problems.append(f"%{name}: {said}")
    return problems


@pytest.mark.parametrize("path", DEFINITIONS, ids=lambda path: path.name)
def test_definitions_of_containers_are_valid(path):
    assert problems_of(path.read_text()) == []


def test_there_is_one_for_nvidia_and_one_for_amd():
    assert [path.stem for path in DEFINITIONS] == ["nvidia", "rocm"]


@pytest.mark.parametrize("path", DEFINITIONS, ids=lambda path: path.name)
def test_containers_install_the_pinned_versions_and_extras_that_exist(path):
    post = "\n".join(read(path.read_text())[1]["post"])
    assert "pip install --no-cache-dir -c constraints.txt" in post
    extras = re.search(r"'\.\[([\w,]+)\]'", post)[1].split(",")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert set(extras) <= set(project["optional-dependencies"])
    assert re.search(r"^torch==", (REPOSITORY / "constraints.txt").read_text(), re.M)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("%post", "%psot", "there is no section %psot"),
        ("Bootstrap: docker\n", "", "Bootstrap is missing"),
        ("From: docker.io", "Form: docker.io", "is no header"),
        ("{{ python }}-slim-bookworm", "latest", "image with a version"),
        ("src /opt", "source /opt", "there is no source"),
        ("python=3.11", "pyhton=3.11", "{{ python }} is not in %arguments"),
        ("set -eu", "set -u", "it needs set -e"),
        ("exec arriero", "exec arriero (", "%runscript"),
        ("%help", "%files", "a second section %files"),
    ],
)
def test_the_checker_finds_mistakes(old, new, problem):
    text = DEFINITIONS[0].read_text()
    assert old in text
    assert any(problem in each for each in problems_of(text.replace(old, new, 1)))


@pytest.mark.skipif(shutil.which("apptainer") is None, reason="apptainer is not installed (not in Debian 12)")
@pytest.mark.parametrize("path", DEFINITIONS, ids=lambda path: path.name)
def test_apptainer_accepts_the_definitions(path, tmp_path):
    """Without a network the build ends at the image, after the definition was read."""
    build = ["apptainer", "build", "--force", tmp_path / "image.sif", path]
    done = subprocess.run(build, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert "invalid" not in done.stderr and "no bootstrap" not in done.stderr, done.stderr


def test_the_plugin_script_passes_shellcheck():
    require_program("shellcheck")
    subprocess.run(["shellcheck", PLUGIN], check=True)


def test_the_plugin_script_builds_for_the_version_of_rocm_that_is_given(tmp_path):
    def run(*options):
        return subprocess.run(["bash", PLUGIN, *options], capture_output=True, text=True)

    shown = run(
        "--rocm", "6.2.4", "--libfabric", "/opt/cray/libfabric/1.22.0", "--prefix", "/p x", "--dry-run"
    )
    assert shown.returncode == 0, shown.stderr
    for part in (
        "--with-rccl=/opt/rocm-6.2.4",
        "--with-libfabric=/opt/cray/libfabric/1.22.0",
        "--prefix=/p x",
    ):
        assert part in shown.stdout
    snippet = shown.stdout.partition("every job finds it:\n")[2].partition("\nA job")[0]
    assert tomllib.loads(snippet)["environment"]["LD_LIBRARY_PATH"]["value"].startswith("/p x/lib:")
    for wrong in (
        ["--rocm", "new"],
        ["--rocm"],
        [],
        ["--rocm", "6.2.4", "--rocm-path", str(tmp_path / "none")],
    ):
        assert run(*wrong).returncode == 2
