"""Timing of operations: warmed up, in blocks, taking turns. No torch; how to wait for a device is passed in."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)

BLOCK_S = 0.015  # a block of operations lasts about this long, so that reading the clock costs nothing
SETTLED = 0.05  # warm once a block improves by less than this share
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
        """The mean without the fastest and the slowest tenth; from three samples on, at least one of each.

        A long run takes the sum of its steps, so forecasts use means: a machine that is slow one second in three is
        neither slow nor fast, whatever its median says.
        """
        count = len(self.samples_s)
        cut = max(count // 10, int(count >= 3))
        return statistics.fmean(sorted(self.samples_s)[cut : count - cut])

    @property
    def min_s(self) -> float:
        return min(self.samples_s)

    @property
    def iqr_s(self) -> float:
        """Interquartile range; 0 if there are too few samples."""
        if len(self.samples_s) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return high - low


class Stopwatch:
    """One operation, called in blocks, with one wait for the device at the end of each."""

    def __init__(self, run: Callable[[], object], wait: Callable[[], None] = lambda: None) -> None:
        self._run, self._wait = run, wait
        self._calls = 1
        self.first_s = 0.0
        self.block_s = 0.0

    def warm(self, limit_s: float) -> list[float]:
        """The first call alone, then blocks until they stop getting faster or time is up. Only the first use warms.

        The second call tells how slow the operation is: the first may touch new memory or compile a kernel, and take
        thirty times as long. For an operation so slow that warming up would cost more than it could change, the second
        call already counts as a sample and is returned.
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
        """Seconds per operation, measured over a block."""
        if self._calls > 1:
            self._run()  # untimed: wakes the threads and refills caches that others have used meanwhile
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
    """Warm all, then sample them in the order A B B A, so that a machine that slows down affects all of them alike.

    `limit_s` is per operation; only one too slow for `min_samples` within it takes longer. One too slow for all rounds
    sits out some of them at even intervals, so that its samples are spread over the whole time too. `before_round` is
    called with the name whose turn it is.
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
