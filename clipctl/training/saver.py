"""When a run is saved, and how: a checkpoint directory that appears whole, or the reason why it could not."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from clipctl.config import layers
from clipctl.config.quantities import Interval
from clipctl.errors import CheckpointError, ClipctlError, RunError, SaveError, TrainingError
from clipctl.files import is_disk_full
from clipctl.runs.checkpoint import MODEL, STATE, Checkpoint, read_checkpoint
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from clipctl.training.course import Course
from clipctl.training.journal import Journal
from clipctl.training.plan import TrainPlan
from clipctl.training.state import Tensors, TrainState, answer_requests, gathering, nonfinite_tensors, write_tensors


class SaveCadence:
    """`due` says whether it is time. Minutes are counted from the last attempt to save, whatever it was made for."""

    def __init__(self, every: Interval) -> None:
        self._every = every
        self._tried_s = time.monotonic()

    def due(self, *, step: int, epoch: int | None = None) -> bool:
        """`epoch` is given at the end of an epoch (the first is 1); within one it is None."""
        match self._every.unit:
            case "epochs":
                return epoch is not None and epoch % self._every.count == 0
            case "steps":
                return step % self._every.count == 0
            case "min":
                return time.monotonic() - self._tried_s >= 60 * self._every.count

    def tried(self) -> None:
        self._tried_s = time.monotonic()


class Saver:
    """Saves nothing; defines which moments of a run are saved. With several processes, those that do not own the run
    directory have this one: they send their part of the model to the one that does."""

    def is_due(self, state: TrainState) -> bool:
        """Whether it is time in the middle of an epoch."""
        return False

    def after_epoch(self, state: TrainState, course: Course) -> None:
        """Save at the end of a run, when it is due, and when the model is the best so far."""
        answer_requests(state)

    def try_to_save(self, state: TrainState, course: Course) -> None:
        """Save; if that fails, say so and continue: there may be space by the next time, and nothing is lost yet."""
        answer_requests(state)

    def follow(self, plan: TrainPlan, state: TrainState, course: Course) -> None:
        """The run's length has changed: save at once, so that a resumed run has the same."""
        self.try_to_save(state, course)

    def save_unless_saved(self, state: TrainState, course: Course) -> None:
        """Save what is not in a checkpoint yet."""
        answer_requests(state)

    def way_out(self) -> str:
        """What to do after weights have become NaN."""
        return ""


