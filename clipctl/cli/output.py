"""Where output goes: data to stdout, prose to stderr; both without terminal control codes."""

import json
import math
import os
import re
import sys
import time
from contextlib import contextmanager, suppress
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.table import Table

    from clipctl.progress import Count, Tell


class PlainConsole(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the program; leave that decision to the caller."""
        raise BrokenPipeError


def prose() -> Console:
    """For people: progress, warnings, errors."""
    return PlainConsole(stderr=True, highlight=False)


def data() -> Console:
    """For the output that a command was asked for."""
    return PlainConsole(highlight=False)


@contextmanager
def stops_said() -> "Iterator[None]":
    """A run that was stopped on request ends with a plain message, not an error. Only the exit code shows it."""
    import typer

    from clipctl.errors import ExitCode, Stopped

    try:
        yield
    except Stopped as stop:
        hint = f". {stop.hint}" if stop.hint else ""
        with suppress(OSError):  # the terminal may be gone, and was the reason
            prose().print(plain(f"{stop}{hint}"), soft_wrap=True)
        raise typer.Exit(stop.exit_code) from None
    except KeyboardInterrupt:
        prose().print("stopped at once; nothing more was saved")
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def print_problem(message: str, hint: str | None) -> None:
    prose().print(plain(f"error: {message}", style="red"), soft_wrap=True)
    if hint:
        prose().print(plain(f"hint: {hint}", style="cyan"), soft_wrap=True)


SAY_INTERVAL_S = 2.0


@contextmanager
def saying(what: str) -> "Iterator[Callable[[str], None]]":
    """Report the progress of slow work: on a terminal in one line that is rewritten, elsewhere in plain lines now and
    then, the first only after a while, and none twice in a row."""
    console = prose()
    if console.is_terminal:
        with console.status(what) as status:
            yield lambda words: status.update(plain(words))
        return
    said, last = time.monotonic(), ""

    def say(words: str) -> None:
        nonlocal said, last
        if words != last and time.monotonic() - said >= SAY_INTERVAL_S:
            said, last = time.monotonic(), words
            console.print(plain(words), soft_wrap=True)

    yield say


@contextmanager
def counting(doing: str, at_first: str = "", *, silent: bool = False) -> "Iterator[tuple[Tell, Count]]":
    """Report how far slow work has got: a bar with rate and time left, or a line now and then."""
    if silent:
        yield lambda words: None, lambda done, total: None
        return
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
    """The same document with null for numbers that JSON cannot express."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_unpadded(console: Console, table: "Table") -> None:
    """A table without the spaces at the ends of its lines, which Rich fills up to its width."""
    for segments in console.render_lines(table, pad=False):
        line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
        line.rstrip()
        console.print(line, soft_wrap=True)


def plain(text: str, style: str = "") -> Text:
    """Text from outside: no markup, and no terminal control codes."""
    return Text(_CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text), style=style)


# Controls and surrogates; invisible characters that turn the direction of what follows, end a line, or hide.
_CONTROLS = re.compile(
    r"[^\n -~\u00a0-\ud7ff\ue000-\U0010ffff]|[\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)


def aligned(rows: "Sequence[tuple[str, ...]]", styles: "Sequence[str] | None" = None) -> Text:
    """Columns, the first one to the left, the others to the right, the last one as it comes. A cell alone in its row
    crosses all columns. By hand, because a Rich table of 200 rows takes a quarter of a second. What is wider than the
    terminal is stacked."""
    whole = [row for row in rows if len(row) > 1]
    widths = [max(len(row[column]) for row in whole) for column in range(len(rows[0]))]
    columns = shown_columns()
    if columns is not None and sum(widths) + 2 * (len(widths) - 1) > columns:
        return stacked(rows, styles or [""] * len(rows), columns)
    lines = []
    for row, style in zip(rows, styles or ["bold", *[""] * (len(rows) - 1)], strict=True):
        if len(row) == 1:
            lines.append(plain(row[0], style=style))
            continue
        first, *cells, last = row
        middle = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:-1], strict=True))
        lines.append(plain(f"{first:<{widths[0]}}{middle}  {last}".rstrip(), style=style))
    return Text("\n").join(lines)


def shown_columns() -> int | None:
    """The width of the terminal; None for a file or a pipe, where a line may have any length."""
    console = data()
    return console.width if console.is_terminal or "COLUMNS" in os.environ else None


def stacked(rows: "Sequence[tuple[str, ...]]", styles: "Sequence[str]", columns: int) -> Text:
    """The same rows for a narrow terminal: the first cell, and under it the others with their header."""
    header, *others = rows
    lines = [plain(header[0], style="dim")]
    for (first, *cells), style in zip(others, styles[1:], strict=True):
        if first:
            lines.append(plain(first, style=f"bold {style}"))
        pieces = [f"{name} {cell}".strip() for name, cell in zip(header[1:], cells, strict=False) if cell.strip("–")]
        lines += [plain(line, style=style) for line in folded_list(pieces, columns)]
    return Text("\n").join(lines)


INDENT = 4


def folded_list(pieces: "Sequence[str]", columns: int) -> "list[str]":
    """`a 1, b 2` in indented lines; a piece goes to the next line as a whole, unless it is longer than a line."""
    lines = [""]
    for piece in pieces:
        joined = f"{lines[-1]}, {piece}" if lines[-1] else piece
        if len(joined) + INDENT < columns or not lines[-1]:
            lines[-1] = joined
        else:
            lines[-1] += ","
            lines.append(piece)
    margin = " " * INDENT
    return [part for line in lines for part in wrap(line, columns, initial_indent=margin, subsequent_indent=margin)]


def show_parts(parts: "Iterable[Text]") -> None:
    """Tables as they are, fitted by `aligned`; sentences folded to the terminal."""
    console = data()
    for part in parts:
        console.print(part, soft_wrap="\n" in part.plain)
