"""`bench parity`: train the same steps in every layout, compare with one process, and write the page."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import groupby
from math import isnan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arriero.bench.cases import BASE, BF16, BF16_WEIGHTS, FLOAT8, FP32, STATES, Case, Tolerance, cases
from arriero.checkpoint.formats.hf_directory import load_hf
from arriero.config.fields import toml_value
from arriero.config.load import load_run
from arriero.errors import UserError
from arriero.files import publish_file
from arriero.model.presets import expand, resolve
from arriero.model.spec import ModelSpec
from arriero.parallel.spawn import RankFailed, run_ranks
from arriero.parallel.world import RENDEZVOUS
from arriero.train.device import choose_device
from arriero.train.run import run

# runs that one group of processes trains one after the other
_BATCH = 12


def without_gradient(spec: ModelSpec) -> tuple[str, ...]:
    """Return the ends of names of weights whose gradient is rounding noise, which AdamW amplifies.

    Softmax ignores a bias that is the same for all keys; RoPE makes it depend on the position.
    """
    return ("attention.k.bias",) if spec.rope_theta is None else ()


@dataclass(frozen=True)
class ShortRun:
    """Losses, gradient norms and final weights of a run."""

    losses: list[float]
    norms: list[float]
    seconds: float
    weights: Mapping[str, Tensor]
    spec: ModelSpec


@dataclass(frozen=True)
class Verdict:
    """Relative differences: the largest of the losses, the first gradient norm's, the largest of the weights.

    `error` is the message of a run that did not finish.
    """

    case: Case
    loss: float
    norm: float
    weights: float
    seconds: float
    error: str = ""

    @property
    def holds(self) -> bool:
        t = self.case.tolerance
        return not self.error and self.loss <= t.loss and self.norm <= t.norm and self.weights <= t.weights


class Parity:
    """Compare cases with their references; each reference is trained once.

    `sets` are keys for all runs, references included.
    """

    def __init__(self, model: str, cache_dir: Path, sets: Mapping[str, Any] | None = None) -> None:
        where = {"model.preset": f"{model}-test", "data.cache": str(cache_dir)}
        self._sets = BASE | where | dict(sets or {})
        self._references: dict[str, ShortRun | str] = {}

    def expected(self, case: Case) -> "ShortRun | str":
        """Return the run that a case is compared with, or why it failed."""
        self._train_references([case])
        return self._references[str(case.against)]

    def compare(self, case: Case) -> Verdict:
        return next(self.compare_all([case]))

    def compare_all(self, every: Sequence[Case]) -> Iterator[Verdict]:
        """Compare all cases. Cases with the same number of ranks share processes, and come together."""
        with _single_thread():
            self._train_references(every)
            for cases in _batches(every, lambda case: case.ranks, lambda case: self._alone(case.sets)):
                for case, found in zip(
                    cases, self._runs([c.sets for c in cases], cases[0].ranks), strict=True
                ):
                    yield _verdict(case, found, self._references[str(case.against)])

    def _train_references(self, every: Sequence[Case]) -> None:
        new = {str(case.against): case.against for case in every}
        new = {key: sets for key, sets in new.items() if key not in self._references}
        for keys in _batches(list(new), lambda _: 1, lambda key: self._alone(new[key])):
            found = self._runs([new[key] for key in keys], 1)
            self._references |= dict(zip(keys, found, strict=True))

    def _alone(self, sets: Mapping[str, Any]) -> bool:
        """Whether a run needs new processes: compiled code and GPUs leave too much behind."""
        every = self._sets | dict(sets)
        return bool(every["precision.compile"]) or every["run.device"] != "cpu"

    def _runs(self, every: Sequence[Mapping[str, Any]], ranks: int) -> "Iterator[ShortRun | str]":
        """Train runs in one group of processes; after one that fails, the next has new ones."""
        # imported once here, so that the forked ranks need not import it
        import_module("arriero.train.build")
        left = [self._sets | dict(sets) for sets in every]
        while left:
            with tempfile.TemporaryDirectory(prefix="arriero-parity-") as name:
                try:
                    run_ranks(partial(_run_each, left, Path(name)), ranks, leader_prints=False)
                    error = ""
                except (UserError, RankFailed) as raised:
                    error = str(raised)
                done = [file for i in range(len(left)) if (file := Path(name) / f"{i}.json").exists()]
                for file in done:
                    weights, spec = load_hf(file.with_suffix("") / "model")
                    yield ShortRun(**json.loads(file.read_text()), weights=weights, spec=spec)
            if len(done) < len(left):
                yield error
            left = left[len(done) + 1 :]


def _run_each(runs: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Train runs one after the other, as one rank of several, and record each that ends."""
    meeting = os.environ[RENDEZVOUS]
    for i, sets in enumerate(runs):
        os.environ[RENDEZVOUS] = f"{meeting}-{i}"
        every = {**sets, "run.dir": str(folder), "run.name": str(i)}
        config = load_run(None, [f"{key}={toml_value(value)}" for key, value in every.items()], expand).config
        begin = time.monotonic()
        result = run(config)
        if os.environ["RANK"] == "0":
            numbers = {"losses": [*result.losses.values()], "norms": [*result.grad_norms.values()]}
            record = numbers | {"seconds": time.monotonic() - begin}
            publish_file(folder / f"{i}.json", json.dumps(record).encode(), is_durable=False)
        # a rank that fails in the next run must not end rank 0 before that
        while not (folder / f"{i}.json").exists():
            time.sleep(0.01)


