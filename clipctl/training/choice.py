"""`auto`: which device, precision and number of threads, by forecast, and by measured steps where it is close."""

import importlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from clipctl.config.sections import PRECISIONS, TrainConfig
from clipctl.hardware import cpu, devices
from clipctl.hardware.devices import HYBRID, Device
from clipctl.hardware.profile import Profile, load_profile, update_profile
from clipctl.model import cost
from clipctl.model.forecast import WORTHWHILE, CostModel, Job, Setting, prior_speedup, with_margin
from clipctl.training.trial import probe_rates, sample_of, time_steps

SHARE_OF_RUN = 0.02  # of the forecast run may be spent on deciding
LIMIT_S = 3.0
LIMIT_WITH_ACCELERATOR_S = 60.0
STEPS_PER_TRIAL = 5.0  # a first one, which takes as long as three, and two that count
TRIAL_SETUP_S = 0.3  # a model and an optimizer, memory touched for the first time, kernels prepared
SETUP_S_PER_PARAMETER = 15e-9
SAMPLES = 2
PROBE_S = 0.05  # about what knowing the speed of one precision costs
SHORT_RUN_S = 60.0  # what the CPU is through with by then is not worth an accelerator's start
FEWER_THREADS_LIMIT = 1.3
AS_BEFORE = "as the run began"


Name = Callable[[Setting], str]


@dataclass(frozen=True)
class Choice:
    """A setting and, in words for the user, why it has this value."""

    value: int | str
    reason: str


@dataclass(frozen=True)
class Decision:
    device: Device
    precision: Choice
    threads: Choice
    seconds: float  # that deciding took
    cost_model: CostModel

    @property
    def setting(self) -> Setting:
        return Setting(self.device.label, str(self.precision.value), int(self.threads.value))


def decide(config: TrainConfig, job: Job, total_steps: int, before: Setting | None = None) -> Decision:
    """What was asked for stays, and what a run was begun with, where it is still there; what was left to `auto` is
    chosen: device first, then precision, then threads."""
    return _Decider(config, job, total_steps, before).decide()


