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
from clipctl.runs.rundir import RunDir, RunStatus, planned_since_s
from clipctl.runs.store import CheckpointStore

ELSEWHERE_S = 60.0  # two computers' clocks may differ

# --- finding --------------------------------------------------------------------------------------------------


def has_run(root: Path, text: str | None) -> bool:
    """Whether `find_run` has anything to choose from."""
    return bool(RunDir.all(root)) or (text is not None and RunDir.is_run(Path(text)))


def find_run(root: Path, text: str | None) -> RunDir:
    """The run that `text` names, or else the most likely one."""
    if text is not None:
        return RunDir.find(root, text)
    found = likeliest_run(root)
    if found is None:
        raise RunError(f"there are no runs in {root}", "start one: clipctl train")
    return found


def likeliest_run(root: Path) -> RunDir | None:
    """The live one whose process started last, otherwise the one with the most recent heartbeat."""

    def rank(run: RunDir) -> tuple[bool, float, float]:
        status = run.status()
        if status is None:
            return False, 0.0, 0.0
        is_live = seems_live(status)
        return is_live, status.process_created_s if is_live else 0.0, status.heartbeat_s

    return max(RunDir.all(root), key=rank, default=None)


def seems_live(status: RunStatus) -> bool:
    """Whether somebody is training it, as far as its status shows. Of a process on another computer only the heartbeat
    is known, by that computer's clock."""
    process = probe(status)
    if process == "elsewhere":
        return status.state == "running" and abs(time.time() - status.heartbeat_s) < ELSEWHERE_S
    return status.state == "running" and process != "dead"


class NewRuns:
    """Notices attempts at training that have begun since: new runs and resumed ones, but no copies or new names of what
    was there."""

    def __init__(self, root: Path) -> None:
        self._root, self._known = root, {_attempt(run, status) for run, status in _live(root)}

    def newest(self) -> tuple[RunDir, RunStatus] | None:
        """The one that started last; each is named only once."""
        found = [(run, status) for run, status in _live(self._root) if _attempt(run, status) not in self._known]
        self._known |= {_attempt(run, status) for run, status in found}
        return max(found, key=lambda entry: entry[1].process_created_s, default=None)


def _live(root: Path) -> list[tuple[RunDir, RunStatus]]:
    return [(run, status) for run in RunDir.all(root) if (status := run.status()) and seems_live(status)]


def _attempt(run: RunDir, status: RunStatus) -> tuple[str, int]:
    return run.run_id, status.attempt


def planning_words(root: Path) -> str | None:
    """For how long a run has been in planning; None if none is."""
    began_s = planned_since_s(root)
    return None if began_s is None else f"planning for {max(0.0, time.time() - began_s):.0f} s"


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
