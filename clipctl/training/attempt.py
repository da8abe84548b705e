"""One attempt at a run: its parts are built, assembled, and handed to the loop."""

import itertools
import time
import typing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from clipctl.data.bad import check_bad
from clipctl.data.baseline import MOST_PICTURES, nearest_pixels_recall, thumbnail
from clipctl.data.cache import CacheKind, make_room, open_cache
from clipctl.data.held_out import HeldOut, read_held_out
from clipctl.data.images import resized
from clipctl.data.loader import Collate, CollateWithViews, PairDataset, TrainLoader
from clipctl.data.sampling import EpochSampler
from clipctl.hardware.memory import peak_rss_bytes
from clipctl.model.weights import save_model
from clipctl.runs.checkpoint import MANIFEST, Checkpoint
from clipctl.runs.retrieval import MOST_THUMBNAILS, SIDE_PX
from clipctl.runs.rundir import RunDir, State
from clipctl.runs.store import CheckpointStore
from clipctl.training import loop
from clipctl.training.course import Course
from clipctl.training.deadline import Deadline
from clipctl.training.distributed import World
from clipctl.training.evaluate import Evaluator
from clipctl.training.journal import Journal, RunJournal, Watcher
from clipctl.training.loop import Training
from clipctl.training.meter import StepMeter
from clipctl.training.plan import TrainPlan
from clipctl.training.saver import RunSaver, Saver, read_course
from clipctl.training.state import TrainState, fresh_state, read_tensors, shard_state, share_state
from clipctl.training.stopping import StopSwitch

BASELINE_S = 10.0  # that decoding pictures for the baseline may take


@dataclass(frozen=True)
class TrainSummary:
    """What `train --json` prints; recalls are of the last and of the best evaluation."""

    run: str
    state: State
    device: str
    parameters: int
    steps: int
    epochs: int
    seconds: float
    images_per_s: float
    loss: float
    i2t_r1: float
    t2i_r1: float
    best_i2t_r1: float
    best_t2i_r1: float
    best_epoch: int
    is_stopped_early: bool  # because nothing better was found for as many evaluations as --patience allows
    start_i2t_r1: float | None  # of the model that the run started from
    start_t2i_r1: float | None
    chance_r1: float  # of guessing, the mean of both directions
    baseline_r1: float | None  # of pictures, by the nearest training picture, without any training
    val_pairs: int
    val_captions: int
    peak_memory_bytes: int
    bad_pictures: dict[str, str]  # those that could not be used, and why

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_state(plan: TrainPlan, *, is_placed: bool = True) -> TrainState:
    placement = plan.placement
    precision, threads = str(placement.precision.value), int(placement.threads.value)
    base = None if plan.base is None else plan.base.model.model.state_dict()
    return fresh_state(plan.config, placement.device, precision, threads, base, is_placed=is_placed)


def make_loader(plan: TrainPlan, world: World | None = None) -> TrainLoader:
    """A loader of this process's share of each batch."""
    config, data, kind = plan.config, plan.data, typing.cast(CacheKind, plan.data.cache.value)
    if kind == "disk":
        make_room(data.train, data.kept_side_px, data.cache_bytes)
    dataset = PairDataset(
        data.train,
        data.tokenizer,
        data.augmentation,
        config.model.image.size_px,
        config.train.seed,
        open_cache(kind, data.train, data.kept_side_px, data.cache_bytes),
        config.tune.views,
    )
    sampler = EpochSampler(
        data.train,
        config.train.batch_size,
        config.train.seed,
        partners=config.train.picture_term > 0,
        rank=world.rank if world else 0,
        ranks=world.size if world else 1,
    )
    fixed_length = plan.placement.device.wants_fixed_shapes
    if data.augmentation.on_device:
        size_px, seed = config.model.image.size_px, config.train.seed
        collate: Collate = CollateWithViews(data.augmentation, size_px, seed, fixed_length=fixed_length)
    else:
        collate = Collate(fixed_length=fixed_length)
    return TrainLoader(dataset, sampler, collate, workers=int(plan.placement.workers.value))


