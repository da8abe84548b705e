"""`clipctl recommend-device`: which device for a model of this size, why, what would change the answer. No torch."""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from clipctl.bench.results import BenchResult
from clipctl.config.layers import Layer, resolve
from clipctl.config.presets import PRESETS
from clipctl.config.sections import LoopConfig, ModelConfig, TrainConfig
from clipctl.errors import ConfigError
from clipctl.hardware import memory
from clipctl.hardware.faults import product_limit
from clipctl.hardware.profile import HYBRID, DeviceFacts, Profile, Rates, StepSample
from clipctl.hardware.timing import Timing
from clipctl.model import cost, ranking
from clipctl.model.forecast import CostModel, Estimate, apple_speedup
from clipctl.model.ranking import Confidence, Place, Verdict
from clipctl.model.workload import ASSUMED_TEXT_TOKENS, Setting, Workload

ASSUMED_PAIRS = 10_000
SYSTEM_BYTES = 2 * 2**30  # of a machine's memory that its system and other programs take
SIZE_TOLERANCE = 0.2
METAL_SHARE = 2 / 3  # of an Apple machine's memory that its GPU may take

# A band of sizes, one that stands for it, and the rule of thumb for it.
BANDS = (
    ("Tiny", "below 10M", 5_000_000, "CPU"),
    ("Small", "10M to 100M", 50_000_000, "CPU"),
    ("Medium", "100M to 500M", 200_000_000, "test both"),
    ("Large", "above 500M", 1_000_000_000, "GPU"),
)


@dataclass(frozen=True)
class Question:
    model: ModelConfig
    batch_size: int
    text_tokens: int = ASSUMED_TEXT_TOKENS
    precision: str = "auto"
    pairs: int = ASSUMED_PAIRS
    epochs: int = LoopConfig.epochs
    memory_bytes: int | None = None  # of a machine to simulate
    devices: tuple[str, ...] | None = None  # None: those of this machine

    @property
    def workload(self) -> Workload:
        text = replace(self.model.text, vocab_size=self.model.text.vocab_size or cost.ASSUMED_VOCAB_SIZE)
        model = replace(self.model, text=text)
        return Workload(model, self.batch_size, min(self.text_tokens, text.context))

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.pairs / self.batch_size)


@dataclass(frozen=True)
class Candidate:
    """A device, what the model would take on it, and whether it is only simulated."""

    name: str
    simulated: bool
    ranked: ranking.Candidate
    largest_batch: int

    @property
    def device(self) -> str:
        return self.ranked.setting.device

    @property
    def margin_bytes(self) -> int:
        return max(0, self.ranked.need_bytes - self.ranked.memory.total_bytes)

    def to_dict(self, steps_per_epoch: int) -> dict[str, Any]:
        ranked, step = self.ranked, self.ranked.step_s
        return {
            "device": self.device,
            "name": self.name,
            "simulated": self.simulated,
            "precision": ranked.setting.precision,
            "fits": ranked.fits,
            "is_right": ranked.is_right,
            "memory_bytes": ranked.need_bytes,
            "memory_basis": ranked.memory_basis,
            "available_bytes": ranked.available_bytes,
            "memory_split": {**asdict(ranked.memory), "margin_bytes": self.margin_bytes},
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
    rule_of_thumb: str


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
                    "rule_of_thumb": band.rule_of_thumb,
                }
                for band in self.bands
            ],
            "assumptions": self.assumptions,
        }


def recommend(question: Question, profile: Profile) -> Recommendation:
    """A recommendation from what is known about a machine."""
    model, workload = CostModel(profile), question.workload
    found = _places(question, profile)
    verdict, ranked = ranking.rank(
        model,
        workload,
        [place for place, _, _ in found],
        precision=question.precision,
        threads=model.cores,
        total_steps=question.epochs * question.steps_per_epoch,
    )
    candidates = [
        Candidate(name, simulated, one, model.largest_batch(one.setting, workload, one.available_bytes))
        for (_, name, simulated), one in zip(found, ranked, strict=True)
    ]
    fits = any(one.is_usable for one in ranked)
    return Recommendation(
        device=verdict.setting.device if fits else None,
        confidence=verdict.confidence,
        reason=verdict.reason if fits else _way_out(question, model, candidates, verdict.reason),
        parameters=cost.parameters(question.model),
        steps_per_epoch=question.steps_per_epoch,
        candidates=candidates,
        bands=[_band(*band, question, model, [one.device for one in candidates]) for band in BANDS],
        assumptions=list(_assumptions(question, profile, candidates, verdict)),
    )


# --- the devices ----------------------------------------------------------------------------------------------


def _is_here(kind: str, here: Collection[str]) -> bool:
    """Whether this machine, which has these kinds of device, has this one."""
    return kind in here or (kind == HYBRID and len(here) > 1)


