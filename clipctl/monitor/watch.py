"""Watches one run through its directory: its reported status, its actual state, and what is wrong with it."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clipctl.config import layers
from clipctl.config.sections import TrainConfig
from clipctl.errors import ClipctlError, RunError
from clipctl.monitor.diagnosis import Alert, RunFacts, diagnose
from clipctl.monitor.liveness import Quiet, RunState, probe, run_state
from clipctl.monitor.reader import MetricsTail, Rows, number
from clipctl.monitor.view import RunView
from clipctl.runs import metrics
from clipctl.runs.retrieval import Retrieval
from clipctl.runs.rundir import RunDir, RunStatus


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment."""

    run: str
    path: Path
    state: RunState
    status: RunStatus | None
    view: RunView
    facts: RunFacts
    epochs: int
    alerts: list[Alert]
    retrieval: Retrieval | None = None  # what the latest evaluation found
    thumbnails: dict[int, bytes] = field(default_factory=dict)  # of the pictures it found
    machine_bytes: int | None = None  # the memory of the machine that the run is on

    @property
    def total_steps(self) -> int:
        return self.facts.total_steps

    @property
    def eta_s(self) -> float | None:
        return self.view.eta_s(self.total_steps) if self.state in ("running", "stalled") else None

    def to_dict(self) -> dict[str, Any]:
        """What `monitor --json` prints."""
        view, last_evaluation = self.view, self.view.evaluations[-1] if self.view.evaluations else None
        return {
            "run": self.run,
            "path": str(self.path),
            "state": self.state,
            "attempt": view.attempt,
            "step": view.step,
            "total_steps": self.total_steps,
            "epoch": view.epoch,
            "epochs": self.epochs,
            "loss": view.loss_now,
            "window_steps": view.window_steps,
            "chance_loss": view.chance_loss,
            "accuracy": view.accuracy_now,
            "val_loss": last_evaluation.val_loss if last_evaluation else None,
            "score": last_evaluation.score if last_evaluation else None,
            "start_score": view.start.score if view.start else None,
            "best_score": view.best.score if view.best else None,
            "baseline_r1": view.baseline,
            "best_step": view.best.step if view.best else None,
            "lr": view.latest("lr"),
            "temperature": view.latest("temperature"),
            "grad_norm": view.latest("grad_norm"),
            "images_per_s": view.images_per_s,
            "step_s": view.step_s,
            "images_per_s_at_start": view.images_per_s_at_start,
            "phase_shares": view.phase_shares(),
            "elapsed_s": view.elapsed_s,
            "eta_s": self.eta_s,
            "system": {key: value for key, value in view.system.items() if key not in ("kind", "time_s", "elapsed_s")},
            "last_checkpoint_step": view.checkpoints[-1].get("step") if view.checkpoints else None,
            "retrieval": self.retrieval.to_dict()["queries"] if self.retrieval else None,
            "ranks": [rank._asdict() for _, rank in sorted(view.ranks.items())],
            "alerts": [vars(alert) for alert in self.alerts],
        }


# Held while a view changes, and by whoever draws one in another thread. Nothing is read from disk under it.
FOLDING = threading.Lock()


