"""The whole course of a run, from its files: curves of bounded size, whatever the length of the run. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from clipctl.monitor.reader import Rows, number
from clipctl.monitor.series import Series
from clipctl.monitor.view import PHASES
from clipctl.monitor.watch import RunWatcher, Snapshot
from clipctl.runs import metrics
from clipctl.runs.rundir import RunDir

STEP_KEYS = ("accuracy", "lr", "temperature", "grad_norm", "images_per_s", "step_s")
EVAL_KEYS = ("val_loss", "i2t_r1", "t2i_r1", "i2t_r5", "t2i_r5", "i2t_r10", "t2i_r10", "score")
BANDS = ("accuracy_easy", "accuracy_medium", "accuracy_hard")
MACHINE_KEYS = ("rss_bytes", "available_bytes", "temperature_c", "power_w", "device_memory_bytes")
MOST_POINTS = 400
MOST_COLUMNS = 120  # of gradient norms by block

Points = list[tuple[float, float]]


@dataclass
class History:
    """Curves over steps, and of the machine over seconds."""

    run: RunDir
    environment: dict[str, Any]
    snapshot: Snapshot = field(init=False)
    steps: dict[str, Series] = field(default_factory=dict)
    machine: dict[str, Series] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # seconds of sampled steps
    blocks: dict[str, Points] = field(default_factory=dict)  # gradient norm of each block, by epoch
    last_evaluation: dict[str, Any] = field(default_factory=dict)
    start_evaluation: dict[str, Any] = field(default_factory=dict)  # of the model that the run started from
    best_evaluation: dict[str, Any] = field(default_factory=dict)
    energy_j: float = 0.0  # as far as power was measured
    _base_s: float = 0.0  # what earlier attempts took
    _last_s: float | None = None

    @classmethod
    def read(cls, run: RunDir, now_s: float) -> "History":
        history = cls(run, run.read_environment())
        history.snapshot = RunWatcher(run, history._fold).look(now_s)
        return history

    def _fold(self, rows: Rows) -> None:
        self._extend(self.steps, "loss", rows.steps, rows.losses)
        for key in STEP_KEYS:
            positions = [row["step"] for row in rows.samples]
            self._extend(self.steps, key, positions, [number(row.get(key)) for row in rows.samples])
        for row in rows.samples:
            for phase in PHASES:
                value = number(row.get(phase))
                self.phases[phase] += value if math.isfinite(value) else 0.0
        if any(row.get("kind") == metrics.RESUME for row in rows.others):  # its clock starts again
            self._base_s, self._last_s = self._last_s or 0.0, None
        for row in rows.systems:
            self._fold_system(row)
        for row in rows.others:
            if row.get("kind") == metrics.EVAL:
                self._fold_evaluation(row)
            elif row.get("kind") == metrics.EPOCH:
                self._fold_epoch(row)

    def _fold_system(self, row: dict[str, Any]) -> None:
        elapsed_s = self._base_s + number(row.get("elapsed_s"))
        if not math.isfinite(elapsed_s):
            return
        for key in MACHINE_KEYS:
            self._extend(self.machine, key, [elapsed_s], [number(row.get(key))])
        cores = row.get("cpu_per_core")
        if isinstance(cores, list) and cores:
            shares = [number(one) for one in cores]
            self._extend(self.machine, "cpu", [elapsed_s], [sum(shares) / len(shares)])
        self._extend(self.machine, "process_cpu", [elapsed_s], [number(row.get("process_cpu"))])
        power_w = number(row.get("power_w"))
        if math.isfinite(power_w) and self._last_s is not None and elapsed_s > self._last_s:
            self.energy_j += power_w * (elapsed_s - self._last_s)
        self._last_s = elapsed_s

    def _fold_evaluation(self, row: dict[str, Any]) -> None:
        step = number(row.get("step"))
        for key in (*EVAL_KEYS, *BANDS):
            self._extend(self.steps, key, [step], [number(row.get(key))])
        self.last_evaluation = row
        if row.get("step") == 0:
            self.start_evaluation = row
        if number(row.get("score")) > number(self.best_evaluation.get("score", -1)):
            self.best_evaluation = row

    def _fold_epoch(self, row: dict[str, Any]) -> None:
        norms = row.get("grad_norm_by_block")
        if isinstance(norms, dict):
            for name, value in list(norms.items())[:500]:
                self.blocks.setdefault(str(name)[:80], []).append((number(row.get("epoch")), number(value)))

    @staticmethod
    def _extend(place: dict[str, Series], key: str, positions: Sequence[float], values: Sequence[float]) -> None:
        if any(math.isfinite(value) for value in values):
            place.setdefault(key, Series()).extend(positions, values)


def points_of(series: Series | None, most: int = MOST_POINTS) -> Points:
    """Means of neighbouring values, at most so many."""
    buckets = series.buckets if series else []
    each = max(1, math.ceil(len(buckets) / most))
    found = []
    for start in range(0, len(buckets), each):
        part = buckets[start : start + each]
        found.append((part[-1].last, sum(one.total for one in part) / sum(one.count for one in part)))
    return found


def band_of(series: Series | None, most: int = MOST_POINTS) -> list[tuple[float, float, float]]:
    """The smallest and the largest of neighbouring values."""
    buckets = series.buckets if series else []
    each = max(1, math.ceil(len(buckets) / most))
    parts = [buckets[start : start + each] for start in range(0, len(buckets), each)]
    return [(part[-1].last, min(one.low for one in part), max(one.high for one in part)) for part in parts]


def thinned(points: Points, most: int = MOST_COLUMNS) -> Points:
    """Every n-th point, the last one included."""
    each = max(1, math.ceil(len(points) / most))
    return points[::-1][::each][::-1]
