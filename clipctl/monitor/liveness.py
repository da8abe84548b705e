"""Is the run's process alive and making progress? Never judged by the wall clock alone."""

import socket
from dataclasses import dataclass
from typing import Literal

import psutil

from clipctl.runs.rundir import RunStatus

RunState = Literal["waiting", "running", "stalled", "crashed", "stopped", "failed", "finished"]
Process = Literal["alive", "asleep", "dead", "elsewhere"]

SILENCE_S = 8.0  # a heartbeat comes every second
SLOW_STEPS = 10  # a step may take this many times as long as usual
FIRST_STEP_S = 300.0  # as long as the usual step time is unknown
CREATE_TIME_SLACK_S = 2.0  # psutil's clock and the kernel's differ by a tick, and by more after the clock was set


@dataclass(frozen=True)
class Quiet:
    """How long a run has shown no change, by the watcher's own monotonic clock."""

    heartbeat_s: float  # without a new status
    progress_s: float  # without a finished batch or a new row


def probe(status: RunStatus) -> Process:
    """The process that wrote a status. If its pid now belongs to another process, it counts as dead."""
    if status.host != socket.gethostname():
        return "elsewhere"
    try:
        process = psutil.Process(status.pid)
        created_s = process.create_time()
        # On Linux both are derived from the boot time, which shifts when the clock is set; their difference does not.
        ages = (created_s - status.process_created_s, created_s - psutil.boot_time() - status.process_since_boot_s)
        if not any(abs(age_s) <= CREATE_TIME_SLACK_S for age_s in ages):
            return "dead"
        state = process.status()
    except psutil.AccessDenied:
        return "alive"
    except psutil.Error:
        return "dead"
    if state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "dead"
    return "asleep" if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "alive"


def run_state(status: RunStatus | None, process: Process, quiet: Quiet, step_s: float | None) -> RunState:
    """What a run is doing: its last reported state, unless that is `running` and cannot be true."""
    if status is None:
        return "waiting"
    if status.state != "running":
        return status.state
    if process == "dead":
        return "crashed"
    if process == "asleep" or quiet.heartbeat_s > SILENCE_S:
        return "stalled"
    patience_s = FIRST_STEP_S if step_s is None else max(SILENCE_S, SLOW_STEPS * step_s)
    return "stalled" if quiet.progress_s > patience_s else "running"
