"""Two separate Slurm clusters behind ssh, a silent site and StreamFlow, with faults in every round."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from arriero.errors import UserError
from arriero.federate.coordinator import Coordinator
from arriero.federate.members import open_global
from arriero.federate.streamflow import streamflow_program
from federate.test_streamflow import REPOSITORY, federation_file, remote
from slurm import require_slurm, slurm_cluster

ENVIRONMENT = REPOSITORY / ".venv-federation" / "bin" / "streamflow"
PROFILE = """
[slurm]
partition = "debug"
gpus_per_node = 0
cpus_per_task = 1
time = "30"
"""
# `arriero` at site b: what it sends is damaged in round 0 until that was refused, and holds a NaN in round 1
FAULTY = """
import json, subprocess, sys
from pathlib import Path
code = subprocess.run([sys.executable, "-m", "arriero", *sys.argv[1:]]).returncode
out = Path(sys.argv[sys.argv.index("--out") + 1])
number = json.loads((out / "order.json").read_text())["round"] if code == 0 else None
delta = next((out / "member").glob("delta*"), None) if code == 0 else None
refused = Path(__file__).parent / "federations" / "fed" / "rounds" / "0000" / "refused" / "b-1"
if delta is not None and (number == 1 or number == 0 and not refused.exists()):
    content = delta.read_bytes()
    delta.unlink()  # it is a hard link to what the site keeps
    delta.write_bytes(content[:-2] + b"\\xc0\\x7f")
    if number == 1:
        from arriero.federate.members import MemberManifest, read_manifest, write_manifest
        from arriero.files import sha256_of_file
        about = read_manifest(out / "member", MemberManifest)
        (out / "member" / "member.json").unlink()
        files = {delta.name: sha256_of_file(delta)}
        write_manifest(out / "member", about.model_copy(update={"files": files}))
