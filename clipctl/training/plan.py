"""Everything decided before the first step, with the reasons: what `--dry-run` prints and the loop carries out."""

import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass, replace

from clipctl.config import TrainConfig
from clipctl.data.loader import Source
from clipctl.data.sampling import batch_count
from clipctl.data.sources.catalog import Split, open_data
from clipctl.data.tokenizers import CharacterTokenizer
from clipctl.errors import ConfigError, DeviceError, SaveError
from clipctl.hardware import cpu, memory
from clipctl.hardware.devices import Device
from clipctl.model import cost
from clipctl.model.forecast import CostModel, Estimate, Job, Setting, with_margin
from clipctl.training.choice import Choice, decide

# What preparing a batch takes besides the step, as measured on 2 cores: in all, and for every pixel that is augmented.
BATCH_S, PIXEL_S = 0.6e-3, 24e-9
# Decoded pictures may take this share of the free memory.
PICTURE_CACHE_SHARE = 0.25


@dataclass(frozen=True)
class TrainPlan:
    config: TrainConfig  # complete: vocabulary and batch size are final
    train_source: Source
    val_source: Source
    data_fingerprint: str  # changes when pairs or captions do
    loss_floor: float  # below which equal captions in a batch do not let the softmax loss fall
    tokenizer: CharacterTokenizer
    device: Device
    precision: Choice
    threads: Choice
    workers: Choice
    picture_cache_bytes: int
    steps_per_epoch: int
    total_steps: int
    parameters: int
    memory: cost.Memory  # by what holds it
    memory_need: Estimate  # the whole of it, margin left out
    step_s: Estimate | None  # seconds of a step, where they can be forecast
    cost_model: CostModel
    job: Job
    decided_s: float  # what deciding took
    notes: tuple[str, ...]  # what differs from what was asked, and why
    verified: str | None = None  # passed or failed: whether the device computes what the CPU does; None: not compared

    @property
    def setting(self) -> Setting:
        return Setting(self.device.label, str(self.precision.value), int(self.threads.value))

    @property
    def seconds(self) -> Estimate | None:
        """Of all steps; evaluations and checkpoints come on top."""
        return self.step_s.scaled(self.total_steps) if self.step_s else None

    @property
    def epochs(self) -> int:
        return math.ceil(self.total_steps / self.steps_per_epoch)

    @property
    def chance_loss(self) -> float:
        """Of a model that knows nothing: ln B for the softmax loss."""
        return math.log(self.config.train.batch_size)

    @property
    def checkpoint_bytes(self) -> int:
        """Weights and both moments; the rest is small."""
        return 12 * self.parameters

    def disk_problem(self, free_bytes: int, copies: int) -> SaveError | None:
        """Why so many checkpoints have no place, if they have none: a new one must fit beside an old one."""
        need_bytes = copies * self.checkpoint_bytes
        if free_bytes >= need_bytes:
            return None
        return SaveError(
            f"{'a checkpoint needs' if copies == 1 else f'{copies} checkpoints need'} about {need_bytes / 2**20:,.1f} "
            f"MiB and the disk has {free_bytes / 2**20:,.1f} MiB free",
            "make room, or pass --runs-dir on another disk",
        )

    def memory_problem(self) -> DeviceError | None:
        """Why this plan cannot be carried out on its device, if it cannot."""
        need, free = with_margin(self.memory_need.value), self.device.memory_bytes
        if need <= free:
            return None
        fitting = self.cost_model.largest_batch(self.setting, self.job, free - self.memory.pictures_bytes)
        _, lean = self.cost_model.memory(self.setting, replace(self.job, recompute=True))
        if not self.job.recompute and with_margin(lean.value) + self.memory.pictures_bytes <= free:
            way_out = "--recompute would fit, at a third more work"
            way_out += f"; so would --batch-size {fitting}" if fitting >= 2 else ""
        else:
            way_out = f"--batch-size {fitting} would fit" if fitting >= 2 else "choose a smaller --preset"
        return DeviceError(
            f"training needs about {need / 2**30:.1f} GiB and {self.device.kind} has {free / 2**30:.1f} GiB free",
            way_out,
        )


