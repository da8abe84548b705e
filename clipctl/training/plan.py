"""Everything decided before the first step, with the reasons: what `--dry-run` prints and the loop carries out."""

import math
from dataclasses import dataclass, replace
from hashlib import sha256

from clipctl.config.sections import CacheName, TrainConfig
from clipctl.data.cache import CacheKind, kept_bytes, pictures_dir, slot_bytes
from clipctl.data.catalog import Data, leakage_notes, leakage_of, open_data
from clipctl.data.images import Augmentation, kept_side
from clipctl.data.inspection import decode_seconds
from clipctl.data.sampling import batch_count, loss_floor, plan_epoch
from clipctl.data.source import Source, Tell, silent
from clipctl.data.tokenizers import Tokenizer, caption_fit, make_tokenizer, words_cut
from clipctl.errors import ConfigError, DeviceError, SaveError
from clipctl.hardware import cpu, disk, memory
from clipctl.hardware.devices import Device
from clipctl.model import cost
from clipctl.model.forecast import CostModel, Estimate, Job, Setting, with_margin
from clipctl.training.choice import Choice, decide
from clipctl.training.compiling import check_compiler

# What preparing a batch takes besides the step, as measured on 2 cores: in all, and for every pixel that is augmented.
BATCH_S, PIXEL_S = 0.6e-3, 24e-9
# Decoded pictures may take this share of the free memory, or of the free disk.
PICTURE_CACHE_SHARE = 0.25
PICTURE_DISK_SHARE = 0.2


@dataclass(frozen=True)
class TrainPlan:
    config: TrainConfig  # complete: vocabulary and batch size are final
    data: Data
    data_fingerprint: str  # changes when pictures or captions do
    loss_floor: float  # below which equal captions in a batch do not let the softmax loss fall
    tokenizer: Tokenizer
    augmentation: Augmentation
    device: Device
    precision: Choice
    threads: Choice
    workers: Choice
    cache: Choice  # where decoded pictures are kept
    cache_bytes: int  # up to how many: in each process in memory, together on disk
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
    def train_source(self) -> Source:
        return self.data.train

    @property
    def val_source(self) -> Source:
        return self.data.val

    @property
    def kept_side_px(self) -> int:
        """Of a decoded picture, before it is cropped."""
        return kept_side(self.config.model.image.size_px, drawn=self.train_source.is_drawn)

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
    def batch_pairs(self) -> int:
        """Of the largest batch: an epoch is cut into equal ones, which may be smaller than what was asked for."""
        return math.ceil(len(self.train_source) / self.steps_per_epoch)

    @property
    def chance_loss(self) -> float:
        """Of a model that knows nothing: ln B for the softmax loss."""
        return math.log(self.batch_pairs)

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


