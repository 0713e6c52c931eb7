"""Inject faults into local sites while a federation runs; `make chaos` writes a table into the docs.

Each site trains a tiny model at a fixed pace, so a site that stops costs its own tokens and gives no time to
the others, as on machines of their own. The same federation without faults runs beside it, under the same
load.
"""

import argparse
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from arriero.data.prepare.builtin import prepare_builtin
from arriero.federate.coordinator import Coordinator
from arriero.federate.driver import Driver, LocalProcess
from arriero.federate.members import GlobalManifest, open_global
from arriero.train.hooks import Hook

BEGIN, END = "<!-- chaos -->", "<!-- chaos end -->"
BATCH = 128
RUN = """
[run]
seed = {seed}
device = "cpu"
deterministic = true
[model]
preset = "llama-test"
vocab_size = 4096
[data]
seq_len = 32
cache = "{cache}"
sources = [{{ path = "builtin:stdlib" }}]
[train]
batch = "{batch} tok"
[schedule]
kind = "{schedule}"
warmup = "{warmup} steps"
[eval]
heldout = "2k tok"
[optim]
lr = {lr}
[precision]
compute = "fp32"
[checkpoint]
every = "{every} steps"
keep = 2
background = false
export = false
[observe]
tensorboard = false
log_every = 1
"""


def run_file(seed: int, cache: Path, **changes: Any) -> str:
    """Return the run file of a site with a tiny model."""
    given = {"batch": BATCH, "schedule": "constant", "warmup": 20, "lr": 2e-3, "every": 3}
    return RUN.format(seed=seed, cache=cache, **given | changes)


@dataclass
class Pace(Hook):
    """Lets every step take at least `step_s` seconds."""

    step_s: float
    _next: float = 0.0

    def on_step(self, session: Any, step: int, tokens: int) -> None:
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + self.step_s


class Linked(Coordinator):
    """Every site reaches the coordinator through a link of its own, which can be cut."""

    def link(self, site: str) -> Path:
        path = self.folder / "links" / site
        if not path.is_symlink():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to("../rounds")
        return path

    def paths(self, site, order):
        real, link, rounds = super().paths(site, order), self.link(site.name), self.folder / "rounds"
        return replace(
            real, model=link / real.model.relative_to(rounds), out=link / real.out.relative_to(rounds)
        )


class TimeIsUp(Exception):
    pass