class RunWatcher:
    """Call `look` as often as you like; silence is measured between looks, on the caller's monotonic clock."""

    def __init__(self, run: RunDir, on_rows: Callable[[Rows], None] = lambda rows: None) -> None:
        """`on_rows` gets the same rows as the view, so that whoever needs more of them reads the file only once."""
        self.run, self._on_rows = run, on_rows
        self._tail = MetricsTail(run.metrics_file)
        self._view = RunView()
        self._heartbeat: tuple[float, float] | None = None  # value, and when it was first seen
        self._progress: tuple[tuple[int, int], float] | None = None  # rows and batches, and when first seen
        self._retrieval: tuple[int, Retrieval, dict[int, bytes]] | None = None
        self._cached: tuple[tuple[int, ...], TrainConfig, dict[str, Any]] | None = None

    def look(self, now_s: float) -> Snapshot:
        status = self.run.status()  # read before the rows, so that a finished run's rows are complete
        self._read()
        process = probe(status) if status else "dead"
        if process == "dead":
            status = self.run.status()  # it may have written a final one in between
        quiet = self._quiet(status, now_s)
        state = run_state(status, process, quiet, self._view.latest("step_s"))
        config, environment = self._settings()
        total_steps = status.total_steps if status else 0
        facts = RunFacts(
            total_steps=total_steps,
            warmup_steps=config.optim.warmup_of(total_steps),
            loss=config.train.loss,
            loss_floor=0.0 if config.train.picture_term else _loss_floor(environment),
            max_bad=config.data.max_bad,
            seen_captions=_seen_captions(environment),
            planned_step_s=_planned_step_s(environment),
            lr=config.optim.lr,
            micro_batch=config.train.micro_batch or config.train.batch_size,
            silence_s=max(quiet.heartbeat_s, quiet.progress_s, 1.0) if state == "stalled" else 0.0,
            state=state,
            handle=self.run.handle,
            lost_rows=status.lost_rows if status else 0,
        )
        return Snapshot(
            self.run.name,
            self.run.path,
            state,
            status,
            self._view,
            facts,
            _epochs(environment, total_steps) or config.train.epochs,
            diagnose(self._view, facts),
            *self._found(),
            _machine_bytes(environment),
        )

    def _found(self) -> tuple[Retrieval | None, dict[int, bytes]]:
        """Read again only if the file has changed. If it is later than the rows, it belongs to steps that a resume has
        undone."""
        changed_ns = _changed_ns(self.run.retrieval_file)
        if self._retrieval is None or self._retrieval[0] != changed_ns:
            found = self.run.retrieval()
            if found is not None:  # else it is being written at this moment, or there is none
                self._retrieval = (changed_ns, found, self.run.thumbnails(found.pictures))
        if self._retrieval is None or self._retrieval[1].step > self._view.step:
            return None, {}
        return self._retrieval[1:]

    def _read(self) -> None:
        starts_over, chunks = self._tail.poll()
        if starts_over:
            self._view = RunView()
        for rows in chunks:
            for row in rows.others:
                if row.get("kind") == metrics.HEADER and number(row.get("schema")) > metrics.SCHEMA:
                    message = f"{self.run.metrics_file} has schema {row['schema']}; this clipctl reads {metrics.SCHEMA}"
                    raise RunError(message, "upgrade clipctl")
            with FOLDING:
                self._view.fold(rows)
            self._on_rows(rows)

    def _settings(self) -> tuple[TrainConfig, dict[str, Any]]:
        """Read again only if the files have changed: parsing YAML every second would be most of the work."""
        key = tuple(_changed_ns(path) for path in (self.run.config_file, self.run.environment_file))
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, _config(self.run), self.run.read_environment())
        return self._cached[1:]

    def _quiet(self, status: RunStatus | None, now_s: float) -> Quiet:
        heartbeat = status.heartbeat_s if status else 0.0
        if self._heartbeat is None or self._heartbeat[0] != heartbeat:
            self._heartbeat = (heartbeat, now_s)
        progress = (self._view.rows_of_progress, status.progress if status else 0)
        if self._progress is None or self._progress[0] != progress:
            self._progress = (progress, now_s)
        return Quiet(now_s - self._heartbeat[1], now_s - self._progress[1])


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _config(run: RunDir) -> TrainConfig:
    """The run's settings; the defaults if they cannot be read, so that a damaged file hides nothing else."""
    try:
        return layers.resolve([layers.load_yaml(run.config_file, follows_links=False)])
    except ClipctlError:
        return TrainConfig()


def _epochs(environment: dict[str, Any], total_steps: int) -> int | None:
    """How many epochs the steps make, the last of them perhaps cut short; None for a run that did not note it."""
    steps = environment.get("steps_per_epoch")
    return -(-total_steps // steps) if type(steps) is int and steps > 0 else None


def _loss_floor(environment: dict[str, Any]) -> float:
    value = number(environment.get("loss_floor"))
    return value if value > 0 else 0.0


def _seen_captions(environment: dict[str, Any]) -> float | None:
    value = number(environment.get("seen_captions"))
    return value if 0 <= value <= 1 else None


def _machine_bytes(environment: dict[str, Any]) -> int | None:
    value = number(environment.get("memory_bytes"))
    return int(value) if 0 < value < math.inf else None


def _planned_step_s(environment: dict[str, Any]) -> float | None:
    planned = environment.get("planned_step_s")
    value = number(planned.get("high")) if isinstance(planned, dict) else math.nan
    return value if value > 0 else None
