"""Seconds and bytes of a training step on a device, from what was measured on this machine. No torch.

A step's time is close to a sum of four kinds of work (`cost.Work`), each times a price. Prices are fitted to the steps
that were measured, by least squares of the relative error, with each price's prior counting as one weak observation.
Without measurements that leaves the prior; with some, the prior hardly matters. Memory is treated in the same way.
"""

import json
import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, Literal

from clipctl.hardware.profile import HYBRID, Profile, StepSample
from clipctl.model import cost
from clipctl.model.workload import Setting, Workload

Basis = Literal["measured", "interpolated", "extrapolated", "prior"]

# How much faster than its CPU an Apple GPU is, for a model below so many parameters: experience with an M1.
APPLE_SPEEDUPS = ((50e6, 0.1), (100e6, 0.3), (200e6, 0.8), (500e6, 1.5), (math.inf, 3.0))
PRIOR_FACTOR = 3.0  # a prior may be wrong by this much, either way

# Prices where nothing was measured: a laptop core of this decade, and an accelerator only to begin a fit with.
CPU_GFLOPS_A_CORE = 30.0
CPU_GBYTES_PER_S = 10.0
CPU_KERNEL_S = 40e-6
ACCELERATOR_PRICES = (1 / 2e12, 1 / 60e9, 1 / 60e9, 20e-6)
PRIOR_WEIGHT = 0.05

PROCESS_BYTES = 330 * 2**20  # Python, torch and its libraries, as measured on Linux
TRAINER_BYTES = 40 * 2**20  # what a training holds that bare steps do not: terminal, log, sensors, held-out pictures
CONTEXT_BYTES = 64 * 2**20  # what an accelerator's libraries keep on it
MARGIN = 0.05  # of the memory, for what no arithmetic sees
SPREAD_FLOOR = 0.1  # no forecast is surer than this: the same steps differ so much from one minute to the next
PLAIN_GAIN = 1.25  # plain attention must be this many times as fast as fused to be chosen
RANGE_FACTOR = 2.0  # work per operation up to this far beyond what was measured still counts as between


@dataclass(frozen=True)
class Estimate:
    """A figure with an interval that it will probably lie in, and what it rests on."""

    value: float
    low: float
    high: float
    basis: Basis

    @classmethod
    def around(cls, value: float, spread: float, basis: Basis) -> "Estimate":
        return cls(value, value / (1 + spread), value * (1 + spread), basis)

    @property
    def is_sure(self) -> bool:
        return self.basis in ("measured", "interpolated")

    def scaled(self, factor: float) -> "Estimate":
        return replace(self, value=self.value * factor, low=self.low * factor, high=self.high * factor)

    def shifted(self, amount: float) -> "Estimate":
        return replace(self, value=self.value + amount, low=self.low + amount, high=self.high + amount)

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high, "basis": self.basis}


def workloads_of(samples: Sequence[StepSample]) -> list[tuple[StepSample, Workload]]:
    """Samples with the workloads they measured; those that this version does not understand are left out."""
    found = []
    for sample in samples:
        with suppress(ValueError):
            found.append((sample, Workload.from_dict(sample.workload)))
    return found


def fit_prices(rows: Sequence[Sequence[float]], totals: Sequence[float], prior: Sequence[float]) -> list[float]:
    """Prices p ≥ 0 that make row · p close to each total, by relative error; the prior pulls weakly at each of them.

    In units of the prior (q = p / prior) this is min Σ (row·p / total − 1)² + w² Σ (q − 1)², solved by turns: with all
    other prices held, the best value of one is a quotient, or zero.
    """
    scaled = [
        [value * price / total for value, price in zip(row, prior, strict=True)]
        for row, total in zip(rows, totals, strict=True)
    ]
    weak, kinds = PRIOR_WEIGHT**2, range(len(prior))
    # The normal equations: how kinds of work go together, and how each goes with the totals.
    together = [[sum(row[j] * row[k] for row in scaled) for k in kinds] for j in kinds]
    alone = [sum(row[j] for row in scaled) for j in kinds]
    q = [1.0] * len(prior)
    for _ in range(500):
        for j in kinds:
            others = sum(together[j][k] * q[k] for k in kinds if k != j)
            q[j] = max(0.0, (alone[j] - others + weak) / (together[j][j] + weak))
    return [share * price for share, price in zip(q, prior, strict=True)]


