"""Examine the nodes of a Slurm allocation: each alone, then the network between those that passed."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from arriero.errors import UserError
from arriero.files import publish_file
from arriero.launch.doctor.check import Finding
from arriero.launch.doctor.devices import SLOW
from arriero.launch.doctor.interfaces import interfaces, selected
from arriero.parallel.rendezvous import address_of
from arriero.slurm import hosts
from arriero.train.rank_process import node_name
from arriero.ui import Console, Table, escape, make_console, styled
from arriero.units import counted

FAILING = "failing_nodes.txt"
REPORT = "report.json"
# srun itself, and the start of Python on a slow file system, before a node can begin its checks
_START_S = 30.0
_STOP_S = 10.0
_RETRIES_AT_ONCE = 16
_CLOCK_S = 1.0
_MUST_AGREE = ("arriero", "source", "python", "torch", "cuda", "hip", "nccl")


@dataclass(frozen=True)
class Examination:
    """What to examine: the disk of `directory`, user `commands`, `devices` per node, each node `node_s`."""

    directory: Path
    out: Path
    commands: tuple[str, ...] = ()
    devices: int | None = None
    node_s: float = 60.0
    exclude: str = ""
    exclude_slow: bool = False
    wrap: str = ""

    @property
    def program(self) -> list[str]:
        return [*shlex.split(self.wrap), "arriero"] if self.wrap else [sys.executable, "-m", "arriero"]


@dataclass
class _Nodes:
    """The nodes of the allocation; `failing` maps a node to the reason."""

    names: list[str]
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    failing: dict[str, str] = field(default_factory=dict)

    @property
    def good(self) -> list[str]:
        return [name for name in self.names if name not in self.failing]


def write_answer(folder: Path, results: Sequence[Finding]) -> None:
    """Leave the results of this node where the examining process looks for them."""
    content = json.dumps({"node": node_name(), "checks": [asdict(each) for each in results]})
    publish_file(folder / f"{node_name()}.json", content.encode())


def examine(asked: Examination, console: Console) -> dict[str, Any]:
    """Examine the allocation of this job; write failing_nodes.txt and report.json, and return the report."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or shutil.which("srun") is None:
        raise UserError(
            "this is not a Slurm job", "run it in a job script, or `arriero doctor` for this node"
        )
    answers = asked.out / "nodes"
    shutil.rmtree(answers, ignore_errors=True)
    answers.mkdir(parents=True)
    excluded = set(hosts(asked.exclude))
    nodes = _Nodes([name for name in hosts(os.environ["SLURM_JOB_NODELIST"]) if name not in excluded])
    start = time.monotonic()
    console.print(f"checking {counted(len(nodes.names), 'node')}, each alone, at most {asked.node_s:.0f} s")
    _each_alone(nodes, asked, answers)
    alone = time.monotonic() - start
    _judge_answers(nodes)
    _write_failing(asked.out, nodes)
    report: dict[str, Any] = {"job": job, "nodes": nodes.names, "alone_s": round(alone, 2), "network": None}
    if len(nodes.good) * _ranks_per_node(nodes) > 1:
        console.print(f"measuring the network between {counted(len(nodes.good), 'node')}")
        report["network"] = _network(nodes, asked)
        _write_failing(asked.out, nodes)
    report["failing"] = nodes.failing
    report["warnings"] = _warnings(nodes, report["network"])
    report["seconds"] = round(time.monotonic() - start, 2)
    publish_file(asked.out / REPORT, json.dumps(report | {"answers": nodes.answers}, indent=1).encode())
    return report


def _write_failing(out: Path, nodes: _Nodes) -> None:
    lines = [f"{name} {reason}\n" for name, reason in nodes.failing.items()]
    publish_file(out / FAILING, "".join(lines).encode())


