"""Everything a run records: its files, the rows of its metrics, its heartbeat, and what its watcher is told.

With several processes, those that are not the writer get a `Journal`, which writes nothing.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from clipctl.config import layers
from clipctl.config.quantities import counted
from clipctl.hardware.devices import Device
from clipctl.hardware.sensors import SystemSensors
from clipctl.runs import metrics
from clipctl.runs.checkpoint import Checkpoint
from clipctl.runs.metrics import MetricsWriter, time_left_s
from clipctl.runs.retrieval import Retrieval
from clipctl.runs.rundir import RunDir, State
from clipctl.training.course import Course
from clipctl.training.environment import describe_environment
from clipctl.training.evaluate import Evaluation
from clipctl.training.meter import Reading
from clipctl.training.plan import TrainPlan

REPORT_INTERVAL_S = 2.0
SYSTEM_INTERVAL_S = 1.0
FEATURES_INTERVAL_S = 5.0


@dataclass(frozen=True)
class Progress:
    """Where a run is, for whoever watches."""

    step: int
    total_steps: int
    epoch: int  # the first is 1
    epochs: int
    loss: float
    accuracy: float
    images_per_s: float
    eta_s: float
    evaluation: Evaluation | None  # the latest


class Watcher(Protocol):
    """Whoever watches a run."""

    def progress(self, progress: Progress) -> None:
        """Called every few seconds."""

    def warn(self, message: str) -> None:
        """Called when something went wrong that does not end the training."""

    def say(self, message: str) -> None:
        """Called now and then while something takes long."""


class Nobody:
    def progress(self, progress: Progress) -> None:
        pass

    def warn(self, message: str) -> None:
        pass

    def say(self, message: str) -> None:
        pass


class RankFacts(NamedTuple):
    """How one of several processes is doing."""

    rank: int
    host: str
    images_per_s: float  # that it contributes
    wait_share: float  # of its time that it waits for the others
    memory_bytes: int


class Journal:
    """Writes nothing; defines which moments of a run are recorded."""

    peak_device_bytes: int | None = None  # the most that was seen; some devices do not remember it themselves

    def begin(self, attempt: int, step: int, course: Course) -> None:
        """The run starts, or continues, at this step."""

    def tick(self, step: int) -> None:
        """A batch was trained on or evaluated."""

    def steps(self, reading: Reading, course: Course, *, report: bool) -> None: ...

    def ranks(self, step: int, facts: Sequence[RankFacts]) -> None:
        """How each of several processes is doing."""

    def epoch(self, epoch: int, step: int, seconds: float, norms: Mapping[str, float], course: Course) -> None: ...

    def evaluation(self, step: int, seconds: float, course: Course, retrieval: Retrieval) -> None: ...

    def checkpoint(self, checkpoint: Checkpoint, seconds: float) -> None: ...

    def save_failed(self, step: int, message: str) -> None: ...

    def made_room(self, step: int, oldest: Checkpoint) -> None:
        """The disk is full: a checkpoint that would have been kept was deleted for a newer one."""

    def bad_pictures(self, step: int, messages: list[str], course: Course) -> None: ...

    def out_of_memory(self, step: int, micro_batch: int | None) -> None:
        """A step did not fit in memory and was computed in smaller parts."""

    def length(self, plan: TrainPlan, step: int) -> None:
        """From this step on, the run is to be shorter or longer."""

    def stopped_early(self, step: int, course: Course) -> None:
        """Nothing better was found for as long as patience allows."""

    def features(self, done: int, total: int) -> None:
        """So many of a locked tower's features have been computed."""

    def end(self, outcome: State, step: int) -> None:
        """The run has ended, however it did."""


