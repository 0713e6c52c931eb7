"""Any layout, the same loss: train the same steps in each and compare with one process."""

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arriero.bench.cases import Case
from arriero.config.load import load_run
from arriero.config.toml import toml_value
from arriero.data.progress import silent
from arriero.model.formats.hf import load_hf
from arriero.model.presets import expand
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import joined, world_from
from arriero.train.arrange import arrange
from arriero.train.build import build
from arriero.train.hooks import Hook
from arriero.train.loop import train
from arriero.train.metrics import StepMetrics

MODELS = ("llama", "gpt2")
BASE: dict[str, Any] = {
    "model.layers": 4,
    "model.vocab_size": 4096,
    "data.sources": [{"path": "builtin:synthetic"}],
    "data.seq_len": 64,
    "train.batch": "1024 tok",
    "train.horizon": "20 steps",
    "optim.lr": 1e-3,
    "schedule.warmup": "4 steps",
    "checkpoint.at_end": False,
    "observe.log_every": 1,
    "observe.tensorboard": False,
    "precision.compile": False,
    "precision.compute": "fp32",
    "run.device": "cpu",
}


@dataclass(frozen=True)
class Trace:
    """What a short run leaves to be compared."""

    losses: list[float]
    norms: list[float]
    weights: Mapping[str, Tensor]
    seconds: float


@dataclass(frozen=True)
class Verdict:
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
    """Cases against the references they name; each reference is trained once."""

    def __init__(self, model: str, cache_dir: Path) -> None:
        self._sets = BASE | {"model.preset": f"{model}-test", "data.cache": str(cache_dir)}
        self._reference = cache(lambda key: self._trace(dict(key), 1))

    def judge(self, case: Case) -> Verdict:
        try:
            expected = self._reference(tuple(case.against.items()))
            found = self._trace(case.sets, case.ranks)
        except Exception as error:
            nothing = float("nan")
            return Verdict(case, nothing, nothing, nothing, 0.0, f"{type(error).__name__}: {error}")
        return Verdict(
            case,
            max(_apart(a, b) for a, b in zip(found.losses, expected.losses, strict=True)),
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
            losses, norms = run_ranks(lambda: _run(config), ranks, leader_prints=False)
            seconds = time.monotonic() - start
            weights, _ = load_hf(Path(folder) / "run" / "model")
            return Trace(losses, norms, weights, seconds)
        finally:
            shutil.rmtree(folder)


class _Recorder(Hook):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_metrics(self, session: Any, metrics: StepMetrics) -> None:
        self.losses.append(metrics.loss)
        self.norms.append(metrics.grad_norm)


def _run(config: Any) -> tuple[list[float], list[float]]:
    torch.set_num_threads(1)
    recorder, world = _Recorder(), world_from()
    plan = arrange(config, world)
    with joined(world, plan.device.torch_device):
        train(build(plan, silent, [recorder]))
    return recorder.losses, recorder.norms


def _apart(a: float, b: float) -> float:
    return abs(a - b) / abs(b)


def _weights_apart(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Of the kind of weight that differs most. A kind is a name without its block's number: single biases may
    have gradients that are zero but for rounding, which AdamW makes large."""
    kinds: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, tensor in expected.items():
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        kinds.setdefault(kind, []).append((found[name], tensor))
    return max(_relative(pairs) for pairs in kinds.values())


def _relative(pairs: list[tuple[Tensor, Tensor]]) -> float:
    off = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    size = sum(b.double().square().sum() for _, b in pairs)
    return float((off / size) ** 0.5)


def judge_all(model: str, wanted: list[Case], cache_dir: Path) -> Iterator[Verdict]:
    parity = Parity(model, cache_dir)
    for case in wanted:
        yield parity.judge(case)
