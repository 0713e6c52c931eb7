"""Inject faults into runs and jobs, and write what came of them into docs/reliability.md.

python tests/reliability.py --write docs/reliability.md                      about an hour on two cores
python tests/reliability.py --only launches --write docs/reliability.md      one section
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))

from arriero.bench.result import replace_section
from checkpoint.kills import Tally, kill_many_ranks, kill_one_process

SEEDS = 30
LAUNCHES, NODES = 30, 4


def tally_table(tally: Tally) -> tuple[str, bool]:
    rows = [f"| {what} | {count} |" for what, count in sorted(tally.counts.items())]
    failed = "\n".join(f"- {failure}" for failure in tally.failures) or "None failed."
    return "\n".join(["| fault | count |", "|---|---|", *rows, "", failed]), not tally.failures


def one_process(asked: argparse.Namespace) -> tuple[str, bool]:
    with tempfile.TemporaryDirectory(prefix="arriero-kills-") as name:
        return tally_table(kill_one_process(Path(name), asked.seeds))


def many_ranks(asked: argparse.Namespace) -> tuple[str, bool]:
    with tempfile.TemporaryDirectory(prefix="arriero-kills-") as name:
        return tally_table(kill_many_ranks(Path(name), max(1, asked.seeds // 5)))


def slurm(asked: argparse.Namespace) -> tuple[str, bool]:
    """Run the cases of launch/faults.py, or read cases that it has stored."""
    from launch.faults import CASES, run_cases

    found = [asdict(case) for case in run_cases()] if not asked.cases else []
    stored = {case["fault"]: case for path in asked.cases for case in json.loads(path.read_text())}
    found += [stored[fault] for fault in CASES if fault in stored]
    rows = ["| fault | outcome | seconds |", "|---|---|---|"]
    for case in found:
        outcome = case["outcome"] if case["holds"] else f"**failed**: {case['outcome'].splitlines()[0]}"
        rows.append(f"| {case['fault']} | {outcome} | {case['seconds']:.0f} |")
    failed = [case for case in found if not case["holds"]]
    rows += ["", f"{len(found) - len(failed)} of {len(found)} hold."]
    return "\n".join(rows), not failed


def launches(asked: argparse.Namespace) -> tuple[str, bool]:
    from launch.launches import launch_often
    from slurm import slurm_cluster

    with (
        tempfile.TemporaryDirectory(prefix="launch-") as name,
        slurm_cluster(Path(name, "s"), nodes=NODES, gpus=0) as cluster,
    ):
        results = launch_often(cluster, Path(name), asked.launches, NODES)
    seconds = [each["seconds"] for each in results]
    started = sum(each["started"] for each in results)
    spread = f"{min(seconds):.0f} | {median(seconds):.0f} | {max(seconds):.0f}"
    rows = ["| nodes | launches | started | least, s | median, s | most, s |", "|---|---|---|---|---|---|"]
    rows.append(f"| {NODES} | {len(results)} | {started} | {spread} |")
    rows += ["", *(f"- {each['state']}: {each['log']}" for each in results if not each["started"])]
    return "\n".join(rows).rstrip(), started == len(results)


SECTIONS: dict[str, Callable[[argparse.Namespace], tuple[str, bool]]] = {
    "one-process": one_process,
    "many-ranks": many_ranks,
    "slurm": slurm,
    "launches": launches,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(SECTIONS), action="append", help="a section; repeatable")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--launches", type=int, default=LAUNCHES)
    parser.add_argument(
        "--cases", type=Path, nargs="+", default=[], help="stored results of launch/faults.py"
    )
    parser.add_argument("--write", type=Path, help="the page whose sections are replaced")
    asked = parser.parse_args()
    all_hold = True
    for name in asked.only or SECTIONS:
        start, load = time.monotonic(), os.getloadavg()[0]
        text, holds = SECTIONS[name](asked)
        took = (time.monotonic() - start) / 60
        text += f"\n\n{took:.0f} minutes, load {load:.0f}.\n" if not asked.cases else "\n"
        all_hold = all_hold and holds
        sys.stdout.write(f"{name}\n\n{text}\n")
        if asked.write:
            asked.write.write_text(replace_section(asked.write.read_text(), name, text, str(asked.write)))
    sys.exit(not all_hold)


if __name__ == "__main__":
    main()
