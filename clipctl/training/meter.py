"""Metrics of steps: their numbers, read from the device now and then, and where their time goes."""

import time
from typing import Any, NamedTuple

import torch

from clipctl.hardware.devices import Device
from clipctl.training.course import StepWindow
from clipctl.training.divergence import NonfiniteGuard
from clipctl.training.step import StepResult

READ_INTERVAL_S = 1.0


class PhaseClock:
    """Splits a step into its phases.

    The CPU works while it is called, so every step can be split. An accelerator only queues work, and every mark would
    have to wait for it; so only sampled steps are split there, and the others run freely.
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
            name = f"{phase}_s"
            self.phases_s[name] = self.phases_s.get(name, 0.0) + now - self._last  # micro-batches take turns
            self._last = now


class _Waiting(NamedTuple):
    """A step whose numbers are still on the device."""

    facts: dict[str, Any]
    pairs: int
    step_s: float
    phases_s: dict[str, float]
    result: StepResult
    ended_s: float  # monotonic


class Reading(NamedTuple):
    """The steps since the last reading: a row for each, with the moment it ended, and their sums."""

    rows: list[tuple[dict[str, Any], float]]
    window: StepWindow


class Effort(NamedTuple):
    """What this process has done in some steps, beside others."""

    images: int = 0  # of all processes
    seconds: float = 0.0
    waited_s: float = 0.0  # of those, for the others


class StepMeter:
    """Times steps and collects their results; the device is asked for its numbers once per reading."""

    def __init__(self, device: Device, skipped_in_a_row: int = 0) -> None:
        self._device = device
        self._clock = PhaseClock(device)
        self.guard = NonfiniteGuard(skipped_in_a_row)
        self._waiting: list[_Waiting] = []
        self._read = self._ended = self._compared = time.perf_counter()
        self._data_s, self._wait_s, self._effort = 0.0, 0.0, Effort()

    @property
    def is_due(self) -> bool:
        """Whether a reading is due."""
        return time.perf_counter() - self._read >= READ_INTERVAL_S

    @property
    def is_comparison_due(self) -> bool:
        """Whether processes are to be compared again."""
        return time.perf_counter() - self._compared >= READ_INTERVAL_S

    def restart(self) -> None:
        """The next step begins now: what came before, such as a save, is not part of it, nor is waiting for that."""
        self._ended, self._wait_s = time.perf_counter(), 0.0

    def wait(self, seconds: float) -> None:
        """Note how long this process has waited for others since the last step."""
        self._wait_s += seconds

    def take_effort(self) -> Effort:
        """Of the steps since the last time."""
        effort, self._effort = self._effort, Effort()
        self._compared = time.perf_counter()
        return effort

    def begin(self) -> None:
        """A batch is there: waiting for data is over."""
        self._data_s = time.perf_counter() - self._ended - self._wait_s
        self._clock.start(sample=self.is_due)

    def mark(self, phase: str) -> None:
        self._clock.mark(phase)

    def end(self, result: StepResult, *, step: int, epoch: int, pairs: int, lr: float) -> None:
        step_s, self._ended = time.perf_counter() - self._ended, time.perf_counter()
        phases_s = {"data_s": self._data_s, **self._clock.phases_s}
        if self._wait_s:  # there are others
            phases_s["wait_s"] = phases_s.get("wait_s", 0.0) + self._wait_s
            self._wait_s = 0.0
        images, seconds, waited_s = self._effort
        self._effort = Effort(images + pairs, seconds + step_s, waited_s + phases_s.get("wait_s", 0.0))
        facts = {"step": step, "epoch": epoch, "lr": lr}
        self._waiting.append(_Waiting(facts, pairs, step_s, phases_s, result, time.monotonic()))

    def read(self) -> Reading | None:
        """The steps since the last time; None if there were none."""
        self._read = time.perf_counter()
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return None
        values = torch.stack([torch.stack([value.float() for value in one.result]) for one in waiting]).tolist()
        images, seconds = sum(one.pairs for one in waiting), sum(one.step_s for one in waiting)
        rows, window = [], StepWindow(images=images, seconds=seconds)
        for one, (loss, accuracy, grad_norm, scale) in zip(waiting, values, strict=True):
            # The host runs ahead of an accelerator; only the whole window's speed is true there.
            speed = images / seconds if self._device.is_accelerator else one.pairs / one.step_s
            row = {
                "step": one.facts["step"],
                "epoch": one.facts["epoch"],
                "loss": loss,
                "accuracy": accuracy,
                "lr": one.facts["lr"],
                "temperature": 1 / scale if scale else float("inf"),
                "grad_norm": grad_norm,
                "batch_size": one.pairs,
                "images_per_s": round(speed, 2),
                "step_s": round(one.step_s, 6),
                **{phase: round(value, 6) for phase, value in one.phases_s.items()},
            }
            if self.guard.see(row):
                row["skipped"] = True
            else:
                window += StepWindow(steps=1, loss_sum=loss, accuracy_sum=accuracy)
            rows.append((row, one.ended_s))
        return Reading(rows, window)