class _Decider:
    def __init__(self, config: TrainConfig, job: Job, total_steps: int, before: Setting | None) -> None:
        self.config, self.job, self.total_steps = config, job, total_steps
        known = devices.labels()
        there = (*known, HYBRID) if len(known) > 1 else known
        self.before = before if before and before.device in there else None
        self.started = time.perf_counter()
        self.profile: Profile = load_profile()
        self.model = CostModel(self.profile)
        self.budget_s = 0.0

    def decide(self) -> Decision:
        asked = self.config.runtime
        known = devices.labels()
        threads = asked.threads or cpu.thread_candidates()[0]
        usual = Setting("cpu" if asked.device == "auto" else devices.open_device(asked.device).label, "fp32", threads)
        self._probe([usual])
        self.budget_s = self._budget(usual, has_accelerator=len(known) > 1)
        device, device_reason = self._device(asked.device, known, usual)
        setting = replace(usual, device=device)
        precision, precision_reason = self._precision(asked.precision, setting)
        setting = replace(setting, precision=precision)
        threads, threads_reason = self._threads(asked.threads, setting)
        setting = replace(setting, threads=threads)
        return Decision(
            device=devices.open_device(device).because(device_reason),
            precision=Choice(precision, precision_reason),
            threads=Choice(threads, threads_reason),
            seconds=time.perf_counter() - self.started,
            cost_model=self.model,
        )

    # --- the three decisions --------------------------------------------------------------------------------------

    def _device(self, asked: str, known: list[str], usual: Setting) -> tuple[str, str]:
        if asked != "auto":
            return usual.device, "as asked"
        if self.before:
            return self.before.device, AS_BEFORE
        if len(known) == 1:
            return "cpu", "no accelerator found"
        options = [replace(usual, device=label) for label in (*known, HYBRID)]
        fitting = [one for one in options if self._fits(one)] or options[:1]
        stand_ins = [self.job.cut(), self.job.cut(batch_size=8)]
        if found := self._measured(fitting, stand_ins, lambda one: one.device):
            return found[0].device, found[1]
        estimates = [self.model.step_s(one, self.job) for one in fitting]
        if all(estimate and estimate.is_sure for estimate in estimates):
            chosen, reason = self._by_forecast(fitting, lambda one: one.device)
            return chosen.device, reason
        return self._by_prior(fitting)

    def _by_prior(self, options: Sequence[Setting]) -> tuple[str, str]:
        """Where measuring would take too long: the notes on an Apple GPU, and that other accelerators are fast."""
        on_cpu = self.model.step_s(options[0], self.job)
        run_s = on_cpu.value * self.total_steps if on_cpu else 0.0
        if len(options) == 1 or run_s < SHORT_RUN_S:
            return "cpu", f"through in about {run_s:.2g} s" if len(options) > 1 else "it fits nowhere else"
        accelerator = options[1].device
        if accelerator != "mps":
            return accelerator, "an accelerator is usually faster; measuring would take too long"
        speedup = prior_speedup(cost.parameters(self.job.model))
        words = f"the notes say that an Apple GPU is {speedup:g} × as fast at this size; measuring would take too long"
        return ("mps" if speedup > 1 else "cpu"), words

    def _precision(self, asked: str, setting: Setting) -> tuple[str, str]:
        if asked != "auto":
            return asked, "as asked"
        if self.before and self.before.device == setting.device:
            return self.before.precision, AS_BEFORE
        if setting.device == HYBRID:
            return "fp32", "the CPU shares the work"
        options = [replace(setting, precision=precision) for precision in PRECISIONS]
        # On one core: several that wait for each other reach next to nothing where another program is busy, and an
        # emulated precision would look as good.
        probed = [replace(one, threads=1) if one.device == "cpu" else one for one in options]
        if not self._probe(probed):
            return "fp32", "the run is too short to measure others"
        rates = [self.profile.rate(one.device, one.precision, one.threads) for one in probed]
        plain = rates[0]
        promising = [
            one
            for one, rate in zip(options, rates, strict=True)
            if one is options[0] or (rate and plain and rate.gflops > WORTHWHILE * plain.gflops)
        ]
        if len(promising) == 1:
            others = ", ".join(f"{rate.gflops:.3g} in {rate.precision}" for rate in rates[1:] if rate)
            core = " on a core" if setting.device == "cpu" else ""
            return "fp32", f"products reach {plain.gflops if plain else 0:.3g} GFLOP/s{core} here, {others}"
        self._probe(promising)
        chosen, reason = self._fastest(promising, self._small_jobs(), lambda one: one.precision)
        return chosen.precision, reason

    def _threads(self, asked: int | None, setting: Setting) -> tuple[int, str]:
        if asked is not None:
            return asked, "as asked"
        if self.before and self.before.threads <= cpu.usable_cores():
            return self.before.threads, AS_BEFORE
        counts = cpu.thread_candidates()
        usual = f"one for each of {counts[0]} usable cores"
        if setting.device not in ("cpu", HYBRID) or len(counts) == 1:
            return counts[0], usual
        options = [one for count in counts if self._might_do(one := replace(setting, threads=count), counts[0])]
        if len(options) == 1:
            return counts[0], usual
        chosen, reason = self._fastest(options, [self.job.cut()], lambda one: f"{one.threads} threads")
        return chosen.threads, usual if chosen is options[0] else reason

    # --- how they are made ----------------------------------------------------------------------------------------

    def _fastest(self, options: Sequence[Setting], stand_ins: Sequence[Job], name: Name) -> tuple[Setting, str]:
        """The first of `options` is the usual one; another must be faster for sure, as measured or by forecast."""
        return self._measured(options, stand_ins, name) or self._by_forecast(options, name)

    def _measured(self, options: Sequence[Setting], stand_ins: Sequence[Job], name: Name) -> tuple[Setting, str] | None:
        """By what was measured of all options, or of those that are close, or can be measured now."""
        jobs = [job for job in (self.job, *stand_ins) if not job.recompute]  # of which there are no samples
        if job := self._measured_job(options, jobs):
            return self._by_measurement(options, job, name)
        close = self._close(options)
        if len(close) < 2 or options[0] not in close:
            return None
        job = self._measured_job(close, jobs) or self._try(close, jobs)
        return self._by_measurement(close, job, name) if job else None

    def _close(self, options: Sequence[Setting]) -> list[Setting]:
        """Those that might be the fastest for all that is known."""
        estimates = {one: self.model.step_s(one, self.job) for one in options}
        best_high = min((estimate.high for estimate in estimates.values() if estimate), default=math.inf)
        return [one for one, estimate in estimates.items() if estimate is None or estimate.low <= best_high]

    def _measured_job(self, options: Sequence[Setting], jobs: Sequence[Job]) -> Job | None:
        """The job, or one that stands in for it, of which all options were timed."""
        return next((job for job in jobs if all(self.model.measured(one, job) for one in options)), None)

    def _try(self, options: Sequence[Setting], jobs: Sequence[Job]) -> Job | None:
        """Time the first job that can be afforded in the time that is left."""
        self.started += _import_what_training_imports()
        for job in jobs:
            estimates = [self.model.step_s(one, job) for one in options]
            slowest = max((estimate.value for estimate in estimates if estimate), default=math.inf)
            seconds = sum(estimate.value if estimate else slowest for estimate in estimates)
            setup_s = TRIAL_SETUP_S + SETUP_S_PER_PARAMETER * cost.parameters(job.model)
            if setup_s + STEPS_PER_TRIAL * seconds <= self._left_s():
                try:
                    timings = time_steps(self.config, job, options, limit_s=0.0, min_samples=SAMPLES)
                except RuntimeError:  # out of memory, or a kernel that a device lacks: then the usual is chosen
                    return None
                self._keep(self.profile.with_steps([sample_of(one, job, timing) for one, timing in timings.items()]))
                return job
        return None

    def _by_measurement(self, options: Sequence[Setting], job: Job, name: Name) -> tuple[Setting, str]:
        seconds = {one: sample.step_s for one in options if (sample := self.model.measured(one, job))}
        usual, best = options[0], min(seconds, key=lambda one: seconds[one])
        chosen = best if seconds[usual] > WORTHWHILE * seconds[best] else usual
        others = ", ".join(f"{name(one)} {seconds[one]:.3g} s" for one in options if one is not chosen)
        blocks = "one block" if job.model.image.depth == 1 else "two blocks"
        where = "" if job == self.job else f" of {job.batch_size} pairs on {blocks} a tower"
        return chosen, f"measured {seconds[chosen]:.3g} s a step{where}, {others}"

    def _by_forecast(self, options: Sequence[Setting], name: Name) -> tuple[Setting, str]:
        usual, *others = options
        expected = self.model.step_s(usual, self.job)
        known = {one: estimate for one in others if (estimate := self.model.step_s(one, self.job))}
        if not known or expected is None:
            unknown = ", ".join(name(one) for one in others)
            return usual, f"measuring {unknown} would take too long"
        best = min(known, key=lambda one: known[one].value)
        verb = "measured" if expected.basis == known[best].basis == "measured" else "about"
        is_sure = known[best].high < expected.low or (expected.is_sure and known[best].is_sure)
        if is_sure and expected.value > WORTHWHILE * known[best].value:
            return best, f"{verb} {known[best].value:.3g} s a step, {name(usual)} {expected.value:.3g} s"
        return usual, f"{verb} {expected.value:.3g} s a step, {name(best)} {known[best].value:.3g} s"

    def _might_do(self, setting: Setting, usual_threads: int) -> bool:
        """Fewer threads can only win where starting operations takes most of the time."""
        fewer, usual = (self.model.step_s(one, self.job) for one in (setting, replace(setting, threads=usual_threads)))
        return fewer is None or usual is None or fewer.value < FEWER_THREADS_LIMIT * usual.value

    def _small_jobs(self) -> list[Job]:
        cuts = [self.job.cut(), self.job.cut(batch_size=4), self.job.cut(batch_size=2)]
        return [*cuts, self.job.cut(batch_size=2, blocks=1)]

    def _probe(self, settings: Sequence[Setting]) -> bool:
        """Know what a product of matrices reaches under these settings; False where there was no time to find out."""
        known = {(rate.device, rate.precision, rate.threads) for rate in self.profile.rates}
        missing = [one for one in settings if (one.device, one.precision, one.threads) not in known]
        if missing and self.budget_s and self._left_s() < PROBE_S * len(missing):
            return False
        rates = [
            probe_rates(devices.open_device(one.device), one.precision, one.threads)
            for one in missing
            if one.device != HYBRID
        ]
        if rates:
            self._keep(self.profile.with_rates(rates))
        return True

    def _keep(self, profile: Profile) -> None:
        rates, steps = list(profile.rates), list(profile.steps)
        update_profile(lambda kept: kept.with_rates(rates).with_steps(steps).with_devices(devices.facts()))
        self.profile, self.model = profile, CostModel(profile)

    def _budget(self, usual: Setting, *, has_accelerator: bool) -> float:
        step = self.model.step_s(replace(usual, device="cpu"), self.job)
        run_s = step.value * self.total_steps if step else 0.0
        return min(SHARE_OF_RUN * run_s, LIMIT_WITH_ACCELERATOR_S if has_accelerator else LIMIT_S)

    def _left_s(self) -> float:
        return self.budget_s - (time.perf_counter() - self.started)

    def _fits(self, setting: Setting) -> bool:
        _, need = self.model.memory(setting, self.job)
        device = devices.open_device(setting.device)
        is_right = device.product_limit is None or self.job.longest_product < device.product_limit
        return is_right and with_margin(need.value) <= device.memory_bytes


def _import_what_training_imports() -> float:
    """Seconds that pass until an optimizer can be made the first time. Training pays for them anyway."""
    started = time.perf_counter()
    importlib.import_module("torch._dynamo")
    return time.perf_counter() - started
