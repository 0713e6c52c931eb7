"""Faults under a training job on a real Slurm, and what came of each. Every run must end with the losses of
an undisturbed run, bit for bit.

python tests/launch/faults.py --json faults.json [--only hang]
"""

import argparse
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from checkpoint.kills import small_disk
from checkpoint.running import BASE
from slurm import Slurm, slurm_cluster

STEPS = 60
SETS = [*BASE, f"train.horizon={STEPS} steps", "checkpoint.every=5 steps", "checkpoint.export=false"]
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Case:
    """One injected fault, as `docs/reliability.md` lists it."""

    fault: str
    outcome: str
    seconds: float
    holds: bool


class Job:
    """A job of two ranks on two nodes, with a supervisor."""

    def __init__(self, slurm: Slurm, folder: Path, cache: Path, name: str, *sets: str, **how) -> None:
        self.slurm, self.name, self.run_dir = slurm, name, folder / name
        nodes, spares, restarts = how.get("nodes", 2), how.get("spares", 0), how.get("restarts", 2)
        own = [f"run.name={name}", f"run.dir='{folder}'", f"data.cache='{cache}'", *sets]
        words = [sys.executable, "-m", "arriero", "launch", "supervise", folder / "run.toml"]
        words += ["--nodes", nodes, "--tasks-per-node", 1, "--spares", spares, "--restarts", restarts]
        words += how.get("more", ["--no-preflight"])
        words += [word for each in [*SETS, *own] for word in ("--set", each)]
        (folder / "run.toml").write_text('[data]\nsources = ["builtin:stdlib"]\n')
        self.script = folder / f"{name}.sh"
        before = how.get("before", "")
        self.script.write_text(f"#!/bin/bash\n{before}\nexec {' '.join(quoted(word) for word in words)}\n")
        self.log = folder / f"{name}.log"
        options = [f"--nodes={nodes + spares}", "--ntasks-per-node=1", "--no-kill", f"--output={self.log}"]
        options += ["--open-mode=append", f"--job-name={name}", *how.get("options", [])]
        with socket.create_server(("127.0.0.1", 0)) as free:
            # other clusters on this machine count their jobs from 1 too
            port = str(free.getsockname()[1])
        meeting = {"MASTER_ADDR": how.get("address", "127.0.0.1"), "MASTER_PORT": port}
        environment = slurm.environment | {"OMP_NUM_THREADS": "1"} | meeting
        self.id = slurm.submit(self.script, *options, env=environment)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: (self.run_dir / "checkpoints" / f"step-{step:08d}").is_dir(), f"step {step}")

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{self.name}: no {what}: {self.output()}"
            time.sleep(0.02)

    def rank(self, number: int) -> tuple[int, str]:
        """Return process id and node of a rank, from the last start in its log."""
        log = (self.run_dir / "logs" / f"rank-{number:05d}.log").read_text()
        found = re.findall(r"rank \d+ of \d+ on (\S+), process (\d+)", log)[-1]
        return int(found[1]), found[0]

    def finish(self) -> None:
        state = self.slurm.wait(self.id, seconds=PATIENCE_S)
        assert state == "COMPLETED", f"{self.name}: {state}: {self.output()}"

    def output(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else "no output"

    def events(self) -> list[dict]:
        return json_lines(self.run_dir / "events.jsonl")

    def decisions(self) -> list[str]:
        return [event["decision"] for event in self.events() if event["event"] == "supervise"]

    def losses(self) -> dict[int, float]:
        return losses_of(self.run_dir)

    def kill(self, rank: int) -> str:
        """Kill a rank with SIGKILL; return the reason of the failure that the supervisor reports."""
        failures = self.decisions().count("failure")
        os.kill(self.rank(rank)[0], signal.SIGKILL)
        self.wait_until(lambda: self.decisions().count("failure") > failures, "report of the failure")
        return [e["reason"] for e in self.events() if e.get("decision") == "failure"][-1]

    def stop(self, rank: int) -> dict:
        """Stop a rank as a hang does; return the report of the others."""
        os.kill(self.rank(rank)[0], signal.SIGSTOP)
        self.wait_until(lambda: any(e["event"] == "hang" for e in self.events()), "report of the hang")
        return next(e for e in self.events() if e["event"] == "hang")

    def signal(self) -> int:
        """Signal the job with SIGUSR1; return the step that was saved before it was requeued."""
        self.slurm.run("scancel", "--batch", "--signal=USR1", self.id)
        self.wait_until(lambda: "requeue" in self.decisions(), "requeue")
        return next(e["step"] for e in self.events() if e["event"] == "signal" and e["saved"])


def losses_of(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in json_lines(run_dir / "metrics.jsonl")}


def quoted(word: object) -> str:
    return "'" + str(word).replace("'", "'\\''") + "'"


def json_lines(path: Path) -> list[dict]:
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


class Faults:
    """The cases, with the losses of an undisturbed run to compare with."""

    def __init__(self, slurm: Slurm, folder: Path, cache: Path) -> None:
        self.slurm, self.folder, self.cache = slurm, folder, cache
        self._expected: dict[int, float] = {}

    def job(self, name: str, *sets: str, **how) -> Job:
        return Job(self.slurm, self.folder, self.cache, name, *sets, **how)

    def compare(self, job: Job) -> None:
        """Compare with a run of two ranks of this machine that nothing disturbs."""
        if not self._expected:
            own = ["run.name=undisturbed", f"run.dir='{self.folder}'", f"data.cache='{self.cache}'"]
            words = [word for each in [*SETS, *own] for word in ("--set", each)]
            environment = self.slurm.environment | {"OMP_NUM_THREADS": "1"}
            train = [sys.executable, "-m", "arriero", "train", self.folder / "run.toml", "--nproc", 2, *words]
            self.slurm.run(*train, env=environment)
            self._expected = losses_of(self.folder / "undisturbed")
            assert list(self._expected) == list(range(1, STEPS + 1))
        assert job.losses() == self._expected, f"{job.name}: the losses differ: {job.output()}"

    def undisturbed(self) -> str:
        job = self.job("plain")
        job.finish()
        self.compare(job)
        assert job.decisions() == ["job", "preflight", "start", "finish", "end of job"], job.decisions()
        return "submitted, finished"

    def requeue_after_a_signal(self) -> str:
        job = self.job("signal", "checkpoint.on_usr1=stop")
        job.wait_for_step(10)
        saved = job.signal()
        job.finish()
        self.compare(job)
        assert self.slurm.job(job.id)["Restarts"] == "1"
        return f"saved at step {saved}, exit code 0, requeued, continued"

    def time_limit(self) -> str:
        slow = ["train.horizon=4000 steps", "checkpoint.every=500 steps"]
        job = self.job("limit", *slow, options=["--time=3", "--signal=B:TERM@60"])
        job.wait_until(lambda: "requeue" in job.decisions(), "requeue before the time limit")
        stop = next(e for e in job.events() if e["event"] == "signal")
        assert stop["saved"], job.output()
        self.slurm.run("scancel", job.id)
        self.slurm.wait(job.id)
        return f"Slurm's signal 60 s before the limit: saved at step {stop['step']}, requeued"

    def killed_rank(self) -> str:
        job = self.job("killed")
        job.wait_for_step(10)
        assert "rank 1" in job.kill(1)
        job.finish()
        self.compare(job)
        failure = next(e for e in job.events() if e.get("decision") == "failure")
        again = next(e["time"] for e in job.events() if e["event"] == "start" and e["time"] > failure["time"])
        return f"the step ended, restarted on the same nodes, training {again - failure['time']:.0f} s later"

    def killed_twice(self) -> str:
        job = self.job("twice", spares=1)
        for step in (10, 25):
            job.wait_for_step(step)
            pid, node = job.rank(1)
            os.kill(pid, signal.SIGKILL)
            starts = job.decisions().count("start")
            job.wait_until(lambda before=starts: job.decisions().count("start") > before, "restart")
        job.finish()
        self.compare(job)
        excluded = [e["node"] for e in job.events() if e.get("decision") == "exclude"]
        assert excluded == [node], (excluded, job.output())
        assert job.rank(1)[1] != node
        return "the node was left out with srun --exclude, a spare took its place"

    def fewer_replicas(self) -> str:
        layout = ["parallel.dp_replicate=2", "parallel.dp_shard=1"]
        job = self.job("shrink", *layout)
        for step in (10, 25):
            job.wait_for_step(step)
            os.kill(job.rank(1)[0], signal.SIGKILL)
            starts = job.decisions().count("start")
            job.wait_until(lambda before=starts: job.decisions().count("start") > before, "restart")
        job.finish()
        assert "shrink" in job.decisions(), job.decisions()
        steps = job.losses()
        assert list(steps) == list(range(1, STEPS + 1)), steps
        return "no spare left: continued with one replica of two and the same global batch"

    def hang(self) -> str:
        job = self.job("hang", "guard.hang_min_s=6")
        job.wait_for_step(10)
        node = job.rank(1)[1]
        event = job.stop(1)
        assert (event["ranks"], event["nodes"]) == ([1], [node]), event
        log = (job.run_dir / "logs" / "rank-00000.log").read_text()
        assert "stacks of all threads" in log
        job.finish()
        self.compare(job)
        return f"named after {event['waited_s']:.0f} s (limit 6 s) with stacks of the others, restarted"

    def bad_loss(self) -> str:
        """Let the loss of one batch be NaN on every rank, and compare both answers to it."""
        runs = {}
        for policy in ("skip", "rollback"):
            program = f"{sys.executable} {Path(__file__).with_name('spoiled.py')}"
            more = ["--no-preflight", "--wrap", program]
            job = self.job(f"nan-{policy}", f"guard.nonfinite={policy}", more=more)
            job.finish()
            [bad] = (e for e in job.events() if e["event"] == "bad step")
            assert bad["documents"][0]["documents"], bad
            runs[policy] = job
        [back] = (e for e in runs["rollback"].events() if e["event"] == "rollback")
        assert back["to_step"] < bad["step"], back
        assert runs["rollback"].losses() == runs["skip"].losses()
        named = bad["documents"][0]["count"]
        return (
            f"step {bad['step']}: {named} documents named; rolled back to step {back['to_step']} and skipped "
            "the batch, with the losses of a run that skips the update"
        )

    def missing_gpu(self) -> str:
        """Let Slurm count a GPU on n2 that torch does not see there."""
        program = self.folder / "without-gpu.sh"
        program.write_text(
            "#!/bin/bash\nshift\n"
            'if [ "$SLURMD_NODENAME" = n2 ]; then export SLURM_GPUS_ON_NODE=1; fi\n'
            f'exec {sys.executable} -m arriero "$@"\n'
        )
        program.chmod(0o755)
        job = self.job("gpu", "run.device=auto", spares=1, more=["--no-preflight", "--wrap", str(program)])
        job.finish()
        self.compare(job)
        [left_out] = (e for e in job.events() if e.get("decision") == "exclude")
        assert (left_out["node"], job.decisions().count("start")) == ("n2", 2), job.output()
        assert "Slurm allocated 1 GPU" in left_out["reason"], left_out
        return "named with the reason, left out at once, trained on the spare"

    def dead_node(self) -> str:
        long = "train.horizon=1500 steps"
        job = self.job("node", long, "checkpoint.every=100 steps", "guard.hang_min_s=60", spares=1)
        job.wait_for_step(100)
        pid, node = job.rank(1)
        try:
            self.slurm.kill_node(node)
            os.kill(pid, signal.SIGKILL)
            job.wait_until(lambda: job.decisions().count("start") > 1, "restart")
            excluded = [e["node"] for e in job.events() if e.get("decision") == "exclude"]
            job.wait_until(lambda: job.rank(1)[1] != node, "rank on another node")
        finally:
            self.slurm.run("scancel", job.id, check=False)
            self.slurm.start_node(node)
            self.slurm.wait_for_nodes(len(self.slurm.nodes), seconds=90)
        return f"restarted on the spare node{' (left out: ' + ', '.join(excluded) + ')' if excluded else ''}"

    def full_disk(self) -> str:
        with small_disk(self.folder / "small", size="26m") as disk:
            if disk is None:
                return "not tried: mounting needs root"
            job = self.job("full", f"run.dir='{disk}'", "checkpoint.keep=9", restarts=0)
            job.run_dir = disk / "full"
            state = self.slurm.wait(job.id)
            failed = [e for e in job.events() if e["event"] == "save failed"]
            assert state == "FAILED", (state, job.output())
            assert failed, job.output()
            assert list(job.losses()) == list(range(1, STEPS + 1))
        return f"{len(failed)} saves failed and were reported, training continued to the end, exit code 2"

    def failing_check_with_spare(self) -> str:
        # the doctor rejects a rendezvous address that is the loopback interface
        own = {"address": socket.gethostname(), "more": ["--check", 'test "$SLURMD_NODENAME" != n2']}
        job = self.job("checked", spares=1, **own)
        job.finish()
        self.compare(job)
        (excluded,) = (e for e in job.events() if e.get("decision") == "exclude")
        assert excluded["node"] == "n2", excluded
        assert {job.rank(0)[1], job.rank(1)[1]} == {"n1", "n3"}, job.output()
        seconds = next(e["seconds"] for e in job.events() if e.get("decision") == "preflight")
        return f"named after {seconds:.0f} s with the reason, left out, trained on the spare"

    def failing_check_without_spare(self) -> str:
        own = {"address": socket.gethostname(), "more": ["--check", 'test "$SLURMD_NODENAME" != n2']}
        job = self.job("resubmitted", **own, options=[f"--chdir={self.folder}"])
        job.wait_until(lambda: "finish" in job.decisions(), "end of the resubmitted job")
        self.compare(job)
        again = next(e for e in job.events() if e.get("decision") == "resubmit")
        assert again["excluded"] == ["n2"], again
        assert "n2" not in {job.rank(0)[1], job.rank(1)[1]}
        jobs = {e["job"] for e in job.events() if e.get("decision") == "job"}
        assert len(jobs) == 2, jobs
        return "submitted again with --exclude, to start after this job; the second job finished"


CASES = {
    "submit a job of 2 nodes": Faults.undisturbed,
    "SIGUSR1 to the job": Faults.requeue_after_a_signal,
    "time limit of the job": Faults.time_limit,
    "kill -9 of a rank": Faults.killed_rank,
    "two failures of one node, with a spare": Faults.killed_twice,
    "two failures of one node, without a spare": Faults.fewer_replicas,
    "a rank that hangs (SIGSTOP)": Faults.hang,
    "a node that dies (slurmd and rank killed)": Faults.dead_node,
    "disk full at a save": Faults.full_disk,
    "a loss that is NaN": Faults.bad_loss,
    "a node that lost its GPU, with a spare": Faults.missing_gpu,
    "a node that fails the doctor, with a spare": Faults.failing_check_with_spare,
    "a node that fails the doctor, without a spare": Faults.failing_check_without_spare,
}


def run_cases(only: str = "") -> list[Case]:
    from arriero.data.prepare.builtin import prepare_builtin

    cases = []
    with tempfile.TemporaryDirectory(prefix="faults-") as name, slurm_cluster(Path(name, "s")) as slurm:
        cache = Path(name, "data")
        prepare_builtin("builtin:stdlib", cache)
        Path(name, "runs").mkdir()
        faults = Faults(slurm, Path(name, "runs"), cache)
        for fault, inject in CASES.items():
            if only not in fault:
                continue
            begin = time.monotonic()
            try:
                outcome, holds = inject(faults), True
            except (AssertionError, TimeoutError, StopIteration) as error:
                outcome, holds = f"{type(error).__name__}: {error}", False
            cases.append(Case(fault, outcome, round(time.monotonic() - begin, 1), holds))
            sys.stdout.write(f"{cases[-1]}\n")
            sys.stdout.flush()
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    cases = run_cases(arguments.only)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(case) for case in cases], indent=1) + "\n")
    sys.exit(not all(case.holds for case in cases))


if __name__ == "__main__":
    main()
