"""Curves drawn with characters: eight braille dots per cell, or plain ASCII if the terminal supports nothing else."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

LABEL_WIDTH = 7
# The bit of each dot in a braille cell, by column and row.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
# The dots from one row to another, counted from the bottom: by column, then 4 * first + last.
_SPANS = tuple(
    tuple(sum(dots[3 - row] for row in range(first, last + 1)) for first in range(4) for last in range(4))
    for dots in _DOTS
)
_ASCII_BY_DOTS = " .:+*"  # by the number of a cell's rows that are set, in the fuller column


@dataclass(frozen=True)
class Curve:
    """Points from left to right; each spans from `low` to `high`."""

    points: Sequence[tuple[float, float, float]]  # x, low, high
    style: str
    is_joined: bool = True  # otherwise single marks


class Canvas:
    """Dots in cells; a cell takes the colour of whatever was drawn last."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._bits = [[0] * width for _ in range(height)]
        self._marks = [[""] * width for _ in range(height)]
        self._styles = [[""] * width for _ in range(height)]

    def bar(self, x: int, low: int, high: int, style: str) -> None:
        """A vertical bar of dots. x and y count dots from the lower left."""
        column, low, high = x // 2, max(0, low), min(self.height * 4 - 1, high)
        if not 0 <= column < self.width or high < low:
            return
        spans, bottom, top = _SPANS[x % 2], low // 4, high // 4
        for cell in range(bottom, top + 1):
            row = self.height - 1 - cell
            first, last = (low % 4 if cell == bottom else 0), (high % 4 if cell == top else 3)
            self._bits[row][column] |= spans[first * 4 + last]
            self._styles[row][column] = style

    def mark(self, x: int, y: int, character: str, style: str) -> None:
        column, row = x // 2, self.height - 1 - y // 4
        if 0 <= column < self.width and 0 <= row < self.height:
            self._marks[row][column], self._styles[row][column] = character, style

    def lines(self, *, ascii_only: bool) -> list[Text]:
        return [self._line(row, ascii_only) for row in range(self.height)]

    def _line(self, row: int, ascii_only: bool) -> Text:
        """Neighbours of the same colour are joined: a separate piece of text per cell would be most of the work."""
        characters = [self._character(row, column, ascii_only) for column in range(self.width)]
        styles, line, begin = self._styles[row], Text(), 0
        for column in range(1, self.width + 1):
            if column == self.width or styles[column] != styles[begin]:
                line.append("".join(characters[begin:column]), styles[begin])
                begin = column
        return line

    def _character(self, row: int, column: int, ascii_only: bool) -> str:
        if mark := self._marks[row][column]:
            return "o" if ascii_only else mark
        bits = self._bits[row][column]
        if ascii_only:
            return _ASCII_BY_DOTS[min(4, bits.bit_count())]
        return chr(0x2800 + bits) if bits else " "


