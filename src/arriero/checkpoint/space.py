"""Whether the disk holds what a run is going to save."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from arriero.errors import UserError
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
    """Of the nearest directory that exists already."""
    while not path.exists():
        path = path.parent
    return Room(shutil.disk_usage(path).free, each)


def refuse_no_room(path: Path, each: int) -> Room:
    room = room_at(path, each)
    if room.fits < 1:
        raise UserError(
            f"a checkpoint needs {human_bytes(each)}, and {path} has {human_bytes(room.free)} free",
            "make room, or set run.dir to a larger disk",
        )
    return room
