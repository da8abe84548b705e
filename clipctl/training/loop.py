"""The training loop: batches in, updates, evaluations and checkpoints out. What it uses was made before."""

import itertools
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from clipctl.data.bad import BadPicture, check_bad
from clipctl.data.batch import Batch
from clipctl.data.loader import TrainLoader
from clipctl.errors import ExitCode, Stopped
from clipctl.hardware.memory import rss_bytes
from clipctl.runs.rundir import RunDir, State
from clipctl.training.course import Course, StepWindow
from clipctl.training.deadline import Deadline
from clipctl.training.distributed import LONG_WAIT_S, WAIT_S, LostRankError, World, is_lost_rank, raised_in_all
from clipctl.training.evaluate import Evaluator
from clipctl.training.features import with_features
from clipctl.training.journal import Journal, RankFacts
from clipctl.training.meter import StepMeter
from clipctl.training.optim import grad_norms_by_block, lr_at
from clipctl.training.plan import TrainPlan
from clipctl.training.saver import Saver
from clipctl.training.state import TrainState
from clipctl.training.step import train_step
from clipctl.training.stopping import StopRequested, StopSwitch

WAIT_STEPS = 10  # as forecast, that one process may be later than another


@dataclass
class Training:
    """One attempt at a run. Only `state`, `course` and `window` change, besides what the parts keep to themselves, and
    the plan's length if there is a deadline."""

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
    deadline: Deadline | None = None
    window: StepWindow = field(default_factory=StepWindow)  # all steps of this attempt


def carry_out(training: Training, attempt: int) -> None:
    """Train to the end of the plan. Stopped by a signal, save and raise Stopped; however it ends, write that down."""
    training.journal.begin(attempt, training.state.step, training.course)
    outcome: State = "failed"
    try:
        run_epochs(training)
        outcome = "finished"
    except StopRequested:
        try:
            limit_waiting(training, to_a_step=False)
            training.loader.close()  # a worker that dies from here on is nobody's loss
            flush(training)
            training.saver.save_unless_saved(training.state, training.course)
            if training.state.world is not None and training.state.step > 0:  # before that, others may not have come
                training.state.world.wait()  # torchrun ends all soon after the first has ended
        except KeyboardInterrupt:
            outcome = "stopped"
            raise
        outcome = "stopped"
        raise stopped(training) from None
    except KeyboardInterrupt:
        outcome = "stopped"
        raise
    except (RuntimeError, OSError) as error:
        if is_lost_rank(error):
            raise lost_rank(training) from error
        # It may have come in the middle of an update, so nothing is saved: the last checkpoint is right.
        problem = training.loader.worker_error(error)
        if problem is None:
            raise
        raise problem from error
    finally:
        # None of these hides how the training itself ended: a device that failed once fails again when it is asked.
        with suppress(Exception):
            training.loader.close()
        with suppress(Exception):
            flush(training)
        training.journal.end(outcome, training.state.step)


def run_epochs(training: Training) -> None:
    patience = training.plan.config.train.patience
    if training.plan.config.tune.has_features:
        use_features(training)
    if training.plan.config.tune.base is not None and training.course.start is None:
        evaluate_epoch(training, 0)
        training.saver.try_to_save(training.state, training.course)
    while not training.course.is_out_of_patience(patience):
        epoch = training.course.evaluated_epochs + 1
        if epoch > training.plan.schedule.epochs:
            break
        train_epoch(training, epoch)
        next_batch(training)
        if training.plan.schedule.is_evaluated(epoch):
            evaluate_epoch(training, epoch)
        else:
            training.course = training.course.passed(epoch)
        training.saver.after_epoch(training.state, training.course)
        keep_to_time(training)
    if training.course.evaluated_epochs < training.plan.schedule.epochs:
        training.journal.stopped_early(training.state.step, training.course)


