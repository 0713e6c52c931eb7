"""Measured times of operations and collectives: the files of `bench ops` and `bench comm`, and interpolation.

Imports no torch: a login node plans with files that were measured on the target.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from arriero.errors import UserError
from arriero.events import warn
from arriero.files import publish_file
from arriero.model.spec import ModelSpec

Precision = Literal["fp32", "bf16", "float8"]
Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p"]

CACHE_VARIABLE = "ARRIERO_CACHE"
# unmeasured shapes are blended from this many of the nearest measured ones
_NEIGHBOURS = 4


class _OpKind(NamedTuple):
    """The dimension along which an operation is interpolated, and the other dimensions of its shape.

    `work` names the dimensions whose product is proportional to the time of a large shape.
    """

    size: str
    others: tuple[str, ...]
    work: tuple[str, ...]


# A linear layer and the loss include all casts of their precision; backward is all gradients.
OPS: dict[str, _OpKind] = {
    "linear": _OpKind("tokens", ("inputs", "outputs"), ("tokens", "inputs", "outputs")),
    "attention": _OpKind(
        "seq_len",
        ("batch", "heads", "kv_heads", "head_dim"),
        ("batch", "seq_len", "seq_len", "heads", "head_dim"),
    ),
    # `attended` is the mean document length of a token, sum(l^2) / sum(l)
    "document_attention": _OpKind(
        "attended",
        ("batch", "seq_len", "heads", "kv_heads", "head_dim"),
        ("batch", "seq_len", "attended", "heads", "head_dim"),
    ),
    "norm": _OpKind("tokens", ("width",), ("tokens", "width")),
    "rope": _OpKind("tokens", ("heads", "head_dim"), ("tokens", "heads", "head_dim")),
    "activation": _OpKind("tokens", ("width",), ("tokens", "width")),
    "embedding": _OpKind("tokens", ("width", "vocab"), ("tokens", "width")),
    # softmax and its gradient from logits, in place: no matmul; everything is counted as forward
    "cross_entropy": _OpKind("tokens", ("vocab",), ("tokens", "vocab")),
    # the output head with its matmuls and all gradients, in chunks; everything is counted as forward
    "head_loss": _OpKind("tokens", ("width", "vocab"), ("tokens", "width", "vocab")),
    # one transformer block as the trainer runs it; the variant is the model's dimensions
    "block": _OpKind("tokens", ("seq_len",), ("tokens",)),
    # the fp32 addition of one micro-batch's gradients to the sum of earlier ones
    "accumulation": _OpKind("parameters", (), ("parameters",)),
    # gradient norm, clipping and update; the variant is "NAME MASTER STATE", such as "adamw fp32 fp32"
    "optimizer": _OpKind("parameters", (), ("parameters",)),
}


def block_variant(spec: ModelSpec) -> str:
    """Return the dimensions of a model's block, which tell its measurements from those of other models."""
    heads = f"{spec.heads}/{spec.kv_heads} heads of {spec.head_dim}"
    return f"{spec.family} {spec.dim} x {spec.ffn}, {heads}"


def optimizer_variant(name: str, master: str, state: str) -> str:
    return f"{name} {master} {state}"


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Spread(_Stored):
    """Seconds of repeated runs: the median, the quartiles and their number."""

    median: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat
    runs: PositiveInt


class OpTime(_Stored):
    """The time of one operation on one device; `backward` is null where forward includes everything."""

    op: str
    precision: Precision
    variant: str = ""
    shape: dict[str, PositiveInt]
    forward: Spread
    backward: Spread | None = None

    @property
    def key(self) -> tuple[object, ...]:
        return self.op, self.precision, self.variant, tuple(sorted(self.shape.items()))

    @property
    def size(self) -> int:
        return self.shape[OPS[self.op].size]


class CollectiveTime(_Stored):
    """The time of one collective in a group of `ranks` on `nodes` nodes, with equally many ranks on each.

    `bytes` is the whole tensor: the output of an all-gather, the input of the others, per rank.
    """

    collective: Collective
    ranks: PositiveInt
    nodes: PositiveInt
    bytes: PositiveInt
    seconds: Spread

    @property
    def key(self) -> tuple[object, ...]:
        return self.collective, self.ranks, self.nodes, self.bytes

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the algorithm: the tensor's bytes by the median time."""
        return self.bytes / self.seconds.median