class CostModel:
    """Forecasts for any workload under any setting, from a machine's profile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._samples = workloads_of(profile.steps)
        self._fits: dict[Setting, tuple[list[float], float, tuple[float, float]]] = {}
        self._memory_fits: dict[str, tuple[float, float, float, float]] = {}

    # --- time -----------------------------------------------------------------------------------------------------

    def step_s(self, setting: Setting, workload: Workload) -> Estimate | None:
        """Seconds of a step; None if not even a guess would be honest."""
        if sample := self.measured(setting, workload):
            return Estimate.around(sample.step_s, max(SPREAD_FLOOR, sample.iqr_s / sample.step_s), "measured")
        if self._samples_of(setting):
            return self._fitted(setting, workload)
        return self._prior(setting, workload)

    def measured(self, setting: Setting, workload: Workload) -> StepSample | None:
        """The seconds of this very step, if it was timed."""
        samples = self._samples_of(setting)
        return next((sample for sample, measured in reversed(samples) if measured == workload), None)

    def _samples_of(self, setting: Setting) -> list[tuple[StepSample, Workload]]:
        return [
            (sample, workload)
            for sample, workload in self._samples
            if (sample.device, sample.precision, sample.threads) == astuple(setting)
        ]

    def _fit(self, setting: Setting) -> tuple[list[float], float, tuple[float, float]]:
        """Prices, how far they are off the measurements, and the range of work per operation that was measured."""
        if setting not in self._fits:
            samples = self._samples_of(setting)
            rows = [astuple(cost.step_work(workload)) for _, workload in samples]
            prices = fit_prices(rows, [sample.step_s for sample, _ in samples], self._prior_prices(setting))
            misses = [_dot(row, prices) / sample.step_s - 1 for row, (sample, _) in zip(rows, samples, strict=True)]
            # A fit through as many points as prices misses none of them, and still knows nothing of others.
            freedom = max(1, len(misses) - len(prices) / 2)
            spread = 2 * math.sqrt(sum(miss**2 for miss in misses) / freedom)
            # And a machine that was not quiet then may be quieter, or busier, when it matters.
            noise = statistics.median(sample.iqr_s / sample.step_s for sample, _ in samples)
            spread = math.hypot(spread, noise)
            density = [cost.step_work(workload).flops / cost.step_work(workload).kernels for _, workload in samples]
            self._fits[setting] = prices, max(SPREAD_FLOOR, spread, 0.3 / len(samples)), (min(density), max(density))
        return self._fits[setting]

    def _fitted(self, setting: Setting, workload: Workload) -> Estimate:
        prices, spread, (low, high) = self._fit(setting)
        density = cost.step_work(workload).flops / cost.step_work(workload).kernels
        beyond = max(low / density, density / high, 1.0)
        basis: Basis = "interpolated" if beyond <= RANGE_FACTOR else "extrapolated"
        return Estimate.around(_dot(astuple(cost.step_work(workload)), prices), spread + 0.1 * math.log2(beyond), basis)

    def _prior(self, setting: Setting, workload: Workload) -> Estimate | None:
        """Prices from what is known of other settings, or from a rule of thumb."""
        if setting.device == HYBRID:
            return None
        if setting.device != "cpu":
            return self._prior_of_accelerator(setting, workload)
        other = self._nearest_setting(setting)
        if other is None:
            return Estimate.around(
                _dot(astuple(cost.step_work(workload)), self._prior_prices(setting)), PRIOR_FACTOR - 1, "prior"
            )
        # Prices measured in another precision or with other threads: products go by the rate of each precision, and
        # what is spread over threads by their number. Updating weights and starting operations stay as they are.
        rates = [self.profile.rate("cpu", one.precision, self.cores) for one in (setting, other)]
        if setting.precision == other.precision:
            speed = 1.0
        elif rates[0] and rates[1] and rates[0].gflops and rates[1].gflops:
            speed = rates[0].gflops / rates[1].gflops
        else:
            return None
        flops, moved, parameters, kernels = self._fit(other)[0]
        slower = self._busy_cores(other) / self._busy_cores(setting)
        prices = (flops * slower / speed, moved * slower, parameters, kernels)
        return Estimate.around(_dot(astuple(cost.step_work(workload)), prices), 0.5, "prior")

    def _nearest_setting(self, setting: Setting) -> Setting | None:
        """One on the same device that was measured: same precision before same threads."""
        measured = {Setting(sample.device, sample.precision, sample.threads) for sample, _ in self._samples}
        on_device = [one for one in measured if one.device == setting.device]
        return max(on_device, key=lambda one: (one.precision == setting.precision, one.threads), default=None)

    def _prior_of_accelerator(self, setting: Setting, workload: Workload) -> Estimate | None:
        if other := self._nearest_setting(setting):
            return Estimate.around(self._fitted(other, workload).value, PRIOR_FACTOR - 1, "prior")
        on_cpu = self.step_s(Setting("cpu", "fp32", self.cores), workload)
        if setting.device != "mps" or on_cpu is None:
            return None  # for no other accelerator is there a rule of thumb
        return Estimate.around(on_cpu.value / apple_speedup(cost.parameters(workload.model)), PRIOR_FACTOR - 1, "prior")

    def _prior_prices(self, setting: Setting) -> Sequence[float]:
        if setting.device != "cpu":
            return ACCELERATOR_PRICES
        rate = self.profile.rate("cpu", setting.precision, setting.threads)
        gflops = 0.8 * rate.gflops if rate and rate.gflops else CPU_GFLOPS_A_CORE * self._busy_cores(setting)
        return 1e-9 / gflops, 1e-9 / CPU_GBYTES_PER_S, 1e-9 / CPU_GBYTES_PER_S, CPU_KERNEL_S

    @property
    def cores(self) -> int:
        return self.profile.machine.cores

    def _busy_cores(self, setting: Setting) -> int:
        """More threads than cores take turns."""
        return min(setting.threads, self.cores)

    # --- attention ------------------------------------------------------------------------------------------------

    def faster_attention(self, setting: Setting, workload: Workload) -> tuple[str, float] | None:
        """`plain` or `fused`, and how many times as fast as the other; None if it was not measured."""
        times = {one.key: one for one in self.profile.attention}
        fused_s = plain_s = 0.0
        for shape, blocks in workload.attention_shapes.items():
            known = times.get((*astuple(setting), json.dumps(asdict(shape.sample), sort_keys=True)))
            if known is None:
                return None
            share = blocks * shape.pairs / shape.sample.pairs
            fused_s, plain_s = fused_s + share * known.fused_s, plain_s + share * known.plain_s
        if not fused_s or not plain_s:
            return None
        # Within that margin nothing is gained that would be worth the memory of the scores.
        return ("plain", fused_s / plain_s) if PLAIN_GAIN * plain_s < fused_s else ("fused", plain_s / fused_s)

    # --- memory ---------------------------------------------------------------------------------------------------

    def memory(
        self, setting: Setting, workload: Workload, attention: str | None = None
    ) -> tuple[cost.Memory, Estimate]:
        """What a step needs, by what holds it, and the whole with its interval. `attention` is plain or fused; None:
        the faster one."""
        need = self._counted(setting, workload, attention)
        process, fixed, kept, largest = self._memory_fit(setting.device)
        calibrated = replace(
            need,
            weights_bytes=round(need.weights_bytes * fixed),
            gradients_bytes=round(need.gradients_bytes * fixed),
            optimizer_bytes=round(need.optimizer_bytes * fixed),
            batch_bytes=round(need.batch_bytes * fixed),
            activations_bytes=round(need.activations_bytes * kept),
            process_bytes=round(process),
        )
        if not largest:
            return calibrated, Estimate.around(calibrated.total_bytes, 0.3, "prior")
        exact = self.measured(setting, workload)
        if exact and exact.peak_bytes:
            besides = TRAINER_BYTES if setting.device == "cpu" else 0
            return calibrated, Estimate.around(exact.peak_bytes + besides, MARGIN, "measured")
        basis: Basis = "interpolated" if need.total_bytes <= 4 * largest else "extrapolated"
        return calibrated, Estimate.around(calibrated.total_bytes, 0.15, basis)

    def _memory_fit(self, device: str) -> tuple[float, float, float, float]:
        """What the process takes, by how much weights and activations exceed their count, and the largest that was
        measured. Peaks under any precision count: what differs by precision is in the arithmetic."""
        if device not in self._memory_fits:
            samples = [
                (sample, workload)
                for sample, workload in self._samples
                if sample.peak_bytes and sample.device == device
            ]
            needs = [
                self._counted(Setting(device, sample.precision, sample.threads), workload)
                for sample, workload in samples
            ]
            rows = [(1.0, one.total_bytes - one.activations_bytes, one.activations_bytes) for one in needs]
            on_cpu = device == "cpu"
            prior = (PROCESS_BYTES if on_cpu else CONTEXT_BYTES, 1.0, 1.0)
            process, fixed, kept = fit_prices(rows, [float(sample.peak_bytes or 0) for sample, _ in samples], prior)
            process += TRAINER_BYTES if on_cpu else 0
            self._memory_fits[device] = process, fixed, kept, max((one.total_bytes for one in needs), default=0)
        return self._memory_fits[device]

    def _counted(self, setting: Setting, workload: Workload, attention: str | None = None) -> cost.Memory:
        if attention is None:
            faster = self.faster_attention(setting, workload)
            attention = faster[0] if faster else "fused"
        return cost.training_memory(workload, setting.precision, attention)

    def largest_batch(self, setting: Setting, workload: Workload, limit_bytes: float) -> int:
        """The largest batch that fits with a margin; 0 if not even a batch of two does."""

        def fits(batch_size: int) -> bool:
            _, need = self.memory(setting, replace(workload, batch_size=batch_size))
            return with_margin(need.value) <= limit_bytes

        low, high = 1, 2
        while fits(high) and high < 1_000_000:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low if low >= 2 else 0

    def fitting_micro_batch(
        self, setting: Setting, workload: Workload, limit_bytes: float, attention: str | None = None
    ) -> int:
        """The whole batch if it fits with a margin, else half of it, a quarter, …; 0 if not even one pair does. Parts
        of equal size keep the shapes of all products the same."""
        micro_batch = workload.batch_size
        while True:
            in_parts = replace(workload, micro_batch=micro_batch)
            if with_margin(self.memory(setting, in_parts, attention)[1].value) <= limit_bytes:
                return micro_batch
            if micro_batch == 1:
                return 0
            micro_batch = -(-micro_batch // 2)


def with_margin(need_bytes: float) -> float:
    return need_bytes * (1 + MARGIN)


def apple_speedup(parameters: int) -> float:
    return next(speedup for limit, speedup in APPLE_SPEEDUPS if parameters < limit)


def _dot(row: Sequence[float], prices: Sequence[float]) -> float:
    return sum(value * price for value, price in zip(row, prices, strict=True))
