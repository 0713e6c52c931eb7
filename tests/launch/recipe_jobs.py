"""Render the job scripts of recipes/ again: python tests/launch/recipe_jobs.py

The working directory and the virtual environment are written as /path/to/project and /path/to/venv.
"""

import contextlib
import os
import sys
import tempfile
from pathlib import Path

from arriero.config.load import load_run
from arriero.config.site import chosen_site
from arriero.launch.jobs import JobRequest, render
from arriero.model.presets import expand

RECIPES = Path(__file__).parents[2] / "recipes"
# run file: site, nodes, spares, account
JOBS = {
    "llama3.1-8b/two-nodes.toml": (str(RECIPES / "llama3.1-8b" / "site.toml"), 2, 0, None),
    "llama3.1-70b/slurm.toml": ("leonardo", 64, 2, "PROJECT"),
}


def rendered(name: str) -> dict[Path, str]:
    """Return the files of a recipe's job."""
    site, nodes, spares, account = JOBS[name]
    config = load_run(RECIPES / name, [], expand).config
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        job = render(config, chosen_site(site, account), JobRequest(nodes=nodes, spares=spares))
        files = {"job.sbatch": job.script.read_text()}
        files["environment.sh"] = (job.folder / "environment.sh").read_text()
        names = {os.getcwd(): "/path/to/project", str(Path(sys.executable).parent): "/path/to/venv/bin"}  # noqa: PTH109
        for path, shown in names.items():
            files = {file: text.replace(path, shown) for file, text in files.items()}
        return {(RECIPES / name).with_name(file): text for file, text in files.items()}


if __name__ == "__main__":
    for recipe in JOBS:
        for path, text in rendered(recipe).items():
            path.write_text(text)
