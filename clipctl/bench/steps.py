"""The `step` suite: the project's own training step, for presets and for probes that calibrate forecasts."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

from clipctl.bench.results import BenchRow, Peak
from clipctl.config.layers import Layer, resolve
from clipctl.config.sections import TrainConfig
from clipctl.errors import DeviceError
from clipctl.hardware import cpu
from clipctl.hardware.devices import labels, open_device
from clipctl.hardware.profile import StepSample, keep_steps, load_profile
from clipctl.hardware.timing import Timing
from clipctl.model import cost
from clipctl.model.cost import ASSUMED_VOCAB_SIZE
from clipctl.model.forecast import PROCESS_BYTES, CostModel
from clipctl.model.workload import ASSUMED_TEXT_TOKENS, Setting, Workload
from clipctl.training.trial import Measured, Task, TrialProcess, sample_of

STEP_LIMIT_S = 0.5  # where a step is timed once
VISIT_LIMIT_S, ROUNDS = 0.3, 5  # where it is timed again and again
PROMISING = 1.2  # another precision is stepped through if its products are this much faster


@dataclass(frozen=True)
class StepProbe:
    """A preset at a batch size, whole or cut to fewer blocks, at once or in micro-batches."""

    preset: str
    batch_size: int
    depths: tuple[int, int] | None = None  # image and text blocks; None: all
    micro_batch: int | None = None  # None: the whole batch at once

    @property
    def name(self) -> str:
        model = self.preset if self.depths is None else f"{self.preset} {self.depths[0]}+{self.depths[1]}"
        micro_batch = self.workload.micro_batch
        return f"{model} in micro-batches of {micro_batch}" if micro_batch else model

    @property
    def config(self) -> TrainConfig:
        values = {"preset": self.preset, "train.batch_size": self.batch_size, "train.micro_batch": self.micro_batch}
        if self.depths:
            values |= {"model.image.depth": self.depths[0], "model.text.depth": self.depths[1]}
        config = resolve([Layer("bench", values)])
        text = replace(config.model.text, vocab_size=config.model.text.vocab_size or ASSUMED_VOCAB_SIZE)
        return replace(config, model=replace(config.model, text=text))

    @property
    def workload(self) -> Workload:
        config = self.config
        return cost.workload_of(config, min(ASSUMED_TEXT_TOKENS, config.model.text.context))


# What forecasts are calibrated with: small and wide models, small and large batches, few and many weights. Wide models
# are cut to a few blocks, because a block costs what a block costs, however many there are. A group shares a process.
Group = tuple[StepProbe, ...]
_QUICK: Group = tuple(StepProbe("tiny", batch_size) for batch_size in (2, 16, 48))
_MANY_WEIGHTS: Group = (StepProbe("small", 2, (4, 3)),)
_WIDE: Group = (StepProbe("small", 8, (2, 2)),)
_LARGE_BATCH: Group = (StepProbe("small", 24, (3, 1)),)
CALIBRATION = (_QUICK, _MANY_WEIGHTS, _QUICK, _WIDE, _QUICK, _LARGE_BATCH)


@dataclass
class ProbeResults:
    rows: list[BenchRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def measure_probes(
    groups: Sequence[Group],
    precisions: Sequence[str],
    devices: Sequence[str],
    threads: int,
    peaks: Sequence[Peak],
    tell: Callable[[str], None] = lambda line: None,
) -> ProbeResults:
    """Every group on every device; samples are kept for forecasts."""
    results = ProbeResults()
    settings: dict[str, list[Setting]] = {device: [] for device in devices}
    for device, precision in itertools.product(devices, precisions):
        if _is_promising(device, precision, peaks):
            settings[device].append(Setting(device, precision, threads))
        else:
            results.skipped.append(f"steps in {precision} on {device}: matrix products are no faster than in fp32")
    timings: dict[tuple[StepProbe, Setting], Timing] = {}
    peaks_bytes: dict[tuple[StepProbe, Setting], int] = {}
    visits = [_Visit(group, tuple(settings[device])) for group in groups for device in devices if settings[device]]
    for visit, measured in _measured(visits, results.skipped, tell):
        for probe, (found, peak_bytes) in zip(visit.group, measured, strict=True):
            if peak_bytes is not None:
                peaks_bytes[probe, visit.settings[0]] = peak_bytes
            for setting, timing in found.items():
                known = timings.get((probe, setting))
                timings[probe, setting] = known + timing if known else timing
    results.rows = [_row(*key, timing, peaks_bytes.get(key)) for key, timing in timings.items()]
    samples = {key: sample_of(key[1], key[0].workload, timing, peaks_bytes.get(key)) for key, timing in timings.items()}
    keep_steps(list(samples.values()))
    return results


@dataclass(frozen=True)
class _Visit:
    """A group on one device."""

    group: Group
    settings: tuple[Setting, ...]

    @property
    def device(self) -> str:
        return self.settings[0].device

    @property
    def name(self) -> str:
        probes = ", ".join(f"{probe.name} at batch {probe.batch_size}" for probe in self.group)
        return f"{probes} on {self.device}"

    @property
    def need_bytes(self) -> int:
        return PROCESS_BYTES + sum(cost.training_memory(probe.workload).total_bytes for probe in self.group)

    def open(self) -> TrialProcess:
        return TrialProcess([Task(probe.config, probe.workload, self.settings) for probe in self.group])


def _measured(
    visits: Sequence[_Visit], skipped: list[str], tell: Callable[[str], None]
) -> Iterator[tuple[_Visit, list[Measured]]]:
    """Every group again and again, in turn, so that no figure rests on one moment: a laptop may be slower in one minute
    than in the next. If they do not fit in memory together, one group after the other."""
    for turns in [visits] if _fit_together(visits) else [[visit] for visit in dict.fromkeys(visits)]:
        with ExitStack() as stack:
            processes = {visit: stack.enter_context(closing(visit.open())) for visit in dict.fromkeys(turns)}
            for visit in itertools.chain.from_iterable([turns, turns[::-1]][number % 2] for number in range(ROUNDS)):
                if visit not in processes:
                    continue
                tell(f"measuring steps of {visit.name}")
                try:
                    yield visit, processes[visit].visit(limit_s=VISIT_LIMIT_S, min_samples=1)
                except DeviceError as error:
                    skipped.append(f"steps of {visit.name}: {error}")
                    processes.pop(visit).close()


def _fit_together(visits: Sequence[_Visit]) -> bool:
    needs: dict[str, int] = {}
    for visit in set(visits):
        needs[visit.device] = needs.get(visit.device, 0) + visit.need_bytes
    return all(need < open_device(device).memory_bytes / 2 for device, need in needs.items())


def _is_promising(device: str, precision: str, peaks: Sequence[Peak]) -> bool:
    """fp32 always; others if their products are clearly faster, so that an emulated precision costs no time."""
    rates = {peak.dtype: peak.gflops for peak in peaks if peak.device == device}
    return precision == "fp32" or rates.get(precision, 0.0) > PROMISING * rates.get("fp32", float("inf"))


def _row(probe: StepProbe, setting: Setting, timing: Timing, peak_bytes: int | None) -> BenchRow:
    work = cost.step_work(probe.workload)
    return BenchRow(
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
        workload=probe.workload.to_dict(),
    )


AFFORDABLE_STEP_S = 5.0


def measure_workload(
    workload: Workload, precision: str, devices: Sequence[str] | None, tell: Callable[[str], None] = lambda line: None
) -> None:
    """Time real steps of a workload on every device; if one would take too long, with two blocks per tower."""
    config = replace(resolve([]), model=workload.model)
    threads, samples = cpu.usable_cores(), list[StepSample]()
    for name in devices or labels():
        device = open_device(name).label
        setting = Setting(device, "fp32" if precision == "auto" else precision, threads)
        step = CostModel(load_profile()).step_s(setting, workload)
        chosen = workload.cut() if step is None or step.value > AFFORDABLE_STEP_S else workload
        tell(f"measuring steps at batch size {chosen.batch_size} in {setting.precision} on {device}")
        with closing(TrialProcess([Task(config, chosen, (setting,))])) as process:
            ((timings, peak_bytes),) = process.visit(limit_s=STEP_LIMIT_S)
        samples.append(sample_of(setting, chosen, timings[setting], peak_bytes))
    keep_steps(samples)