@dataclass
class Chaos:
    """A federation that runs for some time, with a fault every `interval` seconds; 0 for none."""

    folder: Path
    cache: Path
    sites: int = 16
    seconds: float = 900
    interval: float = 20
    steps: int = 45
    step_s: float = 2.0
    seed: int = 1
    injected: Counter = field(default_factory=Counter)
    losses: dict[str, float] = field(default_factory=dict)
    elapsed: float = 0.0

    def __post_init__(self) -> None:
        self._dice, self._stop, self._later = random.Random(self.seed), threading.Event(), []
        self._names = [f"s{i:02d}" for i in range(self.sites)]
        self._joined = self.sites
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write()
        self.coordinator = Linked.of(self.folder / "fed.toml")
        self.driver = Driver(self.coordinator, local=True, hooks=(Pace(self.step_s),))

    def _write(self) -> None:
        lines = [f"[federation]\nname = 'fed'\nrounds = 1000\ntokens = '{self.steps} steps'"]
        lines += ["retries = 8\nquorum = 0.5\n[outer]\nmomentum = 0.5"]
        for name in self._names:
            run = self.folder / f"{name}.toml"
            if not run.exists():
                run.write_text(run_file(self.seed + int(name[1:]), self.cache))
            lines += [f"[[sites]]\nname = '{name}'\nrun_file = '{name}.toml'"]
        path = self.folder / "fed.toml"
        path.with_suffix(".tmp").write_text("\n".join(lines))
        path.with_suffix(".tmp").replace(path)

    def run(self) -> None:
        self.coordinator.prepare()
        begin = time.monotonic()
        faults = threading.Thread(target=self._inject, daemon=True)

        def report(made: GlobalManifest) -> None:
            self.elapsed = time.monotonic() - begin
            print(f"{self.folder.name}: round {made.round}, {made.tokens:,} tokens", flush=True)
            if self.elapsed > self.seconds and (not self.interval or set(self.injected) == set(FAULTS)):
                self._stop.set()
                raise TimeIsUp

        if self.interval:
            faults.start()
        with suppress(TimeIsUp):
            self.driver.run(report)
        if self.interval:
            faults.join()
        self._evaluate()

    def _evaluate(self) -> None:
        """Evaluate the newest global model at every site."""
        config = self.coordinator.config
        rounds = config.federation.model_copy(update={"rounds": self.coordinator.rounds.number})
        self.coordinator.config = config.model_copy(update={"federation": rounds})
        Driver(self.coordinator, local=True).run(lambda _: None)
        self.losses = self.coordinator.final_losses()

    def _inject(self) -> None:
        kinds, order = list(FAULTS), []
        while not self._stop.wait(self.interval):
            if not order:
                # every kind once, then all of them again in another order
                order = self._dice.sample(kinds, len(kinds))
            kind = order.pop()
            if FAULTS[kind](self):
                self.injected[kind] += 1
        for timer, undo in self._later:
            timer.cancel()
            undo()

    def _undo(self, seconds: float, action: Any) -> None:
        def once() -> None:
            with suppress(OSError):
                action()

        timer = threading.Timer(seconds, once)
        timer.daemon = True
        timer.start()
        self._later.append((timer, once))

    def _victim(self) -> tuple[str, int] | None:
        """Return a site that is training and its process."""
        alive = [
            (name, process.process.pid)
            for name, (_, process) in list(self.driver.running.items())
            if isinstance(process, LocalProcess) and process.is_alive() and process.process.pid
        ]
        return self._dice.choice(sorted(alive)) if alive else None

    def kill(self) -> bool:
        if victim := self._victim():
            os.kill(victim[1], signal.SIGKILL)
        return victim is not None

    def freeze(self) -> bool:
        if victim := self._victim():
            os.kill(victim[1], signal.SIGSTOP)
            self._undo(
                self._dice.uniform(0.25, 1) * self.interval, lambda: os.kill(victim[1], signal.SIGCONT)
            )
        return victim is not None

    def cut(self) -> bool:
        """The site cannot reach the coordinator: neither read a model nor publish."""
        if victim := self._victim():
            link = self.coordinator.link(victim[0])
            link.unlink()
            link.symlink_to("../nowhere")

            def mend() -> None:
                link.unlink()
                link.symlink_to("../rounds")

            self._undo(self._dice.uniform(0.25, 1) * self.interval, mend)
        return victim is not None

    def corrupt(self) -> bool:
        """Flip a byte of a member that has arrived and was not averaged yet."""
        rounds = self.coordinator.rounds
        while not self._stop.is_set():
            folder = rounds.at(rounds.number)
            paths = sorted([*folder.glob("inbox/s*/delta*"), *folder.glob("members/s*/delta*")])
            if paths and not (folder / "closed.json").exists():
                with suppress(OSError), self._dice.choice(paths).open("r+b") as file:
                    file.seek(-7, os.SEEK_END)
                    byte = file.read(1)
                    file.seek(-7, os.SEEK_END)
                    file.write(bytes([byte[0] ^ 0x10]))
                    return True
            time.sleep(0.05)
        return False

    def fill_disk(self) -> bool:
        """Let every write of the site beyond 4 KiB of a file fail, for some time."""
        if victim := self._victim():
            none = resource.RLIM_INFINITY
            with suppress(ProcessLookupError):
                resource.prlimit(victim[1], resource.RLIMIT_FSIZE, (4096, none))
            seconds = self._dice.uniform(0.25, 1) * self.interval
            self._undo(seconds, lambda: resource.prlimit(victim[1], resource.RLIMIT_FSIZE, (none, none)))
        return victim is not None

    def replace_site(self) -> bool:
        """One site leaves and a new one joins; the federation file is read again at the next round."""
        self._names.remove(self._dice.choice(self._names))
        self._names.append(f"s{self._joined:02d}")
        self._joined += 1
        self._write()
        return True

    def check(self) -> dict[str, Any]:
        """Return what the files say: whether each token was counted once and the models can be replayed."""
        rounds = self.coordinator.rounds
        accepted = [each for closed in rounds.history() for each in closed.accepted]
        tokens = open_global(rounds.model(rounds.number)).tokens
        spans: dict[str, list[tuple[int, int]]] = {}
        for each in accepted:
            spans.setdefault(each.site, []).append((each.first_step, each.step))
        once = all(a[1] <= b[0] for each in map(sorted, spans.values()) for a, b in itertools.pairwise(each))
        counted = sum((b - a) * BATCH for each in spans.values() for a, b in each)
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            replayed = self.coordinator.replay(Path(scratch))
        refused = [each for n in range(rounds.number + 1) for each in rounds.refusals(n)]
        return {
            "rounds": rounds.number,
            "seconds": self.elapsed,
            "tokens": tokens,
            "counted once": once and counted == tokens == sum(each.tokens for each in accepted),
            "replayed": len(replayed) == rounds.number and all(same for _, same in replayed),
            "late": sum(each.round < c.round for c in rounds.history() for each in c.accepted),
            "refused": len(refused),
            "failed": sum(
                "site failed" in line for line in (self.coordinator.folder / "events.jsonl").open()
            ),
            "loss": sum(self.losses.values()) / max(1, len(self.losses)),
            "injected": dict(self.injected),
        }