def _batches(
    every: Sequence[Any], ranks: Callable[[Any], int], alone: Callable[[Any], bool]
) -> Iterator[list[Any]]:
    """Divide runs into those that share processes."""
    for _, same in groupby(sorted(every, key=ranks), ranks):
        together: list[Any] = []
        for each in same:
            if alone(each):
                yield [each]
            else:
                together.append(each)
        yield from (together[i : i + _BATCH] for i in range(0, len(together), _BATCH))


def _verdict(case: Case, found: ShortRun | str, expected: ShortRun | str) -> Verdict:
    if isinstance(found, str) or isinstance(expected, str):
        nothing = float("nan")
        return Verdict(
            case, nothing, nothing, nothing, 0.0, expected if isinstance(expected, str) else str(found)
        )
    return Verdict(
        case,
        nan_max(_difference(a, b) for a, b in zip(found.losses, expected.losses, strict=True)),
        _difference(found.norms[0], expected.norms[0]),
        weight_difference(found.weights, expected.weights, without_gradient(expected.spec)),
        found.seconds,
    )


def check_device(device: str) -> None:
    """Check a device in a separate process: one that has looked for GPUs cannot fork others that use them."""
    run_ranks(lambda: choose_device(device).name, 1, leader_prints=False)


@contextmanager
def _single_thread() -> Iterator[None]:
    """Use one thread here and in forked ranks: a process that has used torch's threads cannot fork others."""
    threads, variable = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if variable is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = variable


def _difference(a: float, b: float) -> float:
    """Return the relative difference; two infinite norms, of skipped fp16 steps, are equal."""
    return 0.0 if a == b else abs(a - b) / abs(b)


def nan_max(differences: Iterable[float]) -> float:
    """Return the maximum, or NaN if any value is NaN, because max() ignores NaN."""
    known = list(differences)
    return float("nan") if any(map(isnan, known)) else max(known)


def weight_difference(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], ignored: tuple[str, ...] = ()
) -> float:
    """Return the largest |found - expected| / |expected| over groups of weights, without ends of names that
    are `ignored`.

    A group is all tensors of one name over the blocks, so that small tensors count as much as large ones.
    """
    if found.keys() != expected.keys():
        return float("nan")
    kinds: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, tensor in expected.items():
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        if not kind.endswith(ignored):
            kinds.setdefault(kind, []).append((found[name], tensor))
    return nan_max(_relative(pairs) for pairs in kinds.values())


def _relative(pairs: list[tuple[Tensor, Tensor]]) -> float:
    off = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    size = sum(b.double().square().sum() for _, b in pairs)
    return float((off / size) ** 0.5)


