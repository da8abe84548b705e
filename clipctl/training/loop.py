"""The training loop: batches in, rows and checkpoints out."""

import errno
import math
import signal
import time
import typing
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from clipctl.config import layers
from clipctl.data.cache import CacheKind, make_room, open_cache
from clipctl.data.catalog import check_bad
from clipctl.data.loader import BadPicture, PairDataset, TrainLoader, read_held_out
from clipctl.data.sampling import EpochSampler
from clipctl.errors import (
    CheckpointError,
    ClipctlError,
    DeviceError,
    ExitCode,
    RunError,
    SaveError,
    Stopped,
    TrainingError,
)
from clipctl.hardware.devices import is_out_of_memory
from clipctl.hardware.memory import peak_rss_bytes
from clipctl.runs import metrics
from clipctl.runs.checkpoint import STATE, Checkpoint
from clipctl.runs.metrics import MetricsWriter
from clipctl.runs.retention import merit
from clipctl.runs.rundir import RunDir, State
from clipctl.runs.store import CheckpointStore
from clipctl.training.cadence import SaveCadence
from clipctl.training.divergence import NonfiniteGuard
from clipctl.training.environment import describe_environment
from clipctl.training.evaluate import Evaluation, Evaluator
from clipctl.training.optim import grad_norms_by_block, lr_at
from clipctl.training.plan import TrainPlan
from clipctl.training.recording import PhaseClock, StepLog, StepStart, StepWindow, SystemRecorder
from clipctl.training.state import TrainState, fresh_state, nonfinite_tensors, read_checkpoint, write_checkpoint
from clipctl.training.step import train_step
from clipctl.training.stopping import StopRequested, StopSwitch, stop_signals

REPORT_INTERVAL_S = 2.0


@dataclass(frozen=True)
class Progress:
    """Where a run is, for whoever watches."""

    step: int
    total_steps: int
    epoch: int  # the first is 1
    epochs: int
    loss: float
    accuracy: float
    images_per_s: float
    eta_s: float
    evaluation: Evaluation | None  # the latest


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
    val_pairs: int
    val_captions: int
    peak_memory_bytes: int
    bad_pictures: dict[str, str]  # those that could not be used, and why

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Watcher(Protocol):
    """Whoever watches a training."""

    def progress(self, progress: Progress) -> None:
        """Called every few seconds."""

    def warn(self, message: str) -> None:
        """Called when something went wrong that does not end the training."""


class Nobody:
    def progress(self, progress: Progress) -> None:
        pass

    def warn(self, message: str) -> None:
        pass


def train(
    plan: TrainPlan, run: RunDir, watcher: Watcher | None = None, *, resume_from: Checkpoint | None = None
) -> TrainSummary:
    """Carry out a plan in a run directory, from the start or from a checkpoint of the same run."""
    try:
        with stop_signals() as stop:
            return _Training(plan, run, watcher or Nobody(), stop, resume_from).carry_out()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        batch_size = plan.config.train.batch_size
        fitting = plan.cost_model.largest_batch(plan.setting, plan.job, plan.device.memory_bytes)
        hint = f"try --batch-size {max(2, min(fitting, batch_size // 2))}"
        raise DeviceError(f"{plan.device.kind} is out of memory at batch size {batch_size}", hint) from error


def make_state(plan: TrainPlan) -> TrainState:
    return fresh_state(plan.config, plan.device, str(plan.precision.value), int(plan.threads.value))


def make_loader(plan: TrainPlan) -> TrainLoader:
    config, source, kind = plan.config, plan.train_source, typing.cast(CacheKind, plan.cache.value)
    if kind == "disk":
        make_room(source, plan.kept_side_px, plan.cache_bytes)
    dataset = PairDataset(
        source,
        plan.tokenizer,
        plan.augmentation,
        config.model.image.size_px,
        config.train.seed,
        open_cache(kind, source, plan.kept_side_px, plan.cache_bytes),
    )
    sampler = EpochSampler(source, config.train.batch_size, config.train.seed)
    fixed_length = plan.device.wants_fixed_shapes
    return TrainLoader(dataset, sampler, workers=int(plan.workers.value), fixed_length=fixed_length)


