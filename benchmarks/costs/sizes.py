"""Sizes of the measured runs, and the run files made from them."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arriero.bench.step import benchmark_run
from arriero.config.fields import toml_value
from arriero.config.load import load_run
from arriero.config.schema import RunConfig
from arriero.model.presets import expand

Sets = dict[str, Any]

_SHARED: Sets = {
    "data.sources": [{"path": "builtin:synthetic"}],
    "model.max_seq_len": 1 << 20,
    "precision.compile": False,
    "schedule.warmup": "1 steps",
}


def _width(dim: int, layers: int, ffn: int, **others: Any) -> Sets:
    heads = max(1, dim // 64)
    sets = {"dim": dim, "layers": layers, "ffn": ffn, "heads": heads, "kv_heads": heads, "tied": False}
    return {f"model.{name}": value for name, value in (sets | others).items()}


def _batch(sequences: int, seq_len: int) -> Sets:
    return {"data.seq_len": seq_len, "train.batch": f"{sequences * seq_len} tok"}


@dataclass(frozen=True)
class Sizes:
    """Each of the `blocks` has ten steps; `tokens` is the size of the dataset that is read."""

    starts: int = 3
    blocks: int = 15
    repeats: int = 3
    least: Sets = field(default_factory=lambda: _width(16, 1, 32) | _batch(1, 16))
    saves: int = 4
    saved: tuple[tuple[str, Sets], ...] = (
        ("a model of 5 MB", _width(128, 4, 384, tied=True) | _batch(1, 16)),
        ("a model of 100 MB", _width(512, 6, 1536) | _batch(1, 16)),
    )
    tokens: int = 8_000_000
    tokens_per_s: float = 1e6
    drawn_s: float = 4.0
    seq_lens: tuple[int, ...] = (1024, 8192)
    steps: int = 8
    grown: Sets = field(default_factory=lambda: _width(128, 2, 384))
    seq_len: int = 256
    longer: tuple[int, ...] = (1, 2, 4, 8)
    deeper: tuple[int, ...] = (1, 2, 4)


ON_GPU = Sizes(
    steps=20,
    grown=_width(1024, 4, 3072) | {"precision.compute": "bf16"},
    seq_len=2048,
)


@dataclass(frozen=True)
class Place:
    """Where to measure: the device as in run files, a scratch folder, the folder of the built-in corpus."""

    device: str
    folder: Path
    cache: Path
    sizes: Sizes

    def run(self, steps: int, sets: Sets) -> RunConfig:
        """Return a run like that of `bench step`: without evaluation, checkpoints or export."""
        keys = _SHARED | sets | {"run.device": self.device, "data.cache": str(self.cache)}
        config = load_run(None, [f"{key}={toml_value(value)}" for key, value in keys.items()], expand).config
        return benchmark_run(config, steps, Path(tempfile.mkdtemp(dir=self.folder)))


def recorded(sets: Sets) -> Sets:
    return _SHARED | sets
