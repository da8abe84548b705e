"""The `step` suite: the project's own training step, for presets and for probes that calibrate forecasts."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
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
from clipctl.training.trial import Measured, Task, TrialProcess, sample_of

STEP_LIMIT_S = 0.5
PROMISING = 1.2  # another precision is stepped through if its products are this much faster


@dataclass(frozen=True)
class StepProbe:
    """A preset at a batch size, whole or cut to fewer blocks."""

    preset: str
    batch_size: int
    depths: tuple[int, int] | None = None  # image and text blocks; None: all

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


@dataclass(frozen=True)
class Turn:
    """Probes that are measured one after the other in one process; turns of the same probes share theirs."""

    probes: tuple[StepProbe, ...]
    precisions: tuple[str, ...] = ("fp32",)

    @property
    def name(self) -> str:
        return ", ".join(f"{probe.name} at batch {probe.batch_size}" for probe in self.probes)


# What forecasts are calibrated with: small and wide models, small and large batches, few and many weights. Wide models
# are cut to two or three blocks, because a block costs what a block costs, however many there are. Quick ones are
# measured again and again in between: a laptop is slower in one minute than in the next.
_QUICK = Turn(tuple(StepProbe("tiny", batch_size) for batch_size in (2, 16, 48)), PRECISIONS)
_MANY_WEIGHTS = (StepProbe("small", 2),)
_WIDE = (StepProbe("small", 8, (2, 2)),)
_LARGE_BATCH = (StepProbe("small", 24, (3, 1)),)
CALIBRATION = (
    _QUICK,
    Turn(_MANY_WEIGHTS),
    _QUICK,
    Turn(_MANY_WEIGHTS, PRECISIONS[1:]),
    _QUICK,
    Turn(_WIDE, PRECISIONS),
    _QUICK,
    Turn(_LARGE_BATCH),
    _QUICK,
    Turn(_LARGE_BATCH, PRECISIONS[1:]),
    _QUICK,
)


@dataclass
class ProbeResults:
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def measure_probes(
    turns: Sequence[Turn],
    devices: Sequence[str],
    threads: int,
    peaks: Sequence[Peak],
    tell: Callable[[str], None] = lambda line: None,
) -> ProbeResults:
    """Every turn on every device; samples are kept for forecasts."""
    results = ProbeResults()
    timings: dict[tuple[StepProbe, Setting], Timing] = {}
    peaks_bytes: dict[tuple[StepProbe, Setting], int] = {}
    asked = dict.fromkeys(precision for turn in turns for precision in turn.precisions)
    for device, precision in itertools.product(devices, asked):
        if not _is_promising(device, precision, peaks):
            results.skipped.append(f"steps in {precision} on {device}: products are not faster in it")
    visits = [
        _Visit(turn, device, settings)
        for turn, device in itertools.product(turns, devices)
        if (settings := _settings(turn, device, threads, peaks))
    ]
    for visit, measured in _measured(visits, results.skipped, tell):
        for probe, (found, peak_bytes) in zip(visit.turn.probes, measured, strict=True):
            if peak_bytes is not None:
                peaks_bytes[probe, visit.settings[0]] = peak_bytes
            for setting, timing in found.items():
                known = timings.get((probe, setting))
                timings[probe, setting] = known + timing if known else timing
    results.rows = [_row(*key, timing, peaks_bytes.get(key)) for key, timing in timings.items()]
    samples = {key: sample_of(key[1], key[0].job, timing, peaks_bytes.get(key)) for key, timing in timings.items()}
    keep_steps(list(samples.values()))
    return results


@dataclass(frozen=True)
class _Visit:
    """A turn on one device."""

    turn: Turn
    device: str
    settings: tuple[Setting, ...]

    @property
    def process_key(self) -> tuple[tuple[StepProbe, ...], str]:
        return self.turn.probes, self.device


def _measured(
    visits: Sequence[_Visit], skipped: list[str], tell: Callable[[str], None]
) -> Iterator[tuple[_Visit, list[Measured]]]:
    """Each in the process of its probes, which ends after the last of its visits."""
    processes: dict[tuple[tuple[StepProbe, ...], str], TrialProcess] = {}
    with ExitStack() as stack:
        for number, visit in enumerate(visits):
            tell(f"measuring steps of {visit.turn.name} on {visit.device}")
            process = processes.get(visit.process_key) or stack.enter_context(closing(TrialProcess()))
            processes[visit.process_key] = process
            try:
                tasks = [Task(probe.config, probe.job, visit.settings) for probe in visit.turn.probes]
                yield visit, process.measure(tasks, limit_s=STEP_LIMIT_S)
            except DeviceError as error:
                if (words := f"steps of {visit.turn.name}: {error}") not in skipped:
                    skipped.append(words)
            if all(later.process_key != visit.process_key for later in visits[number + 1 :]):
                process.close()


def _settings(turn: Turn, device: str, threads: int, peaks: Sequence[Peak]) -> tuple[Setting, ...]:
    precisions = (one for one in turn.precisions if _is_promising(device, one, peaks))
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
        with closing(TrialProcess()) as process:
            ((timings, peak_bytes),) = process.measure([Task(config, chosen, (setting,))], limit_s=STEP_LIMIT_S)
        samples.append(sample_of(setting, chosen, timings[setting], peak_bytes))
    keep_steps(samples)
