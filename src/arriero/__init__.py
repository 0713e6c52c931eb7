"""Arriero: Llama-class pre-training, from raw text to a finished model.

The functions here are the Python API. They import torch when they need it.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from arriero.config.schema import RunConfig
    from arriero.data.dataset import Dataset
    from arriero.errors import UserError
    from arriero.model.family import Family, register_model
    from arriero.train.hooks import Hook
    from arriero.train.run import run

__version__ = "0.1.0"
__all__ = [
    "Family",
    "Hook",
    "UserError",
    "load_config",
    "load_model",
    "open_dataset",
    "register_model",
    "run",
]

_LAZY = {
    "Family": "arriero.model.family",
    "Hook": "arriero.train.hooks",
    "UserError": "arriero.errors",
    "register_model": "arriero.model.family",
    "run": "arriero.train.run",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'arriero' has no attribute '{name}'")
    return getattr(import_module(_LAZY[name]), name)


def load_config(
    path: str | Path | None = None, overrides: Mapping[str, Any] | Iterable[str] = ()
) -> "RunConfig":
    """Load a run file, or the embedded default without a path.

    `overrides` are like --set: {"train.horizon": "20 steps"} or ["train.horizon=20 steps"].
    """
    from arriero.config.fields import toml_value
    from arriero.config.load import load_run
    from arriero.model.presets import expand

    if isinstance(overrides, Mapping):
        overrides = [f"{key}={toml_value(value)}" for key, value in overrides.items()]
    return load_run(None if path is None else Path(path), overrides, expand).config


def load_model(
    path: str | Path, device: "str | torch.device" = "cpu", dtype: "torch.dtype | None" = None
) -> "nn.Module":
    """Load a model whose `model(tokens)` returns logits, one tensor at a time.

    `path` is a run directory or checkpoint of Arriero, a Hugging Face, Meta or DCP directory, a single torch
    file, or `hf://OWNER/MODEL`. A run directory stands for its newest checkpoint, or else for its exported
    model. `dtype` defaults to the widest type of the stored weights.
    """
    from arriero.checkpoint.convert import load_model as load

    return load(path, device, dtype)


def open_dataset(path: str | Path, cache: str | Path = "data") -> "Dataset":
    """Open a prepared dataset: its documents, and batches for any rank in the order of training.

    A built-in dataset, like "builtin:stdlib", is prepared once in `cache`.
    """
    from arriero.data.dataset import Dataset

    if str(path).startswith("builtin:"):
        from arriero.data.prepare.builtin import prepare_builtin

        path = prepare_builtin(str(path), Path(cache))
    return Dataset(path)
