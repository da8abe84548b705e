"""Line charts and heat strips as SVG text, with the values beside them for a page to show on hover. No torch."""

import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 26
Words = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    style: int = 0  # its colour's number
    dashed: bool = False
    band: Sequence[tuple[float, float, float]] = field(default=())  # low and high around it


def compact(value: float) -> str:
    """As an axis shows it: 1.2k, 3.4M, 0.05, 1.4e-5."""
    if 0 < abs(value) < 1e-3:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    value = float(f"{value:.4g}")  # rounded first: 9,999.7 is 10k
    if not abs(value) >= 1e4:  # NaN too
        return f"{value:.4g}"
    value = float(f"{value:.3g}")
    unit, letter = next((pair for pair in ((1e9, "B"), (1e6, "M")) if abs(value) >= pair[0]), (1e3, "k"))
    return f"{value / unit:.3g}{letter}"


def percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def size(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers between two values."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [(first + number) * step for number in range(max(1, min(count, 12)))]


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    words: Words = compact,
    x_words: Words = compact,
    x_name: str = "step",
    low: float | None = None,
    reference: tuple[float, str] | None = None,
) -> str:
    """A figure, or empty text if there is nothing to draw. `reference` is a level to compare with, and its name."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    ys += [value for line in lines for _, *both in line.band for value in both]
    ys += [reference[0]] if reference else []
    x_low, x_high = min(xs), max(xs)
    y_low, y_high = min(ys) if low is None else low, max(ys)
    if not y_high > y_low:
        y_low, y_high = (y_low if low is not None else y_low - 0.5 * abs(y_low)), y_high + 0.5 * (abs(y_high) or 1)
    margin = 0.04 * (y_high - y_low)
    y_low, y_high = (y_low if low is not None else y_low - margin), y_high + margin

    def across(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((x - x_low) / (x_high - x_low) if x_high > x_low else 0.5)

    def down(y: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (y - y_low) / (y_high - y_low))

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    for tick in ticks(y_low, y_high):
        parts.append(f'<path class="grid" d="M{LEFT} {down(tick):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{down(tick) + 4:.1f}">{html.escape(words(tick))}</text>')
    for tick in ticks(x_low, x_high):
        parts.append(f'<text class="x" x="{across(tick):.1f}" y="{HEIGHT - 7}">{html.escape(x_words(tick))}</text>')
    if reference:
        level, name = reference
        parts.append(f'<path class="reference" d="M{LEFT} {down(level):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="note" x="{WIDTH - RIGHT}" y="{down(level) - 4:.1f}">{html.escape(name)}</text>')
    for line in lines:
        if line.band:
            upper = "L".join(f"{across(x):.1f} {down(high):.1f}" for x, _, high in line.band)
            lower = "L".join(f"{across(x):.1f} {down(below):.1f}" for x, below, _ in reversed(line.band))
            parts.append(f'<path class="band c{line.style}" d="M{upper}L{lower}Z"/>')
    for line in lines:
        path = "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y in line.points)
        dashed = " dashed" if line.dashed else ""
        if len(line.points) == 1:
            x, y = line.points[0]
            parts.append(f'<circle class="dot c{line.style}" cx="{across(x):.1f}" cy="{down(y):.1f}" r="3"/>')
        else:
            parts.append(f'<path class="line c{line.style}{dashed}" d="M{path}"/>')
    parts.append('<path class="cursor" d=""/></svg>')
    values = {
        "x": [x_low, x_high],
        "xName": x_name,
        "lines": [
            {
                "name": line.name,
                "style": line.style,
                "x": [round(x, 3) for x, _ in line.points],
                "y": [_short(y) for _, y in line.points],
                "words": [words(y) for _, y in line.points],
            }
            for line in lines
        ],
    }
    data = html.escape(json.dumps(values, separators=(",", ":")), quote=True)
    legend = "".join(
        f'<span class="c{line.style}{" dashed" if line.dashed else ""}">{html.escape(line.name)}</span>'
        for line in lines
    )
    return (
        f'<figure class="chart" data-values="{data}"><figcaption>{html.escape(title)}</figcaption>{"".join(parts)}'
        f'<div class="legend">{legend}</div><div class="tip" hidden></div></figure>'
    )


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def heat_strip(title: str, rows: Sequence[tuple[str, Sequence[tuple[float, float]]]], x_name: str = "epoch") -> str:
    """One row of cells for each name, brighter for larger values, on one logarithmic scale for all rows."""
    values = [value for _, points in rows for _, value in points if value > 0 and math.isfinite(value)]
    if not values:
        return ""
    low, high = math.log(min(values)), math.log(max(values))
    columns = max(len(points) for _, points in rows)
    label, cell, row_height = 150, 560 / columns, 15
    height = len(rows) * row_height + 20
    parts = [f'<svg viewBox="0 0 {label + 570} {height}" role="img" aria-label="{html.escape(title)}">']
    for number, (name, points) in enumerate(rows):
        top = number * row_height
        parts.append(f'<text class="block" x="{label - 6}" y="{top + 11}">{html.escape(name)}</text>')
        for column, (epoch, value) in enumerate(points):
            is_number = value > 0 and math.isfinite(value)
            share = (math.log(value) - low) / (high - low) if is_number and high > low else 0.0
            tip = html.escape(f"{name}, {x_name} {epoch:g}: {value:.3g}")
            place = f'x="{label + column * cell:.2f}" y="{top}" width="{cell + 0.3:.2f}" height="{row_height - 2}"'
            parts.append(f'<rect {place} fill-opacity="{0.06 + 0.94 * share:.3f}"><title>{tip}</title></rect>')
    first, last = rows[0][1][0][0], rows[0][1][-1][0]
    parts.append(f'<text class="x" x="{label + 20}" y="{height - 4}">{x_name} {first:g}</text>')
    parts.append(f'<text class="x" x="{label + 540}" y="{height - 4}">{last:g}</text></svg>')
    return f'<figure class="heat"><figcaption>{html.escape(title)}</figcaption>{"".join(parts)}</figure>'