_PAGE = """\
# Parity of parallel layouts

Generated by `make parity`, which runs `arriero bench parity --write docs/parity.md`; do not edit.

**{held} of {judged} cases hold**, out of {every}, with torch {torch} on {place}.

## What is compared
Each case trains {horizon} of {batch} in sequences of {seq_len}, with the same seed as its reference, which is
one process. Unless the case says otherwise: AdamW, lr {lr:g} after {warmup} of warm-up, gradients clipped
at 1, fp32, not compiled, on text of known entropy (`builtin:synthetic`).

{models}

A case holds if the run ends without an error and these relative differences are within bounds:

- *loss*: the largest difference over the losses of all steps;
- *gradient*: the difference of the global gradient norm of the first step, before clipping;
- *weights*: |found - expected| / |expected| of the exported weights, computed for each kind of weight (its
  name without the number of the block); the largest value.

GPT-2's `attention.k.bias` is excluded from *weights*: without RoPE, a bias that is the same for all keys does
not change a softmax, so its gradient is zero except for rounding errors, which AdamW scales to full steps.

| cases | loss | gradient | weights |
|---|---:|---:|---:|
{bounds}
"""

_BOUNDS = {
    "fp32, all layouts": FP32,
    "bf16 against fp32; fp16 against fp16": BF16,
    "bf16 weights, against fp32": BF16_WEIGHTS,
    "float8, against fp32": FLOAT8,
} | {f"optimizer state in {bits}, against fp32": bounds for bits, bounds in STATES.items()}

_HEAD = "| layout | ranks | loss | gradient | weights | seconds | |\n|---|---:|---:|---:|---:|---:|---|"


def parity_page(verdicts: Mapping[str, Sequence[Verdict]], device: str) -> str:
    judged = [verdict for each in verdicts.values() for verdict in each]
    top = _PAGE.format(
        held=sum(verdict.holds for verdict in judged),
        judged=len(judged),
        every=sum(len(cases(model)) for model in verdicts),
        torch=torch.__version__,
        place="one GPU that all ranks share" if device == "cuda" else "a CPU (gloo)",
        models="\n".join(f"- {_describe(model)}" for model in verdicts),
        bounds="\n".join(f"| {name} | {_cells(bounds)} |" for name, bounds in _BOUNDS.items()),
        **{key.partition(".")[2]: value for key, value in BASE.items()},
    )
    return top + "\n".join(_tables(verdicts)) + "\n"


def _describe(model: str) -> str:
    own = {key.removeprefix("model."): value for key, value in BASE.items() if key.startswith("model.")}
    spec = resolve(f"{model}-test", own)
    tied = "head tied to the embedding" if spec.tied else "head not tied"
    return (
        f"{model}: {spec.parameters:,} parameters, {spec.layers} blocks of width {spec.dim}, "
        f"{spec.heads} heads, {spec.kv_heads} key/value heads, vocabulary {spec.vocab_size}, {tied}."
    )


def _cells(tolerance: Tolerance) -> str:
    bounds = (tolerance.loss, tolerance.norm, tolerance.weights)
    return " | ".join(f"{value:.1e}".replace(".0e", "e") for value in bounds)


def _tables(verdicts: Mapping[str, Sequence[Verdict]]) -> Iterator[str]:
    for model, judged in verdicts.items():
        yield f"\n## {model}"
        order = {case.title: place for place, case in enumerate(cases(model, "cuda"))}
        sorted_by_case = sorted(judged, key=lambda verdict: order.get(verdict.case.title, 0))
        for group, members in groupby(sorted_by_case, lambda verdict: verdict.case.group):
            yield f"\n### {group}"
            yield _HEAD
            yield from map(_row, members)


def _row(verdict: Verdict) -> str:
    numbers = [f"{value:.1e}" for value in (verdict.loss, verdict.norm, verdict.weights)]
    holds = "holds" if verdict.holds else "**fails**"
    cells = [verdict.case.name, str(verdict.case.ranks), *numbers, f"{verdict.seconds:.0f}", holds]
    return f"| {' | '.join(cells)} |"
