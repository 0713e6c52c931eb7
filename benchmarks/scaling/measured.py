"""Process groups of real ranks on this machine, and launches of real jobs on a virtual Slurm cluster."""

import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from arriero.parallel.mesh import make_mesh
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import process_group, world_from

Rows = list[dict[str, Any]]


def groups(sizes: tuple[int, ...] = (2, 4, 8, 16, 32, 64)) -> Rows:
    """Create the groups of a run that shards over all ranks; sockets of rank 0 after a collective of each."""
    rows = []
    for size in sizes:
        row: dict[str, Any] = {"ranks": size}
        for lazy in (False, True):
            os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))
            found = run_ranks(_one_rank, size, leader_prints=False)
            how = "connected when used" if lazy else "connected at once"
            row |= {f"{name}, {how}": value for name, value in found.items()}
        rows.append(row)
    del os.environ["TORCH_GLOO_LAZY_INIT"]
    return rows


def _one_rank() -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from arriero.plan.layout import Layout

    torch.set_num_threads(1)
    world, device = world_from(), torch.device("cpu")
    start = time.perf_counter()
    with process_group(world, device):
        mesh = make_mesh(Layout(dp_shard=world.size), world, 1, device)
        created = time.perf_counter() - start
        for group in dict.fromkeys([dist.group.WORLD, *mesh.groups.values()]):
            dist.all_reduce(torch.ones(1), group=group)
        sockets = _sockets()
    return {"s": created, "sockets": sockets}


def _sockets() -> int:
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of this listing is closed already
            count += str(path.readlink()).startswith("socket:")
    return count


def launches(sizes: tuple[int, ...] = (4, 16, 64)) -> Rows:
    """Launch a tiny job with one rank per virtual node; the slowest rank of each phase."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from launch.launches import launch_phases
    from slurm import slurm_cluster

    rows = []
    with tempfile.TemporaryDirectory(prefix="scale-") as name:
        folder = Path(name)
        for nodes in sizes:
            with slurm_cluster(folder / f"s{nodes}", nodes=nodes, cpus=1, gpus=0) as cluster:
                found = launch_phases(cluster, folder, nodes, 1500)
            phases = {f"{phase}, s": row["max"] for phase, row in found["phases"].items()}
            rows.append({"nodes": nodes} | phases | {"job, s": found["wall"]})
    return rows


def logs(folder: Path, sizes: tuple[int, ...] = (64, 1024, 10_000)) -> Rows:
    """Create one log file per rank in one directory, from one process."""
    from arriero.train.rank_process import rank_log_path

    rows = []
    for size in sizes:
        run = folder / f"logs-{size}"
        rank_log_path(run, 0).parent.mkdir(parents=True)
        start = time.perf_counter()
        for rank in range(size):
            rank_log_path(run, rank).write_text("rank on node\n")
        rows.append({"ranks": size, "files": size, "create all, s": time.perf_counter() - start})
    return rows
