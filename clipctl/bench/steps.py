"""The `step` suite: the project's own training step, for presets and for probes that calibrate forecasts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from clipctl.bench.results import Peak, Row
from clipctl.config import Layer, TrainConfig, resolve
from clipctl.errors import DeviceError
from clipctl.hardware import cpu
from clipctl.hardware.devices import labels
from clipctl.hardware.profile import StepSample, keep_steps, load_profile
from clipctl.model.forecast import CostModel, Job, Setting, model_keys
from clipctl.training.choice import cut
from clipctl.training.trial import StepMeasurement, measure_apart, sample_of

TEXT_TOKENS = 60  # of the longest caption in a batch of the built-in data
VOCAB_SIZE = 33
STEP_LIMIT_S = 1.5
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
        text = replace(config.model.text, vocab_size=config.model.text.vocab_size or VOCAB_SIZE)
        return replace(config, model=replace(config.model, text=text))

    @property
    def job(self) -> Job:
        config = self.config
        return Job(config.model, self.batch_size, min(TEXT_TOKENS, config.model.text.context))


# What forecasts are calibrated with: small and wide models, small and large batches, few and many weights. Wide models
# are cut to two or three blocks, because a block costs what a block costs, however many there are.
CALIBRATION = (
    StepProbe("tiny", 2, precisions=("fp32", "bf16", "fp16")),
    StepProbe("tiny", 16, precisions=("fp32", "bf16", "fp16")),
    StepProbe("tiny", 48, precisions=("fp32", "bf16", "fp16")),
    StepProbe("small", 2, precisions=("fp32", "bf16", "fp16")),
    StepProbe("small", 8, (2, 2), precisions=("fp32", "bf16", "fp16")),
    StepProbe("small", 40, (3, 1), precisions=("fp32", "bf16", "fp16")),
    StepProbe("small", 7, precisions=("fp32",)),
)


@dataclass
class ProbeResults:
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def measure_probes(
    probes: Sequence[StepProbe],
    devices: Sequence[str],
    threads: int,
    peaks: Sequence[Peak],
    tell: Callable[[str], None] = lambda line: None,
) -> ProbeResults:
    """Every probe on every device, each in a process of its own; samples are kept for forecasts."""
    results, samples = ProbeResults(), list[StepSample]()
    for probe in probes or CALIBRATION:
        for device in devices:
            for precision in probe.precisions:
                setting = Setting(device, precision, threads)
                if not _is_promising(device, precision, peaks):
                    continue
                tell(f"step {probe.name}, batch {probe.batch_size}, {precision} on {device}")
                try:
                    measurement = measure_apart(probe.config, probe.job, setting, limit_s=STEP_LIMIT_S)
                except DeviceError as error:
                    results.skipped.append(f"step {probe.name}, batch {probe.batch_size} on {device}: {error}")
                    continue
                samples.append(sample_of(setting, probe.job, measurement.timing, measurement.peak_bytes))
                results.rows.append(_row(probe, setting, measurement))
    keep_steps(samples)
    return results


def _is_promising(device: str, precision: str, peaks: Sequence[Peak]) -> bool:
    """fp32 always; others where their products are clearly faster, so that an emulated precision costs nothing."""
    rates = {peak.dtype: peak.gflops for peak in peaks if peak.device == device}
    if precision == "fp32" or not rates:
        return True
    return rates.get(precision, 0.0) > PROMISING * rates.get("fp32", float("inf"))


def _row(probe: StepProbe, setting: Setting, measurement: StepMeasurement) -> Row:
    timing, work = measurement.timing, probe.job.work
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
        peak_bytes=measurement.peak_bytes,
        text_tokens=probe.job.text_tokens,
        model=model_keys(probe.job.model),
    )


AFFORDABLE_STEP_S = 5.0


def measure_job(
    job: Job, precision: str, devices: Sequence[str] | None, tell: Callable[[str], None] = lambda line: None
) -> None:
    """Make real steps of a job on every device; where one would take too long, of two blocks of each tower."""
    text = replace(job.model.text, vocab_size=job.model.text.vocab_size or VOCAB_SIZE)
    job = replace(job, model=replace(job.model, text=text))
    config = replace(resolve([]), model=job.model)
    threads, samples = cpu.usable_cores(), list[StepSample]()
    for device in devices or labels():
        setting = Setting(device, "fp32" if precision == "auto" else precision, threads)
        step = CostModel(load_profile()).step_s(setting, job)
        chosen = cut(job) if step is None or step.value > AFFORDABLE_STEP_S else job
        tell(f"steps of batch {chosen.batch_size} in {setting.precision} on {device}")
        measurement = measure_apart(config, chosen, setting, limit_s=STEP_LIMIT_S)
        samples.append(sample_of(setting, chosen, measurement.timing, measurement.peak_bytes))
    keep_steps(samples)
