"""Render the job scripts of recipes/ again: python tests/launch/recipe_jobs.py

The working directory and the virtual environment are written as /path/to/project and /path/to/venv.
"""

import contextlib
import os
import sys
import tempfile
from pathlib import Path

from arriero.config.load import load_run
from arriero.config.site import load_site
from arriero.launch.jobs import JobRequest, render
from arriero.model.presets import expand

RECIPES = Path(__file__).parents[2] / "recipes"
# recipe: site, nodes
JOBS = {"llama3.1-8b-two-nodes": ("generic", 2)}


def rendered(name: str) -> dict[str, str]:
    """Return the files of a recipe's job."""
    site, nodes = JOBS[name]
    config = load_run(RECIPES / f"{name}.toml", [], expand).config
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        job = render(config, load_site(site), JobRequest(nodes=nodes))
        texts = {f"{name}.sbatch": job.script.read_text()}
        texts[f"{name}.environment.sh"] = (job.folder / "environment.sh").read_text()
        names = {os.getcwd(): "/path/to/project", str(Path(sys.executable).parent): "/path/to/venv/bin"}  # noqa: PTH109
        for path, shown in names.items():
            texts = {file: text.replace(path, shown) for file, text in texts.items()}
        return texts


if __name__ == "__main__":
    for recipe in JOBS:
        for file, text in rendered(recipe).items():
            (RECIPES / file).write_text(text)
