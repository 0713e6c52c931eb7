"""How a site trains: `arriero train` in this process and its ranks, or a Slurm job by `arriero launch`."""

from dataclasses import dataclass
from pathlib import Path

from arriero.config.schema import RunConfig
from arriero.train.hooks import Hook


@dataclass(frozen=True)
class Launcher:
    """`nproc` ranks of this machine, or a job on `nodes` nodes with a site profile of `arriero launch`."""

    nproc: int = 1
    profile: str | None = None
    nodes: int = 1

    def train(self, config: RunConfig, work: Path, hooks: tuple[Hook, ...] = ()) -> float:
        """Train a run to its horizon; return the seconds that it waited in a queue."""
        if self.profile is not None:
            raise NotImplementedError(work)
        from arriero.train.run import run

        run(config, list(hooks), nproc=None if self.nproc == 1 else self.nproc)
        return 0.0