def make_plan(
    asked: TrainConfig, before: Setting | None = None, tokenizer: Tokenizer | None = None, tell: Tell = silent
) -> TrainPlan:
    """Look at data and machine and decide what was left open. Of a run that was begun, `before` is under what, and
    `tokenizer` the one it began with."""
    data = open_data(asked.data, tell)
    tell(f"reading the captions of {data.train.name}")
    tokenizer = tokenizer or make_tokenizer(asked.data.tokenizer, data.train, asked.model.text.context)
    config = _fit_vocabulary(asked, tokenizer)
    notes = [*data.notes, *leakage_notes(leakage_of(data.train, data.val))]
    config = _fit_batch(config, len(data.train), notes)
    kind, _, asked_symbols = asked.data.tokenizer.partition(":")
    if kind == "bpe" and tokenizer.vocab_size < int(asked_symbols):
        notes.append(f"the captions give {tokenizer.vocab_size:,} symbols, not the {int(asked_symbols):,} asked for")
    fit = caption_fit(tokenizer, data.train)
    if fit.cut:
        notes.append(words_cut(fit.cut, len(data.train.caption_sizes()), tokenizer))

    steps_per_epoch = batch_count(len(data.train), config.train.batch_size)
    total_steps = config.train.steps or config.train.epochs * steps_per_epoch
    job = Job(config.model, config.train.batch_size, fit.longest, config.runtime.recompute)
    decision = decide(config, job, total_steps, before)
    device = decision.device
    if config.runtime.compile:
        check_compiler(device)
        notes.append("the first step compiles, for up to a minute; forecasts are of steps that are not compiled")
    if device.wants_fixed_shapes:
        job = replace(job, text_tokens=tokenizer.context)
    step_s = decision.cost_model.step_s(decision.setting, job)
    memory_split, memory_need = decision.cost_model.memory(decision.setting, job)

    side_px = kept_side(config.model.image.size_px, drawn=data.train.is_drawn)
    cache = _choose_cache(config.runtime.cache, data.train, side_px)
    if cache.kind == "ram" and not device.is_accelerator:
        memory_split = replace(memory_split, pictures_bytes=cache.need_bytes)
        memory_need = memory_need.shifted(cache.need_bytes)
    workers = Choice(
        *cpu.choose_workers(config.runtime.workers, on_accelerator=device.is_accelerator, cached=cache.is_in_memory)
    )
    if step_s and workers.value == 0:  # otherwise others prepare the next batch meanwhile
        decode_s = 0.0 if cache.keeps_all else decode_seconds(data.train, side_px)
        pair_s = config.model.image.size_px**2 * PIXEL_S + decode_s
        step_s = step_s.shifted(BATCH_S + config.train.batch_size * pair_s)

    if config.optim.warmup_of(total_steps) >= total_steps and total_steps > 1:
        notes.append(
            f"optim.warmup_steps {config.optim.warmup_steps} is not shorter than the run of {total_steps} steps"
        )
    return TrainPlan(
        config=config,
        data=data,
        data_fingerprint=sha256(f"{data.train.fingerprint} {data.val.fingerprint}".encode()).hexdigest(),
        loss_floor=loss_floor(data.train, plan_epoch(data.train, config.train.batch_size, config.train.seed, epoch=1)),
        tokenizer=tokenizer,
        augmentation=Augmentation.of(config.data, drawn=data.train.is_drawn),
        device=device,
        precision=decision.precision,
        threads=decision.threads,
        workers=workers,
        cache=Choice(cache.kind, cache.reason),
        cache_bytes=cache.limit_bytes // (max(1, int(workers.value)) if cache.kind == "ram" else 1),
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


@dataclass(frozen=True)
class _Cache:
    kind: CacheKind
    reason: str
    need_bytes: int  # what it will take
    limit_bytes: int
    keeps_all: bool

    @property
    def is_in_memory(self) -> bool:
        return self.kind == "ram" and self.keeps_all


def _choose_cache(asked: CacheName, source: Source, side_px: int) -> _Cache:
    """Where decoded pictures are kept: in memory where they fit, else on the disk where they fit, else nowhere."""
    all_bytes = len(source) * slot_bytes(side_px)
    ram_bytes = int(memory.available_bytes() * PICTURE_CACHE_SHARE)
    # What is kept already is ours to use or to delete.
    disk_bytes = int((disk.free_bytes(pictures_dir()) + kept_bytes()) * PICTURE_DISK_SHARE)
    if asked == "off":
        return _Cache("off", "as asked: every picture is decoded every time", 0, 0, keeps_all=False)
    if asked == "ram" or (asked == "auto" and all_bytes <= ram_bytes):
        reason = "decoded pictures fit in memory" if all_bytes <= ram_bytes else "as asked: as many as fit in memory"
        return _Cache("ram", reason, min(all_bytes, ram_bytes), ram_bytes, keeps_all=all_bytes <= ram_bytes)
    if asked == "disk" or all_bytes <= disk_bytes:
        words = f"decoded pictures take {all_bytes / 2**20:,.0f} MiB in {pictures_dir()}"
        if all_bytes > disk_bytes:
            words = f"as asked: up to {disk_bytes / 2**20:,.0f} MiB of decoded pictures in {pictures_dir()}"
        return _Cache("disk", words, min(all_bytes, disk_bytes), disk_bytes, keeps_all=all_bytes <= disk_bytes)
    words = f"decoded pictures would take {all_bytes / 2**30:.0f} GiB, more than memory and disk have to spare"
    return _Cache("off", words, 0, 0, keeps_all=False)


def _fit_vocabulary(config: TrainConfig, tokenizer: Tokenizer) -> TrainConfig:
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
