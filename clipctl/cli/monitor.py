"""clipctl monitor, runs and stop: what runs are doing, from a second terminal."""

import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group

from clipctl.cli import options, render
from clipctl.cli.dashboard import SMOOTHINGS, Options, dashboard, summary
from clipctl.cli.terminal import ends_by_exception, next_key, single_keys
from clipctl.errors import RunError
from clipctl.monitor.liveness import SILENCE_S, probe
from clipctl.monitor.watch import RunWatcher, Snapshot
from clipctl.runs.rundir import RunDir, runs_root

ENDED = ("finished", "stopped", "failed", "crashed")
SVG_SIZE = (120, 36)
KEY_POLL_S = 0.1
OTHERS_INTERVAL_S = 5.0


def monitor(
    run: options.Run = None,
    once: options.Once = False,
    all: options.All = False,
    interval: options.Interval = 1.0,
    svg: options.Svg = None,
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Watch a training from a second terminal, and see what is wrong with it."""
    root, console = runs_root(runs_dir), render.data()
    if all:
        list_runs(root, json=json)
        return
    live = console.is_terminal and sys.stdin.isatty() and not (once or json or svg)
    waits = not (once or json or svg)
    with ends_by_exception():
        watcher = RunWatcher(find_run(root, run, waits=waits, interval_s=interval))
        if live:
            Screen(console, root, watcher, interval).show()
        elif waits:
            follow(console, watcher, interval)
        else:
            snapshot = look_surely(watcher)
            show_once(console, snapshot, svg=svg, as_json=json)


def runs(runs_dir: options.RunsDir = None, json: options.Json = False) -> None:
    """List all runs: state, step, score, age, size."""
    list_runs(runs_root(runs_dir), json=json)


def stop(run: options.RunToStop, timeout: options.WaitSeconds = 120.0, runs_dir: options.RunsDir = None) -> None:
    """Ask a run to finish its step, save and end; wait until it has."""
    found = RunDir.find(runs_root(runs_dir), run)
    status = found.status()
    process = probe(status) if status else "dead"
    if status is None or status.state != "running" or process == "dead":
        raise RunError(f"{found.path} is not running", "clipctl runs shows what is")
    if process == "elsewhere":
        raise RunError(f"{found.path} runs on {status.host}", "stop it there")
    os.kill(status.pid, signal.SIGTERM)
    if process == "asleep":
        os.kill(status.pid, signal.SIGCONT)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        now = found.status()
        if probe(status) == "dead" and now is not None:
            if now.state == "stopped":
                words = f"stopped at step {now.step} of {now.total_steps}; go on with: clipctl train --resume "
                render.data().print(render.plain(words + found.handle), soft_wrap=True)
                return
            raise RunError(f"{found.path} has ended as {now.state}", f"clipctl monitor --once {found.handle} says more")
        time.sleep(0.1)
    raise RunError(f"process {status.pid} has not ended within {timeout:g} s", "it may be in a long step; ask again")


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
    console.save_svg(str(path), title="clipctl monitor")


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

    def show(self) -> None:
        with single_keys(), self._console.screen(hide_cursor=True) as screen:
            drawn = None
            next_look = time.monotonic()
            while True:
                if time.monotonic() >= next_look and not self._options.paused:
                    self._look()
                    next_look, drawn = time.monotonic() + self._interval_s, None
                if drawn != (size := tuple(self._console.size)):
                    screen.update(self._picture())
                    drawn = size
                key = next_key(min(KEY_POLL_S, max(0.0, next_look - time.monotonic())) if drawn else 0.0)
                if key is not None:
                    if key in ("q", "Q", ""):
                        return
                    self._press(key)
                    drawn = None

    def _look(self) -> None:
        now_s = time.monotonic()
        self._snapshot = self._watcher.look(now_s)
        if now_s - self._others_read >= OTHERS_INTERVAL_S:
            self._others_read = now_s
            self._others = [run_line(row) for row in run_rows(self._root) if row["run"] != self._snapshot.run]

    def _picture(self) -> Group:
        assert self._snapshot is not None
        width, height = self._console.size
        return Group(*dashboard(self._snapshot, self._others, self._options, width, height))

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
    from clipctl.monitor.liveness import Quiet, run_state
    from clipctl.runs.store import CheckpointStore

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


def run_line(row: dict[str, Any]) -> str:
    return "  ".join(run_cells(row)[:3])


def size_on_disk(path: Path) -> int:
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(directory, name)).st_size
            except OSError:
                continue
    return total
