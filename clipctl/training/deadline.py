"""A run with a time limit: its number of steps follows its actual pace. No torch."""

import time
from collections.abc import Callable

LOOKS = (1 / 8, 1 / 4, 1 / 2, 3 / 4)  # of a run's steps, after which their number is corrected
TOLERATED = 0.02  # what is not worth correcting
LEAVING_S = 1.0  # from the last step to the prompt


class Deadline:
    """Keeps a run to its time: the first seconds of a run may be faster than the rest, on a laptop that gets hot or a
    machine that others use. Uses `time.monotonic` or a substitute for it."""

    def __init__(self, ends_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ends_s, self._clock = ends_s - LEAVING_S, clock
        self._started_s = clock()
        self._looks = list(LOOKS)

    def corrected_steps(self, step: int, total_steps: int) -> int | None:
        """How many steps there should be in all, at the pace so far; None while all is well, and between checks."""
        if not self._looks or step < self._looks[0] * total_steps:
            return None
        self._looks = [look for look in self._looks if step < look * total_steps]
        now_s = self._clock()
        steps_left = (self._ends_s - now_s) / (now_s - self._started_s) * step
        corrected = max(step + 1, round(step + steps_left))
        return corrected if abs(corrected / total_steps - 1) > TOLERATED else None
