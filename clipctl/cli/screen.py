"""The monitor's output: once, line by line, or live on the whole screen."""

import io
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console, Group
from rich.control import Control
from rich.text import Text

from clipctl.cli import output
from clipctl.cli.terminal import ASK_BACKGROUND, Keys, looks_light, single_keys
from clipctl.cli.views.dashboard import dashboard, shows_pictures, summary
from clipctl.cli.views.palette import palette
from clipctl.cli.views.scene import MOST_RUNS, PAGES, SMOOTHINGS, Options, Scene
from clipctl.monitor.runs import NewRuns, planning_words, run_lines
from clipctl.monitor.watch import FOLDING, RunWatcher, Snapshot
from clipctl.runs.rundir import RunDir

ENDED = ("finished", "stopped", "failed", "crashed")
PICTURE_SIZE = (120, 36)
KEY_POLL_S, ERRAND_POLL_S = 0.2, 0.02
OTHERS_INTERVAL_S = 2.0
NOTICE_S = 10.0
CURSOR_STEP = 0.02

# --- showing --------------------------------------------------------------------------------------------------


def show_once(console: Console, snapshot: Snapshot, options: Options) -> None:
    width, height = console.size if console.is_terminal else (console.width, PICTURE_SIZE[1])
    console.print(Group(*dashboard(Scene(snapshot, replace(options, show_keys=False)), width, height - 1)))


def write_picture(snapshot: Snapshot, options: Options, path: Path) -> None:
    """The same as a picture: PNG or SVG, by the file's suffix."""
    from clipctl.cli.views.picture import draw, terminal_theme

    width, height = PICTURE_SIZE
    lines = dashboard(Scene(snapshot, replace(options, show_keys=False)), width, height)
    if path.suffix.lower() == ".png":
        draw(lines, width, height, is_light=options.palette.name == "light").save(path, format="PNG")
        return
    console = Console(
        record=True,
        width=width,
        height=height,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        legacy_windows=False,
    )
    console.print(Group(*lines))
    drawn = console.export_svg(title="clipctl monitor", theme=terminal_theme(is_light=options.palette.name == "light"))
    # Rich's SVG loads its font from a server; a picture of a run should not contact anyone.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    path.write_text(svg, encoding="utf-8")


def follow(console: Console, watcher: RunWatcher, interval_s: float) -> None:
    """Without a terminal: print a line per interval until the run has ended."""
    while True:
        snapshot = watcher.look(time.monotonic())
        console.print(output.plain(f"{snapshot.state}  {summary(snapshot)}"), soft_wrap=True)
        if snapshot.state in ENDED:
            return
        time.sleep(interval_s)


def options_for(
    console: Console | None, *, theme: str = "auto", page: int = 0, pictures: bool | None = None
) -> Options:
    """What a terminal can show, before a key is pressed; None: a file, which can show everything."""
    if console is None:
        return Options(page=page, pictures=pictures, palette=palette(theme))
    chosen = palette(theme, is_light=looks_light(os.environ), colours=console.color_system)
    is_ascii = not console.encoding.lower().startswith("utf")
    colours = None if console.no_color else console.color_system
    return Options(page=page, pictures=pictures, ascii_only=is_ascii, colours=colours, palette=chosen)