def make_evaluator(plan: TrainPlan) -> Evaluator:
    config = plan.config
    size_px, batch_size = config.model.image.size_px, config.train.batch_size
    return Evaluator(read_held_out(plan.val_source, plan.tokenizer, size_px, batch_size))


class BadPictures:
    """Those that could not be used so far, on both sides, with reasons."""

    def __init__(self, plan: TrainPlan, held_out: Sequence[BadPicture]) -> None:
        self._plan = plan
        self.reasons: dict[str, str] = {}  # by label
        self.counts: Counter[str] = Counter()  # by reason
        self.add(dict.fromkeys(plan.data.missing, "missing"))
        self.add({plan.val_source.label(one.picture): one.reason for one in held_out})
        self.check()

    def add(self, reasons: Mapping[str, str]) -> dict[str, str]:
        """Take note; returns those that are new."""
        new = {label: reason for label, reason in reasons.items() if label not in self.reasons}
        self.reasons |= new
        self.counts.update(new.values())
        return new

    def see(self, pictures: Iterable[BadPicture]) -> dict[str, str]:
        """Take note of training pictures; returns those that are new."""
        return self.add({self._plan.train_source.label(one.picture): one.reason for one in pictures})

    def check(self) -> None:
        """Raise where they are too many."""
        data = self._plan.data
        check_bad(self.reasons, len(data.train) + len(data.val) + len(data.missing))


