"""Frames around parts of a screen, and parts beside each other: lines of an exact width."""

import itertools
import math
from collections.abc import Callable, Sequence

from rich.text import Text

from clipctl.cli.views import units
from clipctl.cli.views.palette import Palette

LEAST_FRAMED = 5  # lines: with fewer, a frame would leave next to nothing inside
Size = tuple[int, int]  # width and height
ASCII = str.maketrans("–─│╭╮╰╯┤◆●…×→°✓✗▲▼·▸↵←↑↓█░━┄⣿", "--|++++|o*.x> vx^v.><<^v#.-.*")


def framed(
    title: str,
    body: Sequence[Text],
    width: int,
    height: int,
    palette: Palette,
    *notes: str | Text,
    foot: str = "",
) -> list[Text]:
    """`height` lines: a frame with a title and the first note that fits in its upper edge, around as many lines as
    fit; `foot` stands in the lower edge."""
    room = max(1, width - 6)
    title = title if len(title) <= room else f"{title[: room - 1]}…"
    note = next((one for one in notes if note_fits(title, one, width)), "")
    top = styled("╭─ ", palette.frame)
    top.append(title, palette.title)
    dashes = width - len(title) - len(note) - (7 if note else 6)
    top.append(f" {'─' * max(0, dashes)}", palette.frame)
    if note:
        top.append(" ", palette.frame)
        top.append_text(note if isinstance(note, Text) else styled(note, palette.dim)).append(" ", palette.frame)
    top.append("─╮" if not note else "╮", palette.frame)
    lines = [top]
    for row in range(height - 2):
        line = styled("│", palette.frame)
        line.append_text(padded(body[row] if row < len(body) else Text(), width - 2))
        lines.append(line.append("│", palette.frame))
    bottom = styled("╰", palette.frame)
    if foot and len(foot) + 4 <= width - 2:
        bottom.append("─" * (width - len(foot) - 6), palette.frame).append(f" {foot} ", palette.key).append("──╯")
        bottom.stylize(palette.frame, len(bottom) - 3)
    else:
        bottom.append(f"{'─' * (width - 2)}╯", palette.frame)
    return [*lines, bottom]


def note_fits(title: str, note: str | Text, width: int) -> bool:
    """Whether a frame of this width has room for a note beside its title."""
    return len(title) + len(note) + 2 <= max(1, width - 6)


def headed(
    title: str, body: Sequence[Text], width: int, height: int, palette: Palette, *notes: str | Text, foot: str = ""
) -> list[Text]:
    """`height` lines: the same as `framed`, but only a heading where there is no room for a frame."""
    if height >= LEAST_FRAMED:
        return framed(title, body, width, height, palette, *notes, foot=foot)
    line = padded(styled(title, palette.title), max(0, width - len(foot) - 1))
    line.append(f" {foot}" if foot else "", palette.key)
    return [padded(line, width), *(padded(one, width) for one in body)][:height]


# --- more than fits -------------------------------------------------------------------------------------------


def window(count: int, room: int, scroll: int) -> range:
    """Which of `count` things are shown if `room` of them fit; scrolling past the end leads back to the beginning."""
    first = scroll % max(1, count - room + 1)
    return range(first, min(count, first + max(0, room)))


def hidden(above: int, below: int) -> str:
    """How many are not shown, and the keys that lead there."""
    if above > 0 and below > 0:
        return f"{above} more ↑, {below} ↓"
    return f"{above} more ↑" if above > 0 else f"{below} more ↓" if below > 0 else ""


def grid(
    panels: Sequence[Callable[[int, int, str], list[Text]]], columns: int, least_height: int, size: Size, scroll: int
) -> list[Text]:
    """Panels in rows, as many rows as fit; each is drawn at its width and height, the last one with what is hidden."""
    width, height = size
    all_rows = -(-len(panels) // columns)
    rows = window(all_rows, max(1, min(all_rows, height // least_height)), scroll)
    end, lines = min(len(panels), rows.stop * columns), list[Text]()
    foot = hidden(rows.start * columns, len(panels) - end)
    for row, row_height in zip(rows, shares_of(height, *(1,) * len(rows)), strict=True):
        part = panels[row * columns : min(end, (row + 1) * columns)]
        widths = shares_of(width, *(1,) * len(part))
        feet = [""] * (len(part) - 1) + [foot if row == rows[-1] else ""]
        drawn = zip(part, widths, feet, strict=True)
        lines += beside(*(panel(share, row_height, words) for panel, share, words in drawn))
    return lines


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


def packed(parts: Sequence[Text], width: int) -> list[Text]:
    """Parts next to each other in as few lines as hold them; none is broken."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + 2 + part.cell_len <= width:
            lines[-1] = lines[-1] + Text("  ") + part
        else:
            lines.append(part)
    return lines


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
