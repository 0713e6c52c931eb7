"""Arriero: Llama-class pre-training, from raw text to a finished model."""