@contextmanager
def _step(nodes: Sequence[str], tasks_per_node: int, program: Sequence[str]) -> Iterator[subprocess.Popen]:
    """Start a job step on these nodes only; at the end of the block it is over, whatever its tasks do."""
    command = [
        "srun",
        f"--nodelist={','.join(nodes)}",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes) * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        *("--overlap", "--distribution=block", "--cpu-bind=none", "--kill-on-bad-exit=0", "--no-kill"),
        *("--job-name=doctor", "--unbuffered", "--quiet"),
        *program,
    ]
    # a pipe that nobody reads would stop srun, and its tasks, once it is full
    step = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield step
    finally:
        for stop in (step.terminate, step.kill):
            if step.poll() is None:
                stop()
                try:
                    step.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    continue


def _each_alone(nodes: _Nodes, asked: Examination, answers: Path) -> None:
    """Run the checks on every node. Nodes that a failed step did not reach are tried again, one step each."""
    arguments = [
        *asked.program,
        "doctor",
        "--node-answer",
        str(answers),
        "--dir",
        str(asked.directory),
        "--timeout",
        str(asked.node_s),
    ]
    arguments += [word for command in asked.commands for word in ("--check", command)]
    if asked.devices is not None:
        arguments += ["--devices", str(asked.devices)]
    until = time.monotonic() + _START_S + asked.node_s
    _collect(nodes, answers, until, [nodes.names], arguments)
    missing = [name for name in nodes.names if name not in nodes.answers]
    if missing and time.monotonic() < until:
        # one node that srun cannot reach ends the step of all
        _collect(nodes, answers, until, [[name] for name in missing], arguments)


def _collect(
    nodes: _Nodes, answers: Path, until: float, steps: list[list[str]], arguments: Sequence[str]
) -> None:
    """Run the steps, some at once, and read the answers of their nodes until all have answered or ended."""
    waiting, running = list(steps), []
    with ExitStack() as started:
        while time.monotonic() < until:
            while waiting and len(running) < _RETRIES_AT_ONCE:
                running.append(started.enter_context(_step(waiting.pop(0), 1, arguments)))
            # before the answers are read, because a step leaves its answers before it ends
            running = [step for step in running if step.poll() is None]
            nodes.answers |= {path.stem: json.loads(path.read_text()) for path in answers.glob("*.json")}
            if not (waiting or running) or all(name in nodes.answers for step in steps for name in step):
                return
            time.sleep(0.1)


def _facts(answer: dict[str, Any], check: str) -> dict[str, Any]:
    return next((each["facts"] for each in answer["checks"] if each["name"] == check), {})


def _judge_answers(nodes: _Nodes) -> None:
    """Fail nodes that did not answer, failed a check, or differ from most of the others."""
    for name in nodes.names:
        if name not in nodes.answers:
            nodes.failing[name] = "did not answer: Slurm could not start the checks there, or they hang"
            continue
        failed = [each for each in nodes.answers[name]["checks"] if each["status"] == "fail"]
        if failed:
            nodes.failing[name] = "; ".join(f"{each['name']}: {each['found']}" for each in failed)
    answers = {name: nodes.answers[name] for name in nodes.good}
    versions = {name: _facts(answer, "versions").get("versions", {}) for name, answer in answers.items()}
    for key in _MUST_AGREE:
        for name, own, usual in _minority({name: found.get(key) for name, found in versions.items()}):
            nodes.failing[name] = f"{key} {own} differs from {usual} of most nodes"
    matmul = {name: _facts(answer, "matmul") for name, answer in answers.items()}
    on_gpu = {name: facts for name, facts in matmul.items() if facts.get("device", "CPU") != "CPU"}
    for name, _, _ in _minority({name: facts["bits"] for name, facts in on_gpu.items()}):
        nodes.failing[name] = "matmul gives other bits than on most nodes"
    rates = {name: min(facts["tflops"]) for name, facts in on_gpu.items()}
    for name in _slow(rates):
        usual = median(rates.values())
        nodes.failing[name] = f"matmul {rates[name]:.0f} TFLOP/s, below {SLOW} of the median {usual:.0f}"


