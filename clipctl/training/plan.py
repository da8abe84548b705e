"""Everything decided before the first step, with the reasons: what `--dry-run` prints and the loop carries out."""

import math
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import cast

from clipctl.config import layers
from clipctl.config.layers import Layer
from clipctl.config.presets import PRESETS
from clipctl.config.sections import AttentionName, CacheName, LoopConfig, OptimConfig, TrainConfig
from clipctl.data import tokenizers
from clipctl.data.cache import CacheKind, kept_bytes, pictures_dir, slot_bytes
from clipctl.data.catalog import Data, is_classes, leakage_notes, leakage_of, open_data
from clipctl.data.images import Augmentation, kept_side
from clipctl.data.inspection import decode_seconds
from clipctl.data.sampling import batch_count, loss_floor, plan_epoch
from clipctl.data.source import Source
from clipctl.data.tokenizers import CaptionFit, Tokenizer, caption_fit, make_tokenizer, words_cut
from clipctl.errors import ConfigError, DeviceError, SaveError
from clipctl.hardware import cpu, disk, memory
from clipctl.hardware.devices import Device
from clipctl.hardware.sensors import BUSY_CORES
from clipctl.interop.models import Found
from clipctl.model import cost
from clipctl.model.communication import BETWEEN, WITHIN, communication_s
from clipctl.model.compiling import check_compiler
from clipctl.model.forecast import CostModel, Estimate, with_margin
from clipctl.model.workload import Setting, Workload
from clipctl.progress import Tell, silent
from clipctl.training.choice import AS_ASKED, Choice, Decision, decide
from clipctl.training.distributed import processes_here
from clipctl.training.tuning import usual_rate

# What preparing a batch takes besides the step, as measured on 2 cores: per batch, and per pixel that is augmented.
BATCH_S, PIXEL_S = 0.6e-3, 24e-9
VIEW_S = 20e-6  # per picture, if it is augmented on the device
FORWARD_SHARE = 1 / 3  # of a training step: a backward pass costs two forward passes
START_S = 2.0  # from a plan to the first step, and from the last one to the prompt
SAVE_S, SAVE_BYTES_PER_S = 0.05, 300e6
TURN_S = 2e-3  # that a process waits for another's answer if they take turns on a core
RECIPE_LR = 2e-3  # the highest rate that a recipe chooses
# Decoded pictures may take this share of the free memory, or of the free disk.
PICTURE_CACHE_SHARE = 0.25
PICTURE_DISK_SHARE = 0.2


@dataclass(frozen=True)
class DataPlan:
    """Which pairs, and how they become batches."""

    train: Source
    val: Source
    words: tuple[str, ...]  # for each place: what was understood
    missing: tuple[str, ...]  # pictures that are not there
    fingerprint: str  # changes when pictures or captions do
    loss_floor: float  # equal captions in a batch keep the softmax loss from falling below
    seen_captions: float  # share of the held-out captions that occur in training
    tokenizer: Tokenizer
    augmentation: Augmentation
    cache: Choice  # where decoded pictures are kept
    cache_bytes: int  # up to how many: in each process in memory, together on disk
    kept_side_px: int  # of a decoded picture, before it is cropped

    @property
    def pictures(self) -> int:
        """All pictures the data name, missing ones included."""
        return len(self.train) + len(self.val) + len(self.missing)


@dataclass(frozen=True)
class Schedule:
    """How many steps, in which epochs."""

    steps_per_epoch: int
    total_steps: int
    batch_pairs: int  # of the largest batch: an epoch is cut into equal ones, maybe smaller than what was asked for
    eval_every: int = 1  # epochs

    @property
    def epochs(self) -> int:
        return math.ceil(self.total_steps / self.steps_per_epoch)

    @property
    def chance_loss(self) -> float:
        """Of a model that knows nothing: ln B for the softmax loss."""
        return math.log(self.batch_pairs)

    @property
    def evaluations(self) -> int:
        return math.ceil(self.epochs / self.eval_every)

    def is_evaluated(self, epoch: int) -> bool:
        return epoch % self.eval_every == 0 or epoch == self.epochs

    def first_step(self, epoch: int) -> int:
        """Steps made before an epoch; the first epoch is 1."""
        return (epoch - 1) * self.steps_per_epoch

    def last_step(self, epoch: int) -> int:
        return min(epoch * self.steps_per_epoch, self.total_steps)

    def epoch_of(self, step: int) -> int:
        return math.ceil(step / self.steps_per_epoch)


