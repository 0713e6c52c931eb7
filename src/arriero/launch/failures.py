"""Why a step of a job failed, which node is to blame, and which nodes are left out."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arriero.events import EVENTS, HEARTBEAT, events_since
from arriero.launch.allocation import StepResult
from arriero.parallel.spawn import last_lines
from arriero.train.rank_process import LOGS, rank_log_path

USER_ERROR = 2
# a node is left out after so many failures of its ranks
_FAILURES_OF_A_BAD_NODE = 2
# the ranks' own watchdog acts first and needs time to write its report
_PATIENCE = 2.0
_MARGIN_S = 60.0


@dataclass(frozen=True)
class Failure:
    """Why a step failed, and on which node if that is known.

    `is_of_node`: the rank itself says that its node is the cause. `is_dead`: Slurm says so.
    """

    reason: str
    node: str | None = None
    can_restart: bool = True
    is_of_node: bool = False
    is_dead: bool = False
    log: Sequence[str] = ()


@dataclass
class Nodes:
    """The nodes of an allocation, of which a run needs `wanted`; `bad` maps those left out to the reason."""

    all: Sequence[str]
    wanted: int
    bad: dict[str, str] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def usable(self) -> list[str]:
        return [node for node in self.all if node not in self.bad]

    def charge(self, failure: Failure) -> str | None:
        """Count a failure; return the node if it is left out from now on.

        That is so if the node is dead, or at its second failure; at the first if it is surely the node's and
        a spare can take its place.
        """
        node = failure.node
        if node is None or node in self.bad:
            return None
        self.failures[node] += 1
        times, has_spare = self.failures[node], len(self.usable) > self.wanted
        if failure.is_dead or times >= _FAILURES_OF_A_BAD_NODE or (failure.is_of_node and has_spare):
            self.bad[node] = failure.reason + (f" ({times} failures)" if times > 1 else "")
            return node
        return None


class Failures:
    """Reads what the ranks of a run have written about their end."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._nodes_with: dict[str, set[str]] = {}

    def clear(self) -> None:
        """Delete the records of an earlier step."""
        for path in (self._run_dir / LOGS).glob("failed-*.json"):
            path.unlink(missing_ok=True)

    def of(self, result: StepResult, begin: float) -> Failure:
        """Find out which rank or node failed first in the step that started at `begin`."""
        events = [e for e in events_since(self._run_dir / EVENTS, "") if e.get("time", 0) >= begin]
        if any(event["event"] == "start" for event in events):
            self._nodes_with.clear()
        if hang := [event for event in events if event["event"] == "hang"]:
            missing = hang[-1].get("nodes") or []
            return Failure(hang[-1].get("message", "a rank hangs"), missing[0] if len(missing) == 1 else None)
        if result.dead_node is not None:
            return Failure(f"node {result.dead_node} failed", result.dead_node, is_dead=True)
        if result.killed_task is not None:
            rank, node, how = result.killed_task
            return Failure(f"rank {rank} on {node}: {how}", node, log=self._log_of(rank))
        if records := sorted(self._records(), key=lambda record: record["time"]):
            return self._reported(records)
        can_restart, tail = result.code != USER_ERROR, result.output[-3:]
        return Failure(f"the step ended with code {result.code}", can_restart=can_restart, log=tail)

    def _reported(self, records: Sequence[dict[str, Any]]) -> Failure:
        """Return the first failure that a rank reported. What two nodes report is not the fault of one."""
        first = records[0]
        reason = f"rank {first['rank']} on {first['node']}: {first['error']}: {first['message']}"
        blamed, log = first.get("blamed", first["node"]), self._log_of(first["rank"])
        is_of_node = first.get("is_of_node", False) and blamed is not None
        if is_of_node and "blamed" not in first:
            same = [each["node"] for each in records if each.get("todo") == first["todo"]]
            nodes = self._nodes_with.setdefault(first["todo"], set())
            nodes.update(same)
            if len(nodes) > 1:
                return Failure(f"{reason} (the same on {', '.join(sorted(nodes))})", None, False, log=log)
        return Failure(reason, blamed, first["can_restart"], is_of_node, log=log)

    def _records(self) -> list[dict[str, Any]]:
        found = []
        for path in (self._run_dir / LOGS).glob("failed-*.json"):
            # a full disk leaves half a file
            with suppress(OSError, ValueError):
                found.append(json.loads(path.read_bytes()))
        return found

    def _log_of(self, rank: int) -> list[str]:
        return last_lines(rank_log_path(self._run_dir, rank))


class Heartbeat:
    """Follows RUN/heartbeat.json of rank 0, whose own watchdog cannot act if its process is stopped."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._began = run_dir / HEARTBEAT, time.time()
        self._acted = False

    def silence(self) -> float | None:
        """Return the seconds since the last heartbeat if they are too many, once."""
        try:
            beat = json.loads(self._path.read_bytes())
            last, limit = float(beat["time"]), float(beat["limit_s"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        silence = time.time() - max(last, self._began)
        if self._acted or last < self._began or limit <= 0 or silence < _PATIENCE * limit + _MARGIN_S:
            return None
        self._acted = True
        return silence
