"""Where words go: stdout carries data, stderr prose; both without codes that a terminal would obey."""

import json
import math
import re
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from clipctl.progress import Count, Tell


class PlainConsole(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the program; whoever prints shall decide."""
        raise BrokenPipeError


def prose() -> Console:
    """For people: progress, warnings, errors."""
    return PlainConsole(stderr=True, highlight=False)


def data() -> Console:
    """For what a command was asked to tell."""
    return PlainConsole(highlight=False)


SAY_INTERVAL_S = 2.0


@contextmanager
def saying(what: str) -> "Iterator[Callable[[str], None]]":
    """Says what takes long: in a terminal in one line that changes, elsewhere in plain lines now and then, the first of
    them only after a while."""
    console = prose()
    if console.is_terminal:
        with console.status(what) as status:
            yield lambda words: status.update(plain(words))
        return
    said = time.monotonic()

    def say(words: str) -> None:
        nonlocal said
        if time.monotonic() - said >= SAY_INTERVAL_S:
            said = time.monotonic()
            console.print(plain(words), soft_wrap=True)

    yield say


@contextmanager
def counting(doing: str, at_first: str = "") -> "Iterator[tuple[Tell, Count]]":
    """What takes long, and how far it is: a bar with rate and time left, or a line now and then."""
    console = prose()
    if not console.is_terminal:
        with saying("") as tell:
            yield tell, lambda done, total: tell(f"{doing} {done:,} of {total:,} pictures")
        return
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(at_first or doing, total=None)
        started = time.monotonic()

        def count(done: int, total: int) -> None:
            rate = done / max(time.monotonic() - started, 1e-3)
            bar.update(task, description=f"{doing}, {rate:,.0f}/s", completed=done, total=total)

        yield lambda words: bar.update(task, description=escape(words)), count


def print_json(command: str, document: dict[str, Any]) -> None:
    json.dump(finite({"schema": f"clipctl.{command}/1", **document}), sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def finite(value: Any) -> Any:
    """The same document with null for numbers that JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain(text: str, style: str = "") -> Text:
    """Text from outside: no markup, and no codes that the terminal would obey."""
    return Text(_CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text), style=style)


# Controls and surrogates; invisible characters that turn the direction of what follows, end a line, or hide.
_CONTROLS = re.compile(
    r"[^\n -~\u00a0-\ud7ff\ue000-\U0010ffff]|[\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)


def aligned(rows: "Sequence[tuple[str, ...]]", styles: "Sequence[str] | None" = None) -> Text:
    """Columns, the first one to the left, the others to the right, the last one as it comes. A cell alone in its row
    crosses all columns. By hand, because a Rich table of 200 rows takes a quarter of a second."""
    whole = [row for row in rows if len(row) > 1]
    widths = [max(len(row[column]) for row in whole) for column in range(len(rows[0]))]
    lines = []
    for row, style in zip(rows, styles or ["bold", *[""] * (len(rows) - 1)], strict=True):
        if len(row) == 1:
            lines.append(plain(row[0], style=style))
            continue
        first, *cells, last = row
        middle = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:-1], strict=True))
        lines.append(plain(f"{first:<{widths[0]}}{middle}  {last}".rstrip(), style=style))
    return Text("\n").join(lines)


def show_parts(parts: "Iterable[Text]") -> None:
    """Tables as they are, whatever the width of the terminal; sentences folded to it."""
    console = data()
    for part in parts:
        console.print(part, soft_wrap="\n" in part.plain)
