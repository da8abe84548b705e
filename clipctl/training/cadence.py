"""One word decides how often checkpoints are written."""

import time

from clipctl.config.quantities import Interval


class SaveCadence:
    """`due` says whether it is time. Minutes are counted from the last try to save, whatever it was made for."""

    def __init__(self, every: Interval) -> None:
        self._every = every
        self._tried = time.monotonic()

    def due(self, *, step: int, epoch: int | None = None) -> bool:
        """At the end of an epoch `epoch` is given, the first is 1; within one it is None."""
        match self._every.unit:
            case "e":
                return epoch is not None and epoch % self._every.count == 0
            case "s":
                return step % self._every.count == 0
            case "m":
                return time.monotonic() - self._tried >= 60 * self._every.count

    def tried(self) -> None:
        self._tried = time.monotonic()
