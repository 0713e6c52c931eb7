"""Stretches of a step that a profile shows by name."""

OPTIMIZER = "arriero.optimizer"
