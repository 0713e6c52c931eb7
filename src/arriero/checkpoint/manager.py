"""Save the checkpoints of a run in the background, find the newest valid one, delete old ones."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from arriero.checkpoint.directory import (
    CHECKPOINTS,
    MANIFEST,
    UNFINISHED,
    File,
    Manifest,
    SavedCheckpoint,
    SavedStep,
    delete,
    directory_name,
    disk_space,
    expired_steps,
    find_checkpoints,
    find_damage,
    find_renamed,
    free_name,
    publish,
    remove,
    remove_unfinished,
    rename_aside,
    require_space,
)
from arriero.checkpoint.ranks import Failed, Ranks, explain
from arriero.checkpoint.save_plan import SavePlan
from arriero.checkpoint.state import METADATA, LocalPart, Staging, listed, write_parts
from arriero.errors import UserError
from arriero.files import sha256_of_file, sync
from arriero.units import counted

START_OVER_ADVICE = "--set checkpoint.start_over=true moves old checkpoints aside and starts at step 0"


@dataclass(frozen=True)
class SaveRequest:
    """What a checkpoint contains. `files` are small; `about` returns the manifest for the checksums."""

    step: int
    parts: Mapping[str, LocalPart]
    files: Mapping[str, bytes]
    about: Callable[[Mapping[str, File]], Manifest]


@dataclass(frozen=True)
class SaveReport:
    """The result of a save. `still_fit` is the number of further checkpoints that fit on the disk;
    `warnings` name old checkpoints that could not be deleted."""

    step: int
    blocked_s: float = 0.0
    written_s: float = 0.0
    size: int = 0
    still_fit: int | None = None
    removed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    error: str | None = None


class Checkpoints:
    """Manages the checkpoints of a run; every rank has one. `bytes_each` is the size of a checkpoint.

    Retention keeps the newest `keep`, and for ever the first after each `period` of tokens.
    """

    def __init__(
        self,
        run_dir: Path,
        ranks: Ranks,
        bytes_each: int,
        keep: int = 3,
        period: int | None = None,
        background: bool = True,
    ) -> None:
        self.folder = run_dir / CHECKPOINTS
        self.bytes_each = bytes_each
        self._run_dir, self._ranks = run_dir, ranks
        self._keep, self._period = keep, period
        self._staging, self._background = Staging(), background
        self._plan = SavePlan()
        self._thread: threading.Thread | None = None
        self._reports: deque[SaveReport] = deque()
        self._damaged: set[str] = set()

    def newest(self, start_over: bool = False) -> tuple[SavedCheckpoint | None, list[str]]:
        """Return the newest valid checkpoint, or None, and remarks on the others. Called by all ranks.

        If none of the checkpoints is valid, `start_over` moves them aside; without it this is an error.
        Damaged ones are renamed once a valid one is found; nothing published is deleted.
        """
        found, aside = self._ranks.on_leader(
            lambda: (find_checkpoints(self._run_dir), find_renamed(self._run_dir))
        )
        problems = {saved.directory.name: saved.problem for saved in found if saved.problem}
        damaged = [saved.directory for saved in found if saved.damaged]
        for saved in reversed(found):
            if saved.problem is None:
                if problem := verify_by_ranks(saved, self._ranks):
                    problems[saved.directory.name] = problem
                    damaged.append(saved.directory)
                    continue
                done = self._ranks.on_leader(lambda: self._rename_aside(damaged))
                remarks = [
                    f"checkpoint {name} {problem}: not used{done.get(name, '')}"
                    for name, problem in problems.items()
                ]
                return saved, remarks + self._ranks.on_leader(lambda: remove_unfinished(self._run_dir))
        problems |= {path.name: "was renamed aside earlier" for _, path in aside}
        if problems and start_over:
            return None, self.start_over()
        if problems:
            details = "; ".join(f"{name} {problem}" for name, problem in sorted(problems.items()))
            raise UserError(
                f"no checkpoint of {self._run_dir} can be loaded: {details}",
                f"restore one from a copy; or {START_OVER_ADVICE}",
            )
        return None, self._ranks.on_leader(lambda: remove_unfinished(self._run_dir))

    def _rename_aside(self, damaged: list[Path]) -> dict[str, str]:
        """Rename damaged checkpoints; return the outcomes. Retention ignores one that keeps its name."""
        outcomes = {}
        for path in damaged:
            try:
                outcomes[path.name] = f", renamed to {rename_aside(path).name}"
            except OSError as error:
                outcomes[path.name] = f", and it cannot be renamed ({error})"
                self._damaged.add(path.name)
        return outcomes

    def start_over(self) -> list[str]:
        """Rename the directory of checkpoints, so that the run starts at step 0. Called by all ranks."""

        def move() -> list[str]:
            if not os.path.lexists(self.folder):
                return []
            aside = free_name(self.folder.with_name(f"{CHECKPOINTS}.old"))
            try:
                self.folder.rename(aside)
            except OSError as error:
                raise UserError(f"{self.folder} cannot be renamed ({error})", "rename it yourself") from None
            return [f"{self.folder} was moved to {aside.name} (checkpoint.start_over)"]

        return self._ranks.on_leader(move)

    def save(self, request: SaveRequest) -> float:
        """Copy the tensors and write them in the background; return the seconds that training waited.

        Called by all ranks. Non-finite weights or state are not saved: all ranks raise the same UserError.
        """
        start = time.perf_counter()
        self.wait()
        staged = replace(request, parts=self._staging.copy(request.parts))
        self._check_finite(request.step)
        if not self._background:
            self._write(staged, start)
            return time.perf_counter() - start
        blocked = time.perf_counter() - start
        # a daemon thread does not keep a process alive; what it has half written is not a checkpoint
        self._thread = threading.Thread(
            target=self._write, args=(staged, start, blocked), name="checkpoint", daemon=True
        )
        self._thread.start()
        return blocked

    def _check_finite(self, step: int) -> None:
        found = self._staging.non_finite
        if not self._ranks.any(bool(found)):
            return
        names = sorted({name for part in self._ranks.on_all_ranks(lambda: found) for name in part})
        contain = "contains" if len(names) == 1 else "contain"
        problem = f"{counted(len(names), 'tensor')} {contain} non-finite values: {listed(names)}"
        self._reports.append(SaveReport(step, error=problem))
        raise UserError(
            f"step {step} was not saved: {problem}",
            "older checkpoints are kept, and the same command resumes from the newest; check the data and "
            "the learning rate of the steps since then",
        )

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def reports(self) -> list[SaveReport]:
        """Return the reports of saves that ended since the last call."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def _write(self, request: SaveRequest, start: float, blocked: float | None = None) -> None:
        report = SaveReport(request.step)
        try:
            report = self._write_whole(request)
        except (Exception, CheckpointException) as error:
            problem = str(error) if isinstance(error, Failed | UserError) else explain(error)
            report = replace(report, error=problem)
        seconds = time.perf_counter() - start
        waited = seconds if blocked is None else blocked
        self._reports.append(replace(report, blocked_s=waited, written_s=seconds))

    def _write_whole(self, request: SaveRequest) -> SaveReport:
        ranks = self._ranks
        making = ranks.on_leader(lambda: self._make_room(request.step))
        try:
            written = write_parts(making, request.parts, ranks, self._plan)
            parts = ranks.gather_to_leader(
                lambda: {name: _confirmed(making / name, sha) for name, sha in written.items()}
            )
            files = {name: file for part in parts for name, file in part.items()}
            return ranks.on_leader(lambda: self._finish(request, making, files))
        except (Exception, CheckpointException):
            if ranks.is_leader:
                remove(making)
            raise

    def _make_room(self, step: int) -> Path:
        require_space(self.folder, self.bytes_each)
        making = self.folder / (directory_name(step) + UNFINISHED)
        if os.path.lexists(making) and remove(making):
            making = free_name(self.folder / directory_name(step), UNFINISHED)
        making.mkdir(parents=True)
        return making

    def _finish(self, request: SaveRequest, making: Path, files: dict[str, File]) -> SaveReport:
        assert METADATA in files
        for name, content in request.files.items():
            (making / name).write_bytes(content)
            sync(making / name)
            files[name] = File(len(content), sha256_of_file(making / name))
        manifest = request.about(files)
        (making / MANIFEST).write_bytes(manifest.to_json())
        sync(making / MANIFEST)
        publish(making, self.folder / directory_name(request.step))
        self._damaged.discard(directory_name(request.step))
        report = SaveReport(request.step, size=manifest.size)
        try:
            removed, warnings = self._delete_old()
            fits = disk_space(self.folder, self.bytes_each).fits
        except (OSError, UserError) as error:
            # the new checkpoint is valid, whatever happens to older ones
            return replace(report, warnings=(f"old checkpoints were not deleted ({error})",))
        return replace(report, still_fit=fits, removed=tuple(removed), warnings=tuple(warnings))

    def _delete_old(self) -> tuple[list[str], list[str]]:
        """Delete the checkpoints that retention does not keep; return their names, and what failed."""
        found = find_checkpoints(self._run_dir, report_unreadable=True)
        valid = [s for s in found if s.manifest and not s.problem and s.directory.name not in self._damaged]
        marks = [SavedStep(s.step, s.manifest.tokens) for s in valid if s.manifest]
        removed, warnings = [], []
        for name in map(directory_name, expired_steps(marks, self._keep, self._period)):
            problem = delete(self.folder / name)
            if problem is None:
                removed.append(name)
            else:
                warnings.append(f"the old checkpoint {name} cannot be deleted ({problem})")
        return removed, warnings


def verify_by_ranks(saved: SavedCheckpoint, ranks: Ranks) -> str | None:
    """Return what is wrong with a checkpoint's files, or None. Called by all ranks: each reads some files."""
    manifest = saved.manifest
    assert manifest is not None
    # largest first, to balance the bytes that the ranks read
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    mine = by_size[ranks.rank :: ranks.size]
    found = ranks.on_all_ranks(lambda: find_damage(saved.directory, manifest, mine))
    problems = {name: problem for part in found for name, problem in part.items()}
    return "; ".join(f"{name} {problem}" for name, problem in sorted(problems.items())) or None


def _confirmed(path: Path, sha256: str) -> File:
    """Sync a file, read it back from the disk and compare its checksum."""
    sync(path, drop_cache=True)
    if sha256_of_file(path) != sha256:
        raise Failed(f"{path.name} does not read back as it was written: the disk is faulty")
    return File(path.stat().st_size, sha256)
