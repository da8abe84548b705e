"""The runs in a directory: finding one, listing all, stopping one. No torch, no rich."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from clipctl import files
from clipctl.errors import CheckpointError, RunError
from clipctl.monitor.liveness import SILENCE_S, Quiet, probe, run_state
from clipctl.monitor.watch import RunWatcher, Snapshot
from clipctl.progress import Tell, silent
from clipctl.runs.rundir import RunDir, planned_since_s
from clipctl.runs.store import CheckpointStore

# --- finding --------------------------------------------------------------------------------------------------


def find_run(
    root: Path, text: str | None, *, waits: bool = False, interval_s: float = 1.0, tell: Tell = silent
) -> RunDir:
    """The run that `text` names, or else the most likely one. If `waits`, wait until there is one."""
    said = False
    while True:
        if text is not None and (RunDir.all(root) or not waits or RunDir.is_run(Path(text))):
            return RunDir.find(root, text)
        if text is None and (found := likeliest_run(root)):
            return found
        if not waits:
            raise RunError(f"there are no runs in {root}", "start one: clipctl train")
        if not said:
            tell(f"waiting for a run in {root}; start one: clipctl train")
            said = True
        time.sleep(interval_s)


def likeliest_run(root: Path) -> RunDir | None:
    """A live one if possible, otherwise the one with the most recent heartbeat."""

    def rank(run: RunDir) -> tuple[bool, float]:
        status = run.status()
        if status is None:
            return False, 0.0
        return status.state == "running" and probe(status) != "dead", status.heartbeat_s

    return max(RunDir.all(root), key=rank, default=None)


def planning_since_s(root: Path) -> float | None:
    """For how long a run has been in planning; None if none is."""
    began_s = planned_since_s(root)
    return None if began_s is None else max(0.0, time.time() - began_s)


def look_surely(watcher: RunWatcher) -> Snapshot:
    """One snapshot. If the last heartbeat is old but the process exists, watch until the state is certain."""
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


# --- listing --------------------------------------------------------------------------------------------------


def run_rows(root: Path) -> Iterator[dict[str, Any]]:
    """What each run's directory shows at a glance, without reading its metrics."""
    for run in RunDir.all(root):
        status, best = run.status(), None
        with suppress(CheckpointError):  # one strange run hides no other
            best = CheckpointStore(run).best()
        yield {
            "run": run.name,
            "path": str(run.path),
            "state": run_state(status, probe(status) if status else "dead", Quiet(0.0, 0.0), None),
            "step": status.step if status else 0,
            "total_steps": status.total_steps if status else 0,
            "best_score": best.manifest.metrics.get("score") if best else None,
            "heartbeat_s": status.heartbeat_s if status else None,
            "size_bytes": files.size_on_disk(run.path),
        }


def run_lines(root: Path) -> Iterator[str]:
    """One line per run, from its status alone."""
    for run in RunDir.all(root):
        status = run.status()
        state = run_state(status, probe(status) if status else "dead", Quiet(0.0, 0.0), None)
        yield f"{run.name}  {state}  step {status.step if status else 0}"


# --- stopping -------------------------------------------------------------------------------------------------


def the_live_run(root: Path) -> RunDir:
    """The only run that can be stopped from here. Raises if there is none, or a choice."""
    live = [run for run in RunDir.all(root) if is_live(run)]
    if len(live) == 1:
        return live[0]
    if not live:
        raise RunError(f"no run in {root} is running", "clipctl runs lists all")
    raise RunError(f"{len(live)} runs are running: {', '.join(run.name for run in live)}", "name one: clipctl stop RUN")


def is_live(run: RunDir) -> bool:
    """Whether a process on this computer is training it."""
    status = run.status()
    return status is not None and status.state == "running" and run.is_held_by(status.pid)


def stop_run(run: RunDir, timeout_s: float) -> str:
    """Ask the run's process to finish its step, save and exit; returns a message once it has."""
    status = run.status()
    process = probe(status) if status else "dead"
    if status is None or status.state != "running" or process == "dead":
        raise RunError(f"{run.path} is not running", "clipctl runs shows which are")
    if process == "elsewhere":
        raise RunError(f"{run.path} is running on another computer, {status.host}", "stop it there")
    if not run.is_held_by(status.pid):
        raise RunError(
            f"{run.path} is not running: process {status.pid}, which its run.json names, does not hold its lock",
            "it was copied from elsewhere, or has just ended; clipctl runs shows which are running",
        )
    os.kill(status.pid, signal.SIGTERM)
    if process == "asleep":
        os.kill(status.pid, signal.SIGCONT)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if probe(status) == "dead":
            now = run.status()
            if now is None:
                raise RunError(f"{run.path} has ended, but its run.json is gone")
            if now.state == "finished":
                return f"{run.name} had already finished, at step {now.step:,}"
            if now.state == "stopped":
                return f"{run.name} stopped at step {now.step:,} of {now.total_steps:,}, saved. {run.way_on}"
            raise RunError(f"{run.path} ended as {now.state}", f"clipctl monitor --once {run.handle} shows more")
        time.sleep(0.1)
    raise RunError(f"process {status.pid} did not end within {timeout_s:g} s", "it may be in a long step; try again")
