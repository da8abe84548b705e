"""How runs are found and shown: once, line by line, or on a whole screen."""

import io
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.control import Control
from rich.text import Text

from clipctl.cli import render
from clipctl.cli.dashboard import SMOOTHINGS, Options, dashboard, summary
from clipctl.cli.terminal import next_key, single_keys
from clipctl.errors import RunError
from clipctl.monitor.liveness import SILENCE_S, Quiet, probe, run_state
from clipctl.monitor.watch import RunWatcher, Snapshot
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore

ENDED = ("finished", "stopped", "failed", "crashed")
SVG_SIZE = (120, 36)
KEY_POLL_S = 0.2
OTHERS_INTERVAL_S = 5.0

# --- finding --------------------------------------------------------------------------------------------------


def find_run(root: Path, text: str | None, *, waits: bool, interval_s: float) -> RunDir:
    """The run that is named, or the one to look at; waits for it where somebody is watching."""
    said = False
    while True:
        if text is not None and (RunDir.all(root) or not waits or RunDir.is_run(Path(text))):
            return RunDir.find(root, text)
        if text is None and (found := likeliest_run(root)):
            return found
        if not waits:
            raise RunError(f"there is no run in {root}", "start one: clipctl train")
        if not said:
            render.prose().print(render.plain(f"waiting for a run in {root}; start one: clipctl train"), soft_wrap=True)
            said = True
        time.sleep(interval_s)


def likeliest_run(root: Path) -> RunDir | None:
    """A living one first, then the one that last gave a sign of life."""

    def rank(run: RunDir) -> tuple[bool, float]:
        status = run.status()
        if status is None:
            return False, 0.0
        return status.state == "running" and probe(status) != "dead", status.heartbeat_s

    return max(RunDir.all(root), key=rank, default=None)


def look_surely(watcher: RunWatcher) -> Snapshot:
    """One look. If the last sign of life is old and the process is there, watch for as long as a verdict takes."""
    snapshot = watcher.look(time.monotonic())
    deadline = time.monotonic() + SILENCE_S + 1
    while (
        snapshot.state == "running"
        and snapshot.status is not None
        and abs(time.time() - snapshot.status.heartbeat_s) > SILENCE_S
        and time.monotonic() < deadline
    ):
        time.sleep(0.5)
        snapshot = watcher.look(time.monotonic())
    return snapshot


# --- showing --------------------------------------------------------------------------------------------------


def show_once(console: Console, snapshot: Snapshot, *, svg: Path | None, as_json: bool) -> None:
    if as_json:
        render.print_json("monitor", snapshot.to_dict())
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
    # Rich asks a server for its font; a picture of one's run should ask nobody for anything.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="clipctl monitor"), flags=re.DOTALL)
    path.write_text(svg, encoding="utf-8")


def follow(console: Console, watcher: RunWatcher, interval_s: float) -> None:
    """Where there is no terminal: a line an interval, until the run has ended."""
    while True:
        snapshot = watcher.look(time.monotonic())
        console.print(render.plain(f"{snapshot.state}  {summary(snapshot)}"), soft_wrap=True)
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
        self._drawn: list[Text] = []  # the lines that are on the screen

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
            self._others = [line for line in other_lines(self._root) if line.split("  ")[0] != self._snapshot.run]

    def _draw(self) -> None:
        """Only the lines that differ from what is there; all of them after a resize."""
        assert self._snapshot is not None
        width, height = size = tuple(self._console.size)
        lines = dashboard(self._snapshot, self._others, self._options, width, height)
        with self._console:  # collects what is written, and writes it at once
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


# --- all runs -------------------------------------------------------------------------------------------------


def list_runs(root: Path, *, json: bool) -> None:
    rows = list(run_rows(root))
    if json:
        render.print_json("runs", {"runs": rows})
    elif rows:
        render.data().print(render.aligned([RUN_COLUMNS, *(run_cells(row) for row in rows)]), soft_wrap=True)
    else:
        raise RunError(f"there is no run in {root}", "start one: clipctl train")


RUN_COLUMNS = ("run", "state", "step", "of", "score", "age", "size")


def run_rows(root: Path) -> Iterator[dict[str, Any]]:
    """Of every run what its directory says at a glance, without reading its metrics."""
    for run in RunDir.all(root):
        status = run.status()
        best = CheckpointStore(run).best()
        yield {
            "run": run.name,
            "path": str(run.path),
            "state": run_state(status, probe(status) if status else "dead", Quiet(0.0, 0.0), None),
            "step": status.step if status else 0,
            "total_steps": status.total_steps if status else 0,
            "best_score": best.manifest.metrics.get("score") if best else None,
            "heartbeat_s": status.heartbeat_s if status else None,
            "size_bytes": size_on_disk(run.path),
        }


def run_cells(row: dict[str, Any]) -> tuple[str, ...]:
    score, age, size = render.percent(row["best_score"]), render.age(row["heartbeat_s"]), render.size(row["size_bytes"])
    return row["run"], row["state"], str(row["step"]), str(row["total_steps"]), score, age, size


def other_lines(root: Path) -> Iterator[str]:
    """Every run in a line, from its status alone."""
    for run in RunDir.all(root):
        status = run.status()
        state = run_state(status, probe(status) if status else "dead", Quiet(0.0, 0.0), None)
        yield f"{run.name}  {state}  step {status.step if status else 0}"


def size_on_disk(path: Path) -> int:
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(directory, name)).st_size
            except OSError:
                continue
    return total


# --- stopping -------------------------------------------------------------------------------------------------


def stop_run(run: RunDir, timeout_s: float) -> str:
    """Ask the run's process to finish its step, save and end; returns what to say once it has."""
    status = run.status()
    process = probe(status) if status else "dead"
    if status is None or status.state != "running" or process == "dead":
        raise RunError(f"{run.path} is not running", "clipctl runs shows what is")
    if process == "elsewhere":
        raise RunError(f"{run.path} runs on {status.host}", "stop it there")
    os.kill(status.pid, signal.SIGTERM)
    if process == "asleep":
        os.kill(status.pid, signal.SIGCONT)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if probe(status) == "dead":
            now = run.status()
            if now is None:
                raise RunError(f"{run.path} has ended, and its run.json is gone")
            if now.state == "finished":
                return f"finished at step {now.step}, before it was asked"
            if now.state == "stopped":
                return (
                    f"stopped at step {now.step} of {now.total_steps}; go on with: clipctl train --resume {run.handle}"
                )
            raise RunError(f"{run.path} has ended as {now.state}", f"clipctl monitor --once {run.handle} says more")
        time.sleep(0.1)
    raise RunError(f"process {status.pid} has not ended within {timeout_s:g} s", "it may be in a long step; ask again")
