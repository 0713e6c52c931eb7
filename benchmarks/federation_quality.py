"""Held-out loss of federated training against one run with all data and against a site alone.

`python -m benchmarks.federation_quality --write docs/federation.md` trains on disjoint parts of the embedded
corpus, with as many tokens each time, and writes the table and docs/img/federation.svg. All methods start
from one model that was pre-trained on the data of all sites (`--pretrain`), as in DiLoCo. Methods can be
measured by processes of their own (`--methods`, `--save`) and put together later (`--results`).
"""

import argparse
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path

from arriero.config.load import load_run
from arriero.federate.coordinator import Coordinator
from arriero.federate.demo import Demo, make_demo, train_centralised
from arriero.federate.driver import Driver
from arriero.federate.site import SitePaths, evaluate_global
from arriero.model.presets import expand

SETS = (
    "model.dim=64",
    "model.layers=2",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn=172",
    "model.head_dim=16",
    "optim.lr=4e-3",
    "precision.compile=false",
)
BEGIN, END = "<!-- quality -->", "<!-- quality end -->"
METHODS = {
    "DiLoCo, bf16": {"optimizer": "nesterov", "codec": "bf16"},
    "DiLoCo, int8": {"optimizer": "nesterov", "codec": "int8"},
    "FedAvg, bf16": {"optimizer": "fedavg", "codec": "bf16"},
}
ORDER = ("pre-trained", "centralised", "one site alone", *METHODS)
COLOURS = ("#1b6ca8", "#d1495b", "#2e7d32", "#8e6c8a", "#e09f3e", "#555555")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("federation-quality"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=50, help="inner steps per round (H)")
    parser.add_argument("--batch", type=int, default=4096, help="tokens per step and site")
    parser.add_argument("--pretrain", type=int, default=300, help="steps on all data before; 0 for none")
    parser.add_argument("--sites", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--momentum", type=float, help="of the outer optimizer; by default from the rounds")
    parser.add_argument("--methods", nargs="+", default=list(ORDER))
    parser.add_argument("--save", type=Path, help="write the measurements as JSON")
    parser.add_argument("--results", type=Path, nargs="+", help="read measurements instead of measuring")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    if given.results:
        results = [row for path in given.results for row in json.loads(path.read_text())]
    else:
        results = [row for count in given.sites for row in measure(given, count)]
    results.sort(key=lambda row: (row["sites"], ORDER.index(row["method"])))
    text = table(results, given)
    print(text)
    if given.save:
        given.save.write_text(json.dumps(results, indent=1))
    if given.write:
        page = given.write.read_text()
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        given.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
        (given.write.parent / "img" / "federation.svg").write_text(plot(results))


def measure(given: argparse.Namespace, count: int) -> list[dict]:
    """Return one row per method for a number of sites."""
    folder, rows = given.work / f"{count}-sites", []
    common = {
        "sites": count,
        "rounds": given.rounds,
        "steps": given.steps,
        "sets": SETS,
        "batch": given.batch,
    }
    demo = make_demo(folder / "all", **common)
    first = pretrain(demo, folder, given) if given.pretrain else None
    demo = starting_from(demo, first)
    for name in given.methods:
        started = time.monotonic()
        if name == "pre-trained":
            if first is not None:
                rows.append(row(count, name, evaluate_run(demo, first, folder), started))
        elif name == "centralised":
            train_centralised(demo, folder)
            rows.append(row(count, name, evaluate_run(demo, folder / "centralised", folder), started))
        elif name == "one site alone":
            alone = alone_run(demo, folder, given, count)
            rows.append(row(count, name, evaluate_run(demo, alone, folder), started))
        else:
            rows.append(federate(given, count, name, folder, common, first))
    return rows


def pretrain(demo: Demo, folder: Path, given: argparse.Namespace) -> Path:
    """Train a model on the data of all sites with a constant learning rate; return its run directory."""
    sets = [*demo.sets, "run.name=pre-trained", f"train.horizon='{given.pretrain} steps'", "run.seed=2"]
    train_centralised(replace(demo, sets=(*sets, "schedule.kind=constant")), folder)
    return folder / "pre-trained"


def starting_from(demo: Demo, first: Path | None) -> Demo:
    """Return the demo with this model as the start of every method."""
    if first is None:
        return demo
    section = demo.config.federation.model_copy(update={"model": str(first.absolute())})
    config = demo.config.model_copy(update={"federation": section})
    return replace(demo, config=config, sets=(*demo.sets, f"checkpoint.start_from='{first.absolute()}'"))


def federate(
    given: argparse.Namespace, count: int, name: str, folder: Path, common: dict, first: Path | None
) -> dict:
    started, outer = time.monotonic(), METHODS[name]
    if outer["optimizer"] == "nesterov" and given.momentum is not None:
        outer = outer | {"momentum": given.momentum}
    place = folder / name.replace(", ", "-").lower()
    coordinator = Coordinator(None, starting_from(make_demo(place, outer=outer, **common), first).config)
    coordinator.prepare()
    Driver(coordinator).run(lambda made: print(f"{count} sites, {name}: round {made.round}", flush=True))
    done = row(count, name, coordinator.final_losses(), started)
    return done | {"curve": curve(coordinator), "bytes": shipped(coordinator)}


def row(count: int, name: str, losses: dict[str, float], started: float) -> dict:
    mean = sum(losses.values()) / len(losses)
    return {
        "sites": count,
        "method": name,
        "loss": mean,
        "losses": losses,
        "seconds": time.monotonic() - started,
    }


def alone_run(demo, folder: Path, given: argparse.Namespace, count: int) -> Path:
    """Train the first site alone with the tokens of all sites."""
    from arriero.train.run import run

    sets = [*demo.sets, f"run.dir='{folder}'", "run.name=alone", f"train.batch='{given.batch * count} tok'"]
    return run(load_run(Path(demo.config.sites[0].run_file), sets, expand).config).run_dir


def evaluate_run(demo, run_dir: Path, folder: Path) -> dict[str, float]:
    """Evaluate the last checkpoint of a run on the held-out data of every site, as `fed run` does."""
    from arriero.checkpoint.convert import open_model
    from arriero.checkpoint.directory import resolve_checkpoint
    from arriero.federate.members import publish_first_model

    coordinator = Coordinator(None, demo.config)
    coordinator.prepare()
    model = folder / f"model-of-{run_dir.name}"
    if not model.is_dir():
        publish_first_model(open_model(resolve_checkpoint(run_dir)), model, coordinator.optimizer)
    losses = {}
    for site in demo.config.sites:
        work = folder / "evaluate" / f"{run_dir.name}-{site.name}"
        work.mkdir(parents=True, exist_ok=True)
        losses[site.name] = evaluate_global(SitePaths(model, coordinator.run_file(site.name), work, work))
    return losses


def curve(coordinator: Coordinator) -> list[float]:
    """Return the held-out loss of the global model before each round, and of the last one."""
    points = []
    for number in range(coordinator.rounds.number):
        losses = [member.manifest.eval_before for member in coordinator.rounds.members(number).values()]
        points.append(sum(losses) / len(losses))
    final = coordinator.final_losses()
    return [*points, sum(final.values()) / len(final)]


def shipped(coordinator: Coordinator) -> int:
    members = [m for n in range(coordinator.rounds.number) for m in coordinator.rounds.members(n).values()]
    return sum(member.manifest.bytes for member in members)


def table(results: list[dict], given: argparse.Namespace) -> str:
    tokens = given.rounds * given.steps * given.batch
    start = f", after {given.pretrain} steps of pre-training on all data" if given.pretrain else ""
    lines = [
        f"{given.rounds} rounds of H = {given.steps} steps, {given.batch} tokens per step and site{start} "
        f"({tokens:,} tokens per site; the other runs train as many in all). Losses are means over the "
        "held-out data of all sites.",
        "",
        "| sites | method | held-out loss | against centralised | shipped by all sites |",
        "|---|---|---|---|---|",
    ]
    central = {each["sites"]: each["loss"] for each in results if each["method"] == "centralised"}
    for each in results:
        is_reference = each["method"] in ORDER[:2] or each["sites"] not in central
        against = "" if is_reference else f"{each['loss'] / central[each['sites']] - 1:+.1%}"
        size = f"{each['bytes'] / 1e6:.0f} MB" if "bytes" in each else ""
        lines.append(f"| {each['sites']} | {each['method']} | {each['loss']:.4f} | {against} | {size} |")
    return "\n".join(lines)


def plot(results: list[dict]) -> str:
    """Draw how far the global models are above the centralised run, over the rounds."""
    central = {each["sites"]: each["loss"] for each in results if each["method"] == "centralised"}
    curves = [
        (
            f"{each['sites']} sites, {each['method']}",
            [loss / central[each["sites"]] - 1 for loss in each["curve"]],
        )
        for each in results
        if "curve" in each and each["sites"] in central
    ]
    width, height, left, top, right, bottom = 640, 360, 45, 30, 180, 45
    high = max(max(points) for _, points in curves)
    rounds = max(len(points) for _, points in curves) - 1

    def place(number: float, above: float) -> tuple[float, float]:
        x = left + number / rounds * (width - left - right)
        return round(x, 1), round(top + (1 - above / high) * (height - top - bottom), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="16" font-size="12">held-out loss above the centralised run</text>',
    ]
    for percent in range(0, int(high * 100) + 1, 2):
        y = place(0, percent / 100)[1]
        parts += [f'<line x1="{left}" x2="{width - right}" y1="{y}" y2="{y}" stroke="#ddd"/>']
        parts += [f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{percent} %</text>']
    for number in range(rounds + 1):
        x, y = place(number, 0)
        parts += [f'<text x="{x}" y="{y + 16}" text-anchor="middle">{number}</text>']
    parts += [f'<text x="{place(rounds / 2, 0)[0]}" y="{height - 8}" text-anchor="middle">rounds</text>']
    for i, (name, points) in enumerate(curves):
        colour, x, y = COLOURS[i % len(COLOURS)], width - right + 15, top + 16 * i + 10
        line = " ".join(f"{x},{y}" for x, y in itertools.starmap(place, enumerate(points)))
        parts += [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>']
        parts += [f'<text x="{x}" y="{y}" fill="{colour}">{name}, {points[-1]:+.1%}</text>']
    return "\n".join([*parts, "</svg>"])


if __name__ == "__main__":
    main()