FAULTS = {
    "kill -9": Chaos.kill,
    "SIGSTOP": Chaos.freeze,
    "connection cut": Chaos.cut,
    "member corrupted": Chaos.corrupt,
    "disk full": Chaos.fill_disk,
    "site leaves, another joins": Chaos.replace_site,
}


def table(found: dict[str, Any], calm: dict[str, Any], given: argparse.Namespace) -> str:
    rate, usual = (each["tokens"] / each["seconds"] for each in (found, calm))
    faults = ", ".join(f"{count} x {kind}" for kind, count in found["injected"].items())
    yes = {True: "yes", False: "NO"}
    rows = [
        ("rounds", *(each["rounds"] for each in (calm, found))),
        ("minutes until the last round closed", *(f"{each['seconds'] / 60:.1f}" for each in (calm, found))),
        ("tokens accepted", *(f"{each['tokens']:,}" for each in (calm, found))),
        ("tokens per second", f"{usual:,.0f}", f"{rate:,.0f} ({rate / usual:.1%})"),
        (
            "held-out loss",
            f"{calm['loss']:.4f}",
            f"{found['loss']:.4f} ({found['loss'] / calm['loss'] - 1:+.2%})",
        ),
        ("site processes that failed", *(each["failed"] for each in (calm, found))),
        ("members merged late", *(each["late"] for each in (calm, found))),
        ("members refused", *(each["refused"] for each in (calm, found))),
        ("every accepted token counted once", *(yes[each["counted once"]] for each in (calm, found))),
        ("replay gives the same bits", *(yes[each["replayed"]] for each in (calm, found))),
    ]
    lines = [
        f"{given.sites} sites for {given.seconds / 60:.0f} minutes, rounds of {given.steps} steps of "
        f"{given.step_s:g} s, "
        f"a fault every {given.interval:g} s: {faults}.",
        "",
        "| | undisturbed | with faults |",
        "|---|---|---|",
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--interval", type=float, default=20)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--step-s", type=float, default=2.0)
    parser.add_argument("--work", type=Path, help="keep everything here")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", choices=("calm", "faults"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = given.work or Path(name)
        if given.only:
            one(given, folder)
            return
        prepare_builtin("builtin:stdlib", folder / "data")
        command = [sys.executable, "-m", "benchmarks.federation_chaos", *sys.argv[1:], "--work", str(folder)]
        limit = time.monotonic() + 2 * given.seconds + 60
        both = [
            subprocess.Popen([*command, "--only", kind], start_new_session=True)
            for kind in ("calm", "faults")
        ]
        try:
            codes = [each.wait(max(0.0, limit - time.monotonic())) for each in both]
        except subprocess.TimeoutExpired:
            sys.exit(
                f"not finished after {2 * given.seconds / 60:.0f} minutes: the machine is too slow or busy"
            )
        finally:
            for each in both:
                with suppress(ProcessLookupError):
                    os.killpg(each.pid, signal.SIGKILL)
        if any(codes):
            sys.exit("a federation failed; see its output")
        calm, found = (json.loads((folder / f"{kind}.json").read_text()) for kind in ("calm", "faults"))
    text = table(found, calm, given)
    print(text)
    if given.write:
        page = given.write.read_text()
        given.write.write_text(f"{page.split(BEGIN)[0]}{BEGIN}\n{text}\n{END}{page.split(END)[1]}")


def one(given: argparse.Namespace, folder: Path) -> None:
    interval = given.interval if given.only == "faults" else 0
    chaos = Chaos(
        folder / given.only,
        folder / "data",
        given.sites,
        given.seconds,
        interval,
        given.steps,
        given.step_s,
    )
    chaos.run()
    (folder / f"{given.only}.json").write_text(json.dumps(chaos.check()))


if __name__ == "__main__":
    main()
