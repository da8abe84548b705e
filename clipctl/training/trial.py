"""Real training steps made only to be timed: by the benchmark, and where `auto` has to decide."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from clipctl.config import TrainConfig
from clipctl.data.loader import Batch
from clipctl.errors import DeviceError
from clipctl.hardware.devices import Device, is_out_of_memory, open_device
from clipctl.hardware.memory import peak_rss_bytes
from clipctl.hardware.profile import Rates, StepSample, now_s
from clipctl.hardware.timing import Stopwatch, Timing, time_in_turns
from clipctl.model.forecast import Job, Setting, model_keys
from clipctl.training.state import LossScale, TrainState, fresh_state
from clipctl.training.step import DTYPES, train_step

_TRIAL_LR = 1e-5
_PROBE_SIDES, _PROBE_CALLS = (64, 256, 512), 12
_PROBE_LIMIT_S = 0.008  # of one product, or the next size is left out: where a precision is emulated it takes seconds


def trial_batch(job: Job, seed: int = 0) -> Batch:
    """Noise and random captions of the right shapes; every caption ends where the longest does."""
    rng = torch.Generator().manual_seed(seed)
    side, vocab_size = job.model.image.size_px, job.model.text.vocab_size
    assert vocab_size is not None
    images = torch.randint(0, 256, (job.batch_size, side, side, 3), dtype=torch.uint8, generator=rng)
    tokens = torch.randint(1, vocab_size - 1, (job.batch_size, job.text_tokens), generator=rng)
    tokens[:, -1] = vocab_size - 1
    return Batch(images, tokens)


def time_steps(
    config: TrainConfig, job: Job, settings: Sequence[Setting], *, limit_s: float, min_samples: int = 3
) -> dict[Setting, Timing]:
    """Steps under several settings, taking turns. States are shared by settings that only compute otherwise."""
    config = replace(config, model=job.model, runtime=replace(config.runtime, recompute=False))
    devices = {label: open_device(label) for label in {setting.device for setting in settings}}
    states = {label: fresh_state(config, device, "fp32", settings[0].threads) for label, device in devices.items()}
    batch = trial_batch(job)
    works = {
        str(number): Stopwatch(_stepper(states[setting.device], batch), devices[setting.device].synchronize)
        for number, setting in enumerate(settings)
    }

    def prepare(name: str) -> None:
        setting = settings[int(name)]
        state = states[setting.device]
        torch.set_num_threads(setting.threads)
        state.precision = setting.precision
        state.loss_scale = LossScale(state.device.image) if setting.precision == "fp16" else None

    try:
        timings = time_in_turns(works, limit_s=limit_s, before_round=prepare, min_samples=min_samples)
    finally:
        works.clear()
        states.clear()
        for device in devices.values():
            device.release()
    return {setting: timings[str(number)] for number, setting in enumerate(settings)}


def _stepper(state: TrainState, batch: Batch) -> Callable[[], object]:
    return lambda: train_step(state, batch, lr=_TRIAL_LR)


def sample_of(setting: Setting, job: Job, timing: Timing, peak_bytes: int | None = None) -> StepSample:
    return StepSample(
        device=setting.device,
        precision=setting.precision,
        threads=setting.threads,
        model=model_keys(job.model),
        batch_size=job.batch_size,
        text_tokens=job.text_tokens,
        step_s=timing.mean_s,
        iqr_s=timing.iqr_s,
        peak_bytes=peak_bytes,
        saved_s=now_s(),
    )


@dataclass(frozen=True)
class Task:
    """Steps to make under several settings."""

    config: TrainConfig
    job: Job
    settings: tuple[Setting, ...]


# Timings, and the peak memory until the first setting was through. Only the first task of a process has a peak: what
# comes later inherits the memory of what came before.
Measured = tuple[dict[Setting, Timing], int | None]


class TrialProcess:
    """A process for steps: its peak memory is theirs, and if the system kills it, only it is gone."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))
        self._is_fresh = True

    def measure(self, tasks: Sequence[Task], *, limit_s: float) -> list[Measured]:
        was_fresh, self._is_fresh = self._is_fresh, False
        try:
            return self._pool.submit(_measure, tasks, limit_s, was_fresh).result()
        except BrokenProcessPool:
            words = "the steps were ended by the system, most likely for want of memory"
        except (RuntimeError, MemoryError) as error:
            words = "out of memory" if is_out_of_memory(error) else str(error).strip().splitlines()[0]
        raise DeviceError(f"{words} at batch size {tasks[-1].job.batch_size} on {tasks[-1].settings[0].device}")

    def close(self) -> None:
        self._pool.shutdown()


def _measure(tasks: Sequence[Task], limit_s: float, is_fresh: bool) -> list[Measured]:
    measured = [_measure_task(task, limit_s) for task in tasks]
    return [(timings, peak if is_fresh and number == 0 else None) for number, (timings, peak) in enumerate(measured)]


def _measure_task(task: Task, limit_s: float) -> tuple[dict[Setting, Timing], int]:
    first, *others = task.settings
    timings = time_steps(task.config, task.job, [first], limit_s=limit_s)
    device = open_device(first.device)
    peak_bytes = device.peak_bytes() or device.allocated_bytes() or peak_rss_bytes()
    if others:
        timings |= time_steps(task.config, task.job, others, limit_s=limit_s)
    return timings, peak_bytes


def probe_rates(device: Device, precision: str, threads: int) -> Rates:
    """What a product of matrices reaches in a precision. Costs milliseconds even where that precision is emulated:
    a small product tells first whether a larger one can be afforded."""
    torch.set_num_threads(threads)
    gflops = 0.0
    with suppress(RuntimeError, TypeError):  # a precision that the device does not know reaches nothing
        for side in _PROBE_SIDES:
            matrix = torch.randn(side, side).to(device.image, DTYPES[precision])
            watch = Stopwatch(partial(torch.mm, matrix, matrix), device.synchronize)
            fastest_s = min(watch.sample() for _ in range(_PROBE_CALLS))
            gflops = max(gflops, 2 * side**3 / fastest_s / 1e9)
            if fastest_s > _PROBE_LIMIT_S:
                break
    return Rates(device.label, precision, threads, round(gflops, 3))
