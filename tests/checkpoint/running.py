"""Small runs in forked ranks, for tests of what a checkpoint carries from one to the next."""

import json
from pathlib import Path

import torch

from arriero.config.load import load_run
from arriero.data.workers import no_progress
from arriero.model.presets import expand
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import process_group, world_from
from arriero.train.build import arrange, build
from arriero.train.loop import train

BASE = [
    "model.preset=llama-test",
    "model.vocab_size=4096",
    "data.seq_len=32",
    "train.batch=256 tok",
    "train.horizon=6 steps",
    "schedule.kind=constant",
    "schedule.warmup=2 steps",
    "eval.heldout=false",
    "eval.every=false",
    "optim.lr=1e-3",
    "observe.log_every=1",
    "observe.tensorboard=false",
    "observe.sample=false",
    "run.device=cpu",
    "run.deterministic=true",
    "precision.compute=fp32",
]


class Runs:
    """Every run is its own processes; what rank 0 saw last comes back."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache

    def config(self, name, *sets):
        where = [f"run.name={name}", f"run.dir='{self.folder}'", f"data.cache='{self.cache}'"]
        return load_run(None, [*BASE, *where, *sets], expand).config

    def train(self, name, *sets, ranks=1, hooks=()):
        config = self.config(name, *sets)

        def work():
            torch.set_num_threads(1)
            world = world_from()
            plan = arrange(config, world)
            with process_group(world, plan.device.torch_device):
                session = build(plan, no_progress, hooks)
                return train(session).to_state() | {
                    "decisions": [(d.name, d.value) for d in session.record.decisions]
                }

        return run_ranks(work, ranks, leader_prints=False)

    def losses(self, name):
        """The last line of each step, as readers take it."""
        return {line["step"]: line["loss"] for line in self.lines(name, "metrics.jsonl")}

    def lines(self, name, file):
        return [json.loads(line) for line in (self.folder / name / file).read_text().splitlines()]

    def saved(self, name):
        return sorted(p.name for p in (self.folder / name / "checkpoints").iterdir())
