"""The stored result of `bench step`, the comparison of two results, and tables of many."""

import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from arriero.errors import UserError, first_problem
from arriero.model.spec import FLOP_FORMULAS, OLD_FORMULA_NAMES
from arriero.ui import markdown_table

# of a profiled step; while several overlap, time counts for the first of these
COMPUTE = ("GEMM", "attention", "elementwise", "loss", "optimizer")
CATEGORIES = (*COMPUTE, "communication", "copies", "idle")
# number of steps above which the spread is reported without the number
_MANY_STEPS = 20


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Stored(Part):
    """A JSON file; `MADE_BY` is the command that writes it."""

    MADE_BY: ClassVar[str]

    def write(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error})", "give another file") from None

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error})", f"give a file of `{cls.MADE_BY}`") from None
        except ValidationError as error:
            raise UserError(
                f"{path} is not a benchmark result of this version ({first_problem(error.errors())})",
                f"measure again with `{cls.MADE_BY}`",
            ) from None


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile; of a single value, itself."""
    several = values if len(values) > 1 else [*values, *values]
    return statistics.quantiles(several, n=4, method="inclusive")


class MeasuredWork(Part):
    """What was computed, independent of how: only speeds of equal work are compared."""

    model: dict[str, Any]
    parameters: int
    tokens_per_step: int
    seq_len: int
    document_mask: bool
    documents: str | None = None
    compute: str
    master: str
    float8: str
    float8_head: bool = False
    optimizer: str
    optimizer_state: str
    clip: float | Literal[False]

    def differences(self, other: "MeasuredWork") -> Iterator[tuple[str, Any, Any]]:
        for name in type(self).model_fields:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                for key in sorted(mine.keys() | theirs.keys()):
                    if mine.get(key) != theirs.get(key):
                        yield f"{name}.{key}", mine.get(key), theirs.get(key)
            elif mine != theirs:
                yield name, mine, theirs


class Timing(Part):
    """Milliseconds of each timed step, in order; `tokens_per_s` is of all ranks, at the median step."""

    warmup_steps: int
    step_ms: tuple[float, ...]
    median_ms: float
    min_ms: float
    lower_quartile_ms: float
    upper_quartile_ms: float
    max_ms: float
    tokens_per_s: float
    start_up_s: float

    @property
    def spread(self) -> str:
        """Format the quartiles, and the number of steps if there are few."""
        cold = ", the first" if self.warmup_steps == 0 else ""
        if len(self.step_ms) == 1:
            return f"one step{cold}"
        few = f" of {len(self.step_ms)} steps" if len(self.step_ms) < _MANY_STEPS else ""
        among = f"{cold} among them" if cold else ""
        return f"{self.lower_quartile_ms:,.1f}-{self.upper_quartile_ms:,.1f}{few}{among}"

    @classmethod
    def of(cls, step_ms: Sequence[float], tokens_per_step: int, warmup: int, start_up_s: float) -> "Timing":
        lower, median, upper = quartiles(step_ms)
        return cls(
            warmup_steps=warmup,
            step_ms=tuple(step_ms),
            median_ms=median,
            min_ms=min(step_ms),
            lower_quartile_ms=lower,
            upper_quartile_ms=upper,
            max_ms=max(step_ms),
            tokens_per_s=tokens_per_step / median * 1e3,
            start_up_s=start_up_s,
        )


class Rate(Part):
    """Speed by one FLOP formula. MFU is null if the peak or the FLOP count is unknown."""

    convention: Annotated[str, AfterValidator(lambda name: OLD_FORMULA_NAMES.get(name, name))]
    formula: str
    flops_per_token: float | None
    tflops_per_device: float | None
    mfu: float | None
    mfu_of_float8_peak: float | None


class Memory(Part):
    """Peak memory of the rank that uses most: of its GPU, or of its process on a CPU."""

    allocated_gib: float
    reserved_gib: float | None


class Energy(Part):
    """Energy of all GPUs of the run, from their own meters."""

    joules_per_step: float
    tokens_per_joule: float


class Breakdown(Part):
    """Milliseconds of a profiled step of rank 0 by category; they add up to the step."""

    steps: int
    step_ms: float
    parts: dict[str, float]


class Losses(Part):
    """Losses and gradient norms of the first and the last logged step."""

    first_step: int
    first: float
    last_step: int
    last: float
    first_grad_norm: float | None
    last_grad_norm: float | None


class Gate(Part):
    """Comparison of the mode with fp32 on a small model. `needed` is false for plain fp32; `holds` is null if
    it was not checked."""

    needed: bool
    holds: bool | None
    model: str | None = None
    settings: dict[str, Any] = {}
    steps: int | None = None
    loss: float | None = None
    loss_bound: float | None = None
    norm: float | None = None
    norm_bound: float | None = None
    error: str = ""


class DeviceInfo(Part):
    """The device of a measurement; clocks and limits as reported by the driver, null if it reports none."""

    name: str
    count: int
    memory_gib: float | None
    driver: str | None
    clocks: dict[str, str]
    power_limit: str | None
    cpu: str
    cores: int


class CodeVersion(Part):
    """`commit` is null if it is unknown; `source` is a digest of the package's files."""

    commit: str | None
    dirty: bool | None
    source: str | None = None
    versions: dict[str, str | None]


