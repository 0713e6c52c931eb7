"""Job scripts: what is written, and what is refused before the queue."""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from slurm import require_program

RUN = """
[run]
name = "eight"
[model]
preset = "llama3.1-8b"
[data]
seq_len = 8192
sources = [{ path = "data/web" }]
[train]
batch = "4194304 tok"
horizon = "100B tok"
"""


@pytest.fixture
def render(command, tmp_path):
    (tmp_path / "run.toml").write_text(RUN)

    def run(*options, verb="render"):
        return command("launch", verb, "run.toml", *options)

    return run


def options_of(tmp_path):
    script = (tmp_path / "runs" / "eight.launch" / "job.sbatch").read_text()
    return script, dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script, re.M))


def test_a_script_requests_what_the_site_has_and_runs_one_command(render, tmp_path):
    done = render("--site", "leonardo", "--nodes", 4, "--spares", 1, "--account", "proj")
    assert done.returncode == 0, done.stderr
    script, options = options_of(tmp_path)
    wanted = {"account": "proj", "partition": "boost_usr_prod", "nodes": "5", "gpus-per-node": "4"}
    assert options.items() >= (wanted | {"ntasks-per-node": "4", "time": "24:00:00"}).items()
    assert re.fullmatch(r"B:TERM@\d+", options["signal"])
    command = script.partition("exec ")[2].replace("\\\n", "").split()
    assert command[:3] == ["arriero", "launch", "supervise"]
    assert " ".join(command[4:]) == "--nodes 4 --tasks-per-node 4 --restarts 3 --spares 1"
    subprocess.run(["bash", "-n", tmp_path / "runs" / "eight.launch" / "job.sbatch"], check=True)


def test_without_degrees_the_planner_decides_and_its_prediction_is_written(render, tmp_path):
    done = render("--site", "frontier", "--nodes", 8, "--account", "proj")
    folder = tmp_path / "runs" / "eight.launch"
    best = json.loads((folder / "plan.json").read_text())["best"][0]
    written = tomllib.loads((folder / "resolved.toml").read_text())["parallel"]
    assert best["layout"].items() <= written.items()
    assert f"predicted {best['tokens_per_s']:,.0f} tok/s" in " ".join(done.stdout.split())


@pytest.mark.parametrize("site", ["alps", "jsc", "marenostrum5", "setonix", "generic"])
def test_every_site_has_a_cluster_to_plan_for(render, tmp_path, site):
    small = ["--set", "model.preset=llama3.2-1b", "--set", "train.batch=524288 tok"]
    done = render("--site", site, "--account", "p", "--partition", "p", *small)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "eight.launch" / "plan.json").is_file()
    assert ("assumes 8xa100-80" in done.stdout) == (site == "generic")


def test_a_job_that_is_not_planned_keeps_no_plan_of_an_earlier_one(render, tmp_path):
    (tmp_path / "site.toml").write_text('[slurm]\ngpus_per_node = 4\npartition = "gpu"\n')
    plan = tmp_path / "runs" / "eight.launch" / "plan.json"
    plan.parent.mkdir(parents=True)
    plan.write_text("{}")
    shown = render()
    assert "name the cluster file in site.toml" in " ".join(shown.stdout.split()), shown.stderr
    assert not plan.exists()
    (tmp_path / "site.toml").write_text('cluster = "h200"\n[slurm]\ngpus_per_node = 1\npartition = "gpu"\n')
    assert "assumes" not in render("--set", "model.preset=llama3.2-1b").stdout
    assert plan.exists()