@dataclass(frozen=True)
class Placement:
    """Where and how the run is computed, and why."""

    device: Device
    precision: Choice
    threads: Choice
    attention: Choice
    workers: Choice
    decided_s: float  # what deciding took
    ranks: int = 1  # processes that train together
    verified: str | None = None  # passed or failed: whether the device computes what the CPU does; None: not compared

    @property
    def setting(self) -> Setting:
        return Setting(self.device.label, str(self.precision.value), int(self.threads.value))


@dataclass(frozen=True)
class Forecast:
    """What the run will take."""

    workload: Workload
    parameters: int
    memory: cost.Memory  # by what holds it
    memory_need: Estimate  # the whole of it, without a margin
    step_s: Estimate | None  # seconds per step, if they can be forecast
    cost_model: CostModel
    decode_s: float = 0.0  # to decode a picture, on one core
    features_s: float = 0.0  # to compute the features of locked towers, once

    @property
    def trained_parameters(self) -> int:
        return round(self.parameters * self.workload.trained_share)

    @property
    def checkpoint_bytes(self) -> int:
        """Weights and both moments of what is trained; the rest is small."""
        return 12 * self.trained_parameters


@dataclass(frozen=True)
class Alternative:
    """A model that the recipe considered."""

    model: str
    epochs: float  # that it would make
    seconds: float  # in this time
    is_chosen: bool


@dataclass(frozen=True)
class TrainPlan:
    config: TrainConfig  # complete: vocabulary and batch size are final
    data: DataPlan
    schedule: Schedule
    placement: Placement
    forecast: Forecast
    notes: tuple[str, ...]  # what differs from what was asked, and why
    recipe: tuple[str, ...] = ()  # what was decided from the data and the time, and why
    alternatives: tuple[Alternative, ...] = ()  # models that were considered, from cheap to expensive
    deadline_s: float | None = None  # by time.monotonic(), if the run has a time limit
    base: Found | None = None  # the model that it starts from

    @property
    def seconds(self) -> Estimate | None:
        """Until the prompt returns: steps, evaluations, checkpoints, decoding and the start."""
        step_s = self.forecast.step_s
        if step_s is None:
            return None
        evaluation_s = FORWARD_SHARE * step_s.value / self.schedule.batch_pairs * len(self.data.val)
        # As many checkpoints as evaluations, at most: of a new best, or in turn.
        pictures = len(self.data.train) + len(self.data.val)
        besides_s = (
            START_S + pictures * self.forecast.decode_s + self.schedule.evaluations * (evaluation_s + self.save_s)
        )
        besides_s += self.forecast.features_s
        return step_s.scaled(self.schedule.total_steps).shifted(besides_s)

    @property
    def save_s(self) -> float:
        """A checkpoint, written and synced."""
        return SAVE_S + self.forecast.checkpoint_bytes / SAVE_BYTES_PER_S

    def with_steps(self, steps: int) -> "TrainPlan":
        """The same plan with another number of steps, whatever it was meant to be before."""
        epochs = math.ceil(steps / self.schedule.steps_per_epoch)
        return self._with_loop(replace(self.config.train, steps=steps, epochs=epochs, time=None))

    def with_eval_every(self, epochs: int) -> "TrainPlan":
        return self._with_loop(replace(self.config.train, eval_every=epochs))

    def _with_loop(self, loop: LoopConfig) -> "TrainPlan":
        config = replace(self.config, train=loop)
        return replace(self, config=config, schedule=_schedule(config, len(self.data.train)))

    def disk_problem(self, free_bytes: int, copies: int) -> SaveError | None:
        """Why so many checkpoints do not fit on the disk, if they do not: a new one must fit beside an old one."""
        need_bytes = copies * self.forecast.checkpoint_bytes
        if self.base is not None and copies > 1:
            need_bytes += 4 * self.forecast.parameters  # its own copy
        if free_bytes >= need_bytes:
            return None
        return SaveError(
            f"{'a checkpoint needs' if copies == 1 else f'{copies} checkpoints need'} about {need_bytes / 2**20:,.1f} "
            f"MiB and the disk has {free_bytes / 2**20:,.1f} MiB free",
            "make room, or pass --runs-dir on another disk",
        )

    def memory_problem(self) -> DeviceError | None:
        """Why this plan does not fit on its device, if it does not."""
        forecast, device = self.forecast, self.placement.device
        need, free = with_margin(forecast.memory_need.value), device.memory_bytes
        if need <= free:
            return None
        return DeviceError(
            f"training needs about {need / 2**30:.1f} GiB and {device.kind} has {free / 2**30:.1f} GiB free",
            self._smaller(),
        )

    def _smaller(self) -> str:
        """What would fit into the free memory: the same result in parts, more work, or another model."""
        model, setting, workload = self.forecast.cost_model, self.placement.setting, self.forecast.workload
        free_bytes = self.placement.device.memory_bytes - self.forecast.memory.pictures_bytes
        if fitting := model.fitting_micro_batch(setting, workload, free_bytes):
            return f"--micro-batch {fitting} would fit, with the same result"
        if model.fitting_micro_batch(setting, replace(workload, recompute=True), free_bytes):
            return "--recompute would fit, at a third more work"
        for preset in reversed(PRESETS):
            other = layers.resolve([Layer("preset", {"preset": preset, "model.text.vocab_size": 49_408})]).model
            if model.fitting_micro_batch(setting, replace(workload, model=other), free_bytes):
                return f"not even a single pair fits; --preset {preset} would"
        return "not even the smallest model fits: close other programs"


