"""The monitor's output: once, line by line, or live on the whole screen."""

import io
import re
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console, Group
from rich.control import Control
from rich.text import Text

from clipctl.cli import output
from clipctl.cli.terminal import next_key, single_keys
from clipctl.cli.views.dashboard import SMOOTHINGS, Options, dashboard, summary
from clipctl.monitor.runs import run_lines
from clipctl.monitor.watch import RunWatcher, Snapshot
from clipctl.runs.rundir import RunDir

ENDED = ("finished", "stopped", "failed", "crashed")
SVG_SIZE = (120, 36)
KEY_POLL_S = 0.2
OTHERS_INTERVAL_S = 5.0

# --- showing --------------------------------------------------------------------------------------------------


def show_once(console: Console, snapshot: Snapshot, *, svg: Path | None, as_json: bool) -> None:
    if as_json:
        output.print_json("monitor", snapshot.to_dict())
    if svg is not None:
        write_svg(snapshot, svg)
    if not as_json and svg is None:
        width, height = console.size if console.is_terminal else (console.width, SVG_SIZE[1])
        look = Options(ascii_only=is_ascii(console), show_keys=False)
        console.print(Group(*dashboard(snapshot, [], look, width, height - 1)))


def write_svg(snapshot: Snapshot, path: Path) -> None:
    width, height = SVG_SIZE
    console = Console(record=True, width=width, height=height, file=io.StringIO(), force_terminal=True)
    console.print(Group(*dashboard(snapshot, [], Options(show_keys=False), width, height)))
    # Rich's SVG loads its font from a server; a picture of a run should not contact anyone.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="clipctl monitor"), flags=re.DOTALL)
    path.write_text(svg, encoding="utf-8")


def follow(console: Console, watcher: RunWatcher, interval_s: float) -> None:
    """Without a terminal: print a line per interval until the run has ended."""
    while True:
        snapshot = watcher.look(time.monotonic())
        console.print(output.plain(f"{snapshot.state}  {summary(snapshot)}"), soft_wrap=True)
        if snapshot.state in ENDED:
            return
        time.sleep(interval_s)


def is_ascii(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


class Screen:
    """The live dashboard."""

    def __init__(self, console: Console, root: Path, watcher: RunWatcher, interval_s: float) -> None:
        self._console, self._root, self._watcher, self._interval_s = console, root, watcher, interval_s
        self._options = Options(ascii_only=is_ascii(console))
        self._snapshot: Snapshot | None = None
        self._others: list[str] = []
        self._others_read = -OTHERS_INTERVAL_S
        self._size: tuple[int, ...] = ()
        self._drawn: list[Text] = []  # the lines now on the screen

    def show(self) -> None:
        with single_keys(), self._console.screen(hide_cursor=True):
            next_look = time.monotonic()
            while True:
                is_time = time.monotonic() >= next_look
                if is_time and not self._options.paused:
                    self._look()
                if is_time:
                    next_look = time.monotonic() + self._interval_s
                if is_time or tuple(self._console.size) != self._size:
                    self._draw()
                key = next_key(min(KEY_POLL_S, max(0.0, next_look - time.monotonic())))
                if key is not None:
                    if key in ("q", "Q", ""):
                        return
                    self._press(key)
                    self._draw()

    def _look(self) -> None:
        now_s = time.monotonic()
        self._snapshot = self._watcher.look(now_s)
        if now_s - self._others_read >= OTHERS_INTERVAL_S:
            self._others_read = now_s
            self._others = [line for line in run_lines(self._root) if line.split("  ")[0] != self._snapshot.run]

    def _draw(self) -> None:
        """Redraw only the lines that changed; all of them after a resize."""
        assert self._snapshot is not None
        width, height = size = tuple(self._console.size)
        lines = dashboard(self._snapshot, self._others, self._options, width, height)
        with self._console:  # buffers the output and writes it in one go
            if size != self._size:
                self._size, self._drawn = size, []
                self._console.control(Control.clear())
            for row, line in enumerate(lines):
                if row >= len(self._drawn) or line != self._drawn[row] or line.spans != self._drawn[row].spans:
                    self._console.control(Control.move_to(0, row))
                    rest = " " * (width - line.cell_len)
                    self._console.print(line + rest, end="", no_wrap=True, overflow="crop", crop=True)
        self._drawn = lines

    def _press(self, key: str) -> None:
        chosen = self._options
        match key:
            case " ":
                self._options = replace(chosen, paused=not chosen.paused)
            case "s":
                following = (SMOOTHINGS.index(chosen.smoothing) + 1) % len(SMOOTHINGS)
                self._options = replace(chosen, smoothing=SMOOTHINGS[following])
            case "l":
                self._options = replace(chosen, log=not chosen.log)
            case "x":
                self._options = replace(chosen, over_time=not chosen.over_time)
            case "?":
                self._options = replace(chosen, help=not chosen.help)
            case "\t":
                self._next_run()

    def _next_run(self) -> None:
        runs = RunDir.all(self._root)
        names = [run.name for run in runs]
        if names:
            current = names.index(self._watcher.run.name) if self._watcher.run.name in names else -1
            self._watcher = RunWatcher(runs[(current + 1) % len(runs)])
            self._look()
