"""Launches of a tiny training job on a real Slurm: that each one starts, and how long its phases take.

python tests/launch/launches.py --launches 30 --nodes 4       each launch must take its steps
python tests/launch/launches.py --phases 4 16 64              time per phase of one launch with so many nodes
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

PHASES = ("srun", "Python", "imports", "settings", "rendezvous", "build", "first step")


def settings(folder: Path, name: str, ranks: int) -> list[str]:
    """Return the settings of a run with one sequence per rank and step; ranks are sharded."""
    from checkpoint.running import BASE

    place = [f"run.name={name}", f"run.dir='{folder}/runs'", f"data.cache='{folder}/data'"]
    batch = [f"train.batch={32 * ranks} tok", f"parallel.dp_shard={ranks}"]
    return [
        *BASE,
        *place,
        *batch,
        "train.horizon=2 steps",
        "checkpoint.export=false",
        "checkpoint.at_end=false",
    ]


def be_rank(folder: Path, ranks: int) -> None:
    """Be one rank: take the steps of `arriero train`, and write when each phase ended."""
    ends = {"Python": time.time()}
    import torch

    from arriero.bench.machine import process_started
    from arriero.config.load import load_run
    from arriero.data.workers import no_progress
    from arriero.model.presets import expand
    from arriero.parallel.world import process_group, world_from
    from arriero.train.build import arrange, build
    from arriero.train.loop import train

    torch.set_num_threads(1)
    ends["imports"] = time.time()
    world = world_from()
    config = load_run(
        None, [*settings(folder, f"phases-{ranks}", ranks), "train.horizon=1 step"], expand
    ).config
    plan = arrange(config, world)
    ends["settings"] = time.time()
    with process_group(world, plan.device.torch_device):
        ends["rendezvous"] = time.time()
        session = build(plan, no_progress)
        ends["build"] = time.time()
        train(session)
        ends["first step"] = time.time()
    begins = {"srun": float(os.environ["LAUNCHED"]), "Python": process_started()}
    row = {"srun": begins["Python"] - begins["srun"]}
    last = begins["Python"]
    for name, end in ends.items():
        row[name], last = end - last, end
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(row))


def _job(
    cluster, folder: Path, name: str, nodes: int, command: str, seconds: float
) -> tuple[str, float, str]:
    """Run a command on all nodes as a job; return its state, its seconds and its output."""
    script, log = folder / f"{name}.sh", folder / f"{name}.log"
    script.write_text(
        "#!/bin/bash\nexport LAUNCHED=$(date +%s.%N) OMP_NUM_THREADS=1\n"
        f"srun --kill-on-bad-exit=1 --ntasks-per-node=1 {command}\n"
    )
    start = time.monotonic()
    job = cluster.submit(script, f"--nodes={nodes}", f"--output={log}")
    state = cluster.wait(job, seconds=seconds)
    return state, time.monotonic() - start, log.read_text() if log.exists() else ""


def launch_phases(cluster, folder: Path, nodes: int, seconds: float = 900) -> dict[str, Any]:
    """Launch one rank per node; return median and maximum seconds of each phase."""
    _prepare(folder)
    work = folder / f"phases-{nodes}"
    (work / "data").parent.mkdir(parents=True)
    (work / "data").symlink_to(folder / "data")
    command = f"{sys.executable} {Path(__file__).resolve()} --be-rank {nodes} --folder {work}"
    state, wall, log = _job(cluster, work, "phases", nodes, command, seconds)
    rows = [json.loads(path.read_text()) for path in work.glob("rank-*.json")]
    if state != "COMPLETED" or len(rows) != nodes:
        raise RuntimeError(f"{nodes} nodes: {state}, {len(rows)} ranks reported: {log[-2000:]}")
    table = {
        name: {"median": median(row[name] for row in rows), "max": max(row[name] for row in rows)}
        for name in PHASES
    }
    return {"nodes": nodes, "wall": wall, "phases": table}


def launch_often(cluster, folder: Path, launches: int, nodes: int) -> list[dict[str, Any]]:
    """Launch `arriero train` with a new run again and again; return what came of each launch."""
    _prepare(folder)
    results = []
    for number in range(launches):
        words = " ".join(f'--set "{each}"' for each in settings(folder, f"launch-{number}", nodes))
        command = f"{sys.executable} -m arriero train {words}"
        state, wall, log = _job(cluster, folder, f"launch-{number}", nodes, command, 600)
        metrics = folder / "runs" / f"launch-{number}" / "metrics.jsonl"
        steps = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        started = state == "COMPLETED" and steps == 2
        results.append(
            {"started": started, "seconds": wall, "state": state, "log": "" if started else log[-2000:]}
        )
        sys.stdout.write(f"launch {number + 1}: {state}, {steps} steps, {wall:.1f} s\n")
        sys.stdout.flush()
    return results


def _prepare(folder: Path) -> None:
    """Prepare the built-in corpus once, so that launches do not include it."""
    from arriero.data.prepare.builtin import prepare_builtin

    if not (folder / "data").exists():
        prepare_builtin("builtin:stdlib", folder / "data")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--phases", type=int, nargs="*", default=[])
    parser.add_argument("--be-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.be_rank:
        be_rank(asked.folder, asked.be_rank)
        return
    from slurm import slurm_cluster

    failed = 0
    with tempfile.TemporaryDirectory(prefix="launch-") as name:
        folder = Path(name)
        for nodes in asked.phases:
            with slurm_cluster(folder / f"slurm-{nodes}", nodes=nodes, cpus=1, gpus=0) as cluster:
                sys.stdout.write(f"{json.dumps(launch_phases(cluster, folder, nodes))}\n")
        if asked.launches:
            with slurm_cluster(folder / "slurm", nodes=asked.nodes, gpus=0) as cluster:
                results = launch_often(cluster, folder, asked.launches, asked.nodes)
            failed = sum(not each["started"] for each in results)
            sys.stdout.write(f"{len(results) - failed} of {len(results)} launches started\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