def make_plan(
    asked: TrainConfig,
    before: Setting | None = None,
    tokenizer: Tokenizer | None = None,
    tell: Tell = silent,
    found: Data | None = None,
    base: Found | None = None,
    ranks: int = 1,
) -> TrainPlan:
    """Look at data and machine and decide what was left open. For a run that was begun, `before` says under which
    setting, and `tokenizer` is the one it began with. `found` are the data, if they were opened before; `base` is the
    model to start from. Of each batch, one of several `ranks` has its part."""
    found = found or open_data(asked.data, tell)
    tell(f"reading the captions of {found.train.name}")
    if base is not None:
        tokenizer = tokenizer or tokenizers.from_dict(base.model.tokenizer)
    tokenizer = tokenizer or make_tokenizer(asked.data.tokenizer, found.train, asked.model.text.context)
    fit = caption_fit(tokenizer, found.train)
    leakage = leakage_of(found.train, found.val)
    notes = [*found.notes, *leakage_notes(leakage, of_classes=is_classes(found.train))]
    config = _fit_batch(_fit_vocabulary(_fit_shards(asked, ranks, notes), tokenizer), len(found.train), notes)
    notes += _caption_notes(asked, tokenizer, fit, len(found.train.caption_sizes()))

    schedule = _schedule(config, len(found.train))
    check_ranks(config, schedule, ranks)
    decision = decide(config, _workload(config, fit.longest, ranks), schedule.total_steps, before, ranks)
    device = decision.device
    if device.kind == "cpu":  # the processes of one machine share its memory
        device = replace(device, memory_bytes=device.memory_bytes // processes_here(ranks))
    if config.runtime.compile:
        check_compiler(device)
        notes.append("the first step compiles, for up to a minute; forecasts are for uncompiled steps")
    notes += [*_rate_notes(config, base), *_warmup_notes(config.optim, schedule.total_steps), *_load_notes(decision)]

    side_px = kept_side(config.model.image.size_px, drawn=found.train.is_drawn)
    cache = _choose_cache(config.runtime.cache, found.train, side_px)
    workers = Choice(
        *cpu.choose_workers(config.runtime.workers, on_accelerator=device.is_accelerator, cached=cache.is_in_memory)
    )
    data = DataPlan(
        train=found.train,
        val=found.val,
        words=found.words,
        missing=found.missing,
        fingerprint=sha256(f"{found.train.fingerprint} {found.val.fingerprint}".encode()).hexdigest(),
        loss_floor=_loss_floor(config, found.train),
        seen_captions=leakage.captions / max(1, int(found.val.caption_counts.sum())),
        tokenizer=tokenizer,
        augmentation=Augmentation.of(config.data, drawn=found.train.is_drawn),
        cache=Choice(cache.kind, cache.reason),
        cache_bytes=cache.limit_bytes // (max(1, int(workers.value)) if cache.kind == "ram" else 1),
        kept_side_px=side_px,
    )
    text_tokens = tokenizer.context if device.wants_fixed_shapes else fit.longest
    pictures_bytes = cache.need_bytes if cache.kind == "ram" and not device.is_accelerator else 0
    free_bytes = device.memory_bytes - pictures_bytes
    attention = _fit_attention(_workload(config, text_tokens, ranks), decision, free_bytes)
    way = cast(AttentionName, attention.value)
    config = replace(config, runtime=replace(config.runtime, attention=way))
    placement = Placement(
        device, decision.precision, decision.threads, attention, workers, round(decision.seconds, 3), ranks
    )
    config = _fit_micro_batch(config, _workload(config, text_tokens, ranks), decision, free_bytes, notes)
    forecast = _forecast(config, _workload(config, text_tokens, ranks), decision, data, workers, cache, ranks)
    return TrainPlan(config, data, schedule, placement, forecast, tuple(notes), base=base)


# --- its parts ------------------------------------------------------------------------------------------------


def check_ranks(config: TrainConfig, schedule: Schedule, ranks: int) -> None:
    """Every process must have a pair of every batch."""
    if ranks > 1 and schedule.batch_pairs <= ranks:  # the smallest batch has one pair less
        raise ConfigError(
            f"--batch-size {config.train.batch_size} is too small for {ranks} processes",
            f"use --batch-size {4 * ranks} or more, or fewer processes",
        )


def _fit_shards(config: TrainConfig, ranks: int, notes: list[str]) -> TrainConfig:
    """Whether the model is sharded across the processes."""
    if not config.runtime.shard:
        return config
    if config.tune.is_partial or config.runtime.compile:
        other = "--compile" if config.runtime.compile else "--lock or --lora"
        raise ConfigError(f"--shard cannot be combined with {other}", f"leave out either --shard or {other}")
    if ranks == 1:
        notes.append("--shard has no effect in one process; --nproc N starts several")
        return replace(config, runtime=replace(config.runtime, shard=False))
    return config


def _workload(config: TrainConfig, text_tokens: int, ranks: int) -> Workload:
    """Of one process."""
    workload, shards = cost.workload_of(config, text_tokens), ranks if config.runtime.shard else 1
    return replace(workload, batch_size=-(-workload.batch_size // ranks), shards=shards) if ranks > 1 else workload


def _schedule(config: TrainConfig, pairs: int) -> Schedule:
    steps_per_epoch = batch_count(pairs, config.train.batch_size)
    total_steps = config.train.steps or config.train.epochs * steps_per_epoch
    return Schedule(steps_per_epoch, total_steps, math.ceil(pairs / steps_per_epoch), config.train.eval_every)


def _loss_floor(config: TrainConfig, source: Source) -> float:
    loop = config.train
    return loss_floor(source, plan_epoch(source, loop.batch_size, loop.seed, 1, partners=loop.picture_term > 0))


def _forecast(
    config: TrainConfig,
    workload: Workload,
    decision: Decision,
    data: DataPlan,
    workers: Choice,
    cache: "_Cache",
    ranks: int,
) -> Forecast:
    step_s = decision.cost_model.step_s(decision.setting, workload)
    if step_s and ranks > 1:
        step_s = _together(step_s, config, workload, decision, ranks)
    split, need = decision.cost_model.memory(decision.setting, workload, config.runtime.attention)
    if cache.kind == "ram" and not decision.device.is_accelerator:
        split, need = replace(split, pictures_bytes=cache.need_bytes), need.shifted(cache.need_bytes)
    decode_s = decode_seconds(data.train, data.kept_side_px)
    if step_s and workers.value == 0:  # otherwise others prepare the next batch meanwhile
        view_s = VIEW_S if data.augmentation.on_device else config.model.image.size_px**2 * PIXEL_S
        pair_s = view_s + (0.0 if cache.keeps_all else decode_s)
        step_s = step_s.shifted(BATCH_S + workload.batch_size * pair_s)
    parameters, features_s = cost.parameters(config.model), _features_s(config, workload, decision, len(data.train))
    return Forecast(workload, parameters, split, need, step_s, decision.cost_model, decode_s, features_s)


def _together(step_s: Estimate, config: TrainConfig, workload: Workload, decision: Decision, ranks: int) -> Estimate:
    """A step of several processes: those of one machine share its cores, and all communicate."""
    here = processes_here(ranks)
    is_one_machine = here == ranks
    network = WITHIN if is_one_machine else BETWEEN
    crowding = here * int(decision.threads.value) / cpu.usable_cores()
    if decision.device.kind == "cpu" and crowding > 1:
        step_s = step_s.scaled(crowding)
        network = replace(network, latency_s=TURN_S)
    # On one machine's processors, sending takes the cores that compute.
    compute_s = 0.0 if is_one_machine and decision.device.kind == "cpu" else step_s.value
    return step_s.shifted(communication_s(workload, config.train.batch_size, ranks, network, compute_s))


def _features_s(config: TrainConfig, workload: Workload, decision: Decision, pictures: int) -> float:
    """What computing the features of locked towers takes: a forward pass of each view of each picture."""
    if not config.tune.has_features:
        return 0.0
    image_share, text_share = (float(name in config.tune.locked) for name in ("image", "text"))
    locked = replace(
        workload, image_share=image_share, text_share=text_share, micro_batch=None, trained_share=0.0, recompute=False
    )
    whole = decision.cost_model.step_s(decision.setting, locked)
    views = (config.tune.views or 1) if "image" in config.tune.locked else 1
    return FORWARD_SHARE * whole.value / workload.batch_size * pictures * views if whole else 0.0


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
    """Where decoded pictures are kept: in memory if they fit, else on the disk if they fit, else nowhere."""
    all_bytes = len(source) * slot_bytes(side_px)
    ram_bytes = int(memory.available_bytes() * PICTURE_CACHE_SHARE)
    # What is kept already is ours to use or to delete.
    disk_bytes = int((disk.free_bytes(pictures_dir()) + kept_bytes()) * PICTURE_DISK_SHARE)
    if asked == "off":
        return _Cache("off", "as requested: every picture is decoded every time", 0, 0, keeps_all=False)
    if asked == "ram" or (asked == "auto" and all_bytes <= ram_bytes):
        reason = "decoded pictures fit in memory" if all_bytes <= ram_bytes else "as requested: as many as memory holds"
        return _Cache("ram", reason, min(all_bytes, ram_bytes), ram_bytes, keeps_all=all_bytes <= ram_bytes)
    if asked == "disk" or all_bytes <= disk_bytes:
        words = f"decoded pictures take {all_bytes / 2**20:,.0f} MiB in {pictures_dir()}"
        if all_bytes > disk_bytes:
            words = f"as requested: up to {disk_bytes / 2**20:,.0f} MiB of decoded pictures in {pictures_dir()}"
        return _Cache("disk", words, min(all_bytes, disk_bytes), disk_bytes, keeps_all=all_bytes <= disk_bytes)
    words = f"decoded pictures would take {all_bytes / 2**30:.0f} GiB, more than memory and disk have to spare"
    return _Cache("off", words, 0, 0, keeps_all=False)


def _fit_vocabulary(config: TrainConfig, tokenizer: Tokenizer) -> TrainConfig:
    text = config.model.text
    vocab_size = text.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.text.vocab_size {vocab_size} is too small: the captions need {tokenizer.vocab_size}",
            "leave model.text.vocab_size out to let the tokenizer decide",
        )
    return replace(config, model=replace(config.model, text=replace(text, vocab_size=vocab_size)))


def _fit_batch(config: TrainConfig, pairs: int, notes: list[str]) -> TrainConfig:
    asked = config.train.batch_size
    if asked <= pairs:
        return config
    notes.append(f"batch size {asked} is larger than the {pairs} training pairs: using {pairs}")
    return replace(config, train=replace(config.train, batch_size=pairs))


def _fit_attention(workload: Workload, decision: Decision, free_bytes: int) -> Choice:
    """Plain attention keeps its scores: where they do not fit, fused, however slow."""
    if decision.attention.value == "fused" or decision.attention.reason == AS_ASKED:
        return decision.attention
    _, need = decision.cost_model.memory(decision.setting, workload, "plain")
    if with_margin(need.value) <= free_bytes:
        return decision.attention
    return Choice("fused", "the scores of plain attention do not fit in memory")


def _fit_micro_batch(
    config: TrainConfig, workload: Workload, decision: Decision, free_bytes: int, notes: list[str]
) -> TrainConfig:
    """The whole batch at once if it fits, else in parts: exact, at one forward pass more."""
    batch_size, asked = workload.batch_size, config.train.micro_batch
    if asked is None:
        fitting = decision.cost_model.fitting_micro_batch(
            decision.setting, workload, free_bytes, config.runtime.attention
        )
        micro_batch = fitting or batch_size  # what does not fit at all is said later, with what would
        if micro_batch < batch_size:
            words = f"a batch of {batch_size} does not fit in memory at once: it is computed in micro-batches of"
            notes.append(f"{words} {micro_batch}, with the same result, at a third more work")
    else:
        micro_batch = min(asked, batch_size)
    if micro_batch >= batch_size:
        micro_batch = config.train.batch_size  # whole, however many processes share it
    return replace(config, train=replace(config.train, micro_batch=micro_batch))


def _caption_notes(asked: TrainConfig, tokenizer: Tokenizer, fit: CaptionFit, captions: int) -> list[str]:
    notes = []
    kind, _, tokens = asked.data.tokenizer.partition(":")
    if kind == "bpe" and tokenizer.vocab_size < int(tokens):
        notes.append(f"the captions give a vocabulary of {tokenizer.vocab_size:,} tokens, not {int(tokens):,}")
    if fit.cut:
        notes.append(words_cut(fit.cut, captions, tokenizer))
    return notes


HIGH_RATE = 10.0  # times the usual one


def _load_notes(decision: Decision) -> list[str]:
    notes, threads, cores = [], int(decision.threads.value), decision.cost_model.cores
    if decision.busy_cores > BUSY_CORES:
        notes.append(
            f"other programs keep {decision.busy_cores:.1f} cores busy: measurements may be off, and are not kept"
        )
    if threads > cores:
        notes.append(
            f"{threads} threads on {cores} cores wait for each other: --threads {cores} is likely to be faster"
        )
    return notes


def _rate_notes(config: TrainConfig, base: Found | None) -> list[str]:
    """Warn about a learning rate far above the usual one."""
    preset = layers.resolve([Layer("preset", {"preset": config.preset})]).optim.lr
    usual = usual_rate(base, config.tune)[0] if base is not None else max(preset, RECIPE_LR)
    if config.optim.lr <= HIGH_RATE * usual:
        return []
    times = config.optim.lr / usual
    return [f"learning rate {config.optim.lr:g} is {times:,.0f} times the usual {usual:g}: expect it to diverge"]


def _warmup_notes(optim: OptimConfig, total_steps: int) -> list[str]:
    if total_steps <= 1 or optim.warmup_of(total_steps) < total_steps:
        return []
    return [f"optim.warmup_steps {optim.warmup_steps} is not shorter than the run of {total_steps} steps"]
