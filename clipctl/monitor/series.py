"""A curve of bounded size: neighbouring values share a bucket that keeps their smallest, largest and mean value, and
a few values spread over all of them, for their median.

This way a million steps fit in a few thousand buckets, and a spike of a single step stays visible.
"""

import bisect
import itertools
import math
import operator
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

MAX_BUCKETS = 1024
MIN_SPAN, AUTO_SPANS = 10, 50
SPREAD = 8  # values that stand for all of a bucket's
TAIL = 1000  # the last values, kept one by one to look at closely
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
    spread: list[float]  # up to SPREAD of them, sorted

    @property
    def median(self) -> float:
        return statistics.median(self.spread)

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def middle(self) -> float:
        return (self.first + self.last) / 2

    def absorb(self, later: "Bucket") -> None:
        self.last = later.last
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)
        self.total += later.total
        self.squares += later.squares
        self.count += later.count
        self.spread = _spread(sorted(self.spread + later.spread))


class Series:
    """Values along an axis, added in order."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self._values_per_bucket = 1
        self._count = 0
        self._tail: deque[tuple[float, float]] = deque(maxlen=TAIL)
        self._smoothed: dict[float | None, list[tuple[float, float]]] = {}  # by span, until the next values

    def extend(self, positions: Sequence[float], values: Sequence[float]) -> None:
        """Add values; non-finite ones are left out."""
        self._smoothed = {}
        if (values and not -LARGEST < min(values) <= max(values) < LARGEST) or not math.isfinite(sum(values)):
            pairs = [pair for pair in zip(positions, values, strict=True) if abs(pair[1]) < LARGEST]
            positions, values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        self._count += len(values)
        self._tail.extend(zip(positions[-TAIL:], values[-TAIL:], strict=True))
        start = self._fill_last(positions, values)
        for begin in range(start, len(values), self._values_per_bucket):
            self.buckets.append(_bucket(positions, values, begin, begin + self._values_per_bucket))
        while len(self.buckets) > MAX_BUCKETS:
            self._halve()

    def smoothed(self, span: float | None = None) -> list[tuple[float, float]]:
        """Positions, and the median of about `span` values around each; None: a fiftieth of all, at least ten.

        As many values before a position as after it count, fewer near the ends: so the curve neither lags behind
        falling values nor runs ahead of them.
        """
        if span not in self._smoothed:
            values = max(MIN_SPAN, self._count / AUTO_SPANS) if span is None else span
            self._smoothed[span] = _medians(self.buckets, round(values / self._values_per_bucket / 2))
        return self._smoothed[span]

    def since(self, position: float) -> "Series":
        """The part from a position on: its last values one by one if that is what is left."""
        part = Series()
        if self._tail and self._tail[0][0] <= position:
            pairs = [pair for pair in self._tail if pair[0] >= position]
            part.extend([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        else:
            part.buckets = [bucket for bucket in self.buckets if bucket.last >= position]
            part._values_per_bucket = self._values_per_bucket
            part._count = sum(bucket.count for bucket in part.buckets)
        return part

    def at(self, position: float) -> float | None:
        """The mean of the bucket at a position, or of the one before; None if it lies before all of them."""
        index = bisect.bisect_right(self.buckets, position, key=lambda bucket: bucket.first) - 1
        return self.buckets[index].mean if index >= 0 else None

    @property
    def latest(self) -> float | None:
        return self._tail[-1][1] if self._tail else None

    def mean_of_last(self, count: int) -> float | None:
        values = [value for _, value in itertools.islice(reversed(self._tail), count)]
        return sum(values) / len(values) if values else None

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
    ordered = sorted(part)
    return Bucket(first, last, ordered[0], ordered[-1], sum(part), squares, len(part), _spread(ordered))


def _spread(ordered: list[float]) -> list[float]:
    """As many of the values as are kept, spread evenly over their ranks: a mean would follow the few large ones."""
    if len(ordered) <= SPREAD:
        return ordered
    ranks = [(number + 0.5) * len(ordered) / SPREAD - 0.5 for number in range(SPREAD)]
    return [(ordered[math.floor(rank)] + ordered[math.ceil(rank)]) / 2 for rank in ranks]


def _medians(buckets: Sequence[Bucket], reach: int) -> list[tuple[float, float]]:
    """The middle of each bucket, and the median of the values of up to `reach` buckets on either side."""
    is_full = any(bucket.count > SPREAD for bucket in buckets)  # then the median of each must do
    values = [[bucket.median] if is_full else bucket.spread for bucket in buckets]
    points = []
    for index, bucket in enumerate(buckets):
        near = min(reach, max(1, min(index, len(buckets) - 1 - index)))
        around = itertools.chain(*values[max(0, index - near) : index + near + 1])
        points.append((bucket.middle, statistics.median(around)))
    return points