def chart(
    curves: Sequence[Curve],
    width: int,
    height: int,
    *,
    level: float | None = None,
    log: bool = False,
    ascii_only: bool = False,
    floor: float | None = None,
    x_label: tuple[str, str] = ("", ""),
) -> list[Text]:
    """`height` lines of `width` characters: the curves, a dotted `level`, a scale on the left, labels below."""
    rows, columns = height - 1, width - LABEL_WIDTH - 1
    points = [point for curve in curves for point in curve.points]
    if rows < 2 or columns < 4 or not points:
        return [Text("".ljust(width)) for _ in range(height)]
    x_low, x_high = min(point[0] for point in points), max(point[0] for point in points)
    values = [value for _, *pair in points for value in pair] + ([level] if level is not None else [])
    scale = _Scale(values, rows * 4, log=log, floor=floor)
    canvas = Canvas(columns, rows)
    if level is not None:
        for x in range(0, columns * 2, 4):
            canvas.bar(x, scale(level), scale(level), "dim")
    for curve in curves:
        _draw(canvas, curve, scale, x_low, x_high)
    labels = {0: scale.high, rows // 2: scale.at(0.5), rows - 1: scale.low}
    lines = [
        Text.assemble((f"{number(labels[row]) if row in labels else '':>{LABEL_WIDTH}} ", "dim"), line)
        for row, line in enumerate(canvas.lines(ascii_only=ascii_only))
    ]
    left, right = x_label
    gap = max(1, columns - len(left) - len(right))
    return [*lines, Text(f"{'':>{LABEL_WIDTH}} {left}{' ' * gap}{right}"[:width], style="dim")]


class _Scale:
    """From values to dots, linear or logarithmic."""

    def __init__(self, values: Sequence[float], dots: int, *, log: bool, floor: float | None) -> None:
        self._dots = dots
        positive = [value for value in values if value > 0]
        self._log = log and bool(positive)
        low, high = (min(positive), max(positive)) if self._log else (min(values), max(values))
        if floor is not None and not self._log:
            low = min(low, floor)
        if high <= low:
            low, high = (low / 2, low * 2) if self._log else (low - 0.5, low + 0.5)
        self.low, self.high = low, high

    def __call__(self, value: float) -> int:
        return round(self._share(value) * (self._dots - 1))

    def at(self, share: float) -> float:
        if self._log:
            return math.exp(math.log(self.high) + (math.log(self.low) - math.log(self.high)) * share)
        return self.high + (self.low - self.high) * share

    def _share(self, value: float) -> float:
        low, high = self.low, self.high
        if self._log:
            value, low, high = math.log(max(value, self.low)), math.log(low), math.log(high)
        return (value - low) / (high - low)


def _draw(canvas: Canvas, curve: Curve, scale: _Scale, x_low: float, x_high: float) -> None:
    factor = (canvas.width * 2 - 1) / ((x_high - x_low) or 1.0)
    if not curve.is_joined:
        for x, low, _ in curve.points:
            canvas.mark(round((x - x_low) * factor), scale(low), "◆", curve.style)
        return
    before: tuple[int, int] | None = None
    for column, low, high in _by_column(curve.points, x_low, factor):
        bottom, top = scale(low), scale(high)
        canvas.bar(column, bottom, top, curve.style)
        if before is not None:
            _join(canvas, before, (column, (bottom + top) // 2), curve.style)
        before = (column, (bottom + top) // 2)


def _by_column(
    points: Sequence[tuple[float, float, float]], x_low: float, factor: float
) -> Iterator[tuple[int, float, float]]:
    """Merges the points that share a column of dots into one, from lowest to highest."""
    current, lowest, highest = -1, 0.0, 0.0
    for x, low, high in points:
        column = int((x - x_low) * factor + 0.5)
        if column == current:
            lowest, highest = (low if low < lowest else lowest), (high if high > highest else highest)
            continue
        if current >= 0:
            yield current, lowest, highest
        current, lowest, highest = column, low, high
    if current >= 0:
        yield current, lowest, highest


def _join(canvas: Canvas, start: tuple[int, int], end: tuple[int, int], style: str) -> None:
    """A line between two points, as one bar per column."""
    (x0, y0), (x1, y1) = start, end
    for x in range(x0, x1):
        low, high = sorted(round(y0 + (y1 - y0) * (x + more - x0) / (x1 - x0)) for more in (0, 1))
        canvas.bar(x, low, high, style)


def number(value: float) -> str:
    """At most seven characters."""
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:.1e}" if abs(value) < 0.01 or abs(value) >= 1e6 else f"{value:.0f}"


def gauge(share: float, width: int, *, ascii_only: bool) -> str:
    """A bar of `width` characters, filled up to a share."""
    filled = round(max(0.0, min(1.0, share)) * width)
    full, empty = ("#", "-") if ascii_only else ("█", "░")
    return full * filled + empty * (width - filled)
