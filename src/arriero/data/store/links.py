"""Giving a file a second name instead of a second copy."""

import errno
import os
import shutil
from pathlib import Path
from typing import Literal

from arriero.errors import UserError

Link = Literal["auto", "hard", "symbolic", "copy"]
How = Literal["hard link", "symbolic link", "copy"]

# Another filesystem, a filesystem without hard links, or a kernel that protects files of other users.
_NO_HARD_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}


def place(source: Path, target: Path, link: Link) -> How:
    """`auto` is a hard link, or a symbolic link where a hard one is impossible."""
    source = source.resolve()
    if link == "copy":
        shutil.copyfile(source, target)
        return "copy"
    if link != "symbolic":
        try:
            os.link(source, target)
            return "hard link"
        except OSError as error:
            if error.errno not in _NO_HARD_LINK:
                raise
            if link == "hard":
                raise UserError(
                    f"{source} cannot be hard-linked ({error.strerror})", "use --link symbolic or --link copy"
                ) from None
    target.symlink_to(source)
    return "symbolic link"
