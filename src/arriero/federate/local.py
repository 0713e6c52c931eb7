"""Play all sites as processes of this machine: the coordinator's loop without ssh, Slurm or StreamFlow."""

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from arriero.errors import UserError
from arriero.federate.coordinator import Coordinator
from arriero.federate.launching import Launcher
from arriero.federate.members import GlobalManifest
from arriero.federate.rounds import Assignment, write_json
from arriero.federate.schema import SiteSection
from arriero.federate.site import SitePaths, evaluate_global, run_round
from arriero.interrupt import Interrupted

_POLL_S = 0.1
_LOG = "log.txt"
# a server that has imported torch forks the sites, each in a few milliseconds
_FORK = multiprocessing.get_context("forkserver")


@dataclass
class LocalSites:
    """The processes of the sites. Each outlives the coordinator and finishes its round."""

    coordinator: Coordinator
    running: dict[str, tuple[Assignment, BaseProcess]] = field(default_factory=dict)
    failures: dict[tuple[str, int], int] = field(default_factory=dict)

    def start(self, site: SiteSection, order: Assignment) -> None:
        paths = self.coordinator.paths(site, order.round)
        paths.work.mkdir(parents=True, exist_ok=True)
        paths.out.parent.mkdir(parents=True, exist_ok=True)
        threads = max(1, (os.cpu_count() or 1) // len(self.coordinator.names))
        process = _FORK.Process(
            target=_be_site, args=(order, paths, site.nproc, threads), name=f"site-{site.name}"
        )
        process.start()
        self.running[site.name] = order, process

    def reap(self) -> None:
        """Count the failures of sites that ended without a member; give up after the retries."""
        rounds, retries = self.coordinator.rounds, self.coordinator.config.federation.retries
        for name, (order, process) in list(self.running.items()):
            if process.is_alive():
                continue
            process.join()
            del self.running[name]
            if self._has_published(name, order):
                continue
            count = self.failures[name, order.round] = self.failures.get((name, order.round), 0) + 1
            rounds.events.write(
                "site failed", site=name, round=order.round, code=process.exitcode, count=count
            )
            if count > retries:
                rounds.give_up(name, f"{name} failed {count} times in round {order.round}")

    def join_published(self) -> None:
        """Wait for the processes of sites that have published their member and only have to end."""
        for name, (order, process) in list(self.running.items()):
            if self._has_published(name, order):
                process.join()
                del self.running[name]

    def _has_published(self, name: str, order: Assignment) -> bool:
        rounds = self.coordinator.rounds
        return rounds.pending(name) != order or rounds.inbox(name, order.round).is_dir()

    def stop(self) -> None:
        """Ask the sites to save and end; they continue inside their round at the next start."""
        for _, process in self.running.values():
            process.terminate()
        for _, process in self.running.values():
            process.join(60)


def _be_site(order: Assignment, paths: SitePaths, nproc: int, threads: int) -> None:
    with (paths.work / _LOG).open("a", buffering=1) as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    import torch

    torch.set_num_threads(threads)
    try:
        if order.steps:
            run_round(order, paths, Launcher(nproc))
        else:
            write_json(paths.out, {"site": order.site, "eval_loss": evaluate_global(order, paths)})
    except Interrupted as stop:
        os._exit(128 + stop.number)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        os._exit(2)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def run_local(coordinator: Coordinator, report: Callable[[GlobalManifest], None]) -> None:
    """Run the rounds that are left; `report` is called with each new global model."""
    _FORK.set_forkserver_preload(["arriero.federate.local", "arriero.train.build"])
    sites = LocalSites(coordinator)
    try:
        while not coordinator.is_finished:
            coordinator.reload()
            made = _until_closed(coordinator, sites)
            report(made)
        _evaluate(coordinator, sites)
    finally:
        with contextlib.suppress(KeyboardInterrupt):
            sites.stop()


def _until_closed(coordinator: Coordinator, sites: LocalSites) -> GlobalManifest:
    while True:
        for name, order in coordinator.assign_idle().items():
            site = coordinator.config.site(name)
            if site is not None and name not in sites.running:
                sites.start(site, order)
        sites.reap()
        made = coordinator.rounds.try_to_close(coordinator.names)
        if isinstance(made, GlobalManifest):
            return made
        time.sleep(_POLL_S)


def _evaluate(coordinator: Coordinator, sites: LocalSites) -> None:
    """Evaluate the final model on the held-out data of every site that is not training."""
    sites.join_published()
    number = coordinator.rounds.number
    folder = coordinator.rounds.at(number) / "evaluation"
    folder.mkdir(parents=True, exist_ok=True)
    for site in coordinator.config.sites:
        if not (folder / f"{site.name}.json").is_file() and site.name not in sites.running:
            order = Assignment(site.name, number, 0, 0, 1, "bf16", "continue", time.time())
            _start_evaluation(coordinator, site, order, folder, sites)
    for _, process in sites.running.values():
        process.join()


def _start_evaluation(
    coordinator: Coordinator, site: SiteSection, order: Assignment, folder: Path, sites: LocalSites
) -> None:
    paths = SitePaths(
        coordinator.rounds.model(order.round),
        coordinator.run_file(site.name),
        coordinator.work(site),
        folder / f"{site.name}.json",
    )
    process = _FORK.Process(target=_be_site, args=(order, paths, 1, 1))
    process.start()
    sites.running[site.name] = order, process
