"""How far a benchmark is, and how long the rest will take. No torch."""

import time
from collections.abc import Callable

Tell = Callable[[str], None]
TELLING_SHARE = 0.05  # of the work: what comes before is slower than the rest


class Countdown:
    """The timings that are left, from what each is expected to take and how long earlier ones really took."""

    def __init__(self, tell: Tell, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock, self._started_s = tell, clock, 0.0
        self.done, self._timings = 0, 0
        self._done_s, self._expected_s = 0.0, 0.0

    def expect(self, timings: int, seconds_each: float) -> None:
        """Expect so many more timings, or, if negative, fewer."""
        self._timings += timings
        self._expected_s += timings * seconds_each

    def tick(self, seconds: float) -> None:
        """One more timing begins, expected to take so many seconds."""
        self._started_s = self._started_s or self._clock()
        left = ""
        if self._done_s > TELLING_SHARE * self._expected_s:
            pace = (self._clock() - self._started_s) / self._done_s
            left = f", about {max(0.0, self._expected_s - self._done_s) * pace:.0f} s left"
        self.done += 1
        self._done_s += seconds
        self._tell(f"measuring: {self.done:,} of {max(self.done, self._timings):,} timings{left}")
