"""Whether the disk holds what a run is going to save."""

from dataclasses import dataclass
from pathlib import Path

from arriero.files import check_free_space, free_bytes
from arriero.units import counted, human_bytes


@dataclass(frozen=True)
class Room:
    """`each` is the size of a checkpoint in bytes."""

    free: int
    each: int

    @property
    def fits(self) -> int:
        return self.free // max(1, self.each)

    def __str__(self) -> str:
        which = f"{counted(self.fits, 'checkpoint')} of {human_bytes(self.each)}"
        return f"{which} still fit{'s' if self.fits == 1 else ''} ({human_bytes(self.free)} free)"


def room_at(path: Path, each: int) -> Room:
    return Room(free_bytes(path), each)


def refuse_no_room(path: Path, each: int) -> Room:
    check_free_space(path, each, "a checkpoint", "make room, or set run.dir to a larger disk")
    return room_at(path, each)