def make_plan(asked: TrainConfig, before: Setting | None = None) -> TrainPlan:
    """Look at data and machine and decide what was left open; `before` is under what the run was begun, if it was."""
    notes: list[str] = []
    split = open_data(asked.data)
    tokenizer = CharacterTokenizer.learn(_captions(split.train), asked.model.text.context)
    config = _fit_vocabulary(asked, tokenizer)
    config = _fit_batch(config, len(split.train), notes)
    truncated = sum(tokenizer.truncates(caption) for caption in _captions(split.train))
    if truncated:
        notes.append(f"{truncated} captions are longer than {tokenizer.context - 2} characters and are cut")

    steps_per_epoch = batch_count(len(split.train), config.train.batch_size)
    total_steps = config.train.steps or config.train.epochs * steps_per_epoch
    longest = max(tokenizer.length(caption) for caption in _captions(split.train))
    job = Job(config.model, config.train.batch_size, longest, config.runtime.recompute)
    decision = decide(config, job, total_steps, before)
    device = decision.device
    if device.wants_fixed_shapes:
        job = replace(job, text_tokens=tokenizer.context)
    step_s = decision.cost_model.step_s(decision.setting, job)
    memory_split, memory_need = decision.cost_model.memory(decision.setting, job)

    pictures_bytes = len(split.train) * 3 * config.model.image.size_px**2
    cache_bytes = int(memory.available_bytes() * PICTURE_CACHE_SHARE)
    cached = pictures_bytes <= cache_bytes
    if not device.is_accelerator:
        kept_bytes = min(pictures_bytes, cache_bytes)
        memory_split = replace(memory_split, pictures_bytes=kept_bytes)
        memory_need = memory_need.shifted(kept_bytes)
    workers = Choice(*cpu.choose_workers(config.runtime.workers, on_accelerator=device.is_accelerator, cached=cached))
    if step_s and workers.value == 0:  # otherwise others prepare the next batch meanwhile
        step_s = step_s.shifted(BATCH_S + config.train.batch_size * config.model.image.size_px**2 * PIXEL_S)

    if config.optim.warmup_of(total_steps) >= total_steps and total_steps > 1:
        notes.append(
            f"optim.warmup_steps {config.optim.warmup_steps} is not shorter than the run of {total_steps} steps"
        )
    return TrainPlan(
        config=config,
        train_source=split.train,
        val_source=split.val,
        data_fingerprint=_fingerprint(split),
        loss_floor=loss_floor(split.train, config.train.batch_size),
        tokenizer=tokenizer,
        device=device,
        precision=decision.precision,
        threads=decision.threads,
        workers=workers,
        picture_cache_bytes=cache_bytes // max(1, int(workers.value)),
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        parameters=cost.parameters(config.model),
        memory=memory_split,
        memory_need=memory_need,
        step_s=step_s,
        cost_model=decision.cost_model,
        job=job,
        decided_s=round(decision.seconds, 3),
        notes=tuple(notes),
    )


def _fingerprint(split: Split) -> str:
    """Of the captions of both sides, in their order."""
    digest = hashlib.sha256()
    for source in (split.train, split.val):
        digest.update(json.dumps(_captions(source)).encode())
    return digest.hexdigest()


def loss_floor(source: Source, batch_size: int) -> float:
    """The mean of ln m, where m is how often a pair's caption is to be expected in its batch, itself included.

    With m equal captions no model can tell which picture is meant, so the softmax gives each of them at most 1/m. Of a
    pair's several captions one is shown at a time.
    """
    weights: Counter[str] = Counter()
    for index in range(len(source)):
        captions = source.captions(index)
        for caption in captions:
            weights[caption] += 1 / len(captions)  # type: ignore[assignment]
    share = (batch_size - 1) / max(1, len(source) - 1)
    total = 0.0
    for index in range(len(source)):
        captions = source.captions(index)
        own = Counter(captions)
        for caption in captions:
            others = max(0.0, weights[caption] - own[caption] / len(captions))
            total += math.log1p(others * share) / len(captions)
    return round(total / len(source), 6)


def _captions(source: Source) -> list[str]:
    return [caption for index in range(len(source)) for caption in source.captions(index)]


def _fit_vocabulary(config: TrainConfig, tokenizer: CharacterTokenizer) -> TrainConfig:
    text = config.model.text
    vocab_size = text.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.text.vocab_size {vocab_size} is too small: the captions need {tokenizer.vocab_size} symbols",
            "leave model.text.vocab_size out to let the tokenizer decide",
        )
    return replace(config, model=replace(config.model, text=replace(text, vocab_size=vocab_size)))


def _fit_batch(config: TrainConfig, pairs: int, notes: list[str]) -> TrainConfig:
    asked = config.train.batch_size
    if asked <= pairs:
        return config
    notes.append(f"batch size {asked} is larger than the {pairs} training pairs: using {pairs}")
    return replace(config, train=replace(config.train, batch_size=pairs))
