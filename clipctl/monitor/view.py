"""What is known about a run: a fold over the rows of its metrics file. Pure: reads no files and no clock."""

import bisect
import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from clipctl.monitor.reader import Rows, number
from clipctl.monitor.series import Series
from clipctl.runs import metrics
from clipctl.runs.retention import merit

MAX_RANKS, HOST_LENGTH = 4096, 60
UNEQUAL_SHARE = 0.1  # of their time, that processes wait more than the slowest before it is called that
PHASES = ("data_s", "transfer_s", "forward_s", "backward_s", "optimizer_s")
RECENT_STEPS = 50  # kept in full
MAX_EVALUATIONS = 400
RECENT_EVALUATIONS = 20  # never thinned out
KEPT_CHECKPOINTS = 5
KEPT_EVENTS = 20
MAX_EPOCHS = 200  # whose gradient norms are kept; then every other one
MOST_CORES = 64
RECALLS = ("r5", "r10")
BANDS = ("easy", "medium", "hard")


@dataclass(frozen=True)
class EvalPoint:
    """One evaluation; what an older run did not record is NaN."""

    step: int
    elapsed_s: float
    val_loss: float
    score: float
    r5: float = math.nan  # means of both directions
    r10: float = math.nan
    difficulty: tuple[float, ...] = ()  # accuracy against easy, medium and hard negatives


@dataclass(frozen=True)
class BlockNorms:
    """The gradient norm of each block at the end of an epoch."""

    epoch: int
    norms: dict[str, float]


@dataclass
class MachineView:
    """What the machine did, over the seconds of the run."""

    cores: list[Series] = field(default_factory=list)
    trainer: Series = field(default_factory=Series)  # cores that the trainer keeps busy
    others: Series = field(default_factory=Series)  # cores that other programs keep busy
    rss_bytes: Series = field(default_factory=Series)
    available_bytes: Series = field(default_factory=Series)
    swap_bytes: Series = field(default_factory=Series)
    device_bytes: Series = field(default_factory=Series)
    temperature_c: Series = field(default_factory=Series)
    power_w: Series = field(default_factory=Series)
    disk_free_bytes: Series = field(default_factory=Series)

    def fold(self, rows: list[dict[str, Any]], base_s: float) -> None:
        times = [base_s + _or_zero(number(row.get("elapsed_s"))) for row in rows]
        loads = [_loads(row) for row in rows]
        while len(self.cores) < min(MOST_CORES, max(map(len, loads), default=0)):
            self.cores.append(Series())
        for index, core in enumerate(self.cores):
            core.extend(times, [load[index] if index < len(load) else math.nan for load in loads])
        own = [number(row.get("process_cpu")) for row in rows]
        self.trainer.extend(times, own)
        self.others.extend(times, [max(0.0, sum(load) - mine) for load, mine in zip(loads, own, strict=True)])
        for series, key in (
            (self.rss_bytes, "rss_bytes"),
            (self.available_bytes, "available_bytes"),
            (self.swap_bytes, "swap_used_bytes"),
            (self.device_bytes, "device_memory_bytes"),
            (self.temperature_c, "temperature_c"),
            (self.power_w, "power_w"),
            (self.disk_free_bytes, "disk_free_bytes"),
        ):
            series.extend(times, [number(row.get(key)) for row in rows])


