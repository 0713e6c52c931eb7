"""Compare the planner with published and measured results; write docs/planner-accuracy.md.

usage: python -m benchmarks.planner [docs/planner-accuracy.md]
"""

import statistics
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arriero.config.load import load_run
from arriero.config.schema import RunConfig
from arriero.model.presets import expand
from arriero.plan.hardware import Cluster, load_cluster, read_cluster
from arriero.plan.measured import Measured, read_measured
from arriero.plan.memory import USABLE
from arriero.plan.rates import Rates
from arriero.plan.resolve import resolve
from arriero.plan.timing import StepTime, step_time

_TESTS = Path(__file__).parents[1] / "tests" / "plan"
_SECTIONS = ("model", "data", "train", "optim", "parallel", "precision", "memory")
_SHOWN_DEGREES = ("dp_replicate", "cp", "tp", "pp", "schedule")
_ENOUGH = 2**50
# bytes per logit beside Arriero's, which are overwritten by their gradient: a gradient in fp32; logits,
# log-probabilities and gradient in fp32; torch's loss_parallel also has their exponentials
_COPIES = {"fused": 0, "compiled": 4, "eager": 12}
_LOSS_PARALLEL = 16


@dataclass(frozen=True)
class Row:
    """A result to compare with: the run, where it ran, and what was reported.

    `seconds` are those of a step; `peak` is memory in GiB, and `peak_remark` says why its prediction has no
    bound. `kernel` is the attention kernel.
    """

    name: str
    source: str
    config: RunConfig
    cluster: Cluster
    devices: int
    seconds: float
    peak: float | None = None
    peak_remark: str = ""
    kernel: Any = "best"
    early_stop: bool = True
    fused_sums: bool = False
    loss: str = "fused"
    fitted: bool = False
    assumed: str = ""
    attended: float | None = None

    def predict(self, measured: Measured | None = None) -> tuple[StepTime, float]:
        """Return the predicted time of a step, and the predicted peak memory in GiB."""
        machine = replace(self.cluster.machine, memory_free=_ENOUGH)
        resolved = resolve(self.config, machine, self.devices)
        work = replace(resolved.work(), fused_kernels=self.loss != "eager", attended=self.attended)
        work = replace(work, early_stop=self.early_stop, fused_sums=self.fused_sums)
        time = step_time(work, Rates(self.cluster, measured, kernel=self.kernel))
        copies = _LOSS_PARALLEL if self.loss == "eager" and resolved.layout.tp > 1 else _COPIES[self.loss]
        estimate, reported = resolved.estimates[0], 1.0
        if copies:
            # torchtitan computes all logits at once and reports reserved memory, which includes fragments
            estimate = replace(estimate, copies=copies, choices=replace(estimate.choices, chunk=False))
            reported = 1 / USABLE
        return time, reported * estimate.bytes(resolved.micro_batch) / 2**30


@dataclass(frozen=True)
class Compared:
    """A row beside its prediction; `error` is that of tokens per second, `memory_error` that of memory."""

    row: Row
    predicted: float
    published: float
    error: float
    memory_error: float | None


def compare(rows: Sequence[Row], measured: Measured | None = None) -> list[Compared]:
    """Predict all rows."""
    found = []
    for row in rows:
        time, memory = row.predict(measured)
        published = time.tokens / row.seconds / row.devices
        error = time.tokens_per_s / published - 1
        memory_error = memory / row.peak - 1 if row.peak else None
        found.append(Compared(row, time.tokens_per_s, published, error, memory_error))
    return found


def published(folder: Path = _TESTS / "published") -> list[Row]:
    """Return the rows of the published files."""
    rows = []
    for path in sorted(folder.glob("*.toml")):
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        clusters = {
            name: read_cluster(table, path.with_name(f"{name}.toml"))
            for name, table in document.get("clusters", {}).items()
        }
        rows += [
            _row(_merged(document.get("defaults", {}), given), document["source"], clusters)
            for given in _rows(document)
        ]
    return rows


def measured_rows(path: Path = _TESTS / "measured" / "h200.toml") -> list[Row]:
    """Return steps that were measured with Arriero on one GPU."""
    document, cluster = tomllib.loads(path.read_text(encoding="utf-8")), load_cluster(path.stem)
    return [
        Row(
            name=given["name"],
            source=document["source"],
            config=load_run(None, given["set"], expand).config,
            cluster=cluster,
            devices=1,
            seconds=given["ms"] / 1000,
            peak=given["gib"],
            attended=given.get("attended"),
        )
        for given in document["rows"]
    ]


def measured_ops(path: Path = _TESTS / "measured" / "h200-ops.json") -> Measured:
    """Return the times of operations that `bench ops` measured on the same kind of GPU."""
    return read_measured([path])


