"""Timing what really ran: warmed up, in blocks, taking turns. No torch; how to wait for a device is passed in."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)

BLOCK_S = 0.015  # a block of operations lasts about this long, so that reading the clock costs nothing
SETTLED = 0.05  # warm when a block improves by less than this share
MAX_WARM_BLOCKS = 10
MAX_SAMPLES = 15
MIN_SAMPLES = 3


@dataclass(frozen=True)
class Timing:
    """Seconds of one operation: the first call, and samples of warm blocks."""

    first_s: float
    samples_s: tuple[float, ...]

    def __add__(self, later: "Timing") -> "Timing":
        return Timing(self.first_s, self.samples_s + later.samples_s)

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def mean_s(self) -> float:
        """Without the fastest and the slowest tenth, of three or more at least one each.

        A long run takes its steps' sum, so forecasts are made of means: a machine that is slow one second in three is
        neither slow nor fast, as its median would say.
        """
        count = len(self.samples_s)
        cut = max(count // 10, int(count >= 3))
        return statistics.fmean(sorted(self.samples_s)[cut : count - cut])

    @property
    def min_s(self) -> float:
        return min(self.samples_s)

    @property
    def iqr_s(self) -> float:
        """Between the quartiles; 0 where there are too few samples to have any."""
        if len(self.samples_s) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return high - low


class Stopwatch:
    """One operation, called in blocks with one wait for the device at the end of each."""

    def __init__(self, run: Callable[[], object], wait: Callable[[], None] = lambda: None) -> None:
        self._run, self._wait = run, wait
        self._calls = 1
        self.first_s = 0.0
        self.block_s = 0.0

    def warm(self, limit_s: float) -> list[float]:
        """The first call alone; then blocks until they stop getting faster, or the time is up. Once is enough.

        How slow the operation is, the second call says: the first may touch new memory or compile a kernel, and take
        thirty times as long. Of what is so slow that warming up would take longer than it could change, the second
        call is a sample already, and returned.
        """
        if self.first_s:
            return []
        self.first_s = self._timed(1)
        started = time.perf_counter()
        self.block_s = last = self._timed(1)
        if last >= limit_s / 2:
            return [last]
        self._calls = max(1, round(BLOCK_S / max(last, 1e-9)))
        if self._calls > 1:
            last = self.sample()
        for _ in range(MAX_WARM_BLOCKS):
            if time.perf_counter() - started + self.block_s > limit_s:
                break
            now = self.sample()
            if now > (1 - SETTLED) * last:
                break
            last = now
        return []

    def sample(self) -> float:
        """Seconds of one operation in a block of them."""
        if self._calls > 1:
            self._run()  # untimed: wakes the threads and fills the caches that others have used meanwhile
        self.block_s = self._timed(self._calls)
        return self.block_s / self._calls

    def _timed(self, calls: int) -> float:
        self._wait()
        started = time.perf_counter()
        for _ in range(calls):
            self._run()
        self._wait()
        return time.perf_counter() - started


def time_in_turns(
    works: Mapping[Name, Stopwatch],
    *,
    limit_s: float,
    before_round: Callable[[Name], None] = lambda name: None,
    min_samples: int = MIN_SAMPLES,
) -> dict[Name, Timing]:
    """Warm all, then sample them A B B A, so that a machine that gets slower or faster does so for all of them alike.

    `limit_s` is for each; only what is too slow for `min_samples` takes longer. What is too slow for all rounds sits
    some of them out, evenly, so that its samples are spread over the whole time too. `before_round` is told whose turn
    it is.
    """
    samples: dict[Name, list[float]] = {}
    shares = {}
    for name, work in works.items():
        before_round(name)
        samples[name] = work.warm(limit_s / 2)
        affordable = max(min_samples, int(limit_s / 2 / max(work.block_s, 1e-9)))
        shares[name] = min(MAX_SAMPLES, affordable - len(samples[name])) / MAX_SAMPLES
    order = list(works)
    for number in range(MAX_SAMPLES):
        for name in order:
            if int((number + 1) * shares[name] + 1e-9) > int(number * shares[name] + 1e-9):
                before_round(name)
                samples[name].append(works[name].sample())
        order.reverse()
    return {name: Timing(works[name].first_s, tuple(samples[name])) for name in works}
