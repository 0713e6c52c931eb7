"""Any layout, the same loss: train the same steps in each and compare with one process."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import isnan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arriero.bench.cases import BASE, Case
from arriero.checkpoint.formats.hf_directory import load_hf
from arriero.config.fields import toml_value
from arriero.config.load import load_run
from arriero.errors import UserError
from arriero.model.presets import expand
from arriero.parallel.spawn import RankFailed, run_ranks
from arriero.train.device import choose_device
from arriero.train.run import run

# softmax does not see what is added to all keys alike: its gradient is rounding, which AdamW makes large
UNSEEN = "attention.k.bias"


@dataclass(frozen=True)
class Trace:
    """What a short run leaves to be compared."""

    losses: list[float]
    norms: list[float]
    weights: Mapping[str, Tensor]
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """Relative differences: of losses the largest, of gradient norms the first, of final weights the largest
    over kinds of weight. `error` is what a run that did not finish said."""

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
    """Cases against the references they name; each reference is trained once.

    `sets` are keys for all runs, references too.
    """

    def __init__(self, model: str, cache_dir: Path, sets: Mapping[str, Any] | None = None) -> None:
        where = {"model.preset": f"{model}-test", "data.cache": str(cache_dir)}
        self._sets = BASE | where | dict(sets or {})
        self._reference = cache(lambda key: self._trace(dict(key), 1))

    def expected(self, case: Case) -> Trace:
        return self._reference(tuple(case.against.items()))

    def judge(self, case: Case) -> Verdict:
        with _without_threads():
            return self._judge(case)

    def _judge(self, case: Case) -> Verdict:
        try:
            expected = self.expected(case)
            found = self._trace(case.sets, case.ranks)
        except (UserError, RankFailed) as error:
            nothing = float("nan")
            return Verdict(case, nothing, nothing, nothing, 0.0, str(error))
        return Verdict(
            case,
            _largest(_apart(a, b) for a, b in zip(found.losses, expected.losses, strict=True)),
            _apart(found.norms[0], expected.norms[0]),
            _weights_apart(found.weights, expected.weights),
            found.seconds,
        )

    def _trace(self, sets: Mapping[str, Any], ranks: int) -> Trace:
        folder = tempfile.mkdtemp(prefix="arriero-parity-")
        try:
            every = self._sets | dict(sets) | {"run.dir": folder, "run.name": "run"}
            written = [f"{key}={toml_value(value)}" for key, value in every.items()]
            config = load_run(None, written, expand).config
            start = time.monotonic()
            result = run(config, nproc=ranks)
            seconds = time.monotonic() - start
            weights, _ = load_hf(Path(folder) / "run" / "model")
            return Trace([*result.losses.values()], [*result.grad_norms.values()], weights, seconds)
        finally:
            shutil.rmtree(folder)


def judge_all(model: str, wanted: Iterable[Case], cache_dir: Path, device: str = "cpu") -> Iterator[Verdict]:
    parity = Parity(model, cache_dir, {"run.device": device, "run.share_gpu": device == "cuda"})
    for case in wanted:
        yield parity.judge(case)


def refuse_absent(device: str) -> None:
    """Asked in a process of its own: one that has looked for GPUs cannot fork others that use them."""
    run_ranks(lambda: choose_device(device).name, 1, leader_prints=False)


@contextmanager
def _without_threads() -> Iterator[None]:
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


def _apart(a: float, b: float) -> float:
    """Two infinite norms, of fp16 steps that were skipped, are alike."""
    return 0.0 if a == b else abs(a - b) / abs(b)


def _largest(differences: Iterable[float]) -> float:
    """Not a number if any is not, which max() would pass over."""
    known = list(differences)
    return float("nan") if any(map(isnan, known)) else max(known)


def _weights_apart(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Of the kind of weight that differs most: |found - expected| / |expected| over all tensors of a name,
    whatever their block, so that a small kind is not lost beside a large one."""
    if found.keys() != expected.keys():
        return float("nan")
    kinds: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, tensor in expected.items():
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        if not kind.endswith(UNSEEN):
            kinds.setdefault(kind, []).append((found[name], tensor))
    return _largest(_relative(pairs) for pairs in kinds.values())


def _relative(pairs: list[tuple[Tensor, Tensor]]) -> float:
    off = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    size = sum(b.double().square().sum() for _, b in pairs)
    return float((off / size) ** 0.5)
