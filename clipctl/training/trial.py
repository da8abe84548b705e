"""Real training steps run only to be timed: by the benchmark, and when `auto` has to decide."""

from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from clipctl.config.sections import TrainConfig
from clipctl.data.batch import Batch
from clipctl.errors import DeviceError
from clipctl.hardware.devices import DTYPES, Device, is_out_of_memory, open_device
from clipctl.hardware.memory import peak_rss_bytes
from clipctl.hardware.processes import Helpers
from clipctl.hardware.profile import AttentionTimes, Rates, StepSample, load_profile, now_s, update_profile
from clipctl.hardware.timing import MIN_SAMPLES, Stopwatch, Timing, time_in_turns
from clipctl.model.forecast import CostModel
from clipctl.model.towers import attend
from clipctl.model.workload import AttentionShape, Setting, Workload
from clipctl.training.state import LossScale, TrainState, fresh_state
from clipctl.training.step import train_step

_TRIAL_LR = 1e-5
_PROBE_SIDES, _PROBE_CALLS = (64, 256, 512), 12
_WAYS, _ATTENTION_LIMIT_S = ("fused", "plain"), 0.02
_PROBE_LIMIT_S = 0.008  # of one product, or the next size is left out: where a precision is emulated it takes seconds


def trial_batch(workload: Workload, seed: int = 0) -> Batch:
    """Noise and random captions of the right shapes; every caption ends where the longest does."""
    rng = torch.Generator().manual_seed(seed)
    side, vocab_size = workload.model.image.size_px, workload.model.text.vocab_size
    assert vocab_size is not None
    images = torch.randint(0, 256, (workload.batch_size, side, side, 3), dtype=torch.uint8, generator=rng)
    tokens = torch.randint(1, vocab_size - 1, (workload.batch_size, workload.text_tokens), generator=rng)
    tokens[:, -1] = vocab_size - 1
    if not workload.image_share:  # features of a locked tower
        images = torch.randn(workload.batch_size, workload.model.image.pooled, generator=rng)
    if not workload.text_share:
        tokens = torch.randn(workload.batch_size, workload.model.text.width, generator=rng)
    return Batch(images, tokens)


@dataclass(frozen=True)
class Task:
    """Steps to time under several settings."""

    config: TrainConfig
    workload: Workload
    settings: tuple[Setting, ...]


class Trial:
    """The steps of a task, ready to be timed repeatedly. Settings that only compute differently share a state."""

    def __init__(self, task: Task) -> None:
        runtime = replace(task.config.runtime, recompute=task.workload.recompute, compile=False)
        loop = replace(task.config.train, micro_batch=task.workload.micro_batch)
        config = replace(task.config, model=task.workload.model, train=loop, runtime=runtime)
        self._devices = {label: open_device(label) for label in {setting.device for setting in task.settings}}
        threads = task.settings[0].threads
        self._states = {name: fresh_state(config, device, "fp32", threads) for name, device in self._devices.items()}
        self._attention = {setting: attention_for(setting, task.workload) for setting in task.settings}
        batch = trial_batch(task.workload)
        self._watches = {
            setting: Stopwatch(_stepper(self._states[setting.device], batch), self._devices[setting.device].synchronize)
            for setting in task.settings
        }

    def time(self, settings: Sequence[Setting], *, limit_s: float, min_samples: int) -> dict[Setting, Timing]:
        """Under several settings, taking turns."""
        watches = {setting: self._watches[setting] for setting in settings}
        return time_in_turns(watches, limit_s=limit_s, before_round=self._prepare, min_samples=min_samples)

    def _prepare(self, setting: Setting) -> None:
        state = self._states[setting.device]
        state.model.use_attention(self._attention[setting])
        torch.set_num_threads(setting.threads)
        state.precision = setting.precision
        state.loss_scale = LossScale(state.device.image) if setting.precision == "fp16" else None

    def close(self) -> None:
        self._watches.clear()
        self._states.clear()
        for device in self._devices.values():
            device.release()


def time_steps(
    config: TrainConfig,
    workload: Workload,
    settings: Sequence[Setting],
    *,
    limit_s: float,
    min_samples: int = MIN_SAMPLES,
) -> dict[Setting, Timing]:
    """Steps in this process, once."""
    with closing(Trial(Task(config, workload, tuple(settings)))) as trial:
        return trial.time(settings, limit_s=limit_s, min_samples=min_samples)


def _stepper(state: TrainState, batch: Batch) -> Callable[[], object]:
    micro_batch = state.micro_batch

    def step() -> None:
        train_step(state, batch, lr=_TRIAL_LR)
        if state.micro_batch != micro_batch:  # a training would go on in smaller ones; that is not what is timed
            raise torch.OutOfMemoryError("out of memory")

    return step


def sample_of(setting: Setting, workload: Workload, timing: Timing, peak_bytes: int | None = None) -> StepSample:
    return StepSample(
        device=setting.device,
        precision=setting.precision,
        threads=setting.threads,
        workload=workload.to_dict(),
        step_s=timing.mean_s,
        iqr_s=timing.iqr_s,
        peak_bytes=peak_bytes,
        saved_s=now_s(),
    )


