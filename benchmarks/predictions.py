"""Write what `arriero plan` predicts into the tables of examples/ and recipes/.

A row whose last column is a plan command gets the prediction in the column before it.

usage: python -m benchmarks.predictions [PAGE...]
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "examples").glob("*.md"), *(ROOT / "recipes").glob("*/*.md")])
ROW = re.compile(r"^(?P<before>\|.*\|)(?P<cell>[^|]*)\| `arriero (?P<command>plan [^`]+)` \|$", re.MULTILINE)


def cell(facts: Mapping[str, Any]) -> str:
    """Return the best candidate of `arriero plan --json` as the text of a cell."""
    best = facts["candidates"][0]
    speed, memory = best["tokens_per_s_per_device"], best["memory_bytes"] / 2**30
    return f"{speed:,.0f} tok/s, {memory:.1f} GiB ({best['text']})"


def numbers(text: str) -> list[float]:
    """Return tokens per second and GiB of a cell."""
    found = re.search(r"([\d,]+) tok/s, ([\d.]+) GiB", text)
    return [float(each.replace(",", "")) for each in found.groups()] if found else []


def _filled(row: re.Match[str]) -> str:
    command = [sys.executable, "-m", "arriero", *shlex.split(row["command"]), "--json"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return f"{row['before']} {cell(json.loads(printed))} | `arriero {row['command']}` |"


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:] or PAGES):
        page.write_text(ROW.sub(_filled, page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"written: {page}")
