"""Frames around parts of a screen, and parts beside each other: lines of an exact width."""

import itertools
import math
from collections.abc import Sequence

from rich.text import Text

from clipctl.cli.views import units
from clipctl.cli.views.palette import Palette

ASCII = str.maketrans("–─│╭╮╰╯┤◆●…×→°✓✗▲▼·▸↵←", "--|++++|o*.x> vx^v.><<")


def framed(title: str, body: Sequence[Text], width: int, height: int, palette: Palette, note: str = "") -> list[Text]:
    """`height` lines: a frame with a title and a note in its upper edge, around as many lines as fit."""
    room = max(1, width - 6)
    title = title if len(title) <= room else f"{title[: room - 1]}…"
    note = note if len(title) + len(note) + 2 <= room else ""
    top = styled("╭─ ", palette.frame)
    top.append(title, palette.title)
    dashes = width - len(title) - len(note) - (7 if note else 6)
    top.append(f" {'─' * max(0, dashes)}", palette.frame)
    if note:
        top.append(f" {note}", palette.dim).append(" ", palette.frame)
    top.append("─╮" if not note else "╮", palette.frame)
    lines = [top]
    for row in range(height - 2):
        line = styled("│", palette.frame)
        line.append_text(padded(body[row] if row < len(body) else Text(), width - 2))
        lines.append(line.append("│", palette.frame))
    return [*lines, Text(f"╰{'─' * (width - 2)}╯", palette.frame)]


def styled(words: str, style: str) -> Text:
    """A piece of text in a style that does not spread to what is added to it."""
    return Text().append(words, style)


def padded(line: Text, width: int) -> Text:
    """A copy of exactly `width` cells."""
    line = line.copy()
    line.truncate(width)
    line.pad_right(width - line.cell_len)
    return line


def beside(*columns: Sequence[Text]) -> list[Text]:
    """Columns of lines, next to each other. Each has lines of one width."""
    height = max(len(column) for column in columns)
    widths = [max((line.cell_len for line in column), default=0) for column in columns]
    lines = []
    for row in range(height):
        line = Text()
        for column, width in zip(columns, widths, strict=True):
            line.append_text(padded(column[row] if row < len(column) else Text(), width))
        lines.append(line)
    return lines


def shares_of(total: int, *weights: float) -> list[int]:
    """A length in whole parts by weight; together they are the whole."""
    places = [0.0]
    for weight in weights:
        places.append(places[-1] + weight)
    cuts = [round(total * place / places[-1]) for place in places]
    return [right - left for left, right in itertools.pairwise(cuts)]


def wrapped(texts: Sequence[Text], width: int, limit: int) -> list[Text]:
    from rich.console import Console

    console = Console(width=max(1, width), legacy_windows=False)
    return [line for text in texts for line in text.wrap(console, max(1, width))][:limit]


def fitted(lines: Sequence[Text], width: int, height: int, *, ascii_only: bool) -> list[Text]:
    """Exactly `height` lines of at most `width` characters."""
    found = []
    for line in lines[:height]:
        if line.cell_len > width:
            line = line.copy()
            line.truncate(width, overflow="ellipsis" if width > 1 else "crop")
        if ascii_only:
            line = line.copy()
            line.plain = line.plain.translate(ASCII).encode("ascii", "replace").decode()
        found.append(line)
    return found + [Text("")] * (height - len(found))


def value(number: float | None, form: str) -> str:
    return "–" if number is None or not math.isfinite(number) else f"{number:{form}}"


def size(count_bytes: float | None) -> str:
    return units.size(count_bytes) if count_bytes is not None and math.isfinite(count_bytes) else "–"