# Timings, and the peak memory until the first setting was through. Only the first task of a process has a peak: what
# comes later inherits the memory of what came before.
Measured = tuple[dict[Setting, Timing], int | None]


class TrialProcess:
    """Tasks in a process of their own: its peak memory is theirs, and if the system kills it, nothing else is lost.
    They are kept ready in it, so that timing can be spread over minutes."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._process = Helpers()

    def visit(self, *, limit_s: float, min_samples: int = MIN_SAMPLES) -> list[Measured]:
        try:
            return self._process.submit(_visit, self._tasks, limit_s, min_samples).result()
        except BrokenProcessPool:
            words = "the system killed the process, most likely because memory ran out"
        except (RuntimeError, MemoryError) as error:
            words = "out of memory" if is_out_of_memory(error) else str(error).strip().splitlines()[0]
        last = self._tasks[-1]
        raise DeviceError(f"{words} at batch size {last.workload.batch_size} on {last.settings[0].device}")

    def close(self) -> None:
        self._process.shutdown()


_trials: list[Trial] = []  # those of a TrialProcess, in its process


def _visit(tasks: Sequence[Task], limit_s: float, min_samples: int) -> list[Measured]:
    measured = []
    for number, task in enumerate(tasks):
        timings, peak_bytes, settings = {}, None, task.settings
        if number == len(_trials):  # the first visit
            _trials.append(Trial(task))
            # A step to warm up and two more: by then freed memory has found its places, and the peak stays.
            timings = _trials[number].time(settings[:1], limit_s=limit_s, min_samples=max(2, min_samples))
            peak_bytes = _peak_bytes(settings[0].device) if number == 0 else None
            settings = settings[1:]
        timings |= _trials[number].time(settings, limit_s=limit_s, min_samples=min_samples)
        measured.append((timings, peak_bytes))
    return measured


def _peak_bytes(label: str) -> int:
    device = open_device(label)
    return device.peak_bytes() or device.allocated_bytes() or peak_rss_bytes()


def probe_rates(device: Device, precision: str, threads: int) -> Rates:
    """The speed of a matrix product in a precision. Costs milliseconds even if that precision is emulated: a small
    product tells first whether a larger one can be afforded. No device emulates fp32: if a small product is slow there,
    another program was busy."""
    torch.set_num_threads(threads)
    gflops = 0.0
    with suppress(RuntimeError, TypeError):  # a precision that the device does not know reaches nothing
        for side in _PROBE_SIDES:
            matrix = torch.randn(side, side).to(device.image, DTYPES[precision])
            watch = Stopwatch(partial(torch.mm, matrix, matrix), device.synchronize)
            fastest_s = min(watch.sample() for _ in range(_PROBE_CALLS))
            gflops = max(gflops, 2 * side**3 / fastest_s / 1e9)
            if fastest_s > _PROBE_LIMIT_S and precision != "fp32":
                break
    return Rates(device.label, precision, threads, round(gflops, 3))


def attention_for(setting: Setting, workload: Workload) -> str:
    """`plain` or `fused`: whichever is faster, as known from before or measured now."""
    model = CostModel(load_profile())
    faster = model.faster_attention(setting, workload)
    if faster is None and workload.attention_shapes:
        times = time_attention(setting, workload)
        update_profile(lambda kept: kept.with_attention(times))
        faster = CostModel(model.profile.with_attention(times)).faster_attention(setting, workload)
    return faster[0] if faster else "fused"


def time_attention(setting: Setting, workload: Workload) -> list[AttentionTimes]:
    """Both ways for every shape of a workload, taking turns; none if a device has only one of them."""
    torch.set_num_threads(setting.threads)
    device, times = open_device(setting.device), []
    for shape in workload.attention_shapes:
        place = device.text if shape.causal else device.image
        runs = {way: _attention_run(place, setting.precision, shape.sample, fused=way == "fused") for way in _WAYS}
        try:
            watches = {way: Stopwatch(run, device.synchronize) for way, run in runs.items()}
            taken = time_in_turns(watches, limit_s=_ATTENTION_LIMIT_S)
        except RuntimeError:
            return []
        seconds = {f"{way}_s": taken[way].min_s for way in _WAYS}
        times.append(
            AttentionTimes(setting.device, setting.precision, setting.threads, asdict(shape.sample), **seconds)
        )
    return times


def _attention_run(place: torch.device, precision: str, shape: AttentionShape, *, fused: bool) -> Callable[[], object]:
    """Forward and backward, from queries, keys and values as a block has them: views of one tensor."""
    qkv = torch.randn(shape.pairs, shape.tokens, 3, shape.heads, shape.head_width)
    qkv = qkv.to(place, DTYPES[precision]).requires_grad_()

    def run() -> object:
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = attend(q, k, v, fused=fused, causal=shape.causal).transpose(1, 2)
        return torch.autograd.grad(mixed, qkv, torch.ones_like(mixed))

    return run
