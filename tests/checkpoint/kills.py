"""Runs that are killed, damaged and starved, and must end as the run that was left alone.

tests/reliability.py runs all of it and writes docs/reliability.md.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

from arriero.checkpoint.directory import CHECKPOINTS
from arriero.config.load import load_run
from arriero.data.order.ledger import Audit, read_ledger
from arriero.data.order.streams import build_streams
from arriero.data.workers import no_progress
from arriero.interrupt import Interrupted
from arriero.model.presets import expand
from arriero.train.commands import ConsoleProgress
from arriero.train.run import run
from arriero.ui import Console
from checkpoint.running import BASE

STEPS = 30
SETS = [*BASE, f"train.horizon={STEPS} steps", "checkpoint.every=3 steps", "checkpoint.keep=2"]
KILLS = 3
KINDS = ("metadata", "distcp", "state", "run", "ledger", "tokenizer", "manifest")


@dataclass
class Tally:
    """What was done, and what came of it."""

    counts: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class Range:
    """A place for runs of one configuration, and the losses that all of them must reach."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        self._expected: dict[int, dict[int, float]] = {}

    def config(self, name: str, where: Path | None = None, ranks: int = 1, sets=()):
        place = [f"run.name={name}", f"run.dir='{where or self.folder}'", f"data.cache='{self.cache}'"]
        layout = [f"parallel.dp_shard={ranks}"]
        return load_run(None, [*SETS, *layout, *place, *sets], expand).config

    def expected(self, ranks: int) -> dict[int, float]:
        if ranks not in self._expected:
            code = self.finish(self.config(f"alone-{ranks}", ranks=ranks), ranks)
            assert code == 0, "the run that was left alone did not end well"
            self._expected[ranks] = losses(self.folder / f"alone-{ranks}")
        return self._expected[ranks]

    def start(self, config, ranks: int = 1) -> int:
        """A process that trains, as the command line would; returns its id."""
        if pid := os.fork():
            return pid
        code = 1
        log = self.log(config.run.name).open("a")
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log
        try:
            run(config, [ConsoleProgress(Console(file=log))], nproc=None if ranks == 1 else ranks)
            code = 0
        except Interrupted as stop:
            code = 128 + stop.number
        except BaseException:
            traceback.print_exc()
        finally:
            log.flush()
            os._exit(code)

    def log(self, name: str) -> Path:
        """Not beside the run: a disk with open files cannot be made read-only."""
        return self.folder / f"{name}.log"

    def finish(self, config, ranks: int = 1) -> int:
        return wait(self.start(config, ranks))

    def judge(self, name: str, config, ranks: int = 1) -> str | None:
        """Resume, and compare with the run that was left alone; what is wrong, if anything is."""
        if code := self.finish(config, ranks):
            return f"{name}: the resumed run ended with {code}: {self.log(name).read_text()[-2000:]}"
        return self.compare(name, config, ranks)

    def compare(self, name: str, config, ranks: int = 1) -> str | None:
        run = Path(config.run.dir) / name
        if (found := losses(run)) != (expected := self.expected(ranks)):
            step = next((s for s in expected if found.get(s) != expected[s]), "beyond the end")
            return f"{name}: the loss differs from step {step} on"
        if problem := audited(run, config):
            return f"{name}: {problem}"
        return None


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def losses(run: Path) -> dict[int, float]:
    """Readers take the last line of a step; a kill may leave half a line."""
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):
            content = json.loads(line)
            found[content["step"]] = content["loss"]
    return dict(sorted(found.items()))


def audited(run: Path, config) -> str | None:
    audit = Audit(read_ledger(run), build_streams(config, no_progress).train)
    audit.run(lambda *_: None)
    if audit.ledger.samples != STEPS * config.train.batch.amount // config.data.seq_len:
        return f"the ledger ends at sample {audit.ledger.samples}"
    return "; ".join(audit.problems) or None


def kill_at_random(grounds: Range, seed: int, tally: Tally, ranks: int = 1) -> None:
    """Killed a few times, at any instant or just when a save has begun, and resumed each time."""
    chance = random.Random(seed)
    name = f"killed-{seed}-{ranks}"
    config = grounds.config(name, ranks=ranks)
    folder = grounds.folder / name / CHECKPOINTS
    grounds.expected(ranks)
    for number in range(KILLS):
        inside, began = chance.random() < 0.5, time.time()
        # a third of the way each time, from the very beginning on
        goal = chance.randrange(number * STEPS // KILLS, (number + 1) * STEPS // KILLS - 3)
        pause = chance.uniform(0, 0.05)
        pid = grounds.start(config, ranks)
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if reached(grounds.folder / name) >= goal and (not inside or unfinished(folder, began)):
                time.sleep(pause)
                os.kill(pid, signal.SIGKILL)
                wait(pid)
                where = "inside a save" if unfinished(folder, began) else "elsewhere"
                tally.counts[f"kills {where}"] += 1
                break
            time.sleep(0.001)
        else:
            break
    if problem := grounds.judge(name, config, ranks):
        tally.failures.append(problem)
    tally.counts[f"killed runs resumed to the end, {ranks} rank{'s' if ranks > 1 else ''}"] += 1
    shutil.rmtree(grounds.folder / name)


def reached(run: Path) -> int:
    """The last step that is on record."""
    return max(losses(run), default=0) if (run / "metrics.jsonl").exists() else 0


def unfinished(folder: Path, since: float) -> bool:
    """Whether a save has begun since then and not ended."""
    for path in folder.glob("*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime > since:
                return True
    return False


def stopped_run(grounds: Range) -> str:
    """A run that is stopped after some checkpoints; cases of damage start from copies of it."""
    name = "stopped"
    if (grounds.folder / name).exists():
        return name
    config = grounds.config(name)
    pid = grounds.start(config)
    folder = grounds.folder / name / CHECKPOINTS
    while not (folder.is_dir() and len(list(folder.glob("step-*[0-9]"))) == 2):
        time.sleep(0.001)
    os.kill(pid, signal.SIGTERM)
    assert wait(pid) == 128 + signal.SIGTERM
    return name


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def remove(path: Path, _: random.Random) -> None:
    path.unlink()


def newer(path: Path, _: random.Random) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))


