"""Stretches of a step that a profile shows by name."""

LOSS = "arriero.loss"
OPTIMIZER = "arriero.optimizer"
