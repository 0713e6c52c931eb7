"""Mistral: Llama with a sliding window. Imports no torch."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from arriero.model.llama.family import LLAMA

if TYPE_CHECKING:
    from arriero.model.name_maps import HuggingFaceNames


def _hf() -> "HuggingFaceNames":
    from arriero.model.mistral.hf_names import NAMES

    return NAMES


MISTRAL = replace(
    LLAMA,
    name="mistral",
    options=("sliding_window",),
    hf=_hf,
    presets=Path(__file__).with_name("presets.toml"),
)