class _Training:
    """One attempt at a run."""

    def __init__(
        self, plan: TrainPlan, run: RunDir, watcher: Watcher, stop: StopSwitch, resume_from: Checkpoint | None
    ) -> None:
        self.plan, self.run, self.watcher, self.stop = plan, run, watcher, stop
        plan.device.forget_peak()  # of what was tried before
        self.state = make_state(plan)
        self.loader = make_loader(plan)
        self.evaluator = make_evaluator(plan)
        self.bad = BadPictures(plan, self.evaluator.held_out.bad)
        save = plan.config.save
        self.store = CheckpointStore(run, keep_last=save.keep_last, keep_best=save.keep_best)
        run.checkpoints_dir.mkdir(exist_ok=True)
        self.store.sweep()
        self.attempt = self._next_attempt()
        self.cadence = SaveCadence(save.every)
        self.guard = NonfiniteGuard()
        self.progress = 0
        self.evaluated_epochs = 0
        self.evaluation: Evaluation | None = None  # the latest
        self.best: Evaluation | None = None
        self.epoch_window: StepWindow | None = None  # the steps of this epoch
        self.run_window: StepWindow | None = None  # the steps of this attempt
        self.beginnings: list[tuple[int, int]] = []  # of the attempts that led here, and of this one
        self.saved: tuple[int, int] | None = None  # step and evaluated epochs of the last checkpoint
        if resume_from is not None:
            self._restore(resume_from)
        self.first_step = self.state.step
        self.beginnings.append((self.attempt, self.first_step))
        run.write_config(layers.to_yaml(plan.config))
        run.write_tokenizer(plan.tokenizer.to_dict())
        run.write_environment(describe_environment(plan))
        self.writer = MetricsWriter(run.metrics_file, run.run_id)
        if self.attempt > 1:
            self.writer.write(metrics.RESUME, {"step": self.first_step, "attempt": self.attempt})
        if self.bad.counts:
            self._write_bad("known before the first step")
        self.step_log = StepLog(self.writer, plan.device, self.guard)
        self.clock = PhaseClock(plan.device)
        self.recorder = SystemRecorder(
            self.writer,
            plan.device,
            directory=run.path,
            with_children=plan.workers.value != 0,
            heartbeat=lambda: self._status("running"),
        )
        self.started = self.reported = time.monotonic()

    def _restore(self, checkpoint: Checkpoint) -> None:
        facts = read_checkpoint(self.state, checkpoint)
        self.beginnings = [(attempt, step) for attempt, step in checkpoint.manifest.beginnings]
        try:
            self._restore_facts(facts)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{checkpoint.file(STATE)} lacks what a run needs: {error!r}") from None

    def _restore_facts(self, facts: dict[str, Any]) -> None:
        self.evaluated_epochs = facts["evaluated_epochs"]
        self.saved = (self.state.step, self.evaluated_epochs)
        if self.state.step < self.plan.total_steps:
            # A run that ended within an epoch was evaluated there; when it is made longer, the epoch goes on.
            self.evaluated_epochs = min(self.evaluated_epochs, self.state.step // self.plan.steps_per_epoch)
        self.evaluation = Evaluation.from_dict(facts["evaluation"])
        self.best = Evaluation.from_dict(facts["best"])
        self.epoch_window = StepWindow(**facts["epoch_window"]) if facts["epoch_window"] else None
        self.guard.in_a_row = facts["skipped_in_a_row"]
        self.bad.add(facts.get("bad_pictures", {}))

    def _next_attempt(self) -> int:
        """One more than any that left a trace."""
        status = self.run.status()
        saved = (checkpoint.manifest.attempt for checkpoint in self.store.all())
        return 1 + max(status.attempt if status else 0, *saved, 0)

    def carry_out(self) -> TrainSummary:
        self._status("running")
        self.recorder.start()
        outcome: State = "failed"
        try:
            self._run_epochs()
            outcome = "finished"
        except StopRequested:
            self.loader.close()  # a worker that dies from here on is nobody's loss
            self._flush()
            if self.saved != (self.state.step, self.evaluated_epochs):
                self._save()
            outcome = "stopped"
            raise self._stopped() from None
        except KeyboardInterrupt:
            outcome = "stopped"
            raise
        except RuntimeError as error:
            # It may have come in the middle of an update, so nothing is saved: the last checkpoint is right.
            problem = self.loader.worker_error(error)
            if problem is None:
                raise
            raise problem from error
        finally:
            # Each of these happens whatever the others do, and none of them hides how the training itself ended: a
            # device that failed once fails again when it is asked.
            for last_word in (self.recorder.stop, self.loader.close, self.step_log.flush):
                with suppress(Exception):
                    last_word()
            self._write_end(outcome)
            self.writer.close()
            self._status(outcome)
        return self._summary(outcome)

    def _write_end(self, outcome: State) -> None:
        row = {"state": outcome, "step": self.state.step, "lost_rows": self.writer.lost_rows}
        self.writer.write(metrics.END, row)

    def _run_epochs(self) -> None:
        while self.evaluated_epochs < self.plan.epochs:
            epoch = self.evaluated_epochs + 1
            if self.state.step < self._last_step(epoch):
                self._train_epoch(epoch)
            self.stop.check()
            is_best = self._evaluate(epoch) and self.plan.config.save.keep_best > 0
            if epoch == self.plan.epochs:
                self._save()
            elif is_best or self.cadence.due(step=self.state.step, epoch=epoch):
                self._try_to_save()

    def _last_step(self, epoch: int) -> int:
        return min(epoch * self.plan.steps_per_epoch, self.plan.total_steps)

    def _stopped(self) -> Stopped:
        code = ExitCode.INTERRUPTED if self.stop.signal == signal.SIGINT else ExitCode.TERMINATED
        return Stopped(
            f"stopped at step {self.state.step} of {self.plan.total_steps}; everything is saved in {self.run.path}",
            f"go on with: clipctl train --resume {self.run.handle}",
            code,
        )

    def _train_epoch(self, epoch: int) -> None:
        started = ended = time.perf_counter()
        first_batch = self.state.step - (epoch - 1) * self.plan.steps_per_epoch
        if first_batch == 0:
            self.epoch_window = None
        for batch in self.loader.epoch(epoch, first_batch):
            self._next_batch()
            if batch.bad:
                self._note_bad(batch.bad)
            data_s = time.perf_counter() - ended
            self.clock.start(sample=self.step_log.is_due)
            lr = lr_at(self.state.step + 1, self.plan.total_steps, self.plan.config.optim)
            result = train_step(self.state, batch, lr=lr, mark=self.clock.mark)
            step_s, ended = time.perf_counter() - ended, time.perf_counter()
            phases_s = {"data_s": data_s, **self.clock.phases_s}
            self.step_log.add(StepStart(self.state.step, epoch, len(batch.images), lr, step_s, phases_s), result)
            if self.step_log.is_due:
                self._flush()
            if self.state.step == self._last_step(epoch):
                break
            if self.cadence.due(step=self.state.step):
                self._flush()
                self._try_to_save()
                ended = time.perf_counter()
        self._flush()
        assert self.epoch_window is not None
        self.writer.write(
            metrics.EPOCH,
            {
                "epoch": epoch,
                "step": self.state.step,
                "loss": self.epoch_window.loss,
                "accuracy": self.epoch_window.accuracy,
                "images_per_s": round(self.epoch_window.images_per_s, 2),
                "epoch_s": round(time.perf_counter() - started, 4),
                "grad_norm_by_block": grad_norms_by_block(self.state.model),
            },
        )

    def _note_bad(self, pictures: Sequence[BadPicture]) -> None:
        for label, reason in self.bad.see(pictures).items():
            self._write_bad(f"{label}: {reason}")
        self.bad.check()

    def _write_bad(self, message: str) -> None:
        """With the counts of all so far, so that whoever reads the last such row knows them."""
        row = {"step": self.state.step, "event": "bad_picture", "message": message, "counts": dict(self.bad.counts)}
        self.writer.write(metrics.EVENT, row)

    def _next_batch(self) -> None:
        self.progress += 1
        self.stop.check()

    def _flush(self) -> None:
        """Write the rows of the steps since the last time, and report now and then."""
        window = self.step_log.flush()
        if window is None:
            return
        self.epoch_window = window if self.epoch_window is None else self.epoch_window + window
        self.run_window = window if self.run_window is None else self.run_window + window
        if self.guard.is_tripped:
            raise self.guard.error(self._way_out())
        now = time.monotonic()
        step, total_steps = self.state.step, self.plan.total_steps
        if now - self.reported < REPORT_INTERVAL_S and step != total_steps:
            return
        self.reported = now
        self._tell(
            Progress(
                step=step,
                total_steps=total_steps,
                epoch=math.ceil(step / self.plan.steps_per_epoch),
                epochs=self.plan.epochs,
                loss=window.loss,
                accuracy=window.accuracy,
                images_per_s=window.images_per_s,
                eta_s=(now - self.started) / (step - self.first_step) * (total_steps - step),
                evaluation=self.evaluation,
            )
        )

    def _evaluate(self, epoch: int) -> bool:
        """Measure the held-out pairs; True if this is the best model so far."""
        started = time.perf_counter()
        self.evaluation = self.evaluator(self.state, between_batches=self._next_batch)
        eval_s = round(time.perf_counter() - started, 4)
        row = {"step": self.state.step, "epoch": epoch, **self.evaluation.to_dict(), "eval_s": eval_s}
        self.writer.write(metrics.EVAL, row)
        self.evaluated_epochs = epoch
        if self.best is not None and merit(self.evaluation.to_dict()) <= merit(self.best.to_dict()):
            return False
        self.best = self.evaluation
        return True

    def _tell(self, news: Progress | str) -> None:
        """To the watcher, unless it has gone: a closed pipe or a full disk under its log ends no training."""
        try:
            if isinstance(news, str):
                self.watcher.warn(news)
            else:
                self.watcher.progress(news)
        except OSError:
            self.watcher = Nobody()

    def _try_to_save(self) -> None:
        """Save; if that fails, say so and go on: space may be found before the next time, the work is still here."""
        try:
            self._save()
        except SaveError as error:
            self._tell(f"{error}; the training goes on")
            self.writer.write(metrics.EVENT, {"step": self.state.step, "event": "save_failed", "message": str(error)})

    def _save(self) -> None:
        """Save all that going on exactly needs. Within an epoch there is no score, so it is never the best."""
        started = time.perf_counter()
        if names := nonfinite_tensors(self.state):
            raise TrainingError(
                f"{names[0]} is not finite at step {self.state.step}; nothing was saved", self._way_out()
            )
        scored = self.evaluation is not None and self.state.step == self._last_step(self.evaluated_epochs)
        try:
            checkpoint = self.store.save(
                lambda directory: write_checkpoint(self.state, directory, self._facts()),
                step=self.state.step,
                epoch=self.evaluated_epochs,
                metrics=self.evaluation.to_dict() if self.evaluation and scored else {},
                beginnings=self.beginnings,
            )
        except OSError as error:
            raise self._save_error(error) from error
        finally:
            self.cadence.tried()
        self.saved = (self.state.step, self.evaluated_epochs)
        row = {
            "step": self.state.step,
            "epoch": self.evaluated_epochs,
            "path": checkpoint.path.name,
            "size_bytes": checkpoint.size_bytes,
            "save_s": round(time.perf_counter() - started, 4),
        }
        self.writer.write(metrics.CHECKPOINT, row)

    def _facts(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors."""
        return {
            "evaluated_epochs": self.evaluated_epochs,
            "evaluation": self.evaluation.to_dict() if self.evaluation else None,
            "best": self.best.to_dict() if self.best else None,
            "epoch_window": asdict(self.epoch_window) if self.epoch_window else None,
            "skipped_in_a_row": self.guard.in_a_row,
            "bad_pictures": self.bad.reasons,
            "config": layers.to_dict(self.plan.config),
            "data_fingerprint": self.plan.data_fingerprint,
            "tokenizer": self.plan.tokenizer.to_dict(),
        }

    def _save_error(self, error: OSError) -> ClipctlError:
        if not self.run.checkpoints_dir.is_dir():
            return RunError(f"{self.run.checkpoints_dir} is gone: step {self.state.step} cannot be saved")
        reason = error.strerror or str(error)
        older = f"the last one is that of step {self.saved[0]}" if self.saved else "there is none yet"
        hint = f"make room in {self.run.path}" if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
        return SaveError(f"the checkpoint of step {self.state.step} could not be saved ({reason}); {older}", hint)

    def _way_out(self) -> str:
        """What to do about a training that has diverged."""
        lower = f"--lr {self.plan.config.optim.lr / 2:g}"
        if self.saved is None:
            return f"there is no checkpoint yet; start again with {lower}"
        return (
            f"the last good checkpoint is that of step {self.saved[0]}; go on from there with a lower rate: "
            f"clipctl train --resume {self.run.handle} --allow-change {lower}"
        )

    def _status(self, state: State) -> None:
        self.run.write_status(
            state,
            attempt=self.attempt,
            step=self.state.step,
            total_steps=self.plan.total_steps,
            progress=self.progress,
        )

    def _summary(self, state: State) -> TrainSummary:
        assert self.evaluation and self.best and self.epoch_window
        return TrainSummary(
            run=str(self.run.path),
            state=state,
            device=self.plan.device.kind,
            parameters=self.plan.parameters,
            steps=self.state.step,
            epochs=self.plan.epochs,
            seconds=round(time.monotonic() - self.started, 2),
            images_per_s=round(self.run_window.images_per_s, 2) if self.run_window else 0.0,
            loss=self.epoch_window.loss,
            i2t_r1=self.evaluation.i2t_r1,
            t2i_r1=self.evaluation.t2i_r1,
            best_i2t_r1=self.best.i2t_r1,
            best_t2i_r1=self.best.t2i_r1,
            val_pairs=self.evaluator.held_out.pictures,
            val_captions=len(self.evaluator.held_out.captions),
            peak_memory_bytes=self._peak_memory_bytes(),
            bad_pictures=self.bad.reasons,
        )

    def _peak_memory_bytes(self) -> int:
        """Of the accelerator, by its own account or as far as it was seen; of the process where there is none."""
        return self.plan.device.peak_bytes() or self.recorder.peak_device_bytes or peak_rss_bytes()
