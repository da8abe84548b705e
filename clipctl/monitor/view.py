"""What is known about a run: a fold over the rows of its metrics file. Pure: reads no files and no clock."""

import bisect
import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from clipctl.monitor.reader import Rows, number
from clipctl.monitor.series import Series
from clipctl.runs import metrics
from clipctl.runs.retention import merit

PHASES = ("data_s", "transfer_s", "forward_s", "backward_s", "optimizer_s")
WINDOW = 50  # steps that "now" means
SPEED_WINDOW = 20
MAX_EVALUATIONS = 400
RECENT_EVALUATIONS = 20  # never thinned out
KEPT_CHECKPOINTS = 5
KEPT_EVENTS = 20


@dataclass(frozen=True)
class EvalPoint:
    step: int
    elapsed_s: float
    val_loss: float
    score: float


@dataclass
class RunView:
    """Everything the dashboard and the diagnosis look at."""

    step: int = 0
    epoch: int = 0
    attempt: int = 1
    elapsed_s: float = 0.0  # over all attempts, without steps that a resume has undone
    loss: Series = field(default_factory=Series)  # over steps
    grad_norm: Series = field(default_factory=Series)
    accuracy: Series = field(default_factory=Series)
    speed: Series = field(default_factory=Series)  # images per second
    clock: Series = field(default_factory=Series)  # seconds over steps, to draw over time
    evaluations: list[EvalPoint] = field(default_factory=list)
    checkpoints: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_CHECKPOINTS))
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    bad_pictures: dict[str, int] = field(default_factory=dict)  # how many by reason
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=WINDOW))  # step rows
    system: dict[str, Any] = field(default_factory=dict)  # the latest
    first_system: dict[str, Any] = field(default_factory=dict)  # of this attempt
    skipped: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))  # steps without an update
    rows_of_progress: int = 0  # all rows but those that are written every second anyway
    _base_s: float = 0.0  # time that earlier attempts took
    _attempt_first: tuple[int, float] | None = None  # this attempt's first step and when it ended
    _start_speeds: list[float] = field(default_factory=list)

    # --- folding ----------------------------------------------------------------------------------------------

    def fold(self, rows: Rows) -> None:
        self.rows_of_progress += len(rows.steps) + len(rows.others)
        for row in rows.others:
            if row.get("kind") == metrics.RESUME:  # the reader always puts it first
                self._fold_resume(row)
        self.loss.extend(rows.steps, rows.losses)
        self._fold_samples(rows.samples)
        for row in rows.others:
            self._fold_other(row)
        if rows.systems:
            self.first_system = self.first_system or rows.systems[0]
            self.system = rows.systems[-1]

    def _fold_samples(self, samples: list[dict[str, Any]]) -> None:
        if not samples:
            return
        steps = [row["step"] for row in samples]
        for series, key in (
            (self.grad_norm, "grad_norm"),
            (self.accuracy, "accuracy"),
            (self.speed, "images_per_s"),
        ):
            series.extend(steps, [number(row.get(key)) for row in samples])
        self.skipped.extend(step for step, row in zip(steps, samples, strict=True) if row.get("skipped"))
        elapsed = [self._base_s + number(row.get("elapsed_s")) for row in samples]
        elapsed = [value if math.isfinite(value) else self.elapsed_s for value in elapsed]
        self.clock.extend(steps, elapsed)
        self._attempt_first = self._attempt_first or (steps[0], elapsed[0])
        if len(self._start_speeds) < SPEED_WINDOW:
            self._start_speeds += [number(row.get("images_per_s")) for row in samples[:SPEED_WINDOW]]
        self.recent.extend(samples)
        self.step, self.elapsed_s = steps[-1], elapsed[-1]
        self.epoch = int(_or_zero(number(samples[-1].get("epoch"))))

    def _fold_other(self, row: dict[str, Any]) -> None:
        match row.get("kind"):
            case metrics.EVAL:
                values = (number(row.get(key)) for key in ("val_loss", "score"))
                elapsed_s = self._base_s + number(row.get("elapsed_s"))
                self.evaluations.append(EvalPoint(int(_or_zero(number(row.get("step")))), elapsed_s, *values))
                if len(self.evaluations) > MAX_EVALUATIONS:
                    best = self.best
                    earlier = self.evaluations[:-RECENT_EVALUATIONS]
                    lowest = min(earlier, key=lambda point: point.val_loss)
                    kept = (best, lowest)
                    thinned = [point for index, point in enumerate(earlier) if index % 2 == 0 or point in kept]
                    self.evaluations[:-RECENT_EVALUATIONS] = thinned
            case metrics.CHECKPOINT:
                self.checkpoints.append(row)
            case metrics.EVENT if row.get("event") == "bad_picture":  # there may be thousands
                counts = row.get("counts")
                self.bad_pictures = counts if isinstance(counts, dict) else self.bad_pictures
            case metrics.EVENT:
                self.events.append(row)

    def _fold_resume(self, row: dict[str, Any]) -> None:
        self.attempt = int(_or_zero(number(row.get("attempt"))))
        self._base_s, self._attempt_first, self._start_speeds = self.elapsed_s, None, []
        self.first_system = {}
        self.recent.clear()

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def last(self) -> dict[str, Any]:
        """The latest step in full."""
        return self.recent[-1] if self.recent else {}

    def latest(self, key: str) -> float | None:
        """A number from the latest step; None if unknown or not finite."""
        return _finite(number(self.last.get(key)))

    @property
    def scale(self) -> float | None:
        temperature = self.latest("temperature")
        return 1 / temperature if temperature else None

    @property
    def chance_loss(self) -> float | None:
        """ln B: the loss of a model that knows nothing."""
        batch_size = self.latest("batch_size")
        return math.log(batch_size) if batch_size and batch_size >= 1 else None

    @property
    def smoothed_loss(self) -> float | None:
        points = self.loss.smoothed(WINDOW)
        return points[-1][1] if points else None

    @property
    def best(self) -> EvalPoint | None:
        scored = [point for point in self.evaluations if math.isfinite(point.score)]
        return max(
            scored,
            key=lambda point: (*merit({"score": point.score, "val_loss": point.val_loss}), point.step),
            default=None,
        )

    @property
    def start(self) -> EvalPoint | None:
        """The model as it came, judged before the first step, if the run started from one."""
        first = self.evaluations[0] if self.evaluations else None
        return first if first and first.step == 0 and math.isfinite(first.score) else None

    @property
    def images_per_s(self) -> float | None:
        return _median(number(row.get("images_per_s")) for row in list(self.recent)[-SPEED_WINDOW:])

    @property
    def images_per_s_at_start(self) -> float | None:
        """Of this attempt, without its first steps, which are warm-up."""
        speeds = self._start_speeds[3:] if len(self._start_speeds) > 6 else self._start_speeds
        return _median(speeds)

    def phase_shares(self) -> dict[str, float]:
        """How the time of a step is split into phases, as shares; from the steps that recorded them."""
        split = [row for row in self.recent if isinstance(row.get("forward_s"), int | float)]
        sums = {phase: sum(_or_zero(number(row.get(phase))) for row in split) for phase in PHASES}
        total = sum(_or_zero(number(row.get("step_s"))) for row in split)
        return {phase: value / total for phase, value in sums.items()} if total > 0 else {}

    def data_times(self) -> list[tuple[float, float]]:
        """Seconds spent waiting for data and in total, for each recent step."""
        return [(_or_zero(number(row.get("data_s"))), _or_zero(number(row.get("step_s")))) for row in self.recent]

    def step_seconds(self) -> float | None:
        """Mean time per step in this attempt, including evaluations and saves."""
        if self._attempt_first is None or self.step <= self._attempt_first[0]:
            return self.latest("step_s")
        first_step, first_s = self._attempt_first
        return max(0.0, self.elapsed_s - first_s) / (self.step - first_step)

    def eta_s(self, total_steps: int) -> float | None:
        step_s = self.step_seconds()
        return None if step_s is None else metrics.time_left_s(step_s, 1, total_steps - self.step)

    def seconds_at(self, step: float) -> float:
        """When a step ended, estimated from nearby steps."""
        buckets = self.clock.buckets
        if not buckets:
            return 0.0
        index = bisect.bisect_left(buckets, step, key=lambda bucket: bucket.last)
        if index == len(buckets):
            return buckets[-1].high
        end = buckets[index]
        start_step, start_s = (buckets[index - 1].last, buckets[index - 1].high) if index else (end.first, end.low)
        share = (step - start_step) / (end.last - start_step) if end.last > start_step else 1.0
        return start_s + (end.high - start_s) * max(0.0, share)


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _median(values: Iterable[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else None
