"""Which device, which precision: one ranking for `train --device auto` and `recommend-device`. No torch.

Both ask here: given the same facts, they get the same answer. `auto` may first add facts by timing real steps.

The first option is the usual one (the CPU, fp32). Another one must be faster beyond doubt, by a margin: what was
measured decides first, then forecasts that rest on measurements, then a rule of thumb.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from clipctl.config.quantities import counted
from clipctl.config.sections import PRECISIONS
from clipctl.hardware.profile import HYBRID
from clipctl.model import cost
from clipctl.model.forecast import CostModel, Estimate, apple_speedup, with_margin
from clipctl.model.workload import Setting, Workload

WORTHWHILE = 1.10  # what departs from the usual must be this much faster
SHORT_RUN_S = 60.0  # a run this short on the CPU is not worth an accelerator's start
# The widest interval, relative to the value, that is called high or medium confidence.
HIGH_SPREAD, MEDIUM_SPREAD = 0.25, 0.6

Confidence = Literal["high", "medium", "low"]
Name = Callable[[Setting], str]


@dataclass(frozen=True)
class Place:
    """A device that could be used."""

    device: str
    available_bytes: int
    product_limit: int | None = None  # products at least this long come out wrong


@dataclass(frozen=True)
class Candidate:
    """A device with the precision that suits it best, and the time and memory the workload would take there."""

    setting: Setting
    step_s: Estimate | None
    memory: cost.Memory
    memory_basis: str
    need_bytes: int  # margin included
    available_bytes: int
    is_right: bool = True  # False: a known fault makes this workload come out wrong there

    @property
    def fits(self) -> bool:
        return self.need_bytes <= self.available_bytes

    @property
    def is_usable(self) -> bool:
        return self.fits and self.is_right


@dataclass(frozen=True)
class Verdict:
    setting: Setting
    reason: str
    confidence: Confidence


def rank_devices(model: CostModel, workload: Workload, candidates: Sequence[Candidate], total_steps: int) -> Verdict:
    """The device to train on. If none can be used, the first candidate, and why."""
    usable = [one for one in candidates if one.is_usable]
    if not usable:
        return Verdict(candidates[0].setting, _why_not(candidates), "high")
    # A mixture of two devices is worth a thought only if it was measured, or if there is nothing else.
    options = [one.setting for one in usable if one.setting.device != HYBRID or one.step_s]
    options = options or [one.setting for one in usable]
    if len(options) == 1:
        others = [one for one in candidates if not one.is_usable]
        step_s = model.step_s(options[0], workload)
        return Verdict(options[0], _why_not(others) if others else "there is no other device", _confidence(step_s))
    by_speed = fastest(model, workload, options, device_stand_ins(workload), lambda one: one.device)
    return by_speed or _by_rule_of_thumb(model, workload, options, total_steps)


def _why_not(candidates: Sequence[Candidate]) -> str:
    """Why these cannot be used: too little memory, or wrong results."""
    small = [one.setting.device for one in candidates if not one.fits]
    wrong = [one.setting.device for one in candidates if one.fits and not one.is_right]
    parts = [f"it does not fit on {', '.join(small)}"] if small else []
    return "; ".join(parts + ([f"{', '.join(wrong)} gets this batch size wrong"] if wrong else []))


def rank_precisions(model: CostModel, workload: Workload, setting: Setting) -> Verdict | None:
    """The precision for a device; None if no other than fp32 was measured. An emulated one is no option."""
    usual, *others = promising(model, setting)
    smaller = precision_stand_ins(workload)
    options = [usual, *(one for one in others if _is_known(model, [workload, *smaller], one))]
    return fastest(model, workload, options, smaller, lambda one: one.precision)


def _is_known(model: CostModel, workloads: Sequence[Workload], setting: Setting) -> bool:
    estimate = model.step_s(setting, workloads[0])
    return bool(estimate and estimate.is_sure) or any(model.measured(setting, one) for one in workloads)


# Smaller workloads that can be timed in a workload's place, the most alike first. A step of two pairs mostly starts
# operations: that is no ground to judge a device by, but precisions can still be compared.


def device_stand_ins(workload: Workload) -> list[Workload]:
    return _distinct([workload.cut(), workload.cut(batch_size=8)], workload)


def precision_stand_ins(workload: Workload) -> list[Workload]:
    cuts = [workload.cut(), workload.cut(batch_size=4), workload.cut(batch_size=2)]
    return _distinct([*cuts, workload.cut(batch_size=2, blocks=1)], workload)


def thread_stand_ins(workload: Workload) -> list[Workload]:
    return _distinct([workload.cut()], workload)


def _distinct(workloads: Sequence[Workload], whole: Workload) -> list[Workload]:
    return [one for one in dict.fromkeys(workloads) if one != whole]


def promising(model: CostModel, setting: Setting) -> list[Setting]:
    """Precisions whose matrix products are clearly faster than in fp32, as far as that is known; fp32 first.

    Products on one core decide: several cores that wait for each other reach next to nothing if another program is
    busy, and an emulated precision would then look as good as fp32.
    """
    options = [replace(setting, precision=precision) for precision in PRECISIONS]
    if setting.device == HYBRID:
        return options[:1]
    threads = 1 if setting.device == "cpu" else setting.threads
    rates = [model.profile.exact_rate(one.device, one.precision, threads) for one in options]
    plain = rates[0]
    is_slow = [rate and plain and rate.gflops <= WORTHWHILE * plain.gflops for rate in rates]
    return [one for one, slow in zip(options, is_slow, strict=True) if one is options[0] or not slow]


def fastest(
    model: CostModel, workload: Workload, options: Sequence[Setting], smaller: Sequence[Workload], name: Name
) -> Verdict | None:
    """The option that is fastest beyond doubt, else the first, the usual one. None if what is known cannot tell:
    neither forecasts that rest on measurements, nor measurements of the `smaller` workloads."""
    estimates = {one: model.step_s(one, workload) for one in options}
    known = {one: estimate for one, estimate in estimates.items() if estimate and estimate.is_sure}
    close = close_options(model, workload, options)
    running = [one for one in options if one == options[0] or one in close or one in known]
    if len(running) < 2:
        return None
    if len(known) == len(running):
        return _compare(known, name)
    for stand_in in smaller:
        if all(model.measured(one, stand_in) for one in running):
            measured = {one: estimate for one in running if (estimate := model.step_s(one, stand_in))}
            blocks, whole = stand_in.model.image.depth, workload.model.image.depth
            fewer = f" and {counted(blocks, 'image block')} of {whole}" if blocks < whole else ""
            return _compare(measured, name, f" at batch size {stand_in.batch_size}{fewer}")
    return None


def _compare(seconds: dict[Setting, Estimate], name: Name, where: str = "") -> Verdict:
    usual, best = next(iter(seconds)), min(seconds, key=lambda one: seconds[one].value)
    chosen = best if seconds[usual].value > WORTHWHILE * seconds[best].value else usual
    others = {one: estimate for one, estimate in seconds.items() if one != chosen}
    verb = "measured" if all(estimate.basis == "measured" for estimate in seconds.values()) else "about"
    listed = ", ".join(f"{name(one)} {_step_words(estimate)}" for one, estimate in others.items())
    rival = min(others.values(), key=lambda estimate: estimate.value)
    words = f"{verb} {_step_words(seconds[chosen])} per step{where}, {listed}"
    return Verdict(chosen, words, _confidence(seconds[chosen], rival))


def _step_words(step_s: Estimate) -> str:
    return f"{step_s.value:.3g} s" if step_s.value >= 1 else f"{1000 * step_s.value:.3g} ms"


def close_options(model: CostModel, workload: Workload, options: Sequence[Setting]) -> list[Setting]:
    """Options that might be the fastest, as far as is known: worth measuring."""
    estimates = {one: model.step_s(one, workload) for one in options}
    best_high = min((estimate.high for estimate in estimates.values() if estimate), default=math.inf)
    return [one for one, estimate in estimates.items() if estimate is None or estimate.low <= best_high]


def _by_rule_of_thumb(model: CostModel, workload: Workload, options: Sequence[Setting], total_steps: int) -> Verdict:
    """Without measurements: short runs stay on the CPU, accelerators are fast, Apple's GPU only for large models."""
    usual, accelerator = options[0], options[1]
    on_cpu = model.step_s(usual, workload)
    if usual.device != "cpu":
        return Verdict(usual, "neither was measured; it was named first", "low")
    if on_cpu and on_cpu.value * total_steps < SHORT_RUN_S:
        return Verdict(usual, f"finishes in about {on_cpu.value * total_steps:.2g} s", "low")
    if accelerator.device != "mps":
        return Verdict(accelerator, "an accelerator is usually faster; not measured", "low")
    speedup = apple_speedup(cost.parameters(workload.model))
    words = f"rule of thumb for Apple GPUs: {speedup:g} × the CPU's speed at this size; not measured"
    return Verdict(accelerator if speedup > 1 else usual, words, "low")