HARMS = {"a flipped bit": flip, "a truncated file": truncate, "a removed file": remove}


def damage(grounds: Range, kind: str, harm: str, seed: int, tally: Tally) -> None:
    base = stopped_run(grounds)
    name = f"damaged-{kind}-{seed}"
    shutil.copytree(grounds.folder / base, grounds.folder / name)
    newest = max((grounds.folder / name / CHECKPOINTS).glob("step-*"))
    victim = next(path for path in newest.iterdir() if kind in path.name)
    (HARMS | {"a manifest from a newer version": newer})[harm](victim, random.Random(seed))
    config = grounds.config(name)
    problem = grounds.judge(name, config)
    tally.counts[harm] += 1
    output = grounds.log(name).read_text()
    if problem is None and newest.name not in output:
        problem = f"{name}: {harm} in {victim.name} was not reported"
    if problem:
        tally.failures.append(problem)
    shutil.rmtree(grounds.folder / name)


def damage_all(grounds: Range, harm: str, seed: int, tally: Tally) -> None:
    """Without a valid checkpoint the run is refused and changes nothing; start_over trains it from step 0."""
    base = stopped_run(grounds)
    name = f"lost-{seed}"
    shutil.copytree(grounds.folder / base, grounds.folder / name)
    folder = grounds.folder / name / CHECKPOINTS
    for path in folder.glob("step-*/*.distcp"):
        HARMS[harm](path, random.Random(seed))
    before = sorted(folder.rglob("*"))
    code = grounds.finish(grounds.config(name))
    if code == 0 or "start_over" not in grounds.log(name).read_text():
        tally.failures.append(f"{name}: a run without a valid checkpoint was not refused")
    if sorted(folder.rglob("*")) != before:
        tally.failures.append(f"{name}: the refused run changed its checkpoints")
    if problem := grounds.judge(name, grounds.config(name, sets=["checkpoint.start_over=true"])):
        tally.failures.append(problem)
    tally.counts[f"{harm} in every checkpoint: refused, then started over"] += 1
    shutil.rmtree(grounds.folder / name)


@contextlib.contextmanager
def small_disk(folder: Path, size: str):
    """A tmpfs where that is allowed; None elsewhere."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True)
    try:
        yield folder if done.returncode == 0 else None
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", folder], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


def full_disk(grounds: Range, tally: Tally) -> None:
    """Saves on a disk that is too small fail loudly while training continues, until there is space."""
    with small_disk(grounds.folder / "small", size="26m") as disk:
        if disk is None:
            return
        name = "full"
        config = grounds.config(name, disk, sets=["checkpoint.keep=5"])
        code = grounds.finish(config)
        if code == 0 or "NOT saved" not in grounds.log(name).read_text():
            tally.failures.append(f"{name}: a full disk went by unnoticed")
        remount(disk, "size=1g")
        if problem := grounds.judge(name, config):
            tally.failures.append(problem)
        tally.counts["a full disk"] += 1


def read_only(grounds: Range, tally: Tally) -> None:
    """The disk becomes read-only while training, and writable again."""
    with small_disk(grounds.folder / "fragile", size="1g") as disk:
        if disk is None:
            return
        name = "fragile"
        config = grounds.config(name, disk)
        # its open file would forbid what is to be tried
        with patch("arriero.train.run.lock_run", lambda _: contextlib.nullcontext()):
            pid = grounds.start(config)
        while not list((disk / name / CHECKPOINTS).glob("step-*[0-9]")):
            time.sleep(0.001)
        while subprocess.run(["mount", "-o", "remount,ro", disk], capture_output=True).returncode:
            time.sleep(0.001)
        if wait(pid) == 0:
            tally.failures.append(f"{name}: a read-only disk went by unnoticed")
        remount(disk, "rw")
        if problem := grounds.judge(name, config):
            tally.failures.append(problem)
        tally.counts["a disk that became read-only"] += 1


def kill_one_process(folder: Path, seeds: int) -> Tally:
    """Kill, damage and starve runs of one process."""
    grounds, tally = _grounds(folder), Tally()
    for seed in range(seeds):
        kill_at_random(grounds, seed, tally)
        sys.stdout.write(f"seed {seed}: {dict(tally.counts)} {tally.failures}\n")
    for number, kind in enumerate(KINDS):
        for harm in HARMS:
            damage(grounds, kind, harm, number, tally)
    damage(grounds, "manifest", "a manifest from a newer version", 99, tally)
    for number, harm in enumerate(HARMS):
        damage_all(grounds, harm, number, tally)
    full_disk(grounds, tally)
    read_only(grounds, tally)
    return tally


def kill_many_ranks(folder: Path, seeds: int) -> Tally:
    """Kill runs of two and of four ranks."""
    grounds, tally = _grounds(folder), Tally()
    for seed in range(seeds):
        kill_at_random(grounds, 100 + seed, tally, ranks=2 if seed % 2 else 4)
        sys.stdout.write(f"seed {seed}: {dict(tally.counts)} {tally.failures}\n")
    return tally


def _grounds(folder: Path) -> Range:
    (folder / "runs").mkdir()
    return Range(folder / "runs", folder / "data")
