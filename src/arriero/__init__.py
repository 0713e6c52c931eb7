"""Arriero: Llama-class pre-training, from raw text to a finished model."""

__version__ = "0.1.0"