class RunSaver(Saver):
    """Saves a run. `beginnings` are the attempts that led here: the number of each, and the step it began at."""

    def __init__(
        self,
        run: RunDir,
        plan: TrainPlan,
        journal: Journal,
        beginnings: Sequence[tuple[int, int]],
        saved: tuple[int, int] | None = None,
    ) -> None:
        save = plan.config.save
        self._run, self._plan, self._journal, self._beginnings = run, plan, journal, beginnings
        self._store = CheckpointStore(run, keep_last=save.keep_last, keep_best=save.keep_best)
        self._cadence = SaveCadence(save.every)
        self._saved = saved  # step and evaluated epochs of the last checkpoint
        # If only some weights are trained, a checkpoint holds those, and says where the others are.
        is_partial = plan.config.tune.is_partial
        self._base = read_checkpoint(run.base_dir).manifest.files[MODEL].sha256 if is_partial else None

    def is_due(self, state: TrainState) -> bool:
        return self._cadence.due(step=state.step)

    def after_epoch(self, state: TrainState, course: Course) -> None:
        epoch = course.evaluated_epochs
        is_best = course.is_best and self._plan.config.save.keep_best > 0
        is_last = epoch == self._plan.schedule.epochs or course.is_out_of_patience(self._plan.config.train.patience)
        is_due = is_best or self._cadence.due(step=state.step, epoch=epoch)
        with gathering(state) as tensors:
            if is_last:
                self._save(state, course, tensors())
            elif is_due:
                self._try_to_save(state, course, tensors())

    def try_to_save(self, state: TrainState, course: Course) -> None:
        with gathering(state) as tensors:
            self._try_to_save(state, course, tensors())

    def follow(self, plan: TrainPlan, state: TrainState, course: Course) -> None:
        self._plan = plan
        self.try_to_save(state, course)

    def save_unless_saved(self, state: TrainState, course: Course) -> None:
        with gathering(state) as tensors:
            if self._saved != (state.step, course.evaluated_epochs):
                self._save(state, course, tensors())

    def _try_to_save(self, state: TrainState, course: Course, tensors: Tensors) -> None:
        try:
            self._save(state, course, tensors)
        except SaveError as error:
            self._journal.save_failed(state.step, str(error))

    def _save(self, state: TrainState, course: Course, tensors: Tensors) -> None:
        """Save everything that an exact resume needs. Within an epoch there is no score, so it is never the best."""
        started = time.perf_counter()
        if names := nonfinite_tensors(tensors):
            raise TrainingError(f"{names[0]} is not finite at step {state.step}; nothing was saved", self.way_out())
        is_scored = course.is_scored and state.step == self._plan.schedule.last_step(course.evaluated_epochs)
        save = partial(
            self._store.save,
            lambda directory: self._write(state.step, course, tensors, directory),
            step=state.step,
            epoch=course.evaluated_epochs,
            metrics=course.evaluation.to_dict() if course.evaluation and is_scored else {},
            beginnings=self._beginnings,
        )
        try:
            checkpoint = self._save_in_room(save, state.step)
        except OSError as error:
            raise self._save_error(state.step, error) from error
        finally:
            self._cadence.tried()
        self._saved = (state.step, course.evaluated_epochs)
        self._journal.checkpoint(checkpoint, time.perf_counter() - started)

    def _save_in_room(self, save: Callable[[], Checkpoint], step: int) -> Checkpoint:
        """On a full disk, the oldest checkpoints give way to the new one."""
        while True:
            try:
                return save()
            except OSError as error:
                if not is_disk_full(error):
                    raise
                with suppress(OSError):
                    if oldest := self._store.make_room():
                        self._journal.made_room(step, oldest)
                        continue
                raise

    def _write(self, step: int, course: Course, tensors: Tensors, directory: Path) -> None:
        write_tensors(tensors, directory)
        facts = {"step": step, **course.to_dict(), **plan_facts(self._plan), "base": self._base}
        (directory / STATE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    def _save_error(self, step: int, error: OSError) -> ClipctlError:
        if not self._run.checkpoints_dir.is_dir():
            return RunError(f"{self._run.checkpoints_dir} is gone: step {step} cannot be saved")
        reason = error.strerror or str(error)
        older = f"the last one is from step {self._saved[0]}" if self._saved else "there is none yet"
        hint = f"make room in {self._run.path}" if is_disk_full(error) else None
        return SaveError(f"the checkpoint of step {step} could not be saved ({reason}); {older}", hint)

    def way_out(self) -> str:
        """What to do about a run that has diverged."""
        lower = f"--lr {self._plan.config.optim.lr / 2:g}"
        if self._saved is None:
            return f"there is no checkpoint yet; start again with {lower}"
        return (
            f"the last good checkpoint is from step {self._saved[0]}; continue from there with a lower learning rate: "
            f"clipctl train --resume {self._run.handle} --allow-change {lower}"
        )


def plan_facts(plan: TrainPlan) -> dict[str, Any]:
    """What a checkpoint records about its plan."""
    return {
        "config": layers.to_dict(plan.config),
        "data_fingerprint": plan.data.fingerprint,
        "tokenizer": plan.data.tokenizer.to_dict(),
    }


def read_course(checkpoint: Checkpoint) -> Course:
    """What was saved beside the tensors of a checkpoint."""
    facts, file = checkpoint.read_state(), checkpoint.file(STATE)
    if facts.get("step") != checkpoint.step:
        raise CheckpointError(f"{file} is from step {facts.get('step')!r}")
    try:
        return Course.from_dict(facts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is missing state needed to resume: {error!r}") from None
