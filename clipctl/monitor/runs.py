"""The runs of a directory: finding one, listing all, stopping one. No torch, no rich."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clipctl.errors import RunError
from clipctl.monitor.liveness import SILENCE_S, Quiet, probe, run_state
from clipctl.monitor.watch import RunWatcher, Snapshot
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore

# --- finding --------------------------------------------------------------------------------------------------


def find_run(
    root: Path, text: str | None, *, waits: bool = False, interval_s: float = 1.0, tell: Callable[[str], None] = print
) -> RunDir:
    """The run that `text` names, or the one to look at. If `waits`, one that does not exist yet is waited for."""
    said = False
    while True:
        if text is not None and (RunDir.all(root) or not waits or RunDir.is_run(Path(text))):
            return RunDir.find(root, text)
        if text is None and (found := likeliest_run(root)):
            return found
        if not waits:
            raise RunError(f"there is no run in {root}", "start one: clipctl train")
        if not said:
            tell(f"waiting for a run in {root}; start one: clipctl train")
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


# --- listing --------------------------------------------------------------------------------------------------


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


def run_lines(root: Path) -> Iterator[str]:
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
