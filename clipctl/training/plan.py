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
from clipctl.hardware.devices import Device, choose_device, choose_precision
from clipctl.model import cost

# Decoded pictures may take this share of the free memory.
PICTURE_CACHE_SHARE = 0.25


@dataclass(frozen=True)
class Choice:
    """A setting and, in words for the user, why it has this value."""

    value: int | str
    reason: str


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
    memory: cost.MemoryForecast
    notes: tuple[str, ...]  # what differs from what was asked, and why

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
        return self.memory.weights_bytes + self.memory.optimizer_bytes

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
        need, free = self.memory.total_bytes, self.device.memory_bytes
        if need <= free:
            return None
        fixed = need - self.memory.activations_bytes
        per_pair = self.memory.activations_bytes / self.config.train.batch_size
        fitting = math.floor((free - fixed) / per_pair) if free > fixed else 0
        return DeviceError(
            f"training needs about {need / 2**30:.1f} GiB and {self.device.kind} has {free / 2**30:.1f} GiB free",
            f"--batch-size {fitting} would fit" if fitting >= 2 else "choose a smaller --preset",
        )


def make_plan(asked: TrainConfig) -> TrainPlan:
    """Look at data and machine and decide what was left open."""
    notes: list[str] = []
    split = open_data(asked.data)
    tokenizer = CharacterTokenizer.learn(_captions(split.train), asked.model.text.context)
    config = _fit_vocabulary(asked, tokenizer)
    config = _fit_batch(config, len(split.train), notes)
    truncated = sum(tokenizer.truncates(caption) for caption in _captions(split.train))
    if truncated:
        notes.append(f"{truncated} captions are longer than {tokenizer.context - 2} characters and are cut")

    parameters = cost.parameters(config.model)
    device = choose_device(config.runtime.device, parameters=parameters)
    precision = Choice(*choose_precision(config.runtime.precision, device))
    picture_bytes = 3 * config.model.image.size_px**2
    cache_bytes = int(memory.available_bytes() * PICTURE_CACHE_SHARE)
    cached = len(split.train) * picture_bytes <= cache_bytes
    workers = Choice(*cpu.choose_workers(config.runtime.workers, on_accelerator=device.is_accelerator, cached=cached))

    steps_per_epoch = batch_count(len(split.train), config.train.batch_size)
    total_steps = config.train.steps or config.train.epochs * steps_per_epoch
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
        precision=precision,
        threads=Choice(*cpu.choose_threads(config.runtime.threads)),
        workers=workers,
        picture_cache_bytes=cache_bytes // max(1, int(workers.value)),
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        parameters=parameters,
        memory=cost.training_memory(config.model, config.train.batch_size, str(precision.value)),
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
