"""`auto`: which device, precision and number of threads. The ranking decides; if it is close, real steps are timed."""

import importlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from clipctl.config.quantities import parse_duration
from clipctl.config.sections import PRECISIONS, TrainConfig
from clipctl.errors import DeviceError
from clipctl.hardware import cpu, devices
from clipctl.hardware.devices import Device
from clipctl.hardware.profile import HYBRID, Profile, load_profile, update_profile
from clipctl.hardware.sensors import BUSY_CORES, OtherLoad
from clipctl.model import cost
from clipctl.model.forecast import CostModel
from clipctl.model.ranking import (
    Place,
    Verdict,
    close_options,
    device_stand_ins,
    fastest,
    precision_stand_ins,
    promising,
    rank,
    rank_precisions,
    thread_stand_ins,
)
from clipctl.model.workload import Setting, Workload
from clipctl.training.distributed import own_device, processes_here, threads_each
from clipctl.training.trial import probe_rates, sample_of, time_attention, time_steps

SHARE_OF_RUN = 0.05  # of the forecast run may be spent on deciding
LIMIT_S = 3.0
LIMIT_WITH_ACCELERATOR_S = 60.0
STEPS_PER_TRIAL = 5.0  # a first one, which takes as long as three, and two that count
TRIAL_SETUP_S = 0.3  # a model and an optimizer, memory touched for the first time, kernels prepared
SETUP_S_PER_PARAMETER = 15e-9
SAMPLES = 2
PROBES = 3  # of a speed that cannot be, at most
PROBE_S = 0.05  # about what knowing the speed of one precision costs
ATTENTION_S = 0.5  # about what comparing both ways of attention costs
FEWER_THREADS_LIMIT = 1.3
AS_ASKED, AS_BEFORE = "as requested", "as when the run started"


@dataclass(frozen=True)
class Choice:
    """A setting, and the reason for its value in words for the user."""

    value: int | str
    reason: str


@dataclass(frozen=True)
class Decision:
    device: Device
    precision: Choice
    threads: Choice
    attention: Choice
    seconds: float  # that deciding took
    cost_model: CostModel
    busy_cores: float = 0.0  # by other programs while something was measured

    @property
    def setting(self) -> Setting:
        return Setting(self.device.label, str(self.precision.value), int(self.threads.value))


def decide(
    config: TrainConfig, workload: Workload, total_steps: int, before: Setting | None = None, ranks: int = 1
) -> Decision:
    """Keep what was asked for, and what a run began with, if it is still available; choose what was left to `auto`:
    device first, then precision, then threads. One of several `ranks` gets its part of the machine."""
    return _Decider(config, workload, total_steps, before, ranks).decide()


