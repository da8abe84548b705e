"""Is the run's process alive, and does it get on? Never judged by the wall clock alone."""

import socket
from dataclasses import dataclass
from typing import Literal

import psutil

from clipctl.runs.rundir import RunStatus

RunState = Literal["waiting", "running", "stalled", "crashed", "stopped", "failed", "finished"]
Process = Literal["alive", "asleep", "dead", "elsewhere"]

SILENCE_S = 8.0  # a heartbeat comes every second
SLOW_STEPS = 10  # how many usual steps a step may take
CREATE_TIME_SLACK_S = 2.0  # psutil's clock and the kernel's differ by a tick, and by more after a change of the clock


@dataclass(frozen=True)
class Quiet:
    """For how long, by the watcher's own monotonic clock, a run has shown no change."""

    heartbeat_s: float  # the status was not renewed
    progress_s: float  # neither a step nor any other row was added


def probe(status: RunStatus) -> Process:
    """The process that wrote a status. A number that was given to another process since counts as dead."""
    if status.host != socket.gethostname():
        return "elsewhere"
    try:
        process = psutil.Process(status.pid)
        if abs(process.create_time() - status.process_created_s) > CREATE_TIME_SLACK_S:
            return "dead"
        state = process.status()
    except psutil.Error:
        return "dead"
    if state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "dead"
    return "asleep" if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "alive"


def run_state(status: RunStatus | None, process: Process, quiet: Quiet, step_s: float | None) -> RunState:
    """What a run is doing. Its own last word stands unless it says `running` and that cannot be."""
    if status is None:
        return "waiting"
    if status.state != "running":
        return status.state
    if process == "dead":
        return "crashed"
    if process == "asleep" or quiet.heartbeat_s > SILENCE_S:
        return "stalled"
    return "stalled" if quiet.progress_s > max(SILENCE_S, SLOW_STEPS * (step_s or 0.0)) else "running"
