"""A real Slurm with virtual nodes and fake GPUs on this machine, for tests.

`slurm` is a running cluster of four nodes, one per test process. `slurm_cluster` starts others. Root installs
Slurm where it is missing (Debian, Ubuntu). Elsewhere the tests are skipped with the reason, or fail if
ARRIERO_REQUIRE_SLURM is set, as in CI.
"""

import ctypes
import fcntl
import functools
import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "sinfo", "scontrol", "scancel")
PACKAGES = ("slurmctld", "slurmd", "slurm-client")
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE")
SOURCE = Path(__file__).parents[1] / "src"


@dataclass
class Slurm:
    """A running cluster. Its commands must be started with `environment`."""

    folder: Path
    environment: dict[str, str]
    nodes: tuple[str, ...]
    daemons: dict[str, subprocess.Popen] = field(default_factory=dict)

    def run(self, *command: object, check: bool = True, **options) -> subprocess.CompletedProcess[str]:
        """Run a command that reaches this cluster, such as srun or `arriero launch`."""
        done = subprocess.run(
            [str(word) for word in command],
            **{"env": self.environment, "capture_output": True, "text": True, "timeout": 300} | options,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    def submit(self, script: Path, *options: str, **more) -> str:
        """Submit a job script and return the job's id."""
        return self.run("sbatch", "--parsable", *options, script, **more).stdout.strip().split(";")[0]

    def job(self, job: str) -> dict[str, str]:
        """Return what Slurm says about a job, such as JobState, NodeList and Restarts."""
        shown = self.run("scontrol", "show", "job", "-o", job).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait(self, job: str, states: tuple[str, ...] = FINAL, seconds: float = 240) -> str:
        """Wait until a job is in one of these states and return the state."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (state := (shown := self.job(job))["JobState"]) in states:
                return state
            time.sleep(0.2)
        raise TimeoutError(f"job {job} did not reach {states}: {shown}")

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node, also after it was killed."""
        self._start(name, "slurmd", "-D", "-N", name)

    def kill_node(self, name: str) -> None:
        """Kill the slurmd of a node, as if the machine had crashed. The tasks on it keep running."""
        self.daemons[name].kill()
        self.daemons[name].wait()

    def wait_for_nodes(self, count: int, state: str = "idle", seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            shown = self.run("sinfo", "-h", "-N", "-o", "%T", check=False)
            if shown.stdout.split().count(state) >= count:
                return
            if (ended := self.daemons["slurmctld"].poll()) is not None:
                raise RuntimeError(f"slurmctld ended with {ended}: {self.log('slurmctld')}")
            time.sleep(0.05)
        raise TimeoutError(f"Slurm did not come up: {shown.stdout}{shown.stderr}{self.log('slurmctld')}")

    def log(self, daemon: str, lines: int = 30) -> str:
        """Return the last lines of a daemon's log: 'slurmctld' or a node's name."""
        path = self.folder / f"{daemon}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def start(self) -> None:
        self._start("slurmctld", "slurmctld", "-D")
        for name in self.nodes:
            self.start_node(name)
        self.wait_for_nodes(len(self.nodes))

    def stop(self) -> None:
        """Cancel all jobs, wait until their processes are gone, and stop the daemons."""
        if self.daemons["slurmctld"].poll() is None:
            self.run("scancel", "--user", getpass.getuser(), check=False)
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and self.run("squeue", "-h", check=False).stdout.strip():
                time.sleep(0.1)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start(self, name: str, *command: str) -> None:
        self.daemons[name] = subprocess.Popen(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=_end_with_parent,
        )


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Four virtual nodes with four cores and two fake GPUs each, shared by the tests of one process."""
    require_slurm()
    # paths of sockets are limited to about 100 characters
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm_cluster(Path(folder)) as cluster:
        yield cluster


@contextmanager
def slurm_cluster(folder: Path, nodes: int = 4, cpus: int = 4, gpus: int = 2) -> Iterator[Slurm]:
    """Start a cluster of nodes n1, n2, ... for the block; `folder` should have a short path."""
    require_slurm()
    folder.mkdir(parents=True, exist_ok=True)
    names = tuple(f"n{i}" for i in range(1, nodes + 1))
    paths = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
    kept |= {"SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": paths, "COLUMNS": "200"}
    for attempt in range(5):
        _write_configuration(folder, names, cpus, gpus)
        cluster = Slurm(folder, kept, names)
        try:
            cluster.start()
            break
        except RuntimeError:
            # another process took the port between the check and the start
            cluster.stop()
            if attempt == 4:
                raise
    try:
        yield cluster
    finally:
        cluster.stop()


def require_slurm() -> None:
    """Install Slurm where it is missing; skip the test, or fail in CI, where that is impossible."""
    if (reason := why_no_slurm()) is not None:
        (pytest.fail if os.environ.get("ARRIERO_REQUIRE_SLURM") else pytest.skip)(reason)


def why_no_slurm() -> str | None:
    """Return why there is no Slurm on this machine, after an attempt to install it; None if there is."""
    _search_sbin()
    return why_missing("Slurm", PROGRAMS, PACKAGES)


def require_program(name: str) -> None:
    """Install a program from the Debian package of the same name, or skip the test, as for Slurm."""
    if (reason := why_missing(name, (name,), (name,))) is not None:
        (pytest.fail if os.environ.get("ARRIERO_REQUIRE_SLURM") else pytest.skip)(reason)


@functools.cache
def why_missing(name: str, programs: tuple[str, ...], packages: tuple[str, ...]) -> str | None:
    """Return why programs are missing, after root has tried to install them; None if they are not."""
    if not (missing := _missing(programs)):
        return None
    absent = f"{name} is not installed ({', '.join(missing)})"
    if os.geteuid() != 0:
        return f"{absent}; install {' '.join(packages)}, or run as root"
    if shutil.which("apt-get") is None:
        return f"{absent}, and there is no apt-get to install it"
    with Path(tempfile.gettempdir(), "arriero-install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = "" if not _missing(programs) else _install(packages)
    return f"{absent}, and apt-get failed: {said}" if _missing(programs) else None


def _search_sbin() -> None:
    """Debian installs the daemons where the PATH of other users does not lead."""
    paths = os.environ.get("PATH", "").split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join([*paths, *({"/usr/sbin", "/sbin"} - set(paths))])


def _missing(programs: tuple[str, ...]) -> list[str]:
    return [name for name in programs if shutil.which(name) is None]


def _install(packages: tuple[str, ...]) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    said = ""
    for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(
            ["apt-get", "-qq", *command], env=environment, capture_output=True, text=True, timeout=600
        )
        said = (done.stderr.strip() or said)[-500:]
    return said


def _end_with_parent() -> None:
    """Let a daemon end with this process, even if it is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _free_ports(count: int) -> int:
    """Return the first of `count` free ports in a row, below those that the system gives to clients."""
    for _ in range(200):
        first = random.SystemRandom().randrange(10_000, 20_000 - count)
        sockets = []
        try:
            sockets += [socket.create_server(("0.0.0.0", first + i)) for i in range(count)]
            return first
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
    raise RuntimeError("no free ports between 10,000 and 20,000")


def _write_configuration(folder: Path, names: tuple[str, ...], cpus: int, gpus: int) -> None:
    host, user, first = socket.gethostname().split(".")[0], getpass.getuser(), _free_ports(len(names) + 1)
    for name in ("state", *(f"spool.{name}" for name in names)):
        (folder / name).mkdir(exist_ok=True)
    for i in range(gpus):
        if not (folder / f"gpu{i}").is_symlink():
            (folder / f"gpu{i}").symlink_to("/dev/null")
    options = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmUser": user,
        "SlurmdUser": user,
        "AuthType": "auth/none",
        "CredType": "cred/none",
        # a requeued job waits this long
        "AuthInfo": "cred_expire=5",
        "SlurmctldPort": first,
        # jobs of several clusters on one host must not have the same id, from which ports are derived
        "FirstJobId": 1 + 97 * (first - 10_000),
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "%n.pid",
        "SlurmctldLogFile": folder / "slurmctld.log",
        "SlurmdLogFile": folder / "%n.log",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool.%n",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "sched_interval=1,bf_interval=2,batch_sched_delay=0,sched_min_interval=0",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "MpiDefault": "none",
        "ReturnToService": 2,
        "SlurmdParameters": "config_overrides",
        "PropagateResourceLimits": "NONE",
        "SlurmctldTimeout": 30,
        "SlurmdTimeout": 15,
        "UnkillableStepTimeout": 20,
        "KillWait": 5,
        "JobRequeue": 1,
    } | ({"GresTypes": "gpu"} if gpus else {})
    lines = [f"{name}={value}" for name, value in options.items()]
    resources = f"CPUs={cpus} RealMemory=8000" + (f" Gres=gpu:{gpus}" if gpus else "")
    lines += [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={first + i} {resources}"
        for i, name in enumerate(names, 1)
    ]
    lines.append(f"PartitionName=debug Nodes={','.join(names)} Default=YES State=UP")
    (folder / "slurm.conf").write_text("\n".join([*lines, ""]))
    if gpus:
        devices = f"{folder}/gpu[0-{gpus - 1}]" if gpus > 1 else f"{folder}/gpu0"
        (folder / "gres.conf").write_text(f"NodeName={','.join(names)} Name=gpu File={devices}\n")
