"""Train like `arriero train`, but with a batch whose loss is not finite.

python spoiled.py arriero train run.toml --set run.name=demo
"""

import sys
from pathlib import Path

from arriero.train.hooks import Hook

BAD = 11


class SpoilBatch(Hook):
    """Make the loss of the batch of one step not finite, or ten times as large, whenever it is computed."""

    on_all_ranks = True

    def __init__(self, step=BAD, factor=float("nan"), cause=None):
        self._step, self._factor, self._cause = step, factor, cause or step

    def on_start(self, session):
        computed, bad = session.passes.gradients, session.timeline.samples_after(self._step - 1)
        cause = session.timeline.samples_after(self._cause - 1)
        trained = set()

        def spoilt(batch, scale):
            trained.add(batch.first_sample)
            loss = computed(batch, scale)
            return loss * self._factor if batch.first_sample == bad and cause in trained else loss

        session.passes.gradients = spoilt


def main(run_file: str, *words: str) -> None:
    from arriero.config.load import load_run
    from arriero.model.presets import expand
    from arriero.train.run import run

    sets = [word for word in words if word != "--set"]
    run(load_run(Path(run_file), sets, expand).config, [SpoilBatch()])


if __name__ == "__main__":
    main(*sys.argv[3:])
