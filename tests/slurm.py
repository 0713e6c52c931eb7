"""Start a real Slurm with a few virtual nodes on this machine, for tests.

Debian: apt install slurmctld slurmd slurm-client.
"""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NEEDED = ("slurmctld", "slurmd", "sbatch", "sinfo", "scontrol")
MISSING = [name for name in NEEDED if shutil.which(name) is None]
needs_slurm = pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed ({', '.join(MISSING)})")


@contextmanager
def slurm_cluster(folder: Path, nodes: int = 2) -> Iterator[dict[str, str]]:
    """Start the cluster for the block; return the environment in which sbatch and the others reach it."""
    folder.mkdir(parents=True, exist_ok=True)
    conf = folder / "slurm.conf"
    conf.write_text(_configuration(folder, nodes))
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    names = [f"n{i}" for i in range(nodes)]
    commands = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in names)]
    daemons = [
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in commands
    ]
    try:
        _wait_until_idle(environment, nodes)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(timeout=30)


def wait_for_job(job: str, environment: dict[str, str], seconds: float = 120) -> str:
    """Wait for a job and return its final state."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        shown = subprocess.run(
            ["scontrol", "show", "job", "-o", job], env=environment, capture_output=True, text=True
        ).stdout
        state = shown.partition("JobState=")[2].split(" ")[0]
        if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            return state
        time.sleep(0.2)
    raise TimeoutError(shown)


def _wait_until_idle(environment: dict[str, str], nodes: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        shown = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%T"], env=environment, capture_output=True, text=True
        )
        if shown.stdout.split().count("idle") == nodes:
            return
        time.sleep(0.1)
    raise TimeoutError(f"Slurm did not come up: {shown.stdout}{shown.stderr}")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _configuration(folder: Path, nodes: int) -> str:
    host, user = socket.gethostname().split(".")[0], getpass.getuser()
    control, *ports = _free_ports(nodes + 1)
    for name in ("state", *(f"spool.n{i}" for i in range(nodes))):
        (folder / name).mkdir(exist_ok=True)
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/none",
        "CredType=cred/none",
        f"SlurmctldPort={control}",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd.%n.pid",
        f"SlurmctldLogFile={folder}/slurmctld.log",
        f"SlurmdLogFile={folder}/slurmd.%n.log",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool.%n",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=1,bf_interval=2,batch_sched_delay=0,sched_min_interval=0",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "MpiDefault=none",
        "ReturnToService=2",
        "SlurmdParameters=config_overrides",
        "PropagateResourceLimits=NONE",
        "KillWait=5",
    ]
    lines += [
        f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=2000"
        for i, port in enumerate(ports)
    ]
    return "\n".join([*lines, f"PartitionName=debug Nodes=n[0-{nodes - 1}] Default=YES State=UP", ""])