def candidate(model: CostModel, workload: Workload, place: Place, setting: Setting) -> Candidate:
    split, need = model.memory(setting, workload)
    return Candidate(
        setting=setting,
        step_s=model.step_s(setting, workload),
        memory=split,
        memory_basis=need.basis,
        need_bytes=round(with_margin(need.value)),
        available_bytes=place.available_bytes,
        is_right=place.product_limit is None or workload.longest_product < place.product_limit,
    )


def best_setting(model: CostModel, workload: Workload, device: str, precision: str, threads: int) -> Setting:
    """A device with the precision that was asked for, or, if that is auto, with the best one known."""
    usual = Setting(device, "fp32" if precision == "auto" else precision, threads)
    verdict = rank_precisions(model, workload, usual) if precision == "auto" else None
    return verdict.setting if verdict else usual


def rank(
    model: CostModel, workload: Workload, places: Sequence[Place], *, precision: str, threads: int, total_steps: int
) -> tuple[Verdict, list[Candidate]]:
    """Device and precision for a workload, from what is known; and all candidates, in the order of the places."""
    candidates = [
        candidate(model, workload, place, best_setting(model, workload, place.device, precision, threads))
        for place in places
    ]
    # Whatever the order they were named in: the CPU is the usual one, a mixture of two devices comes last.
    by_kind = sorted(candidates, key=lambda one: (one.setting.device != "cpu", one.setting.device == HYBRID))
    return rank_devices(model, workload, by_kind, total_steps), candidates


def _confidence(best: Estimate | None, rival: Estimate | None = None) -> Confidence:
    """As sure as the wider of the two intervals; not sure at all if they overlap or rest on no measurement."""
    estimates = [one for one in (best, rival) if one]
    if best is None or any(one.basis == "prior" for one in estimates) or (rival and best.high >= rival.low):
        return "low"
    spread = max(one.high / one.value - 1 for one in estimates)
    if spread > MEDIUM_SPREAD:
        return "low"
    return "high" if spread <= HIGH_SPREAD and all(one.is_sure for one in estimates) else "medium"
