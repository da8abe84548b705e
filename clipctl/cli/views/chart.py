"""Curves drawn with characters: eight braille dots per cell, or plain ASCII if the terminal supports nothing else."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from clipctl.cli.views.palette import Gradient, shade
from clipctl.report.charts import compact, ticks

Style = str | Gradient

LABEL_WIDTH, LABEL_TRIES = 7, 5
# The bit of each dot in a braille cell, by column and row.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
# The dots from one row to another, counted from the bottom: by column, then 4 * first + last.
_SPANS = tuple(
    tuple(sum(dots[3 - row] for row in range(first, last + 1)) for first in range(4) for last in range(4))
    for dots in _DOTS
)
MARK = "◆"
LETTERS_APART = 3  # of a curve's length
_ASCII_BY_DOTS = " .:+*"  # by the number of a cell's rows that are set, in the fuller column


@dataclass(frozen=True)
class Curve:
    """Points from left to right; each spans from `low` to `high`."""

    points: Sequence[tuple[float, float, float]]  # x, low, high
    style: Style  # a gradient runs from the bottom of the chart to its top
    is_joined: bool = True  # otherwise single marks
    is_area: bool = False  # what lies between the lows and the highs is filled
    letter: str = ""  # along the curve, to tell it from others without colours


@dataclass(frozen=True)
class Axes:
    """How a chart is scaled and labelled."""

    log: bool = False
    floor: float | None = None  # the scale goes at least down to this
    ceiling: float | None = None  # and at least up to this
    words: Callable[[float], str] = compact
    x_words: Callable[[float], str] = compact
    level: float | None = None  # a dotted line, unless it is far from the curves
    cursor: float | None = None  # an upright line at this x
    ascii_only: bool = False
    dim: str = "dim"


class Canvas:
    """Dots in cells; a cell takes the colour of whatever was drawn last."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._bits = [[0] * width for _ in range(height)]
        self._marks = [[""] * width for _ in range(height)]
        self._styles = [[""] * width for _ in range(height)]

    def bar(self, x: int, low: int, high: int, style: Style) -> None:
        """A vertical bar of dots. x and y count dots from the lower left."""
        column, low, high = x // 2, max(0, low), min(self.height * 4 - 1, high)
        if not 0 <= column < self.width or high < low:
            return
        spans, bottom, top = _SPANS[x % 2], low // 4, high // 4
        for cell in range(bottom, top + 1):
            row = self.height - 1 - cell
            first, last = (low % 4 if cell == bottom else 0), (high % 4 if cell == top else 3)
            self._bits[row][column] |= spans[first * 4 + last]
            self._styles[row][column] = self._colour(style, cell)

    def mark(self, x: int, y: int, character: str, style: Style) -> None:
        column, row = x // 2, self.height - 1 - y // 4
        if 0 <= column < self.width and 0 <= row < self.height:
            self._marks[row][column], self._styles[row][column] = character, self._colour(style, y // 4)

    def _colour(self, style: Style, cell: int) -> str:
        return style if isinstance(style, str) else shade(style, (cell + 0.5) / self.height)

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
            return "o" if ascii_only and mark == MARK else mark
        bits = self._bits[row][column]
        if ascii_only:
            return _ASCII_BY_DOTS[min(4, bits.bit_count())]
        return chr(0x2800 + bits) if bits else " "


def chart(curves: Sequence[Curve], width: int, height: int, axes: Axes = Axes()) -> list[Text]:  # noqa: B008 (frozen)
    """`height` lines of `width` characters: the curves, a scale on the left, where they begin and end below."""
    rows, columns = height - 1, width - LABEL_WIDTH - 1
    points = [point for curve in curves for point in curve.points]
    if rows < 2 or columns < 4 or not points:
        words = "nothing yet" if height > 0 and width > 12 and not points else ""
        return [Text(words.center(width) if row == height // 2 else "".ljust(width), axes.dim) for row in range(height)]
    x_low, x_high = min(point[0] for point in points), max(point[0] for point in points)
    level = shown_level(curves, axes)
    values = [point[1] for point in points] + [point[2] for point in points]
    scale = _Scale(values + ([level] if level is not None else []), rows * 4, axes)
    canvas = Canvas(columns, rows)
    if level is not None:
        for x in range(0, columns * 2, 4):
            canvas.bar(x, scale(level), scale(level), axes.dim)
    for curve in curves:
        _draw(canvas, curve, scale, x_low, x_high)
    for curve in curves:  # on top of all
        _draw_letters(canvas, curve, scale, x_low, x_high)
    if axes.cursor is not None and x_low <= axes.cursor <= x_high:
        canvas.bar(round((axes.cursor - x_low) * _factor(canvas, x_low, x_high)), 0, rows * 4, axes.dim)
    labels = _labels(scale, rows, axes)
    lines = [
        Text.assemble((f"{labels.get(row, ''):>{LABEL_WIDTH}}{'┤' if row in labels else ' '}", axes.dim), line)
        for row, line in enumerate(canvas.lines(ascii_only=axes.ascii_only))
    ]
    return [*lines, _x_line(x_low, x_high, columns, axes)]


def shown_level(curves: Sequence[Curve], axes: Axes) -> float | None:
    """The level, if it is no farther from the curves than they are apart: farther away, it would flatten them."""
    if axes.level is None or not any(curve.points for curve in curves):
        return None
    low = min(point[1] for curve in curves for point in curve.points)
    high = max(point[2] for curve in curves for point in curve.points)
    return axes.level if 2 * low - high <= axes.level <= 2 * high - low else None


def _labels(scale: "_Scale", rows: int, axes: Axes) -> dict[int, str]:
    """Which rows get a label: round values, a few rows apart; two if there is room, because one is no scale."""
    about = max(1, min(6, rows // 2 - 1))
    found: dict[int, str] = {}
    for more in range(LABEL_TRIES):
        labels = _labels_at(scale.ticks(about + more), scale, rows, axes)
        if len(labels) > len(found):
            found = labels
        if len(found) > 1:
            break
    return found


def _labels_at(values: Sequence[float], scale: "_Scale", rows: int, axes: Axes) -> dict[int, str]:
    found: dict[int, str] = {}
    for value in values:
        row = rows - 1 - scale(value) // 4
        words = axes.words(value)
        if 0 <= row < rows and len(words) <= LABEL_WIDTH and not {row - 1, row, row + 1} & found.keys():
            found[row] = words
    return found


def log_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers between two positive values that are some way apart: powers of ten, or 1, 2 and 5 times them."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first >= about:
        return [10.0**power for power in range(first, last + 1, math.ceil((last - first + 1) / about))]
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in factors]
        found = [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if 2 <= len(found) <= about + 1:
            return found
    return ticks(low, high, about)


def _x_line(x_low: float, x_high: float, columns: int, axes: Axes) -> Text:
    """Where the curves begin, their middle if there is room, and where they end."""
    left, middle, right = (axes.x_words(x_low + (x_high - x_low) * share) for share in (0.0, 0.5, 1.0))
    line = left.ljust(columns - len(right)) + right
    place = (columns - len(middle)) // 2
    if place > len(left) + 2 and place + len(middle) + 2 < columns - len(right):
        line = line[:place] + middle + line[place + len(middle) :]
    return Text(f"{'':>{LABEL_WIDTH}} {line[:columns]}", axes.dim)


class _Scale:
    """From values to dots, linear or logarithmic."""

    def __init__(self, values: Sequence[float], dots: int, axes: Axes) -> None:
        self._dots = dots
        positive = [value for value in values if value > 0]
        self.is_log = axes.log and bool(positive)
        low, high = (min(positive), max(positive)) if self.is_log else (min(values), max(values))
        if not self.is_log:
            low = low if axes.floor is None else min(low, axes.floor)
            high = high if axes.ceiling is None else max(high, axes.ceiling)
        if high <= low:
            low, high = (low / 2, low * 2) if self.is_log else (low - abs(low) / 2, low + abs(low) / 2)
        if high <= low:
            low, high = -0.5, 0.5
        self.low, self.high = low, high

    def __call__(self, value: float) -> int:
        return round(self._share(value) * (self._dots - 1))

    def ticks(self, about: int) -> list[float]:
        return (log_ticks if self.is_log else ticks)(self.low, self.high, about)

    def _share(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log(max(value, self.low)), math.log(low), math.log(high)
        return (value - low) / (high - low)


def _draw(canvas: Canvas, curve: Curve, scale: _Scale, x_low: float, x_high: float) -> None:
    factor = _factor(canvas, x_low, x_high)
    if not curve.is_joined or len(curve.points) == 1:  # a line of one point would be a speck
        for x, low, _ in curve.points:
            canvas.mark(round((x - x_low) * factor), scale(low), MARK, curve.style)
        return
    before: tuple[int, int, int] | None = None
    for column, low, high in _by_column(curve.points, x_low, factor):
        bottom, top = scale(low), scale(high)
        canvas.bar(column, bottom, top, curve.style)
        if before is not None and curve.is_area:
            _fill(canvas, before, (column, bottom, top), curve.style)
        elif before is not None:
            _join(canvas, (before[0], (before[1] + before[2]) // 2), (column, (bottom + top) // 2), curve.style)
        before = (column, bottom, top)


def _draw_letters(canvas: Canvas, curve: Curve, scale: _Scale, x_low: float, x_high: float) -> None:
    """A curve's letter at its end, and twice on the way there."""
    if not curve.letter or not curve.points:
        return
    factor, last = _factor(canvas, x_low, x_high), len(curve.points) - 1
    for part in range(1, LETTERS_APART + 1):
        x, low, high = curve.points[last * part // LETTERS_APART]
        canvas.mark(round((x - x_low) * factor), scale((low + high) / 2), curve.letter, curve.style)


def _factor(canvas: Canvas, x_low: float, x_high: float) -> float:
    """Dots per unit of x."""
    return (canvas.width * 2 - 1) / ((x_high - x_low) or 1.0)


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


def _join(canvas: Canvas, start: tuple[int, int], end: tuple[int, int], style: Style) -> None:
    """A line between two points, as one bar per column."""
    (x0, y0), (x1, y1) = start, end
    for x in range(x0, x1):
        low, high = sorted(round(y0 + (y1 - y0) * (x + more - x0) / (x1 - x0)) for more in (0, 1))
        canvas.bar(x, low, high, style)


def _fill(canvas: Canvas, start: tuple[int, int, int], end: tuple[int, int, int], style: Style) -> None:
    """The columns between two bars."""
    for x in range(start[0] + 1, end[0]):
        share = (x - start[0]) / (end[0] - start[0])
        low, high = (round(left + (right - left) * share) for left, right in zip(start[1:], end[1:], strict=True))
        canvas.bar(x, low, high, style)


# --- bars -----------------------------------------------------------------------------------------------------

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = " ▁▂▃▄▅▆▇█"


def gauge(share: float, width: int, *, ascii_only: bool) -> str:
    """A bar of `width` characters, filled up to a share, to an eighth of a character."""
    share = max(0.0, min(1.0, share))
    if ascii_only:
        filled = round(share * width)
        return "#" * filled + "-" * (width - filled)
    eighths = round(share * width * 8)
    bar = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return bar + "░" * (width - len(bar))


def meter(share: float, width: int, gradient: Gradient, empty: str, *, ascii_only: bool) -> Text:
    """A bar whose colour says how full it is, changing along the way."""
    bar, line = gauge(share, width, ascii_only=ascii_only), Text()
    for place, character in enumerate(bar):
        line.append(character, empty if character in "░-" else shade(gradient, place / max(1, width - 1)))
    return line


def sparkline(values: Sequence[float], width: int, gradient: Gradient, top: float, *, ascii_only: bool) -> Text:
    """The last `width` values as bars of eighths, coloured by their height."""
    line = Text(" " * max(0, width - len(values)))
    for value in values[-width:]:
        share = max(0.0, min(1.0, value / top)) if top > 0 and math.isfinite(value) else 0.0
        character = " .:-=+*#@"[round(share * 8)] if ascii_only else _LEVELS[max(1, round(share * 8))]
        line.append(character, shade(gradient, share))
    return line


def stacked(shares: Sequence[float], styles: Sequence[str], width: int, characters: Sequence[str]) -> Text:
    """A bar in parts, one after the other."""
    line, place = Text(), 0.0
    for share, style, character in zip(shares, styles, characters, strict=False):
        cells = round((place + share) * width) - round(place * width)
        line.append(character * cells, style)
        place += share
    return line