def write_base(run: RunDir, plan: TrainPlan) -> None:
    """Save the model that a run starts from in its directory, so that checkpoints need not repeat frozen weights."""
    if plan.base is not None and not (run.base_dir / MANIFEST).exists():
        identity = plan.base.identity
        facts = {"source": identity.path, "fingerprint": identity.fingerprint, "revision": plan.base.revision}
        save_model(plan.base.model, run.base_dir, name=identity.name, facts=facts)


def write_thumbnails(run: RunDir, held_out: HeldOut) -> None:
    """Save thumbnails of the held-out pictures in the run directory, so that its watchers can show what is found."""
    pictures = (pixels for batch in held_out.batches for pixels in batch.images.numpy())
    small = (
        resized(pixels, (0, 0, pixels.shape[1], pixels.shape[0]), SIDE_PX, SIDE_PX).tobytes()
        for pixels in itertools.islice(pictures, MOST_THUMBNAILS)
    )
    run.write_thumbnails(b"".join(small))


def make_evaluator(plan: TrainPlan) -> Evaluator:
    config = plan.config
    size_px, batch_size = config.model.image.size_px, config.train.batch_size
    return Evaluator(read_held_out(plan.data.val, plan.data.tokenizer, size_px, batch_size))


def measure_baseline(plan: TrainPlan, loader: TrainLoader, evaluator: Evaluator) -> float | None:
    """Recall without training, from as many training pictures as can be decoded in a few seconds."""
    if plan.data.train.is_drawn:
        return None  # no held-out combination occurs in training
    most = min(MOST_PICTURES, int(BASELINE_S / max(plan.forecast.decode_s, 1e-6)))
    held_out = evaluator.held_out
    asked = np.stack([thumbnail(pixels) for batch in held_out.batches for pixels in batch.images.numpy()])
    return nearest_pixels_recall(held_out.matches, asked, plan.data.train, loader.dataset.pixels, most).recall


def attempt_run(
    plan: TrainPlan,
    run: RunDir,
    checkpoint: Checkpoint | None,
    watcher: Watcher | None,
    stop: StopSwitch,
    world: World | None = None,
) -> TrainSummary:
    """Train from the start or from a checkpoint of the same run. The caller holds the run's lock, or is one of several
    processes, another of which does."""
    plan.placement.device.forget_peak()  # of what was tried before
    is_sharded = world is not None and plan.config.runtime.shard
    state = make_state(plan, is_placed=not is_sharded)
    loader, evaluator = make_loader(plan, world), make_evaluator(plan)
    owns_run = world is None or world.is_first
    parts = _Owned.begin(plan, run, checkpoint, watcher, state, loader, evaluator) if owns_run else _Owned()
    course = parts.course
    if world is not None:
        share_state(state, world)
        if is_sharded:
            shard_state(state, plan.config)
        course = Course.from_dict(world.from_first(course.to_dict()))
    training = Training(
        plan=plan,
        run=run,
        state=state,
        course=course,
        loader=loader,
        evaluator=evaluator,
        meter=StepMeter(plan.placement.device, course.skipped_in_a_row),
        saver=parts.saver,
        journal=parts.journal,
        stop=stop,
        # A run that is resumed keeps the number of steps that it has.
        deadline=Deadline(plan.deadline_s) if plan.deadline_s and checkpoint is None else None,
    )
    started = time.monotonic()
    loop.carry_out(training, parts.attempt)
    return _summary(training, time.monotonic() - started)