class RankView(NamedTuple):
    """The latest facts about one of several processes that train together."""

    rank: int
    host: str
    images_per_s: float
    wait_share: float  # of its time that it waits for the others
    memory_bytes: float


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
    lr: Series = field(default_factory=Series)
    temperature: Series = field(default_factory=Series)
    data_share: Series = field(default_factory=Series)  # of a step, spent waiting for pictures
    step_seconds: Series = field(default_factory=Series)
    clock: Series = field(default_factory=Series)  # seconds over steps, to draw over time
    evaluations: list[EvalPoint] = field(default_factory=list)
    baseline: float | None = None  # R@1 of the nearest training picture by pixels, without any training
    blocks: list[BlockNorms] = field(default_factory=list)
    machine: MachineView = field(default_factory=MachineView)
    checkpoints: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_CHECKPOINTS))
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    bad_pictures: dict[str, int] = field(default_factory=dict)  # how many by reason
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))  # step rows
    system: dict[str, Any] = field(default_factory=dict)  # the latest
    first_system: dict[str, Any] = field(default_factory=dict)  # of this attempt
    skipped: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))  # steps without an update
    ranks: dict[int, RankView] = field(default_factory=dict)  # empty if there is only one process
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
            self.machine.fold(rows.systems, self._base_s)

    def _fold_samples(self, samples: list[dict[str, Any]]) -> None:
        if not samples:
            return
        steps = [row["step"] for row in samples]
        for series, key in (
            (self.grad_norm, "grad_norm"),
            (self.accuracy, "accuracy"),
            (self.speed, "images_per_s"),
            (self.lr, "lr"),
            (self.temperature, "temperature"),
            (self.step_seconds, "step_s"),
        ):
            series.extend(steps, [number(row.get(key)) for row in samples])
        self.data_share.extend(steps, [_share(row) for row in samples])
        self.skipped.extend(step for step, row in zip(steps, samples, strict=True) if row.get("skipped"))
        elapsed = [self._base_s + number(row.get("elapsed_s")) for row in samples]
        elapsed = [value if math.isfinite(value) else self.elapsed_s for value in elapsed]
        self.clock.extend(steps, elapsed)
        self._attempt_first = self._attempt_first or (steps[0], elapsed[0])
        if len(self._start_speeds) < metrics.WINDOW_STEPS:
            self._start_speeds += [number(row.get("images_per_s")) for row in samples[: metrics.WINDOW_STEPS]]
        self.recent.extend(samples)
        self.step, self.elapsed_s = steps[-1], elapsed[-1]
        self.epoch = int(_or_zero(number(samples[-1].get("epoch"))))

    def _fold_other(self, row: dict[str, Any]) -> None:
        match row.get("kind"):
            case metrics.EVAL:
                self._fold_evaluation(row)
            case metrics.EPOCH:
                self._fold_epoch(row)
            case metrics.CHECKPOINT:
                self.checkpoints.append(row)
            case metrics.RANK:
                self._fold_rank(row)
            case metrics.EVENT if row.get("event") == "bad_picture":  # there may be thousands
                counts = row.get("counts")
                self.bad_pictures = counts if isinstance(counts, dict) else self.bad_pictures
            case metrics.EVENT:
                self.events.append(row)

    def _fold_evaluation(self, row: dict[str, Any]) -> None:
        r5, r10 = (statistics.fmean(number(row.get(f"{side}_{key}")) for side in ("i2t", "t2i")) for key in RECALLS)
        point = EvalPoint(
            int(_or_zero(number(row.get("step")))),
            self._base_s + number(row.get("elapsed_s")),
            number(row.get("val_loss")),
            number(row.get("score")),
            r5,
            r10,
            tuple(number(row.get(f"accuracy_{band}")) for band in BANDS),
        )
        self.evaluations.append(point)
        baseline = number(row.get("baseline_r1"))
        self.baseline = baseline if math.isfinite(baseline) else self.baseline
        if len(self.evaluations) > MAX_EVALUATIONS:
            earlier = self.evaluations[:-RECENT_EVALUATIONS]
            kept = (self.best, min(earlier, key=lambda point: point.val_loss))
            thinned = [point for index, point in enumerate(earlier) if index % 2 == 0 or point in kept]
            self.evaluations[:-RECENT_EVALUATIONS] = thinned

    def _fold_epoch(self, row: dict[str, Any]) -> None:
        norms = row.get("grad_norm_by_block")
        if isinstance(norms, dict) and norms:
            finite = {str(name): number(value) for name, value in norms.items() if math.isfinite(number(value))}
            self.blocks.append(BlockNorms(int(_or_zero(number(row.get("epoch")))), finite))
        if len(self.blocks) > MAX_EPOCHS:
            self.blocks[:-1] = self.blocks[:-1:2]

    def _fold_rank(self, row: dict[str, Any]) -> None:
        rank = int(_or_zero(number(row.get("rank"))))
        if rank in self.ranks or 0 <= rank < MAX_RANKS:
            numbers = (_or_zero(number(row.get(key))) for key in ("images_per_s", "wait_share", "memory_bytes"))
            self.ranks[rank] = RankView(rank, str(row.get("host"))[:HOST_LENGTH], *numbers)

    def _fold_resume(self, row: dict[str, Any]) -> None:
        self.attempt = int(_or_zero(number(row.get("attempt"))))
        self._base_s, self._attempt_first, self._start_speeds = self.elapsed_s, None, []
        self.first_system = {}
        self.recent.clear()
        self.ranks.clear()  # there may be fewer now

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def last(self) -> dict[str, Any]:
        """The latest step in full."""
        return self.recent[-1] if self.recent else {}

    @property
    def slowest_rank(self) -> RankView | None:
        """The process that the others wait for: it waits least. None if they are about equal."""
        if len(self.ranks) < 2:
            return None
        slowest = min(self.ranks.values(), key=lambda one: one.wait_share)
        others = [one.wait_share for one in self.ranks.values() if one is not slowest]
        return slowest if min(others) - slowest.wait_share > UNEQUAL_SHARE else None

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
    def loss_now(self) -> float | None:
        """The mean of the last `window_steps` steps: the one figure that console, header and JSON show."""
        return self._mean_now("loss")

    @property
    def accuracy_now(self) -> float | None:
        """In a batch of training pairs, over the same steps."""
        return self._mean_now("accuracy")

    def _mean_now(self, key: str) -> float | None:
        values = [number(row.get(key)) for row in self._window]
        finite = [value for value in values if math.isfinite(value)]
        return sum(finite) / len(finite) if finite else None

    @property
    def window_steps(self) -> int:
        """How many steps "now" covers: fewer at the beginning of an attempt."""
        return len(self._window)

    @property
    def _window(self) -> list[dict[str, Any]]:
        return list(self.recent)[-metrics.WINDOW_STEPS :]

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
        """The evaluation of the model that the run started from, before the first step, if there was one."""
        first = self.evaluations[0] if self.evaluations else None
        return first if first and first.step == 0 and math.isfinite(first.score) else None

    @property
    def images_per_s(self) -> float | None:
        """Over the last `window_steps` steps, as `step_s` and `eta_s` are."""
        pairs = [(number(row.get("batch_size")), number(row.get("step_s"))) for row in self._window]
        known = [(images, seconds) for images, seconds in pairs if images > 0 and seconds > 0]
        if not known:
            return _median(number(row.get("images_per_s")) for row in self._window)
        return sum(images for images, _ in known) / sum(seconds for _, seconds in known)

    @property
    def step_s(self) -> float | None:
        return self._mean_now("step_s")

    @property
    def usual_step_s(self) -> float | None:
        """Of this attempt, without its first step and what came between steps."""
        return self._usual_s()[0] or None

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

    def eta_s(self, total_steps: int) -> float | None:
        """At the pace of the last steps, and with as much time for evaluations and saves as there was so far."""
        if self.step_s is None:
            return None
        return metrics.time_left_s(self.step_s, *self._usual_s(), total_steps - self.step)

    def _usual_s(self) -> tuple[float, float]:
        """Seconds per step of this attempt, without and with what came between the steps."""
        if self._attempt_first is None or self.step <= self._attempt_first[0]:
            return 0.0, 0.0
        first_step, first_s = self._attempt_first
        seconds = self.step_seconds.since(first_step + 1)
        counted = sum(bucket.count for bucket in seconds.buckets)
        usual_s = sum(bucket.total for bucket in seconds.buckets) / counted if counted else 0.0
        return usual_s, (self.elapsed_s - first_s) / (self.step - first_step)

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


def _share(row: dict[str, Any]) -> float:
    """Of a step's time, what was spent waiting for data."""
    step_s = number(row.get("step_s"))
    return number(row.get("data_s")) / step_s if step_s > 0 else math.nan


def _loads(row: dict[str, Any]) -> list[float]:
    cores = row.get("cpu_per_core")
    return [_or_zero(number(load)) for load in cores] if isinstance(cores, list) else []


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _median(values: Iterable[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else None