class _Decider:
    def __init__(
        self, config: TrainConfig, workload: Workload, total_steps: int, before: Setting | None, ranks: int
    ) -> None:
        self.config, self.workload, self.total_steps = config, workload, total_steps
        self.is_alone, self.processes = ranks == 1, processes_here(ranks)
        known = devices.labels()
        self.labels = [*known, HYBRID] if len(known) > 1 else known
        self.before = before if before and before.device in self.labels else None
        self.started = time.perf_counter()
        self.profile: Profile = load_profile()
        self.model = CostModel(self.profile)
        self.budget_s = 0.0
        self.others, self.busy_cores = OtherLoad(), 0.0  # by other programs while something was measured

    def decide(self) -> Decision:
        asked = self.config.runtime
        if not self.is_alone and asked.device in ("mps", HYBRID):
            words = "Apple's GPU cannot be shared by several processes"
            raise DeviceError(words, "use --device cpu, or train in one process")
        threads = asked.threads or threads_each(self.processes)
        usual = Setting("cpu" if asked.device == "auto" else devices.open_device(asked.device).label, "fp32", threads)
        self._probe([usual])
        self.budget_s = self._budget(usual)
        device, device_reason = self._device(asked.device, usual)
        setting = replace(usual, device=device)
        precision, precision_reason = self._precision(asked.precision, setting)
        setting = replace(setting, precision=precision)
        threads, threads_reason = self._threads(asked.threads, setting)
        attention = self._attention(asked.attention, replace(setting, threads=threads))
        return Decision(
            device=devices.open_device(device).because(device_reason),
            precision=Choice(precision, precision_reason),
            threads=Choice(threads, threads_reason),
            attention=attention,
            seconds=time.perf_counter() - self.started,
            cost_model=self.model,
            busy_cores=self.busy_cores,
        )

    # --- the three decisions --------------------------------------------------------------------------------------

    def _device(self, asked: str, usual: Setting) -> tuple[str, str]:
        if asked != "auto":
            return usual.device, AS_ASKED
        if not self.is_alone:
            device = own_device()
            return device, "no CUDA device found" if device == "cpu" else "one for each process"
        if self.before:
            return self.before.device, AS_BEFORE
        if len(self.labels) == 1:
            return "cpu", "no accelerator found"
        opened = [devices.open_device(label) for label in self.labels]
        places = [Place(one.label, one.memory_bytes, one.product_limit) for one in opened]

        def ranked() -> tuple[Verdict, list[Setting]]:
            verdict, candidates = rank(
                self.model,
                self.workload,
                places,
                precision=self.config.runtime.precision,
                threads=usual.threads,
                total_steps=self.total_steps,
            )
            return verdict, [one.setting for one in candidates if one.is_usable]

        _, usable = ranked()
        if len(usable) > 1:
            self._time_if_close(usable, device_stand_ins(self.workload))
        verdict, _ = ranked()
        return verdict.setting.device, verdict.reason

    def _precision(self, asked: str, setting: Setting) -> tuple[str, str]:
        if asked != "auto":
            return asked, AS_ASKED
        if self.before and self.before.device == setting.device:
            return self.before.precision, AS_BEFORE
        if setting.device == HYBRID:
            return "fp32", "the CPU shares the work"
        on_core = replace(setting, threads=1) if setting.device == "cpu" else setting
        if not self._probe([replace(on_core, precision=precision) for precision in PRECISIONS]):
            return "fp32", "the run is too short to measure the others"
        options = promising(self.model, setting)
        if len(options) == 1:
            return "fp32", self._slow_words(on_core)
        self._probe(options)
        self._time_if_close(options, precision_stand_ins(self.workload))
        verdict = rank_precisions(self.model, self.workload, setting)
        if verdict is None:
            return "fp32", f"measuring {', '.join(one.precision for one in options[1:])} would take too long"
        return verdict.setting.precision, verdict.reason

    def _slow_words(self, setting: Setting) -> str:
        """Why no other precision is an option."""
        place = (setting.device, setting.threads)
        known = {one.precision: one.gflops for one in self.profile.rates if (one.device, one.threads) == place}
        others = ", ".join(f"{known[name]:.3g} in {name}" for name in PRECISIONS[1:] if name in known)
        where = " per core" if setting.device == "cpu" else ""
        return f"matrix products reach {known.get('fp32', 0):.3g} GFLOP/s{where} in fp32, {others}"

    def _threads(self, asked: int | None, setting: Setting) -> tuple[int, str]:
        if asked is not None:
            return asked, AS_ASKED
        if self.processes > 1:
            return setting.threads, f"{self.processes} processes share {cpu.usable_cores()} usable cores"
        if self.before and self.before.threads <= cpu.usable_cores():
            return self.before.threads, AS_BEFORE
        counts = cpu.thread_candidates()
        usual = f"one per usable core ({counts[0]})"
        if setting.device not in ("cpu", HYBRID) or len(counts) == 1:
            return counts[0], usual
        options = [one for count in counts if self._might_do(one := replace(setting, threads=count), counts[0])]
        if len(options) == 1:
            return counts[0], usual
        smaller = thread_stand_ins(self.workload)
        self._time_if_close(options, smaller)
        verdict = fastest(self.model, self.workload, options, smaller, lambda one: f"{one.threads} threads")
        if verdict is None or verdict.setting == options[0]:
            return counts[0], usual
        return verdict.setting.threads, verdict.reason

    def _attention(self, asked: str, setting: Setting) -> Choice:
        """Chosen for speed, not memory: whether scores fit is decided with the micro-batch."""
        if asked != "auto":
            return Choice(asked, AS_ASKED)
        faster = self.model.faster_attention(setting, self.workload)
        if faster is None and self.workload.attention_shapes:
            if self.budget_s and self._left_s() < ATTENTION_S:
                return Choice("fused", "the run is too short to measure the alternative")
            # Kept even beside busy programs: the two ways take turns, so that both suffer, and the same command gives
            # the same weights only if it is decided in the same way.
            self._keep(self.profile.with_attention(time_attention(setting, self.workload)))
            faster = self.model.faster_attention(setting, self.workload)
        if faster is None:
            return Choice("fused", "the default")
        way, gain = faster
        return Choice(way, f"{gain:.1f} times as fast as {'fused' if way == 'plain' else 'plain'} here")

    # --- facts ----------------------------------------------------------------------------------------------------

    def _time_if_close(self, options: Sequence[Setting], smaller: Sequence[Workload]) -> None:
        """Time the options that might be the fastest, unless that was done before or would take too long: with the
        workload itself, or the first of the smaller ones that is affordable."""
        close = close_options(self.model, self.workload, options)
        if len(close) < 2 or options[0] not in close:
            return
        workloads = [self.workload, *smaller]
        if not any(all(self.model.measured(one, workload) for one in close) for workload in workloads):
            self._time(close, workloads)

    def _time(self, options: Sequence[Setting], workloads: Sequence[Workload]) -> None:
        """Time the first workload that the time left allows."""
        self.started += _import_what_training_imports()
        for workload in workloads:
            estimates = [self.model.step_s(one, workload) for one in options]
            slowest = max((estimate.value for estimate in estimates if estimate), default=math.inf)
            seconds = sum(estimate.value if estimate else slowest for estimate in estimates)
            setup_s = TRIAL_SETUP_S + SETUP_S_PER_PARAMETER * cost.parameters(workload.model)
            if setup_s + STEPS_PER_TRIAL * seconds <= self._left_s():
                try:
                    timings = time_steps(self.config, workload, options, limit_s=0.0, min_samples=SAMPLES)
                except RuntimeError:  # out of memory, or a kernel that a device lacks: then the usual is chosen
                    return
                samples = [sample_of(one, workload, timing) for one, timing in timings.items()]
                self._keep(self.profile.with_steps(samples), is_sure=not self._is_disturbed())
                return

    def _might_do(self, setting: Setting, usual_threads: int) -> bool:
        """Fewer threads can only win if starting operations takes most of the time."""
        usual_setting = replace(setting, threads=usual_threads)
        fewer, usual = (self.model.step_s(one, self.workload) for one in (setting, usual_setting))
        return fewer is None or usual is None or fewer.value < FEWER_THREADS_LIMIT * usual.value

    def _probe(self, settings: Sequence[Setting]) -> bool:
        """Make sure that the speed of matrix products is known under these settings; False if there was no time to
        measure it."""
        known = [self.profile.exact_rate(one.device, one.precision, one.threads) for one in settings]
        missing = [one for one, rate in zip(settings, known, strict=True) if rate is None and one.device != HYBRID]
        if missing and self.budget_s and self._left_s() < PROBE_S * len(missing):
            return False
        for one in missing:
            found = [probe_rates(devices.open_device(one.device), one.precision, one.threads)]
            while len(found) < PROBES and not self.profile.is_plausible(found[-1]):
                found.append(probe_rates(devices.open_device(one.device), one.precision, one.threads))
            best = max(found, key=lambda rate: rate.gflops)
            self._keep(
                self.profile.with_rates([best]),
                is_sure=self.profile.is_plausible(best) and not self._is_disturbed(),
            )
        return True

    def _is_disturbed(self) -> bool:
        """Whether other programs were busy while something was measured."""
        self.busy_cores = self.others.cores()
        return self.busy_cores > BUSY_CORES

    def _keep(self, profile: Profile, *, is_sure: bool = True) -> None:
        """Decide by this profile from now on. What was measured beside busy programs is not kept for later runs."""
        if not is_sure:
            self.profile, self.model = profile, CostModel(profile)
            return
        rates, steps, attention = list(profile.rates), list(profile.steps), list(profile.attention)
        update_profile(
            lambda kept: (
                kept.with_rates(rates).with_steps(steps).with_attention(attention).with_devices(devices.facts())
            )
        )
        self.profile, self.model = profile, CostModel(profile)

    def _budget(self, usual: Setting) -> float:
        step, asked = self.model.step_s(replace(usual, device="cpu"), self.workload), self.config.train.time
        run_s = parse_duration(asked) if asked else step.value * self.total_steps if step else 0.0
        return min(SHARE_OF_RUN * run_s, LIMIT_WITH_ACCELERATOR_S if len(self.labels) > 1 else LIMIT_S)

    def _left_s(self) -> float:
        return self.budget_s - (time.perf_counter() - self.started)


def _import_what_training_imports() -> float:
    """Seconds until an optimizer can be made for the first time. Training pays for them anyway."""
    started = time.perf_counter()
    importlib.import_module("torch._dynamo")
    return time.perf_counter() - started
