"""The result of a benchmark as it lies in a file: what was computed, where, how fast, and whether rightly."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from arriero.errors import UserError
from arriero.model.spec import OLD_FORMULA_NAMES

SCHEMA = 1
# steps whose quartiles say what to expect of the next
ENOUGH = 20


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Stored(Part):
    """What lies in a file of its own; `MADE_BY` is the command that leaves it."""

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
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise UserError(
                f"{path} is no benchmark result of this version ({where}: {first['msg']})",
                f"make it anew with `{cls.MADE_BY}`",
            ) from None


class Work(Part):
    """What was computed, whoever computed it and how: speeds are compared only where all of it is equal."""

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

    def differences(self, other: "Work") -> Iterator[tuple[str, Any, Any]]:
        for name in type(self).model_fields:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                for key in sorted(mine.keys() | theirs.keys()):
                    if mine.get(key) != theirs.get(key):
                        yield f"{name}.{key}", mine.get(key), theirs.get(key)
            elif mine != theirs:
                yield name, mine, theirs


class Timing(Part):
    """Milliseconds of each timed step, in order; `tokens_per_s` are those of all ranks at the median."""

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
        """The quartiles; and how many steps, where they are fewer than `bench step` takes by itself."""
        cold = ", the first" if self.warmup_steps == 0 else ""
        if len(self.step_ms) == 1:
            return f"one step{cold}"
        few = f" of {len(self.step_ms)} steps" if len(self.step_ms) < ENOUGH else ""
        among = f"{cold} among them" if cold else ""
        return f"{self.lower_quartile_ms:,.1f}-{self.upper_quartile_ms:,.1f}{few}{among}"

    @classmethod
    def of(cls, step_ms: Sequence[float], tokens_per_step: int, warmup: int, start_up_s: float) -> "Timing":
        several = step_ms if len(step_ms) > 1 else [*step_ms, *step_ms]
        lower, median, upper = statistics.quantiles(several, n=4, method="inclusive")
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
    """By one way of counting. Shares of the peak are null where the peak, or the count, is not known."""

    convention: Annotated[str, AfterValidator(lambda name: OLD_FORMULA_NAMES.get(name, name))]
    formula: str
    flops_per_token: float | None
    tflops_per_device: float | None
    mfu: float | None
    mfu_of_float8_peak: float | None


class Memory(Part):
    """Of the fullest rank: of its GPU, or on a CPU of its process."""

    allocated_gib: float
    reserved_gib: float | None


class Energy(Part):
    """Of all devices of the run, as their own meters say."""

    joules_per_step: float
    tokens_per_joule: float


class Breakdown(Part):
    """Milliseconds of a profiled step of the first rank, by what the device did; they sum to the step."""

    steps: int
    step_ms: float
    parts: dict[str, float]


class Losses(Part):
    """Of the first and the last logged step, before each update."""

    first_step: int
    first: float
    last_step: int
    last: float
    first_grad_norm: float | None
    last_grad_norm: float | None


class Gate(Part):
    """The mode on a small model beside fp32. `needed` is false for the reference itself; `holds` is null
    where it was not judged."""

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


class Machine(Part):
    """Clocks and limits as the driver tells them; null where it does not."""

    name: str
    count: int
    memory_gib: float | None
    driver: str | None
    clocks: dict[str, str]
    power_limit: str | None
    cpu: str
    cores: int


class Code(Part):
    """`commit` is null outside a checkout; `source` is a digest of the package's files, whatever git says."""

    commit: str | None
    dirty: bool | None
    source: str | None = None
    versions: dict[str, str | None]


class Result(Stored):
    MADE_BY = "arriero bench step --json"

    schema_version: Literal[1] = SCHEMA
    name: str
    time: str
    command: list[str]
    mode: str
    layout: str
    ranks: int
    micro_batch: int
    work: Work
    timing: Timing
    rates: list[Rate]
    memory: Memory
    energy: Energy | None
    breakdown: Breakdown | None
    losses: Losses
    gate: Gate
    inside: list[str]
    left_out: list[str]
    device: Machine
    code: Code
    config: dict[str, Any]

    def rate(self, convention: str) -> Rate:
        return next(rate for rate in self.rates if rate.convention == convention)
