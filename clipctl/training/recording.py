"""What a run writes down about itself while it runs, without slowing it down."""

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from clipctl.hardware.devices import Device
from clipctl.hardware.sensors import SystemSensors
from clipctl.runs import metrics
from clipctl.runs.metrics import MetricsWriter
from clipctl.training.divergence import NonfiniteGuard
from clipctl.training.step import StepResult

FLUSH_INTERVAL_S = 1.0
SYSTEM_INTERVAL_S = 1.0


class PhaseClock:
    """Splits a step into its phases.

    The CPU works while it is called, so every step can be split. An accelerator only queues, and would have to be
    waited for at every mark; there only sampled steps are split, the others run freely.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._sampled = False
        self._last = 0.0
        self.phases_s: dict[str, float] = {}

    def start(self, *, sample: bool) -> None:
        self.phases_s = {}
        self._sampled = sample or not self._device.is_accelerator
        if self._sampled:
            self._device.synchronize()  # what was queued before is not part of this step
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        if self._sampled:
            self._device.synchronize()
            now = time.perf_counter()
            self.phases_s[f"{phase}_s"] = now - self._last
            self._last = now


@dataclass(frozen=True)
class StepStart:
    """What is known of a step without asking the device."""

    step: int
    epoch: int
    pairs: int
    lr: float
    step_s: float
    phases_s: dict[str, float]


@dataclass(frozen=True)
class StepWindow:
    """Several steps in sums, so that windows can be added."""

    steps: int  # with a finite loss: the others are left out of the sums below
    images: int
    seconds: float
    loss_sum: float
    accuracy_sum: float

    def __add__(self, other: "StepWindow") -> "StepWindow":
        return StepWindow(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def loss(self) -> float:
        return self.loss_sum / self.steps if self.steps else math.nan

    @property
    def accuracy(self) -> float:
        return self.accuracy_sum / self.steps if self.steps else math.nan

    @property
    def images_per_s(self) -> float:
        return self.images / self.seconds


class StepLog:
    """Collects steps and writes their rows together: the device is asked for its numbers once per flush."""

    def __init__(self, writer: MetricsWriter, device: Device, guard: NonfiniteGuard) -> None:
        self._writer = writer
        self._device = device
        self._guard = guard
        self._waiting: list[tuple[StepStart, StepResult, float]] = []
        self._flushed = time.perf_counter()

    def add(self, start: StepStart, result: StepResult) -> None:
        self._waiting.append((start, result, self._writer.elapsed_s))

    @property
    def is_due(self) -> bool:
        return time.perf_counter() - self._flushed >= FLUSH_INTERVAL_S

    def flush(self) -> StepWindow | None:
        """Write the waiting rows; None if there are none."""
        self._flushed = time.perf_counter()
        if not self._waiting:
            return None
        values = torch.stack(
            [torch.stack([value.float() for value in result]) for _, result, _ in self._waiting]
        ).tolist()
        images = sum(start.pairs for start, _, _ in self._waiting)
        seconds = sum(start.step_s for start, _, _ in self._waiting)
        sums = (0, 0.0, 0.0)  # steps, losses, accuracies
        for (start, _, elapsed_s), (loss, accuracy, grad_norm, scale) in zip(self._waiting, values, strict=True):
            # The host runs ahead of an accelerator; only the whole window's speed is true there.
            speed = images / seconds if self._device.is_accelerator else start.pairs / start.step_s
            row = {
                "step": start.step,
                "epoch": start.epoch,
                "loss": loss,
                "accuracy": accuracy,
                "lr": start.lr,
                "temperature": 1 / scale if scale else float("inf"),
                "grad_norm": grad_norm,
                "batch_size": start.pairs,
                "images_per_s": round(speed, 2),
                "step_s": round(start.step_s, 6),
                **{phase: round(value, 6) for phase, value in start.phases_s.items()},
            }
            if self._guard.see(row):
                row["skipped"] = True
            else:
                sums = (sums[0] + 1, sums[1] + loss, sums[2] + accuracy)
            self._writer.write(metrics.STEP, row, elapsed_s=elapsed_s)
        self._waiting.clear()
        steps, loss_sum, accuracy_sum = sums
        return StepWindow(steps, images, seconds, loss_sum, accuracy_sum)


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
        self.peak_device_bytes: int | None = None  # the most that was seen; some devices do not remember it themselves

    def run(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(SYSTEM_INTERVAL_S):
            now = time.monotonic()
            with suppress(Exception):  # a sensor that fails must not look like a trainer that hangs
                row = self._sensors.read(now - last)
                held_bytes = self._device.allocated_bytes()
                if held_bytes is not None:
                    self.peak_device_bytes = max(held_bytes, self.peak_device_bytes or 0)
                self._writer.write(metrics.SYSTEM, {**row, "device_memory_bytes": held_bytes})
            last = now
            self._heartbeat()

    def stop(self) -> None:
        self._stopped.set()
        self.join()
