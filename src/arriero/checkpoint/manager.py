"""The checkpoints of a run: saved as one unit, found again, and let go."""

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from arriero.checkpoint.directory import (
    CHECKPOINTS,
    UNFINISHED,
    Saved,
    delete,
    name_of,
    publish,
    saved_in,
    tidy,
)
from arriero.checkpoint.manifest import (
    MANIFEST,
    File,
    Manifest,
    damaged_files,
    make_durable,
    sha256_of_file,
)
from arriero.checkpoint.pieces import METADATA, Piece, Staging, write_pieces
from arriero.checkpoint.ranks import Failed, Ranks, explain
from arriero.checkpoint.retention import Mark, to_delete
from arriero.checkpoint.space import refuse_no_room, room_at
from arriero.errors import UserError


@dataclass(frozen=True)
class Unit:
    """All that is saved together. `files` are small; `about` makes the manifest around all checksums."""

    step: int
    pieces: Mapping[str, Piece]
    files: Mapping[str, bytes]
    about: Callable[[Mapping[str, File]], Manifest]


@dataclass(frozen=True)
class Report:
    """What became of a save. `still_fit` is how many more the disk holds."""

    step: int
    blocked_s: float
    written_s: float
    size: int = 0
    still_fit: int | None = None
    removed: tuple[str, ...] = ()
    error: str | None = None


class Checkpoints:
    """One on each rank. `bytes_each` is what a save of all ranks needs; `period`, in tokens, sets apart those
    kept for ever."""

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
        self._thread: threading.Thread | None = None
        self._reports: deque[Report] = deque()
        self._damaged: set[str] = set()

    def newest(self) -> tuple[Saved | None, list[str]]:
        """The newest sound one, and what to tell of the others. All ranks read a share of the files."""
        told = self._ranks.by_leader(lambda: tidy(self._run_dir))
        for saved in self._ranks.by_leader(lambda: saved_in(self._run_dir)[::-1]):
            if problem := saved.problem or self._damage(saved):
                told.append(f"{saved.directory.name} {problem}: not used")
                if saved.manifest is not None:
                    self._damaged.add(saved.directory.name)
                continue
            return saved, told
        return None, told

    def _damage(self, saved: Saved) -> str | None:
        manifest = saved.manifest
        assert manifest is not None
        mine = sorted(manifest.files)[self._ranks.rank :: self._ranks.size]
        found = self._ranks.together(lambda: damaged_files(saved.directory, manifest, mine))
        problems = {name: problem for part in found for name, problem in part.items()}
        return "; ".join(f"{name} {problem}" for name, problem in sorted(problems.items())) or None

    def save(self, unit: Unit) -> float:
        """Returns the seconds training had to wait. Failures are told by `reports`."""
        start = time.perf_counter()
        self.wait()
        staged = Unit(unit.step, self._staging.copy(unit.pieces), unit.files, unit.about)
        if not self._background:
            self._write(staged, start)
            return time.perf_counter() - start
        blocked = time.perf_counter() - start
        # a daemon: when the process must end at once, it ends; what is half written is not a checkpoint
        self._thread = threading.Thread(
            target=self._write, args=(staged, start, blocked), name="checkpoint", daemon=True
        )
        self._thread.start()
        return blocked

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def reports(self) -> list[Report]:
        """Of the saves that have ended since last asked; the writing thread may add one meanwhile."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def _write(self, unit: Unit, start: float, blocked: float | None = None) -> None:
        making = self.folder / (name_of(unit.step) + UNFINISHED)
        size, fits, removed, problem = 0, None, [], None
        try:
            size, fits, removed = self._write_whole(unit, making)
        except (Exception, CheckpointException) as error:
            problem = str(error) if isinstance(error, Failed | UserError) else explain(error)
            if self._ranks.leads:
                shutil.rmtree(making, ignore_errors=True)
        seconds = time.perf_counter() - start
        waited = seconds if blocked is None else blocked
        self._reports.append(Report(unit.step, waited, seconds, size, fits, tuple(removed), problem))

    def _write_whole(self, unit: Unit, making: Path) -> tuple[int, int, list[str]]:
        ranks = self._ranks
        ranks.by_leader(lambda: self._make_room(making))
        written = write_pieces(making, unit.pieces, ranks)
        parts = ranks.together(
            lambda: {name: _confirmed(making / name, sha) for name, sha in written.items()}
        )
        files = {name: file for part in parts for name, file in part.items()}
        return ranks.by_leader(lambda: self._finish(unit, making, files))

    def _make_room(self, making: Path) -> None:
        refuse_no_room(self.folder, self.bytes_each)
        if making.exists():
            shutil.rmtree(making)
        making.mkdir(parents=True)

    def _finish(self, unit: Unit, making: Path, files: dict[str, File]) -> tuple[int, int, list[str]]:
        assert METADATA in files
        for name, content in unit.files.items():
            (making / name).write_bytes(content)
            make_durable(making / name)
            files[name] = File(len(content), sha256_of_file(making / name))
        manifest = unit.about(files)
        (making / MANIFEST).write_bytes(manifest.to_json())
        make_durable(making / MANIFEST)
        publish(making, self.folder / name_of(unit.step))
        self._damaged.discard(name_of(unit.step))
        removed = self._let_go()
        return manifest.size, room_at(self.folder, self.bytes_each).fits, removed

    def _let_go(self) -> list[str]:
        """Called when a new one is in place, read back and sound."""
        found = saved_in(self._run_dir)
        sound = [s for s in found if s.manifest and not s.problem and s.directory.name not in self._damaged]
        marks = [Mark(s.step, s.manifest.tokens) for s in sound if s.manifest]
        gone = [name_of(step) for step in to_delete(marks, self._keep, self._period)]
        older = {s.directory.name for s in found if s.step < sound[-1].step}
        gone += sorted(self._damaged & older)
        for name in gone:
            delete(self.folder / name)
            self._damaged.discard(name)
        return gone


def _confirmed(path: Path, sha256: str) -> File:
    """On the disk, and read back from there."""
    make_durable(path, drop=True)
    if sha256_of_file(path) != sha256:
        raise Failed(f"{path.name} does not read back as it was written: the disk is not to be trusted")
    return File(path.stat().st_size, sha256)