def _minority(values: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (node, its value, the usual value) where more than half of the nodes agree on another value."""
    usual, count = Counter(values.values()).most_common(1)[0] if values else (None, 0)
    if 2 * count > len(values):
        yield from ((name, value, usual) for name, value in values.items() if value != usual)


def _slow(rates: dict[str, float]) -> list[str]:
    """Return the nodes below 0.8 of the median, the slowest first."""
    if len(rates) < 2:
        return []
    limit = SLOW * median(rates.values())
    return sorted((name for name in rates if rates[name] < limit), key=lambda name: rates[name])


def _ranks_per_node(nodes: _Nodes) -> int:
    counts = [_facts(nodes.answers[name], "devices").get("count", 0) for name in nodes.good]
    return max(1, min(counts, default=1))


def _address() -> str:
    """Return the address under which the other nodes reach this one: of the interface that gloo uses."""
    found = {each.name: each.address for each in interfaces() if each.address}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable)
        chosen = selected(value, found, variable) if value else []
        if chosen:
            return str(found[chosen[0]])
    return address_of(node_name())


def _network(nodes: _Nodes, asked: Examination) -> dict[str, Any]:
    """Start one rank per device on the good nodes, wait until all have arrived, and let them measure."""
    import torch.distributed as dist

    per_node, names = _ranks_per_node(nodes), nodes.good
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    arguments = [
        *asked.program,
        "doctor",
        "--fabric-store",
        f"{_address()}:{store.port}",
        "--timeout",
        str(asked.node_s),
    ]
    ranks = len(names) * per_node
    begun = time.monotonic()
    with _step(names, per_node, arguments) as step:
        _wait_for(store, "arrived", ranks, begun + _START_S + asked.node_s, step)
        arrival_s = time.monotonic() - begun
        arrived = _collected(store, "arrived", ranks)
        counts = Counter(each["node"] for each in arrived.values())
        for index, name in enumerate(names):
            if counts[name] < per_node:
                lost = [i for i in range(index * per_node, (index + 1) * per_node) if i not in arrived]
                which = ", ".join(map(str, lost))
                nodes.failing[name] = f"rank {which} did not arrive at the rendezvous in {arrival_s:.0f} s"
        present = [rank for rank, each in sorted(arrived.items()) if each["node"] not in nodes.failing]
        store.set("go", json.dumps({"ranks": present, "per_node": per_node}))
        if len(present) > 1:
            _wait_for(store, "done", len(present), time.monotonic() + 2 * asked.node_s, step)
        done = _collected(store, "done", ranks)
    for rank in present if len(present) > 1 else ():
        if rank not in done:
            name = arrived[rank]["node"]
            nodes.failing.setdefault(name, f"rank {rank} did not finish the all-reduce of all nodes")
    placed = [arrived[rank]["node"] for rank in present]
    report = _bandwidths(store, placed[::per_node], placed)
    if asked.exclude_slow:
        nodes.failing |= {
            name: reason for name, reason in report["slow"].items() if name not in nodes.failing
        }
    phases = {rank: arrived[rank]["phases"] | done.get(rank, {}) for rank in present}
    launched = {"launch until the last rank arrived": {"max": round(arrival_s, 3)}}
    return report | {"ranks": len(present), "phases": launched | _phase_table(phases, arrived)}


def _wait_for(store: Any, key: str, count: int, until: float, step: subprocess.Popen) -> None:
    """Wait until a counter reaches `count`; no longer if the step has ended."""
    while store.add(key, 0) < count and time.monotonic() < until:
        if step.poll() is not None and store.add(key, 0) < count:
            return
        time.sleep(0.05)


def _collected(store: Any, key: str, ranks: int) -> dict[int, dict[str, Any]]:
    names = [f"{key}/{rank}" for rank in range(ranks)]
    return {i: json.loads(store.get(name)) for i, name in enumerate(names) if store.check([name])}


def _bandwidths(store: Any, nodes: list[str], placed: list[str]) -> dict[str, Any]:
    """Return GB/s of the pairs and of the world, the slow nodes, and the clock of each node."""
    from arriero.launch.doctor.fabric import ROUNDS, pairs

    found, best, wrong = [], {}, set()
    for number in range(ROUNDS):
        for a, b in pairs(len(nodes), number):
            key = f"pair/{number}/{a}/{b}"
            if store.check([key]):
                result = json.loads(store.get(key))
                rate = result["gb_per_s"]
                found.append({"nodes": [nodes[a], nodes[b]], "gb_per_s": round(rate, 3)})
                wrong |= set() if result["correct"] else {nodes[a], nodes[b]}
                # a slow link of one node must not count against its partners
                best |= {nodes[i]: max(rate, best.get(nodes[i], 0.0)) for i in (a, b)}
    usual = median(best.values()) if best else 0.0
    slow = {
        name: f"all-reduce with another node {best[name]:.2f} GB/s, below {SLOW} of the median {usual:.2f}"
        for name in _slow(best)
    }
    world = json.loads(store.get("world")) if store.check(["world"]) else {}
    clocks = {}
    for name, offset in zip(placed, world.get("clocks", ()), strict=False):
        clocks[name] = max(clocks.get(name, 0.0), offset, key=abs)
    return {
        "pairs": found,
        "pair_median_gb_per_s": round(usual, 3),
        "world_gb_per_s": round(world["gb_per_s"], 3) if world else None,
        "wrong": sorted(wrong) + ([] if world.get("correct", True) else ["all nodes"]),
        "slow": slow,
        "clocks": {name: round(offset, 4) for name, offset in clocks.items()},
    }


def _phase_table(phases: dict[int, dict[str, float]], arrived: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return median, maximum and slowest node of each phase of the start."""
    table = {}
    for name in dict.fromkeys(name for each in phases.values() for name in each):
        seconds = {rank: each[name] for rank, each in phases.items() if name in each}
        last = max(seconds, key=lambda rank: seconds[rank])
        row = {"median": round(median(seconds.values()), 3), "max": round(seconds[last], 3)}
        table[name] = row | {"slowest": arrived[last]["node"]}
    return table


def _warnings(nodes: _Nodes, network: dict[str, Any] | None) -> list[str]:
    """Return what did not fail a node, with the names of the nodes; equal findings are listed together."""
    found: dict[str, list[str]] = {}
    for name in nodes.good:
        for each in nodes.answers[name]["checks"]:
            if each["status"] == "warn":
                found.setdefault(f"{each['name']}: {each['found']}", []).append(name)
    drivers = {n: _facts(nodes.answers[n], "versions").get("versions", {}).get("driver") for n in nodes.good}
    for name, own, usual in _minority(drivers):
        found.setdefault(f"driver {own}, most nodes have {usual}", []).append(name)
    if network:
        for name, reason in network["slow"].items():
            found.setdefault(reason, []).append(name)
        for name, offset in network["clocks"].items():
            if abs(offset) > _CLOCK_S:
                found.setdefault(f"the clock is {offset:+.1f} s from the median", []).append(name)
        if network["wrong"]:
            found.setdefault("all-reduce gave a wrong sum", []).extend(network["wrong"])
    return [f"{what} ({_some(names)})" for what, names in found.items()]


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def print_report(report: dict[str, Any]) -> None:
    console = make_console()
    failing, network = report["failing"], report["network"]
    table = Table("node", "", "reason", no_wrap=("node", ""))
    for name, reason in failing.items():
        table.row(name, styled("fail", "bold red"), reason)
    if failing:
        console.print(table)
    for each in report["warnings"]:
        console.print(f"[yellow]warning:[/] {escape(each)}")
    if network:
        world = network["world_gb_per_s"]
        shown = "not measured" if world is None else f"{world:.2f} GB/s"
        pair = f"{network['pair_median_gb_per_s']:.2f} GB/s (median of {len(network['pairs'])})"
        console.print(f"all-reduce bus bandwidth: pairs of nodes {pair}, {network['ranks']} ranks {shown}")
        phases = Table("phase", ">median, s", ">max, s", "slowest node")
        for name, row in network["phases"].items():
            phases.row(name, row.get("median", ""), row["max"], row.get("slowest", ""))
        console.print(phases)
    good = len(report["nodes"]) - len(failing)
    console.print(f"{good} of {counted(len(report['nodes']), 'node')} passed in {report['seconds']:.0f} s")
