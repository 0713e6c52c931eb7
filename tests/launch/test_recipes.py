"""The job scripts of recipes/ are what `arriero launch render` writes."""

import re
import subprocess

import pytest

from launch.recipe_jobs import JOBS, RECIPES, rendered

SCRIPTS = sorted(RECIPES.rglob("*.sbatch"))


@pytest.mark.parametrize("name", sorted(JOBS))
def test_the_job_script_of_a_recipe_is_the_rendered_one(name):
    for path, text in rendered(name).items():
        assert path.read_text() == text, "run python tests/launch/recipe_jobs.py"


def test_every_job_script_belongs_to_a_recipe_and_is_valid():
    jobs = sorted((RECIPES / name).with_name("job.sbatch") for name in JOBS)
    assert jobs == SCRIPTS
    for path in SCRIPTS:
        subprocess.run(["bash", "-n", path], check=True)


def test_slurm_accepts_the_options_of_a_recipe(slurm, tmp_path):
    """`sbatch --test-only` reads every #SBATCH line; this cluster is smaller than what recipes request."""
    for path in SCRIPTS:
        script = path.read_text().replace("/path/to/project", str(tmp_path))
        small = re.sub(r"--(gpus-per-node|ntasks-per-node|nodes|cpus-per-task)=\d+", r"--\1=1", script)
        (tmp_path / "job.sbatch").write_text(re.sub(r"#SBATCH --(account|partition)=.*\n", "", small))
        slurm.run("sbatch", "--test-only", tmp_path / "job.sbatch")