def test_degrees_of_the_run_file_are_kept(render, tmp_path):
    sets = ["--set", "parallel.tp=4", "--set", "parallel.dp_shard=-1"]
    done = render("--site", "leonardo", "--nodes", 2, "--account", "proj", *sets)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs" / "eight.launch" / "plan.json").exists()
    assert tomllib.loads((tmp_path / "runs/eight.launch/resolved.toml").read_text())["parallel"]["tp"] == 4


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--site", "leonardo"], "needs slurm.account"),
        (["--site", "leonardo", "--account", "p", "--set", "parallel.tp=3"], "tp"),
        (["--site", "leonardo", "--account", "p", "--set", "model.preset=llama3.1-405b"], "no layout"),
        (["--site", "leonardo", "--account", "p", "--time", "5"], "time limit is 5"),
        (["--site", "leonrado", "--account", "p"], "did you mean 'leonardo'"),
    ],
)
def test_a_job_that_cannot_run_is_refused_before_the_queue(render, options, complaint):
    done = render(*options, verb="submit")
    assert done.returncode == 2
    assert complaint in " ".join(done.stderr.split())


def test_the_signal_comes_early_enough_for_the_measured_saves(render, tmp_path):
    run = tmp_path / "runs" / "eight"
    run.mkdir(parents=True)
    save = {"time": 1.0, "event": "save", "step": 10, "blocked_s": 5.0, "written_s": 595.0}
    (run / "events.jsonl").write_text(json.dumps(save) + "\n")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 10, "step_s": 20.0}) + "\n")
    render("--site", "leonardo", "--nodes", 4, "--account", "proj")
    assert options_of(tmp_path)[1]["signal"] == f"B:TERM@{600 * 3 // 2 + 60 + 90}"
    render("--site", "leonardo", "--nodes", 4, "--account", "proj", "--save-seconds", 10)
    assert options_of(tmp_path)[1]["signal"] == "B:TERM@165"


def test_a_container_is_put_before_the_command_of_each_rank(render, tmp_path):
    (tmp_path / "site.toml").write_text(
        'site = "lumi"\n[slurm]\naccount = "p"\n[container]\nimage = "/my dir/a.sif"\n'
    )
    assert render("--nodes", 1, "--set", "model.preset=llama3.2-1b").returncode == 0
    script, _ = options_of(tmp_path)
    assert "--wrap 'singularity exec --rocm --bind /var/spool/slurmd" in script
    assert "/my dir/a.sif" in script


def test_options_for_sbatch_and_paths_with_spaces_survive(command, tmp_path, monkeypatch):
    folder = tmp_path / "with space"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "run.toml").write_text(RUN)
    site = ["--site", "jsc", "--account", "p", "--nodes", 4]
    done = command("launch", "render", "run.toml", *site, "--no-plan", "--sbatch", "qos=debug")
    assert done.returncode == 0, done.stderr
    script = (folder / "runs" / "eight.launch" / "job.sbatch").read_text()
    assert "#SBATCH --qos=debug\n" in script
    assert f'#SBATCH --chdir="{folder}"\n' in script
    assert f"supervise '{folder}/runs/eight.launch/resolved.toml'" in script


def test_the_commands_and_the_site_file_of_the_slurm_page_are_valid(command, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "slurm.md").read_text()
    (tmp_path / "run.toml").write_text(RUN)
    commands = re.findall(r"^ *arriero (launch (?:sites|render|status).*)$", page, re.M)
    assert len(commands) > 3
    for line in commands:
        assert command(*shlex.split(line, comments=True)).returncode == 0, line
    (tmp_path / "site.toml").write_text(re.search(r"```toml\n(.*?)```", page, re.S)[1])
    assert command("launch", "render", "run.toml", "--nodes", 2).returncode == 0
    script, options = options_of(tmp_path)
    assert options["account"] == "IscrB_LLAMA"
    assert "#SBATCH --exclusive\n" in script


def test_scripts_of_sites_pass_shellcheck(render, tmp_path):
    require_program("shellcheck")
    for site in ("frontier", "marenostrum5", "alps"):
        render("--site", site, "--nodes", 2, "--account", "p", "--no-plan", "-o", site)
        for name in ("job.sbatch", "environment.sh"):
            subprocess.run(["shellcheck", "-e", "SC1091", tmp_path / site / name], check=True)
