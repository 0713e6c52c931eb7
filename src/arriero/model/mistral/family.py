"""Mistral: Llama with a sliding window. Imports no torch."""

from dataclasses import replace
from pathlib import Path

from arriero.model.family import lazily
from arriero.model.llama.family import LLAMA

MISTRAL = replace(
    LLAMA,
    name="mistral",
    options=("sliding_window",),
    hf=lazily("arriero.model.mistral.hf_names:NAMES"),
    presets=Path(__file__).with_name("presets.toml"),
)
