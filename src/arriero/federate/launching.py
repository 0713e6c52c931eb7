"""How a site trains: `arriero train` in this process and its ranks, or a Slurm job by `arriero launch`."""

from dataclasses import dataclass
from datetime import datetime
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
        """Train a run to its horizon; return the seconds that it waited in a queue.

        Whether it was reached is read from the checkpoints: the state of a job says too little.
        """
        if self.profile is not None:
            return self._submit(config, self.profile, work)
        from arriero.train.run import run

        run(config, list(hooks), nproc=None if self.nproc == 1 else self.nproc)
        return 0.0

    def _submit(self, config: RunConfig, profile: str, work: Path) -> float:
        """Submit a job as `arriero launch submit` does and wait for it; a job that is alive is waited for."""
        from arriero import slurm
        from arriero.launch.commands import chosen_site
        from arriero.launch.jobs import JobRequest, launch_folder, render, submit_chain

        earlier = slurm.submitted(launch_folder(config))[-1:]
        alive = [each["job"] for each in earlier if _is_alive(slurm.job_facts([each["job"]]), each["job"])]
        given = Path(profile) if Path(profile).is_absolute() else work / profile
        site = chosen_site(str(given) if given.is_file() else profile)
        job = alive[0] if alive else submit_chain(render(config, site, JobRequest(nodes=self.nodes)), 1)[0]
        slurm.wait_for(job, poll_s=2.0)
        said = slurm.job_facts([job]).get(job, {})
        return _seconds_between(said.get("SubmitTime"), said.get("StartTime"))


def _is_alive(facts: dict[str, dict[str, str]], job: str) -> bool:
    from arriero.slurm import ENDED

    return job in facts and facts[job].get("JobState") not in (*ENDED, None)


def _seconds_between(start: str | None, end: str | None) -> float:
    try:
        return max(
            0.0, (datetime.fromisoformat(end or "") - datetime.fromisoformat(start or "")).total_seconds()
        )
    except ValueError:
        return 0.0