def _places(question: Question, profile: Profile) -> list[tuple[Place, str, bool]]:
    """Devices to compare, what they are called, and whether each is only simulated."""
    here = {facts.kind: facts for facts in profile.devices}
    asked = question.devices or (*here, *([HYBRID] if len(here) > 1 else [])) or ("cpu",)
    found = []
    for name in asked:
        kind = next((known for known in here if name in (known, known.split(":")[0])), name)
        if kind not in (*here, HYBRID) and kind.split(":")[0] not in ("cpu", "mps", "cuda"):
            raise ConfigError(f"unknown device {kind!r}", f"here: {', '.join(here)}; mps and cuda can be simulated")
        title = here[kind].name if kind in here else "pictures on the accelerator, captions on the CPU"
        if not _is_here(kind, here):
            title = f"a simulated {kind}"
        accelerator = next((known for known in here if known != "cpu"), kind) if kind == HYBRID else kind
        limit = product_limit(accelerator.split(":")[0], here[accelerator].name if accelerator in here else "")
        place = Place(kind, _available(kind, question.memory_bytes, here), limit)
        found.append((place, title, not _is_here(kind, here) or question.memory_bytes is not None))
    return found


def _available(kind: str, machine_bytes: int | None, here: dict[str, DeviceFacts]) -> int:
    if kind == HYBRID:  # as much as its accelerator
        kind = next((known for known in here if known != "cpu"), "mps")
    if machine_bytes is None:
        if kind == "cpu":
            return memory.available_bytes()
        return here[kind].memory_bytes if kind in here else round(METAL_SHARE * memory.total_bytes())
    if kind == "cpu":
        return max(0, machine_bytes - SYSTEM_BYTES)
    return round(METAL_SHARE * machine_bytes) if kind == "mps" else machine_bytes


# --- the answer -----------------------------------------------------------------------------------------------


def _way_out(question: Question, model: CostModel, candidates: Sequence[Candidate], why: str) -> str:
    """What to change if no device can train a model: the batch size, what is kept in memory, the model."""
    best = max(candidates, key=lambda one: one.largest_batch)
    setting, free_bytes = best.ranked.setting, best.ranked.available_bytes
    ways = []
    if best.largest_batch:
        ways.append(f"a batch size of {best.largest_batch} would fit on {best.device}")
    if model.largest_batch(setting, replace(question.workload, recompute=True), free_bytes) >= question.batch_size:
        ways.append(f"--recompute would fit on {best.device}")
    if not ways:
        smaller = [preset for preset in PRESETS if _preset_fits(preset, question, model, setting, free_bytes)]
        ways.append(f"the largest preset that fits is {smaller[-1]}" if smaller else "no preset fits")
    return f"{why} at batch size {question.batch_size}: {'; '.join(ways)}"


def _preset_fits(preset: str, question: Question, model: CostModel, setting: Setting, free_bytes: int) -> bool:
    other = replace(question, model=resolve([Layer("preset", {"preset": preset})]).model)
    return model.largest_batch(setting, other.workload, free_bytes) >= question.batch_size


def _band(
    name: str, range: str, parameters: int, rule: str, question: Question, model: CostModel, devices: list[str]
) -> Band:
    workload = replace(question.workload, model=model_of_size(parameters))
    estimates = {}
    for device in devices:
        setting = ranking.best_setting(model, workload, device, question.precision, model.cores)
        estimates[device] = model.step_s(setting, workload)
    known = {device: one.value for device, one in estimates.items() if one}
    return Band(name, range, parameters, estimates, min(known, key=lambda one: known[one], default=None), rule)


def _assumptions(question: Question, profile: Profile, candidates: Sequence[Candidate], verdict: Verdict) -> list[str]:
    image, text = question.model.image, question.model.text
    words = [
        f"image {image.words}, "
        f"text {text.width}×{text.depth}, vocabulary {text.vocab_size or cost.ASSUMED_VOCAB_SIZE:,}",
        f"batch size {question.batch_size}, captions of {question.workload.text_tokens} tokens, "
        f"{question.pairs:,} pairs per epoch, {verdict.setting.threads} threads",
    ]
    if question.memory_bytes is not None:
        words.append(f"simulated: a machine with {question.memory_bytes / 2**30:.3g} GiB of memory")
    kinds = [facts.kind for facts in profile.devices]
    if absent := [one.device for one in candidates if not _is_here(one.device, kinds)]:
        words.append(f"simulated: this machine has no {', '.join(absent)}")
    steps = [one.ranked.step_s for one in candidates if one.device == "mps"]
    if any(step and step.basis == "prior" for step in steps):
        speedup = apple_speedup(cost.parameters(question.model))
        words.append(f"rule of thumb: an Apple GPU is {speedup:g} × as fast as its CPU at this size")
    if not profile.steps:
        words.append("no training step has been timed on this machine yet: run clipctl bench, which takes two minutes")
    return words


# --- models and measurements from elsewhere -------------------------------------------------------------------


def model_of_size(parameters: int) -> ModelConfig:
    """Like the preset nearest in size, made wider or narrower to fit. Raises ValueError if no width does."""
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
    """What a saved benchmark says about the machine it was made on."""
    steps = [
        StepSample(
            device=row.device,
            precision=row.dtype,
            threads=row.threads,
            workload=row.workload,
            step_s=Timing(row.first_s, tuple(row.samples_s)).mean_s,
            iqr_s=row.iqr_s,
            peak_bytes=row.peak_bytes,
            saved_s=result.saved_s,
        )
        for row in result.results
        if row.workload
    ]
    rates = [Rates(one.device, one.dtype, one.threads, one.gflops) for one in result.peaks]
    # What they have free is not known: whoever asks assumes a machine with as much memory.
    facts = [DeviceFacts(device, device, 0) for device in dict.fromkeys(row.device for row in result.results)]
    return Profile(result.machine).with_steps(steps).with_rates(rates).with_devices(facts)
