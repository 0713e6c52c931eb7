"""The job scripts of recipes/ are what `arriero launch render` writes."""

import subprocess

import pytest

from launch.recipe_jobs import JOBS, RECIPES, rendered


@pytest.mark.parametrize("name", sorted(JOBS))
def test_the_job_script_of_a_recipe_is_the_rendered_one(name):
    for file, text in rendered(name).items():
        assert (RECIPES / file).read_text() == text, "run python tests/launch/recipe_jobs.py"


def test_every_job_script_belongs_to_a_recipe_and_is_valid():
    scripts = sorted(RECIPES.glob("*.sbatch"))
    assert [path.stem for path in scripts] == sorted(JOBS)
    for path in scripts:
        subprocess.run(["bash", "-n", path], check=True)


def test_slurm_accepts_the_options_of_a_recipe(slurm, tmp_path):
    """`sbatch --test-only` reads every #SBATCH line; this cluster has fewer GPUs than the recipe requests."""
    for path in RECIPES.glob("*.sbatch"):
        script = path.read_text().replace("/path/to/project", str(tmp_path))
        small = script.replace("--gpus-per-node=8", "--gpus-per-node=2").replace(
            "--ntasks-per-node=8", "--ntasks-per-node=2"
        )
        (tmp_path / "job.sbatch").write_text(small)
        slurm.run("sbatch", "--test-only", tmp_path / "job.sbatch")
