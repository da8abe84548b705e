"""`clipctl recommend-device`: which device for a model of this size, why, what would change the answer. No torch."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from clipctl.bench.results import BenchResult
from clipctl.config.layers import Layer, resolve
from clipctl.config.presets import PRESETS
from clipctl.config.sections import ModelConfig, TrainConfig
from clipctl.errors import ConfigError
from clipctl.hardware import memory
from clipctl.hardware.profile import DeviceFacts, Profile, Rates, StepSample
from clipctl.model import cost
from clipctl.model.forecast import (
    ASSUMED_TEXT_TOKENS,
    WORTHWHILE,
    CostModel,
    Estimate,
    Job,
    Setting,
    prior_speedup,
    with_margin,
)

ASSUMED_PAIRS = 10_000
SYSTEM_BYTES = 2 * 2**30  # of a machine's memory is taken by its system and other programs
SIZE_TOLERANCE = 0.2
METAL_SHARE = 2 / 3  # of an Apple machine's memory that its GPU may take

# The notes' table: a band of sizes, one that stands for it, and what they advise.
BANDS = (
    ("Tiny", "below 10M", 5_000_000, "CPU"),
    ("Small", "10M to 100M", 50_000_000, "CPU"),
    ("Medium", "100M to 500M", 200_000_000, "test both"),
    ("Large", "above 500M", 1_000_000_000, "GPU"),
)

Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True)
class Question:
    model: ModelConfig
    batch_size: int
    text_tokens: int = ASSUMED_TEXT_TOKENS
    precision: str = "auto"
    pairs: int = ASSUMED_PAIRS
    memory_bytes: int | None = None  # of a machine to imagine
    devices: tuple[str, ...] | None = None  # None: those of this machine

    @property
    def job(self) -> Job:
        text = replace(self.model.text, vocab_size=self.model.text.vocab_size or cost.ASSUMED_VOCAB_SIZE)
        model = replace(self.model, text=text)
        return Job(model, self.batch_size, min(self.text_tokens, text.context))


@dataclass(frozen=True)
class Candidate:
    device: str
    name: str
    simulated: bool
    precision: str
    fits: bool
    memory: cost.Memory
    memory_bytes: int  # what it needs, margin included
    memory_basis: str
    available_bytes: int
    step_s: Estimate | None
    largest_batch: int

    @property
    def margin_bytes(self) -> int:
        return max(0, self.memory_bytes - self.memory.total_bytes)

    def to_dict(self, steps_per_epoch: int) -> dict[str, Any]:
        step = self.step_s
        return {
            "device": self.device,
            "name": self.name,
            "simulated": self.simulated,
            "precision": self.precision,
            "fits": self.fits,
            "memory_bytes": self.memory_bytes,
            "memory_basis": self.memory_basis,
            "available_bytes": self.available_bytes,
            "memory_split": {**asdict(self.memory), "margin_bytes": self.margin_bytes},
            "step_s": step.value if step else None,
            "step_low_s": step.low if step else None,
            "step_high_s": step.high if step else None,
            "epoch_s": step.value * steps_per_epoch if step else None,
            "basis": step.basis if step else None,
            "largest_batch": self.largest_batch,
        }


@dataclass(frozen=True)
class Band:
    name: str
    range: str
    parameters: int
    step_s: dict[str, Estimate | None]  # by device
    fastest: str | None
    notes: str


@dataclass(frozen=True)
class Recommendation:
    device: str | None  # None: nothing fits
    confidence: Confidence
    reason: str
    parameters: int
    steps_per_epoch: int
    candidates: list[Candidate]
    bands: list[Band]
    assumptions: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "confidence": self.confidence,
            "reason": self.reason,
            "parameters": self.parameters,
            "candidates": [one.to_dict(self.steps_per_epoch) for one in self.candidates],
            "bands": [
                {
                    "name": band.name,
                    "range": band.range,
                    "parameters": band.parameters,
                    "step_s": {device: one.value if one else None for device, one in band.step_s.items()},
                    "fastest": band.fastest,
                    "notes": band.notes,
                }
                for band in self.bands
            ],
            "assumptions": self.assumptions,
        }


def recommend(question: Question, profile: Profile) -> Recommendation:
    """From what is known of a machine."""
    model = CostModel(profile)
    places = _places(question, profile)
    candidates = [_candidate(question, model, facts, simulated) for facts, simulated in places]
    device, confidence, reason = _choose(candidates, question)
    return Recommendation(
        device=device,
        confidence=confidence,
        reason=reason,
        parameters=cost.parameters(question.model),
        steps_per_epoch=math.ceil(question.pairs / question.batch_size),
        candidates=candidates,
        bands=[_band(*band, question, model, [facts.kind for facts, _ in places]) for band in BANDS],
        assumptions=list(_assumptions(question, profile, candidates)),
    )


# --- the devices ----------------------------------------------------------------------------------------------


def _places(question: Question, profile: Profile) -> list[tuple[DeviceFacts, bool]]:
    """Devices to compare, and whether each is only imagined."""
    here = {facts.kind: facts for facts in profile.devices}
    asked = question.devices or tuple(here) or ("cpu",)
    found = []
    for name in asked:
        kind = next((known for known in here if name in (known, known.split(":")[0])), name)
        if kind not in here and kind.split(":")[0] not in ("cpu", "mps", "cuda"):
            raise ConfigError(f"unknown device {kind!r}", f"here: {', '.join(here)}; mps and cuda can be imagined")
        is_imagined = kind not in here or question.memory_bytes is not None
        title = here[kind].name if kind in here else f"an imagined {kind}"
        found.append((DeviceFacts(kind, title, _available(kind, question.memory_bytes, here)), is_imagined))
    return found


def _available(kind: str, machine_bytes: int | None, here: dict[str, DeviceFacts]) -> int:
    if machine_bytes is None:
        if kind == "cpu":
            return memory.available_bytes()
        return here[kind].memory_bytes if kind in here else round(METAL_SHARE * memory.total_bytes())
    if kind == "cpu":
        return max(0, machine_bytes - SYSTEM_BYTES)
    return round(METAL_SHARE * machine_bytes) if kind == "mps" else machine_bytes


def _candidate(question: Question, model: CostModel, facts: DeviceFacts, simulated: bool) -> Candidate:
    setting = _setting(question, model, facts.kind)
    split, need = model.memory(setting, question.job)
    need_bytes = round(with_margin(need.value))
    return Candidate(
        device=facts.kind,
        name=facts.name,
        simulated=simulated,
        precision=setting.precision,
        fits=need_bytes <= facts.memory_bytes,
        memory=split,
        memory_bytes=need_bytes,
        memory_basis=need.basis,
        available_bytes=facts.memory_bytes,
        step_s=model.step_s(setting, question.job),
        largest_batch=model.largest_batch(setting, question.job, facts.memory_bytes),
    )


def _setting(question: Question, model: CostModel, device: str) -> Setting:
    """fp32, unless another precision was asked for or is known to be faster."""
    usual = Setting(device, "fp32", model.cores)
    if question.precision != "auto":
        return replace(usual, precision=question.precision)
    plain = model.step_s(usual, question.job)
    for precision in ("bf16", "fp16"):
        other = replace(usual, precision=precision)
        estimate = model.step_s(other, question.job)
        if plain and estimate and estimate.is_sure and plain.is_sure and plain.value > WORTHWHILE * estimate.value:
            return other
    return usual


# --- the answer -----------------------------------------------------------------------------------------------


def _choose(candidates: Sequence[Candidate], question: Question) -> tuple[str | None, Confidence, str]:
    fitting = [one for one in candidates if one.fits]
    if not fitting:
        best = max(candidates, key=lambda one: one.largest_batch)
        way_out = (
            f"a batch of {best.largest_batch} would fit on {best.device}" if best.largest_batch else "no batch does"
        )
        return None, "high", f"it fits nowhere at batch {question.batch_size}: {way_out}"
    timed = sorted((one for one in fitting if one.step_s), key=lambda one: one.step_s.value)  # type: ignore[union-attr]
    unknown = [one for one in fitting if not one.step_s]
    for one in unknown:
        if not timed or not one.simulated:  # what is there is usually there because it is fast
            return one.device, "low", f"nothing was measured on {one.device}; --measure would tell"
    best = timed[0]
    assert best.step_s is not None
    if len(timed) == 1:
        others = [one.device for one in candidates if not one.fits]
        words = f"it does not fit on {', '.join(others)}" if others else "there is no other device"
        if unknown:
            words = f"of {', '.join(one.device for one in unknown)} nothing is known"
        return best.device, _confidence(best.step_s, None), words
    second = timed[1]
    assert second.step_s is not None
    ratio = second.step_s.value / best.step_s.value
    words = f"a step takes about {best.step_s.value:.3g} s, {ratio:.2g} × faster than on {second.device}"
    if "prior" in (best.step_s.basis, second.step_s.basis):
        words += " by the notes' thresholds, not by measurement"
    return best.device, _confidence(best.step_s, second.step_s), words


def _confidence(best: Estimate, second: Estimate | None) -> Confidence:
    bases = {best.basis, second.basis} if second else {best.basis}
    if "prior" in bases:
        return "low"
    if second and best.high >= second.low:
        return "low"
    return "high" if bases <= {"measured", "interpolated"} else "medium"


def _band(
    name: str, range: str, parameters: int, notes: str, question: Question, model: CostModel, devices: list[str]
) -> Band:
    job = replace(question.job, model=model_of_size(parameters))
    estimates = {
        device: model.step_s(_setting(replace(question, model=job.model), model, device), job) for device in devices
    }
    known = {device: one.value for device, one in estimates.items() if one}
    return Band(name, range, parameters, estimates, min(known, key=lambda one: known[one], default=None), notes)


def _assumptions(question: Question, profile: Profile, candidates: Sequence[Candidate]) -> list[str]:
    image, text = question.model.image, question.model.text
    words = [
        f"image {image.width}×{image.depth} at {image.size_px} px in patches of {image.patch_px}, "
        f"text {text.width}×{text.depth} over {text.vocab_size or cost.ASSUMED_VOCAB_SIZE:,} symbols",
        f"batch {question.batch_size}, captions of {question.job.text_tokens} tokens, "
        f"{question.pairs:,} pairs an epoch, {profile.machine.cores} threads",
    ]
    if question.memory_bytes is not None:
        words.append(f"simulated: a machine with {question.memory_bytes / 2**30:.3g} GiB of memory")
    imagined = [one.device for one in candidates if one.simulated and one.name.startswith("an imagined")]
    if imagined:
        words.append(f"simulated: this machine has no {', '.join(imagined)}")
    if any(one.step_s and one.step_s.basis == "prior" and one.device == "mps" for one in candidates):
        speedup = prior_speedup(cost.parameters(question.model))
        words.append(f"prior: the notes say that an Apple GPU is {speedup:g} × as fast as the CPU at this size")
    if not profile.steps:
        words.append("no training step was timed on this machine yet: clipctl bench does, in two minutes")
    return words


# --- models and measurements from elsewhere -------------------------------------------------------------------


def model_of_size(parameters: int) -> ModelConfig:
    """Like the preset that is nearest in size, made wider or narrower until the number fits. Raises ValueError where
    no width does."""
    nearest = best = nearest_preset(parameters).model
    for percent in range(5, 1000):
        scaled = _scaled(nearest, percent / 100)
        if abs(cost.parameters(scaled) - parameters) < abs(cost.parameters(best) - parameters):
            best = scaled
    if abs(cost.parameters(best) / parameters - 1) > SIZE_TOLERANCE:
        raise ValueError(f"a size that a CLIP model can have; the nearest is {cost.parameters(best):,}")
    return best


def nearest_preset(parameters: int) -> TrainConfig:
    presets = [resolve([Layer("preset", {"preset": preset})]) for preset in PRESETS]
    return min(presets, key=lambda one: abs(math.log(cost.parameters(one.model) / parameters)))


def _scaled(model: ModelConfig, factor: float) -> ModelConfig:
    def width(width: int, heads: int) -> int:
        return max(1, round(width * factor / heads)) * heads

    image = replace(model.image, width=width(model.image.width, model.image.heads))
    text = replace(model.text, width=width(model.text.width, model.text.heads))
    return replace(model, image=image, text=text, embed_dim=max(4, round(model.embed_dim * factor)))


def profile_of(result: BenchResult) -> Profile:
    """What a saved benchmark says of the machine it was made on."""
    steps = [
        StepSample(
            device=row.device,
            precision=row.dtype,
            threads=row.threads,
            model=row.model,
            batch_size=row.size,
            text_tokens=row.text_tokens,
            step_s=row.median_s,
            iqr_s=row.iqr_s,
            peak_bytes=row.peak_bytes,
            saved_s=result.saved_s,
        )
        for row in result.results
        if row.model and row.text_tokens
    ]
    rates = [Rates(one.device, one.dtype, one.threads, one.gflops) for one in result.peaks]
    # What they have free is not known: whoever asks imagines a machine with as much memory.
    facts = [DeviceFacts(device, device, 0) for device in dict.fromkeys(row.device for row in result.results)]
    return Profile(result.machine).with_steps(steps).with_rates(rates).with_devices(facts)