class RunJournal(Journal):
    """The journal of the process that owns the run directory. `begin` opens it, `end` closes it."""

    _writer: MetricsWriter
    _recorder: "SystemRecorder"

    def __init__(self, run: RunDir, plan: TrainPlan, watcher: Watcher | None = None) -> None:
        self._run, self._plan, self._watcher = run, plan, watcher or Nobody()
        self._attempt, self._step, self._progress = 0, 0, 0
        self._reported_s = 0.0
        self._first: tuple[int, float] | None = None  # this attempt's first step and when it ended
        self._ended_s, self._steps_s = 0.0, 0.0  # when the last step ended; what all after the first took
        self._recent: deque[dict[str, Any]] = deque(maxlen=metrics.WINDOW_STEPS)
        self._is_reported = True
        self._retrieval: Retrieval | None = None  # of the latest evaluation

    def begin(self, attempt: int, step: int, course: Course) -> None:
        run, plan = self._run, self._plan
        run.write_config(layers.to_yaml(plan.config))
        run.write_tokenizer(plan.data.tokenizer.to_dict())
        run.write_environment(describe_environment(plan))
        self._attempt, self._step = attempt, step
        self._retrieval = run.retrieval()
        self._writer = MetricsWriter(run.metrics_file, run.run_id)
        if attempt > 1:
            self._writer.write(metrics.RESUME, {"step": step, "attempt": attempt})
        if course.bad_pictures:
            self.bad_pictures(step, ["known before the first step"], course)
        self._reported_s = time.monotonic()
        self._status("running")
        self._recorder = SystemRecorder(
            self._writer,
            plan.placement.device,
            directory=run.path,
            with_children=plan.placement.workers.value != 0,
            heartbeat=lambda: self._status("running"),
        )
        self._recorder.start()

    def tick(self, step: int) -> None:
        self._step = step
        self._progress += 1

    def steps(self, reading: Reading, course: Course, *, report: bool) -> None:
        """`report` is False if an evaluation follows; the report then includes it."""
        for row, ended_s in reading.rows:
            self._writer.write(metrics.STEP, row, elapsed_s=ended_s - self._writer.started_s)
            self._steps_s += row["step_s"] if self._first else 0.0
            self._first, self._ended_s = self._first or (row["step"], ended_s), ended_s
        self._step = reading.rows[-1][0]["step"]
        self._recent.extend(row for row, _ in reading.rows)
        self._is_reported = False
        if report:
            self._report(course)

    def ranks(self, step: int, facts: Sequence[RankFacts]) -> None:
        for one in facts:
            self._writer.write(metrics.RANK, {"step": step, **one._asdict()})

    def epoch(self, epoch: int, step: int, seconds: float, norms: Mapping[str, float], course: Course) -> None:
        assert course.epoch_window is not None
        row = {
            "epoch": epoch,
            "step": step,
            "loss": course.epoch_window.loss,
            "accuracy": course.epoch_window.accuracy,
            "images_per_s": round(course.epoch_window.images_per_s, 2),
            "epoch_s": round(seconds, 4),
            "grad_norm_by_block": dict(norms),
        }
        self._writer.write(metrics.EPOCH, row)

    def evaluation(self, step: int, seconds: float, course: Course, retrieval: Retrieval) -> None:
        assert course.evaluation is not None
        row = {"step": step, "epoch": course.evaluated_epochs, **course.evaluation.to_dict()}
        baseline = {} if course.baseline is None else {"baseline_r1": course.baseline}
        self._writer.write(metrics.EVAL, {**row, **baseline, "eval_s": round(seconds, 4)})
        earlier = self._retrieval
        self._retrieval = retrieval.after(earlier if earlier and earlier.step < step else None)
        self._run.write_retrieval(self._retrieval)
        if step == 0:
            score = course.evaluation.score
            self._tell(lambda: self._watcher.say(f"before training: R@1 {score:.1%} on unseen pictures"))
        self._report(course)

    def checkpoint(self, checkpoint: Checkpoint, seconds: float) -> None:
        row = {
            "step": checkpoint.step,
            "epoch": checkpoint.manifest.epoch,
            "path": checkpoint.path.name,
            "size_bytes": checkpoint.size_bytes,
            "save_s": round(seconds, 4),
        }
        self._writer.write(metrics.CHECKPOINT, row)

    def save_failed(self, step: int, message: str) -> None:
        self._tell(lambda: self._watcher.warn(f"{message}; training continues"))
        self._writer.write(metrics.EVENT, {"step": step, "event": "save_failed", "message": message})

    def made_room(self, step: int, oldest: Checkpoint) -> None:
        message = f"the disk is full: checkpoint {oldest.path.name} was deleted to save step {step}"
        self._tell(lambda: self._watcher.warn(message))
        self._writer.write(metrics.EVENT, {"step": step, "event": "made_room", "message": message})

    def out_of_memory(self, step: int, micro_batch: int | None) -> None:
        message = f"out of memory at step {step}: training continues in micro-batches of {micro_batch}, same result"
        self._tell(lambda: self._watcher.warn(message))
        self._writer.write(metrics.EVENT, {"step": step, "event": "out_of_memory", "message": message})

    def bad_pictures(self, step: int, messages: list[str], course: Course) -> None:
        """With the totals so far, so that the last such row holds them all."""
        for message in messages:
            row = {"step": step, "event": "bad_picture", "message": message, "counts": course.bad_counts}
            self._writer.write(metrics.EVENT, row)

    def length(self, plan: TrainPlan, step: int) -> None:
        before, now = self._plan.schedule.total_steps, plan.schedule.total_steps
        self._plan = plan
        message = f"{now} steps instead of {before}, to end on time"
        self._writer.write(metrics.EVENT, {"step": step, "event": "length", "message": message})
        self._run.write_config(layers.to_yaml(plan.config))

    def stopped_early(self, step: int, course: Course) -> None:
        evaluations = counted(course.stale_evaluations, "evaluation")
        message = f"stopped early, as --patience asks: {evaluations} without a new best since epoch {course.best_epoch}"
        self._tell(lambda: self._watcher.say(message))
        self._writer.write(metrics.EVENT, {"step": step, "event": "stopped_early", "message": message})

    def features(self, done: int, total: int) -> None:
        if time.monotonic() - self._reported_s >= FEATURES_INTERVAL_S:
            self._reported_s = time.monotonic()
            self._tell(lambda: self._watcher.say(f"features of locked towers: {done:,} of {total:,}"))

    def end(self, outcome: State, step: int) -> None:
        self._step = step
        with suppress(Exception):  # a device that failed once fails again when it is asked
            self._recorder.stop()
        self._writer.write(metrics.END, {"state": outcome, "step": step, "lost_rows": self._writer.lost_rows})
        self._writer.close()
        if lost := self._writer.lost_rows:
            message = f"{lost:,} rows of metrics could not be written: the curves have gaps; the model is not affected"
            self._tell(lambda: self._watcher.warn(message))
        self._status(outcome)

    def _status(self, state: State) -> None:
        self._run.write_status(
            state,
            attempt=self._attempt,
            step=self._step,
            total_steps=self._plan.schedule.total_steps,
            progress=self._progress,
            lost_rows=self._writer.lost_rows,
        )

    def _report(self, course: Course) -> None:
        """Tell the watcher every few seconds, and at the end."""
        now_s, step, schedule = time.monotonic(), self._step, self._plan.schedule
        is_time = now_s - self._reported_s >= REPORT_INTERVAL_S or step == schedule.total_steps
        if self._is_reported or not is_time:
            return
        self._is_reported, self._reported_s = True, now_s
        news = Progress(
            step=step,
            total_steps=schedule.total_steps,
            epoch=schedule.epoch_of(step),
            epochs=schedule.epochs,
            loss=self._mean_of_recent("loss"),
            accuracy=self._mean_of_recent("accuracy"),
            images_per_s=sum(row["batch_size"] for row in self._recent) / sum(row["step_s"] for row in self._recent),
            eta_s=time_left_s(self._mean_of_recent("step_s"), *self._usual_s(), schedule.total_steps - step),
            evaluation=course.evaluation,
        )
        self._tell(lambda: self._watcher.progress(news))

    def _usual_s(self) -> tuple[float, float]:
        """Seconds per step of this attempt, without and with what came between the steps."""
        if self._first is None or self._step <= self._first[0]:
            return 0.0, 0.0
        steps = self._step - self._first[0]
        return self._steps_s / steps, (self._ended_s - self._first[1]) / steps

    def _mean_of_recent(self, key: str) -> float:
        """Over the same steps as the monitor's, so that both show the same figure."""
        values = [row[key] for row in self._recent if math.isfinite(row[key])]
        return sum(values) / len(values) if values else math.nan

    def _tell(self, tell: Callable[[], None]) -> None:
        """Unless the watcher is gone: neither a closed pipe nor a full disk under its log ends a run."""
        try:
            tell()
        except OSError:
            self._watcher = Nobody()

    @property
    def peak_device_bytes(self) -> int | None:  # type: ignore[override]
        return self._recorder.peak_device_bytes


