"""A loss scale that follows the gradients: fp16 loses those below 6e-8, and overflows above 65504."""

from dataclasses import dataclass

from arriero.errors import UserError

_FIRST = 2.0**16
_SMALLEST = 2.0**-14
_GROWS_AFTER = 2000


@dataclass
class LossScale:
    value: float = _FIRST
    good_steps: int = 0

    def saw(self, finite: bool) -> None:
        """Halve the scale after an overflow; double it after 2000 updates without one."""
        if not finite and self.value < _SMALLEST:
            raise UserError(
                "fp16 gradients overflow at any scale of the loss",
                "set precision.compute to 'bf16' or 'fp32', or lower optim.lr",
            )
        if not finite:
            self.value, self.good_steps = self.value / 2, 0
            return
        self.good_steps += 1
        if self.good_steps == _GROWS_AFTER:
            self.value, self.good_steps = self.value * 2, 0