@dataclass(frozen=True)
class _Owned:
    """What only the process that owns the run directory has; the defaults are what the others have instead."""

    course: Course = field(default_factory=Course)
    journal: Journal = field(default_factory=Journal)
    saver: Saver = field(default_factory=Saver)
    attempt: int = 0

    @classmethod
    def begin(
        cls,
        plan: TrainPlan,
        run: RunDir,
        checkpoint: Checkpoint | None,
        watcher: Watcher | None,
        state: TrainState,
        loader: TrainLoader,
        evaluator: Evaluator,
    ) -> "_Owned":
        """Prepare the run directory; if there is a checkpoint, `state` is read from it."""
        known_bad = dict.fromkeys(plan.data.missing, "missing")
        known_bad |= {plan.data.val.label(one.picture): one.reason for one in evaluator.held_out.bad}
        check_bad(known_bad, plan.data.pictures, plan.config.data.max_bad)
        run.checkpoints_dir.mkdir(exist_ok=True)
        store = CheckpointStore(run)
        store.sweep()
        write_base(run, plan)
        write_thumbnails(run, evaluator.held_out)
        attempt = _next_attempt(run, store)
        course, beginnings, saved = Course(), list[tuple[int, int]](), None
        if checkpoint is not None:
            read_tensors(state, checkpoint)
            course = read_course(checkpoint)
            beginnings = [(number, step) for number, step in checkpoint.manifest.beginnings]
            saved = (state.step, course.evaluated_epochs)
            course = _reopened(course, state.step, plan)
            if course.micro_batch and state.micro_batch:
                state.micro_batch = min(state.micro_batch, course.micro_batch)
        else:
            course = replace(course, baseline=measure_baseline(plan, loader, evaluator))
        journal = RunJournal(run, plan, watcher)
        saver = RunSaver(run, plan, journal, [*beginnings, (attempt, state.step)], saved)
        return cls(course.with_bad(known_bad), journal, saver, attempt)


def _reopened(course: Course, step: int, plan: TrainPlan) -> Course:
    """A run that ended in mid-epoch was evaluated there; if it is now to be longer, that epoch continues."""
    if step >= plan.schedule.total_steps:
        return course
    whole_epochs = step // plan.schedule.steps_per_epoch
    return replace(course, evaluated_epochs=min(course.evaluated_epochs, whole_epochs))


def _next_attempt(run: RunDir, store: CheckpointStore) -> int:
    """One more than the last attempt that left a trace."""
    status = run.status()
    saved = (checkpoint.manifest.attempt for checkpoint in store.all())
    return 1 + max(status.attempt if status else 0, *saved, 0)


def _summary(training: Training, seconds: float) -> TrainSummary:
    plan, course, held_out = training.plan, training.course, training.evaluator.held_out
    assert course.evaluation and course.best and course.epoch_window
    # Of the accelerator, by its own account or as far as it was seen; of the process if there is none.
    peak_bytes = plan.placement.device.peak_bytes() or training.journal.peak_device_bytes or peak_rss_bytes()
    return TrainSummary(
        run=str(training.run.path),
        state="finished",
        device=plan.placement.device.kind,
        parameters=plan.forecast.parameters,
        steps=training.state.step,
        epochs=course.evaluated_epochs,
        seconds=round(seconds, 2),
        images_per_s=round(training.window.images_per_s, 2),
        loss=course.epoch_window.loss,
        i2t_r1=course.evaluation.i2t_r1,
        t2i_r1=course.evaluation.t2i_r1,
        best_i2t_r1=course.best.i2t_r1,
        best_t2i_r1=course.best.t2i_r1,
        best_epoch=course.best_epoch,
        is_stopped_early=course.evaluated_epochs < plan.schedule.epochs,
        start_i2t_r1=course.start.i2t_r1 if course.start else None,
        start_t2i_r1=course.start.t2i_r1 if course.start else None,
        chance_r1=sum(held_out.matches.chance_recalls()) / 2,
        baseline_r1=course.baseline,
        val_pairs=held_out.pictures,
        val_captions=len(held_out.captions),
        peak_memory_bytes=peak_bytes,
        bad_pictures=dict(course.bad_pictures),
    )