class SystemRecorder(threading.Thread):
    """Writes a system row and a heartbeat about once a second until told to stop."""

    def __init__(
        self,
        writer: MetricsWriter,
        device: Device,
        *,
        directory: Path,
        with_children: bool,
        heartbeat: Callable[[], None],
    ) -> None:
        super().__init__(name="system-recorder", daemon=True)
        self._writer, self._device, self._heartbeat = writer, device, heartbeat
        self._sensors = SystemSensors(with_children=with_children, directory=directory)
        self._stopped = threading.Event()
        self.peak_device_bytes: int | None = None

    def run(self) -> None:
        last_s = time.monotonic()
        while not self._stopped.wait(SYSTEM_INTERVAL_S):
            now_s = time.monotonic()
            with suppress(Exception):  # a sensor that fails must not look like a trainer that hangs
                self._write_row(now_s - last_s)
            last_s = now_s
            self._heartbeat()

    def _write_row(self, interval_s: float) -> None:
        row: dict[str, Any] = self._sensors.read(interval_s)
        held_bytes = self._device.allocated_bytes()
        if held_bytes is not None:
            self.peak_device_bytes = max(held_bytes, self.peak_device_bytes or 0)
        self._writer.write(metrics.SYSTEM, {**row, "device_memory_bytes": held_bytes})

    def stop(self) -> None:
        self._stopped.set()
        self.join()