def _rows(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, those of a compact table included."""
    yield from document.get("rows", [])
    compact = document.get("compact", {})
    for values in compact.get("rows", []):
        row = dict(zip(compact["columns"], values, strict=True))
        yield {
            **{key: row[key] for key in ("cluster", "devices", "accumulation", "tokens_per_s")},
            "label": f"mpt-{row['model']}",
            "model": {**document["models"][row["model"]], "max_seq_len": row["seq_len"]},
            "data": {"seq_len": row["seq_len"]},
            "train": {"micro_batch": row["micro_batch"]},
            "memory": {"activation_checkpointing": row["recompute"]},
            "fitted": [row["model"], row["cluster"], row["seq_len"]] in compact.get("fitted", []),
        }


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in own.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = {**merged[key], **value} if both else value
    return merged


def _row(row: Mapping[str, Any], source: str, clusters: Mapping[str, Cluster]) -> Row:
    tables = {name: dict(row[name]) for name in _SECTIONS if name in row}
    parallel, seq_len = tables.setdefault("parallel", {}), tables["data"]["seq_len"]
    # what these systems do unless they say otherwise
    parallel.setdefault("reshard", "never" if parallel.get("pp", 1) > 1 else "always")
    parallel.setdefault("sync", "last")
    tables.setdefault("memory", {}).setdefault("activation_checkpointing", "none")
    ranks = row["devices"]
    for axis in ("cp", "tp", "pp"):
        ranks //= parallel.get(axis, 1)
    tokens = tables["train"]["micro_batch"] * row.get("accumulation", 1) * ranks * seq_len
    tables["train"]["batch"] = f"{tokens} tok"
    tables["data"]["sources"] = "none"
    model = dict(tables["model"])
    tables["model"] = {**expand(model), **{key: value for key, value in model.items() if key == "preset"}}
    config = RunConfig.model_validate(tables)
    cluster = clusters.get(row["cluster"]) or load_cluster(row["cluster"])
    software = row.get("software", {})
    batch = f"{tables['train']['micro_batch']} x {seq_len:,}"
    if (count := row.get("accumulation", 1)) > 1:
        batch += f" x {count}"
    checkpointing = str(config.memory.activation_checkpointing)
    options = [
        *(f"{key} {value}" for key, value in parallel.items() if key in _SHOWN_DEGREES),
        "" if checkpointing == "none" else f"{checkpointing} AC",
        "compile" if config.precision.compile is True else "",
        "float8" if config.precision.float8 != "off" else "",
        "async TP" if config.parallel.async_tp else "",
    ]
    label = row.get("label") or model["preset"]
    return Row(
        name=", ".join([f"{label}, {row['devices']} x {cluster.name}, {batch}", *filter(None, options)]),
        source=source,
        config=config,
        cluster=cluster,
        devices=row["devices"],
        seconds=tokens / row["tokens_per_s"] / row["devices"],
        peak=row.get("peak"),
        peak_remark=row.get("peak_remark", ""),
        kernel=software.get("attention", "best"),
        early_stop=software.get("early_stop", True),
        fused_sums=software.get("fused_sums", False),
        loss=software.get("loss", "eager"),
        fitted=row.get("fitted", False),
        assumed=row.get("assumed", ""),
    )


def summary(compared: Sequence[Compared]) -> str:
    """Return the number of rows, and the median and largest error of speed."""
    errors = [abs(each.error) for each in compared]
    return f"{len(errors)} rows, median error {statistics.median(errors):.1%}, largest {max(errors):.1%}"


def memory_summary(compared: Sequence[Compared]) -> str:
    """Return the number of rows, and the median and largest error of memory."""
    errors = [abs(each.memory_error) for each in compared if each.memory_error is not None]
    return f"{len(errors)} rows, median error {statistics.median(errors):.1%}, largest {max(errors):.1%}"


def page() -> str:
    """Return docs/planner-accuracy.md."""
    rows, single = compare(published()), compare(measured_rows())
    with_ops = compare(measured_rows(), measured_ops())
    others, fitted = (
        [each for each in rows if not each.row.fitted],
        [each for each in rows if each.row.fitted],
    )
    lines = [
        _HEAD,
        f"- Published rows that were not fitted: {summary(others)}.",
        f"- Published rows on which device rates were fitted (7B and 8B): {summary(fitted)}.",
        f"- Memory, where it was published: {memory_summary(rows)}.",
        f"- Steps measured on one H200, predicted without measurements: {summary(single)}.",
        f"- The same steps, predicted with the times of `bench ops` on that H200: {summary(with_ops)}.",
        f"- Memory of these steps: {memory_summary(single)}.",
    ]
    source = None
    for each in [*rows, *single]:
        if each.row.source != source:
            source = each.row.source
            lines += ["", f"## {source[0].upper()}{source[1:]}", "", *_COLUMNS]
        lines.append(_line(each))
    return "\n".join(lines) + "\n"


def _line(each: Compared) -> str:
    name = each.row.name + (" (fitted)" if each.row.fitted else "")
    name += f"; assumed: {each.row.assumed}" if each.row.assumed else ""
    name += f"; {each.row.peak_remark}" if each.row.peak_remark else ""
    memory = ""
    if each.memory_error is not None and each.row.peak:
        memory = f"{each.row.peak * (1 + each.memory_error):.1f} / {each.row.peak:.1f}"
    numbers = f"{each.predicted:,.0f} | {each.published:,.0f} | {each.error:+.1%} | {memory}"
    return f"| {name} | {numbers} |"


_COLUMNS = (
    "| run | tok/s per device, predicted | reported | error | GiB, predicted / reported |",
    "|---|---:|---:|---:|---:|",
)
_HEAD = """# Accuracy of the planner
<!-- Generated by `make planner-accuracy`; do not edit. -->

Predictions of `arriero plan` without measurements, beside what others published and what was measured with
Arriero on one H200. One set of rates per device type (`src/arriero/plan/devices.toml`) is fitted on the rows
that say so, and the H200's on the measured steps. The rows, their sources and what the sources leave open are
in `tests/plan/published`; `tests/plan/test_accuracy.py` checks the bounds. The published memory is what
torchtitan reserved. To the memory estimate, which is for Arriero, the copies of the logits are added that
torchtitan makes, and the share for fragments that the planner leaves free.
"""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        print(page())