class Drawing:
    """Lines on a terminal's screen, redrawn where they have changed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._size: tuple[int, ...] = ()
        self._drawn: Sequence[Text] = ()

    @property
    def is_resized(self) -> bool:
        return tuple(self._console.size) != self._size

    def draw(self, scene: Scene) -> None:
        width, height = size = tuple(self._console.size)
        lines = dashboard(scene, width, height)
        with self._console:  # buffers the output and writes it in one go
            if size != self._size:
                self._size, self._drawn = size, ()
                self._console.control(Control.clear())
            for row, line in enumerate(lines):
                if row >= len(self._drawn) or line != self._drawn[row] or line.spans != self._drawn[row].spans:
                    self._console.control(Control.move_to(0, row))
                    rest = " " * (width - line.cell_len)
                    self._console.print(line + rest, end="", no_wrap=True, overflow="crop", crop=True)
        self._drawn = lines


# --- live -----------------------------------------------------------------------------------------------------


class Errands:
    """Work that reads from disk, done one piece at a time in a thread of its own: a slow disk must not delay the
    keys."""

    def __init__(self) -> None:
        self._todo, self._done = queue.SimpleQueue[Callable[[], None]](), queue.SimpleQueue[Exception | None]()
        self._count_out = 0
        threading.Thread(target=self._run, daemon=True).start()  # one that hangs must not hold up the end

    @property
    def is_out(self) -> bool:
        return self._count_out > 0

    def send(self, errand: Callable[[], None]) -> None:
        self._count_out += 1
        self._todo.put(errand)

    def is_done(self) -> bool:
        """True once for each finished errand; raises what the errand raised."""
        try:
            problem = self._done.get_nowait()
        except queue.Empty:
            return False
        self._count_out -= 1
        if problem is not None:
            raise problem
        return True

    def _run(self) -> None:
        while True:
            errand = self._todo.get()
            try:
                errand()
            except Exception as problem:
                self._done.put(problem)
            else:
                self._done.put(None)


class Screen:
    """The live dashboard. If it `follows`, it shows a new run as soon as one starts. In the trainer's own terminal it
    runs in a thread, until it is closed."""

    def __init__(
        self, console: Console, root: Path, watcher: RunWatcher, interval_s: float, options: Options, *, follows: bool
    ) -> None:
        self._console, self._root, self._watcher, self._interval_s = console, root, watcher, interval_s
        self._options, self._follows, self._asks = options, follows, options.palette.name != "ansi"
        self._drawing, self._keys, self._errands = Drawing(console), Keys(), Errands()
        self._snapshot: Snapshot | None = None
        self._rivals: list[RunWatcher] = []
        self._rival_snapshots: list[Snapshot] = []
        self._others: list[str] = []
        self._others_read = -OTHERS_INTERVAL_S
        self._new_runs = NewRuns(root)
        self._back: RunWatcher | None = None  # what was shown before a new run began
        self._notice, self._notice_until_s = "", 0.0
        self._closed = threading.Event()

    def close(self) -> None:
        """Let `show` return, from another thread."""
        self._closed.set()

    def show(self) -> None:
        with single_keys(), self._console.screen(hide_cursor=True):
            if self._asks:
                self._console.file.write(ASK_BACKGROUND)
                self._console.file.flush()
            self._errands.send(self._look)
            next_look = time.monotonic() + self._interval_s
            while not self._closed.is_set():
                has_news = self._errands.is_done()
                is_time = time.monotonic() >= next_look
                if is_time:
                    next_look = time.monotonic() + self._interval_s
                if is_time and not self._options.paused and not self._errands.is_out:
                    self._errands.send(self._look)
                if has_news or self._drawing.is_resized:
                    self._draw()
                poll_s = ERRAND_POLL_S if self._errands.is_out else KEY_POLL_S
                key = self._keys.next(min(poll_s, max(0.0, next_look - time.monotonic())))
                if key == "" or (key in ("q", "Q") and not self._options.in_trainer):
                    return
                if key is not None:
                    self._press(key)
                    self._draw()

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._others_read >= OTHERS_INTERVAL_S:
            self._others_read = now_s
            if self._follows:
                self._follow_new()
            lines = list(run_lines(self._root))
            self._others = [line for line in lines if line.split("  ")[0] != self._watcher.run.name]
            if planning := planning_words(self._root):
                self._others.insert(0, f"a new run: {planning}")
        self._snapshot = self._watcher.look(now_s)
        self._rival_snapshots = [rival.look(now_s) for rival in self._rivals]

    def _follow_new(self) -> None:
        """Switch to a run that has started or resumed since, and say so."""
        found = self._new_runs.newest()
        if found is None or found[0].path == self._watcher.run.path:
            return
        run, status = found
        self._back, self._watcher = self._watcher, RunWatcher(run)
        what = "resumed" if status.attempt > 1 else "started"
        self._say(f"now showing {run.name}, which has just {what}; tab: back")

    def notify(self, words: str) -> None:
        """Show a message for a while; may be called from another thread."""
        self._say(words)

    def _say(self, words: str) -> None:
        self._notice, self._notice_until_s = words, time.monotonic() + NOTICE_S

    def _scene(self, snapshot: Snapshot) -> Scene:
        notice = self._notice if time.monotonic() < self._notice_until_s else ""
        return Scene(snapshot, self._options, self._others, self._rival_snapshots, notice)

    def _draw(self) -> None:
        if self._snapshot is None:
            return
        with FOLDING:
            self._drawing.draw(self._scene(self._snapshot))

    def _press(self, key: str) -> None:
        if key == "\t":
            self._errands.send(self._next_run)
        elif key == "c":
            self._errands.send(self._next_rival)
        elif key in ("light", "dark"):
            self._options = replace(self._options, palette=palette(key))
        elif key == "p" and self._snapshot is not None:
            shown = shows_pictures(self._scene(self._snapshot), *self._console.size)
            self._options = replace(self._options, pictures=not shown)
        elif key in ("+", "=") and self._snapshot is not None and self._scene(self._snapshot).is_closest:
            return
        else:
            self._options = pressed(self._options, key)

    def _next_run(self) -> None:
        if self._back is not None:
            self._watcher, self._back = self._back, None
        else:
            runs = RunDir.all(self._root)
            names = [run.name for run in runs]
            if not names:
                return
            current = names.index(self._watcher.run.name) if self._watcher.run.name in names else -1
            self._watcher = RunWatcher(runs[(current + 1) % len(runs)])
        self._rivals, self._rival_snapshots, self._notice_until_s = [], [], 0.0
        self._look()

    def _next_rival(self) -> None:
        """Overlay one more run, the newest first; after the fourth, or the last, none."""
        shown = {self._watcher.run.name, *(rival.run.name for rival in self._rivals)}
        others = [run for run in reversed(RunDir.all(self._root)) if run.name not in shown]
        if others and len(self._rivals) + 1 < MOST_RUNS:
            self._rivals.append(RunWatcher(others[0]))
        else:
            self._say("there is no other run to compare with" if not self._rivals else "comparison off")
            self._rivals = []
        self._look()


def pressed(options: Options, key: str) -> Options:
    """The options after a key is pressed."""
    if key.isdigit() and 1 <= int(key) <= len(PAGES):
        return replace(options, page=int(key) - 1, scroll=0, help=False)
    cursor = 1.0 if options.cursor is None else options.cursor
    match key:
        case " ":
            return replace(options, paused=not options.paused)
        case "s":
            following = (SMOOTHINGS.index(options.smoothing) + 1) % len(SMOOTHINGS)
            return replace(options, smoothing=SMOOTHINGS[following])
        case "l":
            return replace(options, log=not options.log)
        case "x":
            return replace(options, over_time=not options.over_time)
        case "down" | "j":
            return replace(options, scroll=options.scroll + 1)
        case "up" | "k":
            return replace(options, scroll=options.scroll - 1)
        case "+" | "=":
            return replace(options, zoom=options.zoom + 1)
        case "-":
            return replace(options, zoom=max(0, options.zoom - 1))
        case "left":
            return replace(options, cursor=max(0.0, cursor - CURSOR_STEP))
        case "right":
            return replace(options, cursor=min(1.0, cursor + CURSOR_STEP))
        case "esc":
            return replace(options, cursor=None, help=False)
        case "?":
            return replace(options, help=not options.help)
    return options