class StepResult(Stored):
    """The result of `bench step`; old files have the same schema."""

    MADE_BY = "arriero bench step --json"

    schema_version: Literal[1] = 1
    name: str
    time: str
    command: list[str]
    mode: str
    layout: str
    ranks: int
    micro_batch: int
    work: MeasuredWork
    timing: Timing
    rates: list[Rate]
    memory: Memory
    energy: Energy | None
    breakdown: Breakdown | None
    losses: Losses
    gate: Gate
    inside: list[str]
    left_out: list[str]
    device: DeviceInfo
    code: CodeVersion
    config: dict[str, Any]

    def rate(self, convention: str) -> Rate:
        """Return the speed by a formula; without numbers if the file is older than the formula."""
        unknown = dict.fromkeys(("flops_per_token", "tflops_per_device", "mfu", "mfu_of_float8_peak"))
        found = (rate for rate in self.rates if rate.convention == convention)
        return next(found, Rate(convention=convention, formula="", **unknown))


@dataclass(frozen=True)
class Comparison:
    """How many times as fast the second result is: at the medians, and at the quartiles furthest apart."""

    ratio: float
    least: float
    most: float
    problem: str | None = None

    @property
    def verdict(self) -> str:
        if self.problem:
            return f"undecided: {self.problem}"
        if self.least > 1:
            return "the second is faster"
        return "the first is faster" if self.most < 1 else "no difference beyond the spread"


def compare_results(first: StepResult, second: StepResult) -> Comparison:
    """Compare two results of equal work; raise UserError if the work differs."""
    if different := [f"{name} is {a} and {b}" for name, a, b in first.work.differences(second.work)]:
        raise UserError(f"the work differs: {'; '.join(different)}", "compare results of the same work")
    return compare_timings(first.timing, second.timing)


def compare_timings(first: Timing, second: Timing) -> Comparison:
    problem = None
    if 0 in (first.warmup_steps, second.warmup_steps):
        problem = "a first step, in which blocks are compiled, was timed"
    elif 1 in (len(first.step_ms), len(second.step_ms)):
        problem = "one step has no spread"
    return Comparison(
        first.median_ms / second.median_ms,
        first.lower_quartile_ms / second.upper_quartile_ms,
        first.upper_quartile_ms / second.lower_quartile_ms,
        problem,
    )


Kept = tuple[Path, StepResult]


def read_results(paths: Sequence[Path]) -> list[Kept]:
    """Read result files, and all results of directories, in order of device and file name."""
    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    return sorted(((file, StepResult.read(file)) for file in files), key=lambda kept: kept[1].device.name)


def replace_section(text: str, name: str, generated: str, where: str) -> str:
    """Return a page with the text between <!-- name --> and <!-- /name --> replaced."""
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise UserError(f"{where} has no {first} ... {last}", "add both where the tables belong")
    return f"{before}{first}\n{generated}{last}{after}"


def tables(results: Sequence[Kept], relative_to: Path) -> str:
    """Format results as Markdown tables by device; links are relative to a directory."""
    if not results:
        return "No results yet.\n"
    parts: list[str] = []
    for device, group in groupby(results, lambda kept: kept[1].device.name):
        members = list(group)
        parts += [f"### {device}\n", *_speed_table(members, relative_to), ""]
        parts += ["Share of the bf16 peak, by each way of counting:\n", *_mfu_table(members), ""]
        if any(result.breakdown for _, result in members):
            parts += ["Where a step goes, in ms:\n", *_breakdown_table(members), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


def _speed_table(members: Sequence[Kept], relative_to: Path) -> list[str]:
    heads = ("work", "mode", "layout", ">tok/s", ">ms per step (quartiles)", ">GiB", ">J per step")
    rows = []
    for path, result in members:
        t, work = result.timing, result.work
        link = os.path.relpath(path, relative_to)
        rows.append(
            (
                f"{result.name}, {work.tokens_per_step // work.seq_len} x {work.seq_len}"
                + (f", documents ({work.documents})" if work.documents else ""),
                result.mode,
                result.layout,
                f"{t.tokens_per_s:,.0f}",
                f"{t.median_ms:,.1f} ({t.spread})",
                f"{result.memory.allocated_gib:.1f}",
                f"{result.energy.joules_per_step:,.0f}" if result.energy else "not reported",
                _loss_check(result),
                f"{(result.code.commit or 'no commit')[:7]}{'+' if result.code.dirty else ''}",
                f"[{path.name}]({link})",
            )
        )
    return markdown_table((*heads, "loss checked", "code", "file"), rows)


def _loss_check(result: StepResult) -> str:
    gate = result.gate
    if not gate.needed:
        return "is the reference"
    return f"{gate.loss:.0e} of {gate.loss_bound:.0e}" if gate.holds else "**no**"


def _mfu_table(members: Sequence[Kept]) -> list[str]:
    """Show MFU, or TFLOP/s if the peak of the precision is unknown."""

    def cell(rate: Rate) -> str:
        speed = "-" if rate.tflops_per_device is None else f"{rate.tflops_per_device:.3g} TFLOP/s"
        shares = f"{rate.mfu:.1%}" if rate.mfu is not None else speed
        float8 = rate.mfu_of_float8_peak
        return shares if float8 is None else f"{shares} ({float8:.1%} of float8's)"

    rows = [[path.stem, *(cell(result.rate(name)) for name in FLOP_FORMULAS)] for path, result in members]
    return markdown_table(("file", *(f">{name}" for name in FLOP_FORMULAS)), rows)


def _breakdown_table(members: Sequence[Kept]) -> list[str]:
    rows = [
        [path.stem, *(f"{each:,.1f}" for each in (found.step_ms, *(found.parts[c] for c in CATEGORIES)))]
        for path, result in members
        if (found := result.breakdown) is not None
    ]
    return markdown_table(("file", ">profiled step", *(f">{each}" for each in CATEGORIES)), rows)
