"""Steps whose loss or gradient is not finite: one is skipped, several in a row end the run with what is known."""

import math
from typing import Any

from clipctl.errors import TrainingError

LIMIT_IN_A_ROW = 5


class NonfiniteGuard:
    """Sees the row of every step, in order."""

    def __init__(self, in_a_row: int = 0) -> None:
        self.in_a_row = in_a_row
        self._last_finite: dict[str, Any] | None = None
        self._last_skipped: dict[str, Any] = {}

    def see(self, row: dict[str, Any]) -> bool:
        """True if the step made no update."""
        if math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]):
            if not self.is_tripped:
                self.in_a_row, self._last_finite = 0, row
            return False
        if not self.is_tripped:
            self.in_a_row, self._last_skipped = self.in_a_row + 1, row
        return True

    @property
    def is_tripped(self) -> bool:
        return self.in_a_row >= LIMIT_IN_A_ROW

    def error(self, way_out: str) -> TrainingError:
        """What is known about those steps; `way_out` says what can be done."""
        row, before = self._last_skipped, self._last_finite
        gradient = f"gradient norm {row['grad_norm']:.3g}"
        if before:
            gradient += f" (still {before['grad_norm']:.3g} at step {before['step']})"
        return TrainingError(
            f"training diverged: {self.in_a_row} steps in a row, up to step {row['step']}, had a NaN or infinite loss "
            f"or gradient. Loss {row['loss']:.3g}, {gradient}, scale {1 / row['temperature']:.3g}, "
            f"learning rate {row['lr']:.2e}, batch size {row['batch_size']}. No weights were changed",
            way_out,
        )