def use_features(training: Training) -> None:
    """From here on, locked towers are not run again."""

    def progress(done: int, total: int) -> None:
        training.journal.tick(training.state.step)
        training.stop.check()  # alone: processes of one machine take turns here, and cannot ask each other
        training.journal.features(done, total)

    found = with_features(training.plan, training.state, training.loader, training.evaluator, progress)
    training.loader, training.evaluator = found


def keep_to_time(training: Training) -> None:
    """Change the number of steps if the run would end too late or too early."""
    step, total_steps, world = training.state.step, training.plan.schedule.total_steps, training.state.world
    steps = training.deadline.corrected_steps(step, total_steps) if training.deadline and step < total_steps else None
    if world is not None and training.deadline:  # by one clock
        steps = world.from_first(steps)
    if steps is not None:
        limit_waiting(training, to_a_step=False)
        training.plan = training.plan.with_steps(steps)
        training.journal.length(training.plan, step)
        training.saver.follow(training.plan, training.state, training.course)
        training.meter.restart()  # saving is no part of a step


def train_epoch(training: Training, epoch: int) -> None:
    """The batches of an epoch that are left."""
    state, first_batch = training.state, training.state.step - training.plan.schedule.first_step(epoch)
    if state.step >= training.plan.schedule.last_step(epoch):
        return
    if first_batch == 0:
        training.course = replace(training.course, epoch_window=None)
    started = time.perf_counter()
    training.meter.restart()
    for batch in training.loader.epoch(epoch, first_batch):
        bad, pairs = next_batch(training, batch)
        note_bad(training, bad)
        limit_waiting(training, to_a_step=True)
        training.meter.begin()
        micro_batch = state.micro_batch
        lr = lr_at(state.step + 1, training.plan.schedule.total_steps, training.plan.config.optim)
        result = train_step(state, batch, lr=lr, mark=training.meter.mark)
        if state.micro_batch != micro_batch:
            note_micro_batch(training)
        training.meter.end(result, step=state.step, epoch=epoch, pairs=pairs, lr=lr)
        if state.step >= training.plan.schedule.last_step(epoch):
            break
        is_read, is_saved = what_is_due(training)
        if is_read:
            flush(training)
            compare_ranks(training)
            keep_to_time(training)
        if is_saved:
            limit_waiting(training, to_a_step=False)
            flush(training)
            training.saver.try_to_save(state, training.course)
            training.meter.restart()
    limit_waiting(training, to_a_step=False)
    flush(training, report=not training.plan.schedule.is_evaluated(epoch))  # otherwise once it is evaluated
    if (world := state.world) and asked(training, world, training.meter.is_comparison_due)[0][0]:
        compare_ranks(training)  # epochs may be too short for it to be due within one
    norms = grad_norms_by_block(state.model, state.world if state.is_sharded else None)
    training.journal.epoch(epoch, state.step, time.perf_counter() - started, norms, training.course)


def evaluate_epoch(training: Training, epoch: int) -> None:
    """Measure the held-out pairs."""
    started = time.perf_counter()
    evaluation, retrieval = training.evaluator(training.state, between_batches=lambda: next_batch(training))
    training.course = training.course.evaluated(epoch, evaluation)
    training.journal.evaluation(training.state.step, time.perf_counter() - started, training.course, retrieval)


def next_batch(training: Training, batch: Batch | None = None) -> tuple[Sequence[BadPicture], int]:
    """Before every batch: stop here if any process was asked to. Returns the bad pictures and the number of pairs, of
    all processes."""
    training.journal.tick(training.state.step)
    bad, pairs = (batch.bad, len(batch.images)) if batch else ((), 0)
    if (world := training.state.world) is not None:
        signals, bads, several = zip(*asked(training, world, training.stop.signal or 0, len(bad), pairs), strict=True)
        if any(bads):
            bad = tuple(itertools.chain(*world.all_of(bad)))
        pairs = sum(several)
        if not any(signals):
            return bad, pairs  # one that has come since then waits for the next time: all must know of it
        training.stop.join(max(signals))
    training.stop.check()
    return bad, pairs


