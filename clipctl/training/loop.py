"""The training loop: batches in, updates, evaluations and checkpoints out. What it uses was made before."""

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from clipctl.data.bad import BadPicture, check_bad
from clipctl.data.loader import TrainLoader
from clipctl.errors import ExitCode, Stopped
from clipctl.runs.rundir import RunDir, State
from clipctl.training.course import Course, StepWindow
from clipctl.training.evaluate import Evaluator
from clipctl.training.journal import Journal
from clipctl.training.meter import StepMeter
from clipctl.training.optim import grad_norms_by_block, lr_at
from clipctl.training.plan import TrainPlan
from clipctl.training.saver import Saver
from clipctl.training.state import TrainState
from clipctl.training.step import train_step
from clipctl.training.stopping import StopRequested, StopSwitch


@dataclass
class Training:
    """One attempt at a run. Only `state`, `course` and `window` change, besides what the parts keep to themselves."""

    plan: TrainPlan
    run: RunDir
    state: TrainState
    course: Course
    loader: TrainLoader
    evaluator: Evaluator
    meter: StepMeter
    saver: Saver
    journal: Journal
    stop: StopSwitch
    window: StepWindow = field(default_factory=StepWindow)  # all steps of this attempt


def carry_out(run: Training, attempt: int) -> None:
    """Train to the end of the plan. Stopped by a signal, save and raise Stopped; however it ends, write that down."""
    run.journal.begin(attempt, run.state.step, run.course)
    outcome: State = "failed"
    try:
        run_epochs(run)
        outcome = "finished"
    except StopRequested:
        run.loader.close()  # a worker that dies from here on is nobody's loss
        flush(run)
        run.saver.save_unless_saved(run.state, run.course)
        outcome = "stopped"
        raise stopped(run) from None
    except KeyboardInterrupt:
        outcome = "stopped"
        raise
    except RuntimeError as error:
        # It may have come in the middle of an update, so nothing is saved: the last checkpoint is right.
        problem = run.loader.worker_error(error)
        if problem is None:
            raise
        raise problem from error
    finally:
        # None of these hides how the training itself ended: a device that failed once fails again when it is asked.
        with suppress(Exception):
            run.loader.close()
        with suppress(Exception):
            flush(run)
        run.journal.end(outcome, run.state.step)


def run_epochs(run: Training) -> None:
    while run.course.evaluated_epochs < run.plan.schedule.epochs:
        epoch = run.course.evaluated_epochs + 1
        train_epoch(run, epoch)
        run.stop.check()
        evaluate_epoch(run, epoch)
        run.saver.after_epoch(run.state, run.course)


def train_epoch(run: Training, epoch: int) -> None:
    """The batches of an epoch that are left."""
    state, schedule = run.state, run.plan.schedule
    first_batch, last_step = state.step - schedule.first_step(epoch), schedule.last_step(epoch)
    if state.step >= last_step:
        return
    if first_batch == 0:
        run.course = replace(run.course, epoch_window=None)
    started = time.perf_counter()
    run.meter.restart()
    for batch in run.loader.epoch(epoch, first_batch):
        next_batch(run)
        note_bad(run, batch.bad)
        run.meter.begin()
        lr = lr_at(state.step + 1, schedule.total_steps, run.plan.config.optim)
        result = train_step(state, batch, lr=lr, mark=run.meter.mark)
        run.meter.end(result, step=state.step, epoch=epoch, pairs=len(batch.images), lr=lr)
        if state.step == last_step:
            break
        if run.meter.is_due:
            flush(run)
        if run.saver.is_due(state):
            flush(run)
            run.saver.try_to_save(state, run.course)
            run.meter.restart()
    flush(run, report=False)  # once the epoch is evaluated
    norms = grad_norms_by_block(state.model)
    run.journal.epoch(epoch, state.step, time.perf_counter() - started, norms, run.course)


def evaluate_epoch(run: Training, epoch: int) -> None:
    """Measure the held-out pairs."""
    started = time.perf_counter()
    evaluation = run.evaluator(run.state, between_batches=lambda: next_batch(run))
    run.course = run.course.evaluated(epoch, evaluation)
    run.journal.evaluation(run.state.step, time.perf_counter() - started, run.course)


def next_batch(run: Training) -> None:
    run.journal.tick(run.state.step)
    run.stop.check()


def flush(run: Training, *, report: bool = True) -> None:
    """Write down the steps since the last time; end the run if several in a row were not finite."""
    reading = run.meter.read()
    if reading is None:
        return
    run.course = replace(run.course.with_steps(reading.window), skipped_in_a_row=run.meter.guard.in_a_row)
    run.window += reading.window
    run.journal.steps(reading, run.course, report=report)
    if run.meter.guard.is_tripped:
        raise run.meter.guard.error(run.saver.way_out())


def note_bad(run: Training, pictures: Sequence[BadPicture]) -> None:
    """Take note of pictures that were replaced by others; too many end the run."""
    data = run.plan.data
    reasons = {data.train.label(one.picture): one.reason for one in pictures}
    new = {label: reason for label, reason in reasons.items() if label not in run.course.bad_pictures}
    if new:
        run.course = run.course.with_bad(new)
        messages = [f"{label}: {reason}" for label, reason in new.items()]
        run.journal.bad_pictures(run.state.step, messages, run.course)
        check_bad(run.course.bad_pictures, data.pictures)


def stopped(run: Training) -> Stopped:
    code = ExitCode.INTERRUPTED if run.stop.signal == signal.SIGINT else ExitCode.TERMINATED
    return Stopped(
        f"stopped at step {run.state.step} of {run.plan.schedule.total_steps}; everything is saved in {run.run.path}",
        f"continue: clipctl train --resume {run.run.handle}",
        code,
    )