sys.exit(code)
"""


@pytest.fixture
def streamflow(monkeypatch):
    """StreamFlow of the environment that `make test` installs."""
    require_slurm()
    if shutil.which("sshd") is None and not Path("/usr/sbin/sshd").exists():
        pytest.skip("sshd is not installed")
    if ENVIRONMENT.is_file():
        monkeypatch.setenv("ARRIERO_STREAMFLOW", str(ENVIRONMENT))
    try:
        streamflow_program()
    except UserError as error:
        pytest.skip(f"{error.what}: `make .venv-federation/.installed`")


@contextmanager
def sshd(folder, clusters):
    """Run an ssh server of our own; the key of a site leads to its own Slurm cluster."""
    ssh = folder / "ssh"
    ssh.mkdir()
    for name in ("host", *(f"id-{site}" for site in clusters)):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", ssh / name], check=True)
    keys = [
        f'environment="SLURM_CONF={cluster.environment["SLURM_CONF"]}" {(ssh / f"id-{site}.pub").read_text()}'
        for site, cluster in clusters.items()
    ]
    (ssh / "authorized_keys").write_text("".join(keys))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    kind, key = (ssh / "host.pub").read_text().split()[:2]
    settings = [f"Port {port}", "ListenAddress 127.0.0.1", f"HostKey {ssh / 'host'}", "UsePAM no"]
    settings += [f"AuthorizedKeysFile {ssh / 'authorized_keys'}", "PasswordAuthentication no"]
    settings += ["StrictModes no", "PidFile none", "MaxSessions 100", "PermitRootLogin prohibit-password"]
    settings += ["PermitUserEnvironment yes"]
    (ssh / "config").write_text("\n".join(settings) + "\n")
    Path("/run/sshd").mkdir(exist_ok=True)
    program = shutil.which("sshd") or "/usr/sbin/sshd"
    server = subprocess.Popen([program, "-D", "-e", "-f", ssh / "config"], stderr=subprocess.DEVNULL)
    (ssh / "known_hosts").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
    try:
        yield port
    finally:
        server.terminate()
        server.wait()


class Run:
    """`arriero fed run`, which is killed and started again."""

    def __init__(self, path):
        self.path, self.folder = path, path.parent / "federations" / "fed"
        self.process = None

    def start(self):
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "COLUMNS": "200"}
        log = (self.path.parent / "out.txt").open("a")
        command = [sys.executable, "-m", "arriero", "fed", "run", str(self.path)]
        self.process = subprocess.Popen(
            command, cwd=self.path.parent, env=environment, stdout=log, stderr=log
        )

    def kill(self):
        self.process.kill()
        self.process.wait()

    def wait(self, condition, seconds=900):
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < end, self.told()
            time.sleep(0.1)

    def told(self):
        logs = [self.path.parent / "out.txt", *self.folder.glob("streamflow/[ab]/log.txt")]
        return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in logs)


def job_of(cluster):
    """Return the id of the running job of a cluster."""
    shown = cluster.run("squeue", "-h", "-t", "RUNNING", "-o", "%A").stdout.split()
    return shown[0] if shown else None


@pytest.mark.slow
@pytest.mark.usefixtures("streamflow")
def test_two_slurm_clusters_train_one_model_through_every_fault(tmp_path, corpus_cache):
    """A damaged and a NaN member, a cancelled job, a killed site, a silent site, a killed coordinator."""
    with ExitStack() as stack:
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fed-")))
        clusters = {site: stack.enter_context(slurm_cluster(short / site, nodes=1, gpus=0)) for site in "ab"}
        port = stack.enter_context(sshd(tmp_path, clusters))
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        (tmp_path / "faulty.py").write_text(FAULTY)
        (tmp_path / "here.toml").write_text(PROFILE)
        path = federation_file(
            tmp_path, corpus_cache, "abc", **remote(tmp_path, port), profile=f"'{tmp_path}/here.toml'"
        )
        text = path.read_text().replace("rounds = 2", "rounds = 3").replace("'2 steps'", "'4 steps'")
        text = text.replace("mode = 'synchronous'", "mode = 'quorum'\nquorum = 1\ngrace = 1.0")
        before, b, c = text.partition("name = 'b'")
        b, c, last = (b + c).partition("name = 'c'")
        b = b.replace("-m arriero'", f"{tmp_path}/faulty.py'")
        last = last.replace(f"port = {port}", f"port = {silent.getsockname()[1]}").replace("id-c", "id-a")
        path.write_text(before + b + c + last)
        run, rounds = Run(path), tmp_path / "federations" / "fed" / "rounds"
        run.start()
        run.wait(lambda: job_of(clusters["a"]) and job_of(clusters["b"]))
        run.kill()  # inside a round; the jobs go on

        run.start()
        run.wait(lambda: (rounds / "0001" / "global").is_dir())
        run.kill()  # between rounds
        run.start()
        run.wait(lambda: job_of(clusters["a"]))
        clusters["a"].run("scancel", "--full", job_of(clusters["a"]) or "0", check=False)
        run.wait(lambda: (rounds / "0002" / "global").is_dir())
        run.wait(lambda: job_of(clusters["b"]))
        site = f"fed round --site b --work {tmp_path}"
        found = subprocess.run(["pgrep", "-f", site], capture_output=True, text=True).stdout.split()
        for pid in found:
            os.kill(int(pid), signal.SIGKILL)
        run.wait(lambda: (rounds / "0003" / "global").is_dir())
        assert run.process.wait(900) == 0, run.told()

    coordinator = Coordinator.of(path)
    assert coordinator.replay(tmp_path) == [(1, True), (2, True), (3, True)], run.told()
    history = coordinator.rounds.history()
    accepted = [each for closed in history for each in closed.accepted]
    assert {each.site for each in accepted} == {"a", "b"}, "nothing of the silent site is averaged"
    assert [each.step - each.first_step for each in accepted] == [4] * len(accepted)
    assert len({(each.site, each.first_step) for each in accepted}) == len(accepted)
    assert open_global(coordinator.rounds.model(3)).tokens == 4 * 256 * len(accepted)
    reasons = " ".join(each.reason for n in range(4) for each in coordinator.rounds.refusals(n))
    assert "other bytes than were written" in reasons and "NaN or infinity" in reasons
    assert ("b", 1) not in {(each.site, each.round) for each in accepted}
    assert {path.stem for path in (rounds / "0003" / "evaluation").iterdir()} <= {"a", "b"}
    events = (tmp_path / "work-a" / "run" / "events.jsonl").read_text()
    assert "supervise" in events, "a round is a job of `arriero launch`"
    for file in coordinator.folder.rglob("*.*"):
        if file.is_file() and file.suffix != ".safetensors":
            assert "id-a" not in file.read_text(errors="replace"), f"a key file is named in {file}"
