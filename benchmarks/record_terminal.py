"""Record a command in a terminal and write what it shows as an SVG picture.

python benchmarks/record_terminal.py docs/img/train.svg -- arriero train
"""

import argparse
import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

_TOKEN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+")


def recorded(command: list[str], width: int) -> str:
    """Run the command in a pseudo-terminal in an empty folder and return everything it wrote."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(width)}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command, stdin=follower, stdout=follower, stderr=follower, cwd=folder, env=environment
        )
        os.close(follower)
        written = bytearray()
        try:
            while part := os.read(leader, 1 << 16):
                written += part
        except OSError:
            pass  # Linux reports EIO when the last writer has closed the terminal
    if process.wait():
        sys.exit(f"{shlex.join(command)} failed:\n{written.decode(errors='replace')}")
    return written.decode()


def final_screen(written: str) -> list[str]:
    """Apply cursor movements and erasures; colours stay in the lines as escape codes."""
    lines, row, fresh = [""], 0, False
    for token in _TOKEN.findall(written):
        if token == "\n":
            row, fresh = row + 1, False
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            fresh = True
        elif token.endswith("A") and token.startswith("\x1b"):
            row = max(0, row - int(token[2:-1] or 1))
        elif token.endswith("K") and token.startswith("\x1b"):
            lines[row] = ""
        elif token.startswith("\x1b") and not token.endswith("m"):
            continue
        else:
            lines[row] = token if fresh else lines[row] + token
            fresh = False
    return lines


def without_middle(lines: list[str], height: int) -> list[str]:
    """Keep the first and last lines where there are more than fit in the picture."""
    if len(lines) <= height:
        return lines
    head = height * 2 // 3
    return [*lines[:head], "\x1b[2m...\x1b[0m", *lines[len(lines) - (height - head - 1) :]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("command", nargs="+")
    parser.add_argument("--width", type=int, default=112)
    parser.add_argument("--height", type=int, default=46)
    arguments = parser.parse_args()
    shown = final_screen(recorded(arguments.command, arguments.width))
    while shown and not shown[-1].strip():
        shown.pop()
    console = Console(record=True, width=arguments.width, file=io.StringIO(), force_terminal=True)
    console.print(f"[bold]$[/] {shlex.join(arguments.command)}", highlight=False)
    for line in without_middle(shown, arguments.height):
        console.print(Text.from_ansi(line), no_wrap=True, crop=True)
    title = shlex.join(arguments.command)
    picture = console.export_svg(title=title, theme=MONOKAI)
    # without the fonts that rich would load from a network
    arguments.picture.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    main()
