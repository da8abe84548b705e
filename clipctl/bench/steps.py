"""The `step` suite: the project's own training step, for presets and for probes that calibrate forecasts."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from clipctl.bench.results import Peak, Row
from clipctl.config import PRECISIONS, Layer, TrainConfig, resolve
from clipctl.errors import DeviceError
from clipctl.hardware import cpu
from clipctl.hardware.devices import labels, open_device
from clipctl.hardware.profile import StepSample, keep_steps, load_profile
from clipctl.hardware.timing import Timing
from clipctl.model.cost import ASSUMED_VOCAB_SIZE
from clipctl.model.forecast import ASSUMED_TEXT_TOKENS, CostModel, Job, Setting, model_keys
from clipctl.training.trial import Task, measure_apart, sample_of

STEP_LIMIT_S = 0.5
PROMISING = 1.2  # another precision is stepped through if its products are this much faster


@dataclass(frozen=True)
class StepProbe:
    """A preset at a batch size, whole or cut to fewer blocks."""

    preset: str
    batch_size: int
    depths: tuple[int, int] | None = None  # image and text blocks; None: all
    precisions: tuple[str, ...] = ("fp32",)

    @property
    def name(self) -> str:
        return self.preset if self.depths is None else f"{self.preset} {self.depths[0]}+{self.depths[1]}"

    @property
    def config(self) -> TrainConfig:
        values = {"preset": self.preset, "train.batch_size": self.batch_size}
        if self.depths:
            values |= {"model.image.depth": self.depths[0], "model.text.depth": self.depths[1]}
        config = resolve([Layer("bench", values)])
        text = replace(config.model.text, vocab_size=config.model.text.vocab_size or ASSUMED_VOCAB_SIZE)
        return replace(config, model=replace(config.model, text=text))

    @property
    def job(self) -> Job:
        config = self.config
        return Job(config.model, self.batch_size, min(ASSUMED_TEXT_TOKENS, config.model.text.context))


# What forecasts are calibrated with: small and wide models, small and large batches, few and many weights. Wide models
# are cut to two or three blocks, because a block costs what a block costs, however many there are. Quick ones are
# measured again and again in between: a laptop is slower in one minute than in the next.
_QUICK = tuple(StepProbe("tiny", batch_size, precisions=PRECISIONS) for batch_size in (2, 16, 48))
CALIBRATION = (
    _QUICK,
    (StepProbe("small", 2, precisions=PRECISIONS),),
    _QUICK,
    (StepProbe("small", 8, (2, 2), precisions=PRECISIONS),),
    _QUICK,
    (StepProbe("small", 24, (3, 1), precisions=PRECISIONS),),
    _QUICK,
)


@dataclass
class ProbeResults:
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def measure_probes(
    groups: Sequence[Sequence[StepProbe]],
    devices: Sequence[str],
    threads: int,
    peaks: Sequence[Peak],
    tell: Callable[[str], None] = lambda line: None,
) -> ProbeResults:
    """Every probe on every device, each group in a process of its own; samples are kept for forecasts."""
    results = ProbeResults()
    timings: dict[tuple[StepProbe, Setting], Timing] = {}
    peaks_bytes: dict[tuple[StepProbe, Setting], int] = {}
    asked = dict.fromkeys(precision for group in groups for probe in group for precision in probe.precisions)
    for device, precision in itertools.product(devices, asked):
        if not _is_promising(device, precision, peaks):
            results.skipped.append(f"steps in {precision} on {device}: products are not faster in it")
    for group, device in itertools.product(groups, devices):
        tasks = {
            probe: Task(probe.config, probe.job, settings)
            for probe in group
            if (settings := _settings(probe, device, threads, peaks))
        }
        names = ", ".join(f"{probe.name} at batch {probe.batch_size}" for probe in tasks)
        tell(f"measuring steps of {names} on {device}")
        try:
            measured = measure_apart(list(tasks.values()), limit_s=STEP_LIMIT_S) if tasks else []
        except DeviceError as error:
            results.skipped.append(f"steps of {names}: {error}")
            continue
        for number, ((probe, task), (found, peak_bytes)) in enumerate(zip(tasks.items(), measured, strict=True)):
            if number == 0:  # what comes later inherits the memory of what came before
                peaks_bytes.setdefault((probe, task.settings[0]), peak_bytes)
            for setting, timing in found.items():
                known = timings.get((probe, setting))
                timings[probe, setting] = known + timing if known else timing
    results.rows = [_row(*key, timing, peaks_bytes.get(key)) for key, timing in timings.items()]
    samples = {key: sample_of(key[1], key[0].job, timing, peaks_bytes.get(key)) for key, timing in timings.items()}
    keep_steps(list(samples.values()))
    return results


def _settings(probe: StepProbe, device: str, threads: int, peaks: Sequence[Peak]) -> tuple[Setting, ...]:
    precisions = (one for one in probe.precisions if _is_promising(device, one, peaks))
    return tuple(Setting(device, precision, threads) for precision in precisions)


def _is_promising(device: str, precision: str, peaks: Sequence[Peak]) -> bool:
    """fp32 always; others where their products are clearly faster, so that an emulated precision costs nothing."""
    rates = {peak.dtype: peak.gflops for peak in peaks if peak.device == device}
    return precision == "fp32" or rates.get(precision, 0.0) > PROMISING * rates.get("fp32", float("inf"))


def _row(probe: StepProbe, setting: Setting, timing: Timing, peak_bytes: int | None) -> Row:
    work = probe.job.work
    return Row(
        suite="step",
        operation=probe.name,
        device=setting.device,
        dtype=setting.precision,
        size=probe.batch_size,
        threads=setting.threads,
        first_s=timing.first_s,
        median_s=timing.median_s,
        iqr_s=timing.iqr_s,
        min_s=timing.min_s,
        samples_s=list(timing.samples_s),
        gflops=work.flops / timing.median_s / 1e9,
        peak_bytes=peak_bytes,
        text_tokens=probe.job.text_tokens,
        model=model_keys(probe.job.model),
    )


AFFORDABLE_STEP_S = 5.0


def measure_job(
    job: Job, precision: str, devices: Sequence[str] | None, tell: Callable[[str], None] = lambda line: None
) -> None:
    """Make real steps of a job on every device; where one would take too long, of two blocks of each tower."""
    config = replace(resolve([]), model=job.model)
    threads, samples = cpu.usable_cores(), list[StepSample]()
    for name in devices or labels():
        device = open_device(name).label
        setting = Setting(device, "fp32" if precision == "auto" else precision, threads)
        step = CostModel(load_profile()).step_s(setting, job)
        chosen = job.cut() if step is None or step.value > AFFORDABLE_STEP_S else job
        tell(f"measuring steps of batch {chosen.batch_size} in {setting.precision} on {device}")
        ((timings, peak_bytes),) = measure_apart([Task(config, chosen, (setting,))], limit_s=STEP_LIMIT_S)
        samples.append(sample_of(setting, chosen, timings[setting], peak_bytes))
    keep_steps(samples)
