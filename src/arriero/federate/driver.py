"""The coordinator's loop: start what each site was asked, close rounds, evaluate the final model.

A site without `host`, or any site with --local, is a process of this machine. Others are reached through
StreamFlow. The loop only knows processes that may end, hang or fail; what they did is read from the files.
"""

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Protocol

from arriero.errors import UserError
from arriero.federate.coordinator import Coordinator
from arriero.federate.members import GlobalManifest
from arriero.federate.round_files import Assignment
from arriero.federate.schema import SiteSection
from arriero.federate.site import Launcher, SitePaths, perform
from arriero.federate.streamflow import Engine
from arriero.interrupt import Interrupted
from arriero.train.hooks import Hook

_POLL_S = 0.1
_LONGEST_PAUSE_S = 60.0
_LOG = "log.txt"
# a server that has imported torch forks the sites, each in a few milliseconds
_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["arriero.federate.driver", "arriero.train.build"])


class Process(Protocol):
    """`spans_rounds`: it fetches the next order by itself and ends with the federation."""

    spans_rounds: bool

    def is_alive(self) -> bool: ...

    def stop(self, wait: bool = True) -> None:
        """Ask the process to end, and wait for it."""

    @property
    def code(self) -> int | None: ...


@dataclass
class LocalProcess:
    """A site on this machine. It outlives a coordinator that is killed, and finishes its round."""

    process: BaseProcess
    spans_rounds = False

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def stop(self, wait: bool = True) -> None:
        self.process.terminate()
        if wait:
            self.process.join(60)

    @property
    def code(self) -> int | None:
        return self.process.exitcode


@dataclass
class Driver:
    """`local` plays every site on this machine. `hooks` observe the training runs of local sites."""

    coordinator: Coordinator
    local: bool = False
    hooks: tuple[Hook, ...] = ()
    running: dict[str, tuple[Assignment, Process]] = field(default_factory=dict)
    _failures: dict[tuple[str, int], int] = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)
    _stopped: set[str] = field(default_factory=set)

    def run(self, report: Callable[[GlobalManifest], None]) -> None:
        """Run the rounds that are left and evaluate the result; `report` gets each new global model."""
        try:
            while not self.coordinator.is_finished:
                self.coordinator.reload()
                report(self._until_closed())
            self._evaluate()
        finally:
            with suppress(KeyboardInterrupt):
                self.stop()

    def _until_closed(self) -> GlobalManifest:
        while True:
            self.start_idle()
            self.reap()
            made = self.coordinator.rounds.try_to_close(self.coordinator.names)
            if isinstance(made, GlobalManifest):
                return made
            time.sleep(_POLL_S)

    def start_idle(self) -> None:
        """Start every site that has something to do and no process; stop those that have left."""
        for name, order in self.coordinator.assign_idle().items():
            site = self.coordinator.config.site(name)
            due = time.monotonic() >= self._not_before.get(name, 0.0)
            if site is not None and due and name not in self.running:
                self.start(site, order)

    def start(self, site: SiteSection, order: Assignment) -> None:
        if site.host and not self.local:
            self.running[site.name] = order, Engine.start(self.coordinator, site, order)
            return
        paths = self.coordinator.paths(site, order)
        there = self.coordinator.rounds.at(order.round) / ("inbox" if order.steps else "evaluation")
        for folder in (paths.work, there):
            folder.mkdir(parents=True, exist_ok=True)
        threads = max(1, (os.cpu_count() or 1) // len(self.coordinator.names))
        given = (order, paths, Launcher(site.nproc), threads, self.hooks)
        process = _FORK.Process(target=_be_site, args=given, name=f"site-{site.name}")
        process.start()
        self.running[site.name] = order, LocalProcess(process)

    def reap(self) -> None:
        """Pause sites that ended without a member; give up after the retries."""
        rounds, retries = self.coordinator.rounds, self.coordinator.config.federation.retries
        for name, (order, process) in list(self.running.items()):
            pending = rounds.pending(name)
            if process.spans_rounds and name in self.coordinator.names:
                order = pending or order
                if pending is None and process.is_alive():
                    continue
            is_published = rounds.has_member(name, order.round)
            is_unwanted = name not in self.coordinator.names or pending != order
            if process.is_alive():
                # a round that would be discarded is not finished
                if is_unwanted and not is_published and name not in self._stopped:
                    self._stopped.add(name)
                    process.stop(wait=False)
                continue
            del self.running[name]
            self._stopped.discard(name)
            if is_unwanted or is_published:
                continue
            count = self._failures[name, order.round] = self._failures.get((name, order.round), 0) + 1
            self._not_before[name] = time.monotonic() + min(_LONGEST_PAUSE_S, 2.0 ** (count - 1))
            about = {"site": name, "round": order.round, "code": process.code, "count": count}
            rounds.events.write("site failed", **about)
            if count > retries:
                rounds.give_up(name, f"{name} failed {count} times in round {order.round}")

    def _evaluate(self) -> None:
        """Evaluate the final model on the held-out data of every site that is not training."""
        coordinator, begin = self.coordinator, time.monotonic()
        number, limit = coordinator.rounds.number, coordinator.config.federation.deadline.amount
        tried: set[str] = set()
        while time.monotonic() - begin < limit:
            busy = False
            for site in coordinator.config.sites:
                is_training = coordinator.rounds.pending(site.name) is not None
                if is_training or coordinator.evaluation(site.name, number).is_file():
                    continue
                if site.name in self.running and self.running[site.name][1].is_alive():
                    busy = True
                elif site.name not in tried:
                    tried.add(site.name)
                    self.start(site, coordinator.evaluation_order(site.name, number))
                    busy = True
            if not busy:
                return
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Ask the sites to save and end; they continue inside their round at the next start."""
        for _, process in self.running.values():
            process.stop(wait=False)
        for _, process in self.running.values():
            process.stop()


def _be_site(
    order: Assignment, paths: SitePaths, launcher: Launcher, threads: int, hooks: tuple[Hook, ...]
) -> None:
    with (paths.work / _LOG).open("a", buffering=1) as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    import torch

    torch.set_num_threads(threads)
    try:
        perform(order, paths, launcher, hooks)
    except Interrupted as stop:
        os._exit(128 + stop.number)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        os._exit(2)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