class MeasuredFile(_Stored):
    """One file of `bench ops` or `bench comm`: where it was measured, with which versions, and the times."""

    schema_version: Literal[1] = 1
    time: str
    device: str
    hardware: dict[str, str | int | float | None] = {}
    fabric: str | None = None
    versions: dict[str, str | None] = {}
    ops: list[OpTime] = []
    collectives: list[CollectiveTime] = []

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file; raise UserError that names the key if it is damaged."""
        todo = "measure again with `arriero bench ops --out FILE` or `arriero bench comm --out FILE`"
        try:
            found = cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror})", todo) from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise UserError(
                f"{path} is not a file of measured times ({where}: {first['msg']})", todo
            ) from None
        for number, row in enumerate(found.ops):
            wanted = {OPS[row.op].size, *OPS[row.op].others} if row.op in OPS else None
            if wanted is None or set(row.shape) != wanted:
                what = f"unknown operation '{row.op}'" if wanted is None else f"shape needs {sorted(wanted)}"
                raise UserError(f"{path} is not a file of measured times (ops.{number}: {what})", todo)
        return found

    def write(self, path: Path) -> None:
        """Write the file with one time per line; times are rounded to four digits."""
        head = self.model_dump(mode="json", exclude={"ops", "collectives"}, exclude_defaults=True)
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        for name in ("ops", "collectives"):
            rows = [
                json.dumps(_rounded(row.model_dump(exclude_defaults=True))) for row in getattr(self, name)
            ]
            if rows:
                lines.append(f"{json.dumps(name)}: [\n  " + ",\n  ".join(rows) + "\n]")
        path.parent.mkdir(parents=True, exist_ok=True)
        publish_file(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


class OpEstimate(NamedTuple):
    """Seconds of an operation; `distance` is 0 if the shape was measured, else that of the nearest shape.

    A distance of 1 means that the dimensions differ by a factor e.
    """

    forward: float
    backward: float
    distance: float


@dataclass(frozen=True)
class Measured:
    """The measurements of one kind of device; `sources` names their files."""

    device: str
    ops: Sequence[OpTime] = ()
    collectives: Sequence[CollectiveTime] = ()
    sources: tuple[str, ...] = ()

    @cached_property
    def _curves(self) -> dict[tuple[str, str, str], dict[tuple[int, ...], list[OpTime]]]:
        found: dict[tuple[str, str, str], dict[tuple[int, ...], list[OpTime]]] = {}
        for row in sorted(self.ops, key=lambda row: row.size):
            others = tuple(row.shape[name] for name in OPS[row.op].others)
            curves = found.setdefault((row.op, row.precision, row.variant), {})
            curves.setdefault(others, []).append(row)
        return found

    @cached_property
    def _groups(self) -> dict[str, dict[tuple[int, int], list[CollectiveTime]]]:
        found: dict[str, dict[tuple[int, int], list[CollectiveTime]]] = {}
        for row in sorted(self.collectives, key=lambda row: row.bytes):
            found.setdefault(row.collective, {}).setdefault((row.ranks, row.nodes), []).append(row)
        return found

    def op(self, op: str, precision: str, variant: str = "", **shape: float) -> OpEstimate | None:
        """Return the time of an operation, interpolated where its shape was not measured.

        None if no shape of this operation, precision and variant was measured.
        """
        kind = OPS[op]
        curves = self._curves.get((op, precision, variant))
        if not curves:
            return None
        wanted = tuple(shape[name] for name in kind.others)
        near = sorted(curves, key=lambda others: _distance(others, wanted))
        if _distance(near[0], wanted) < 1e-9:
            near = near[:1]
        weights, forward, backward = 0.0, 0.0, 0.0
        for others in near[:_NEIGHBOURS]:
            weight = 1 / (_distance(others, wanted) + 1e-9) ** 2
            first, second = _on_curve(kind, curves[others], shape)
            weights += weight
            forward += weight * math.log(first)
            backward += weight * math.log(second) if second else 0.0
        has_backward = curves[near[0]][0].backward is not None
        off = min(abs(math.log(shape[kind.size] / row.size)) for row in curves[near[0]])
        return OpEstimate(
            math.exp(forward / weights),
            math.exp(backward / weights) if has_backward else 0.0,
            math.hypot(_distance(near[0], wanted), off),
        )

    def collective(self, collective: str, size: float, ranks: int, nodes: int = 1) -> float | None:
        """Return the seconds of a collective over `size` bytes; None if no similar group was measured.

        A group that was not measured is taken from the nearest one of the same kind, inside a node or over
        several: latency grows with the steps of a ring (of a tree for an all-reduce), bytes with (n - 1) / n.
        """
        groups = {
            group: rows
            for group, rows in self._groups.get(collective, {}).items()
            if (group[1] > 1) == (nodes > 1)
        }
        if not groups or size <= 0 or ranks < 2:
            return None if not groups else 0.0
        near = min(groups, key=lambda g: _distance((g[0] / g[1], g[1]), (ranks / nodes, nodes)))
        rows = groups[near]
        seconds = _interpolated([(row.bytes, row.seconds.median) for row in rows], size, grows=True)
        if near == (ranks, nodes):
            return seconds
        latency = min(rows[0].seconds.median, seconds)
        steps = (ranks - 1) / (near[0] - 1)
        if collective == "all_reduce":
            steps = math.log2(ranks) / math.log2(near[0])
        share = (1 - 1 / ranks) / (1 - 1 / near[0])
        return latency * steps + (seconds - latency) * share if collective != "p2p" else seconds


def _on_curve(kind: _OpKind, rows: Sequence[OpTime], shape: Mapping[str, float]) -> tuple[float, float]:
    """Return forward and backward seconds of `shape` from rows that differ in size only.

    Seconds per unit of work are interpolated and applied to the work of `shape`, whose other dimensions may
    differ from those of the rows.
    """
    size, work = shape[kind.size], math.prod(shape[name] for name in kind.work)
    times = []
    for pass_ in ("forward", "backward"):
        spreads = [(row, getattr(row, pass_)) for row in rows]
        points = [
            (float(row.size), spread.median / math.prod(row.shape[name] for name in kind.work))
            for row, spread in spreads
            if spread is not None
        ]
        times.append(_interpolated(points, size) * work if points else 0.0)
    return times[0], times[1]


def _interpolated(points: Sequence[tuple[float, float]], x: float, grows: bool = False) -> float:
    """Interpolate y(x) linearly in logarithms. Outside the points y is constant; with `grows` it is
    proportional to x above them."""
    if x <= points[0][0]:
        return points[0][1]
    if x >= points[-1][0]:
        return points[-1][1] * (x / points[-1][0] if grows else 1.0)
    upper = next(i for i, (at, _) in enumerate(points) if at >= x)
    (x0, y0), (x1, y1) = points[upper - 1], points[upper]
    share = math.log(x / x0) / math.log(x1 / x0)
    return math.exp((1 - share) * math.log(y0) + share * math.log(y1))


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    return math.sqrt(sum(math.log(x / y) ** 2 for x, y in zip(a, b, strict=True)))


def cache_folder() -> Path:
    """Return the folder that keeps measurements of this user: ARRIERO_CACHE, or one below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE_VARIABLE) or Path(base) / "arriero") / "measured"


def read_measured(files: Iterable[Path]) -> Measured:
    """Join measurements of one kind of device; a later file replaces equal shapes of an earlier one."""
    read = [(path, MeasuredFile.read(path)) for path in files]
    devices = {found.device for _, found in read}
    if len(devices) > 1:
        raise UserError(
            f"the measured files are of different devices: {', '.join(sorted(devices))}",
            "give files of one device",
        )
    ops = {row.key: row for _, found in read for row in found.ops}
    collectives = {row.key: row for _, found in read for row in found.collectives}
    return Measured(
        device=devices.pop() if devices else "",
        ops=list(ops.values()),
        collectives=list(collectives.values()),
        sources=tuple(str(path) for path, _ in read),
    )


def cached_measurements(device: str) -> Measured | None:
    """Return what this user has measured on a device of that name, oldest files first; None if nothing."""
    folder = cache_folder()
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    wanted = []
    for path in files:
        try:
            if MeasuredFile.read(path).device == device:
                wanted.append(path)
        except UserError as error:
            warn(f"{error.what}; it is not used")
    return read_measured(wanted) if wanted else None