def what_is_due(training: Training) -> tuple[bool, bool]:
    """Whether it is time to write steps down, and to save: by the clock of the process that does both."""
    is_read, is_saved = training.meter.is_due, training.saver.is_due(training.state)
    if (world := training.state.world) is not None:
        is_read, is_saved = map(bool, asked(training, world, is_read, is_saved)[0])
    return is_read, is_saved


def limit_waiting(training: Training, *, to_a_step: bool) -> None:
    """How long to wait for other processes before the run ends without them. Elsewhere than in a step one of them may
    have work that the others have not: it saves, evaluates, or computes features."""
    if (world := training.state.world) is not None:
        forecast = training.plan.forecast.step_s
        step_wait_s = max(WAIT_S, WAIT_STEPS * forecast.value if forecast else 0.0)
        world.wait_at_most(step_wait_s if to_a_step else LONG_WAIT_S)


def asked(training: Training, world: World, *numbers: int) -> list[tuple[int, ...]]:
    """What every process says; the time until all have is waiting, not loading."""
    started = time.perf_counter()
    answers = world.ask(*numbers)
    training.meter.wait(time.perf_counter() - started)
    return answers


def compare_ranks(training: Training) -> None:
    """Write down how each process fares, so that the slowest can be found."""
    world, effort = training.state.world, training.meter.take_effort()
    if world is None or not effort.seconds:
        return
    facts = RankFacts(
        rank=world.rank,
        host=socket.gethostname(),
        images_per_s=round(effort.images / effort.seconds / world.size, 2),
        wait_share=round(effort.waited_s / effort.seconds, 4),
        memory_bytes=training.plan.placement.device.allocated_bytes() or rss_bytes(),
    )
    training.journal.ranks(training.state.step, world.all_of(facts))


def flush(training: Training, *, report: bool = True) -> None:
    """Write down the steps since the last time; end the run if several in a row were not finite."""
    reading = training.meter.read()
    if reading is None:
        return
    training.course = replace(
        training.course.with_steps(reading.window), skipped_in_a_row=training.meter.guard.in_a_row
    )
    training.window += reading.window
    training.journal.steps(reading, training.course, report=report)
    if training.meter.guard.is_tripped:
        with raised_in_all():
            raise training.meter.guard.error(training.saver.way_out())


def note_bad(training: Training, pictures: Sequence[BadPicture]) -> None:
    """Take note of pictures that were replaced by others; too many end the run."""
    data = training.plan.data
    reasons = {data.train.label(one.picture): one.reason for one in pictures}
    new = {label: reason for label, reason in reasons.items() if label not in training.course.bad_pictures}
    if new:
        training.course = training.course.with_bad(new)
        messages = [f"{label}: {reason}" for label, reason in new.items()]
        training.journal.bad_pictures(training.state.step, messages, training.course)
        with raised_in_all():
            check_bad(training.course.bad_pictures, data.pictures, training.plan.config.data.max_bad)


def note_micro_batch(training: Training) -> None:
    """Memory ran out, and the step was made in smaller parts; so will all that follow, after a resume too."""
    training.course = replace(training.course, micro_batch=training.state.micro_batch)
    training.journal.out_of_memory(training.state.step, training.state.micro_batch)


def lost_rank(training: Training) -> LostRankError:
    """Another process is gone. What it has not taken with it is saved."""
    if training.state.is_sharded:  # and with it its part of the model
        words = "the run continues from its last checkpoint"
    else:
        # Processes tell each other something before an update and after it, never during one.
        training.saver.save_unless_saved(training.state, training.course)
        words = f"step {training.state.step:,} is saved"
    return LostRankError(f"another process ended or is not responding; {words}", training.run.way_on)


def stopped(training: Training) -> Stopped:
    step, total_steps = training.state.step, training.plan.schedule.total_steps
    codes = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}
    code = codes.get(training.stop.signal or signal.SIGINT, ExitCode.HUNG_UP)
    words = f"stopped at step {step:,} of {total_steps:,}, saved" if step else "stopped before the first step"
    return Stopped(words, training.run.way_on, code)
