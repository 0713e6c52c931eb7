"""Adapters: small trained modules in a frozen model, as data and as the modules that replace the model's.

Settings of an adapter have `tensors(own)`, its tensors by name on the meta device; `add(model, blocks)`,
which replaces modules of a model or a pipeline stage; `merges`, whether its effect can be added to the
weights; and `offset`, by how much it moves the positions of all tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from arriero.model.attention_prompts import (
    GATE,
    PREFIX_K,
    PREFIX_V,
    PROMPT,
    GatedPromptSettings,
    PrefixSettings,
)
from arriero.model.lora import A, B, LoraSettings
from arriero.model.speculator.settings import is_speculator

AdapterSettings = LoraSettings | PrefixSettings | GatedPromptSettings
# sections of the run file, with the key that turns each on
SECTIONS = {"lora": "rank", "prefix": "tokens", "llama_adapter": "tokens"}
_KINDS = {"lora": LoraSettings, "prefix": PrefixSettings, "llama_adapter": GatedPromptSettings}
_MAKE: Mapping[str, Callable[..., AdapterSettings]] = {
    "lora": lambda rank, alpha, dropout, targets: LoraSettings(rank, alpha, dropout, tuple(targets)),
    "prefix": PrefixSettings,
    "llama_adapter": GatedPromptSettings,
}
# the standard deviation of initial values as a function of the width; others are zero at first
_STD: Mapping[str, Callable[[int], float]] = {
    # the variance of PEFT's uniform distribution; B is zero, so that training starts from the model
    A: lambda width: (3 * width) ** -0.5,
    PREFIX_K: lambda _: 0.02,
    PREFIX_V: lambda _: 0.02,
    PROMPT: lambda _: 1.0,
}


def adapter_of(run: Mapping[str, Any]) -> AdapterSettings | None:
    """Return the adapter of a run by the sections of its run file; None if it trains the model itself."""
    for name, switch in SECTIONS.items():
        section = run.get(name) or {}
        if section.get(switch):
            return _MAKE[name](**section)
    return None


def keys_of(settings: AdapterSettings) -> dict[str, Any]:
    """Return the keys of a run file that give an adapter these settings."""
    section = next(name for name, kind in _KINDS.items() if isinstance(settings, kind))
    return {f"{section}.{key}": value for key, value in asdict(settings).items() if value is not None}


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter or a speculator, not to the model itself."""
    return name.endswith((A, B, PREFIX_K, PREFIX_V, PROMPT, GATE)) or is_speculator(name)


def initial_std(name: str, width: int) -> float:
    """Return the standard deviation of the initial values of an adapter's parameter."""
    return next((std(width) for end, std in _STD.items() if name.endswith(end)), 0.0)
