"""A curve of bounded size: neighbouring values share a bucket that keeps their smallest, largest and mean value.

So a million steps fit in a few thousand buckets, and a spike of a single step stays visible.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

MAX_BUCKETS = 1024
LARGEST = 1e100  # anything larger is not a measurement, and its square overflows


@dataclass(slots=True)
class Bucket:
    first: float  # position on the axis where it begins, and where it ends
    last: float
    low: float
    high: float
    total: float
    squares: float
    count: int

    @property
    def mean(self) -> float:
        return self.total / self.count

    def absorb(self, later: "Bucket") -> None:
        self.last = later.last
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)
        self.total += later.total
        self.squares += later.squares
        self.count += later.count


class Series:
    """Values along an axis, added in order."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self._values_per_bucket = 1
        self._smoothed: dict[float, list[tuple[float, float]]] = {}  # by span, until the next values

    def extend(self, positions: Sequence[float], values: Sequence[float]) -> None:
        """Add values; non-finite ones are left out."""
        self._smoothed = {}
        if (values and not -LARGEST < min(values) <= max(values) < LARGEST) or not math.isfinite(sum(values)):
            pairs = [pair for pair in zip(positions, values, strict=True) if abs(pair[1]) < LARGEST]
            positions, values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        start = self._fill_last(positions, values)
        for begin in range(start, len(values), self._values_per_bucket):
            self.buckets.append(_bucket(positions, values, begin, begin + self._values_per_bucket))
        while len(self.buckets) > MAX_BUCKETS:
            self._halve()

    def smoothed(self, span: float) -> list[tuple[float, float]]:
        """Positions and the exponential mean over about `span` values, corrected for the bias of a start at zero."""
        if span in self._smoothed:
            return self._smoothed[span]
        points, mean, weight = [], 0.0, 0.0
        for bucket in self.buckets:
            keep = math.exp(-bucket.count / span) if span > 0 else 0.0
            mean, weight = keep * mean + (1 - keep) * bucket.mean, keep * weight + (1 - keep)
            points.append((bucket.last, mean / weight))
        self._smoothed[span] = points
        return points

    def _fill_last(self, positions: Sequence[float], values: Sequence[float]) -> int:
        """Fill up the last bucket if it is not full; returns how many values that took."""
        room = self._values_per_bucket - self.buckets[-1].count if self.buckets else 0
        taken = min(max(0, room), len(values))
        if taken:
            self.buckets[-1].absorb(_bucket(positions, values, 0, taken))
        return taken

    def _halve(self) -> None:
        """Merge neighbouring buckets in pairs."""
        for left, right in zip(self.buckets[::2], self.buckets[1::2], strict=False):
            left.absorb(right)
        self.buckets = self.buckets[::2]
        self._values_per_bucket *= 2


def _bucket(positions: Sequence[float], values: Sequence[float], begin: int, end: int) -> Bucket:
    part = values[begin:end]
    first, last = positions[begin], positions[begin + len(part) - 1]
    squares = sum(map(operator.mul, part, part))
    return Bucket(first, last, min(part), max(part), sum(part), squares, len(part))
