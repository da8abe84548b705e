"""What is wrong with a run, why, and what to do about it: pure functions of its view, shared by trainer and monitor."""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from clipctl.config.sections import MAX_SCALE
from clipctl.monitor.reader import number
from clipctl.monitor.series import Bucket, Series
from clipctl.monitor.view import RunView

Severity = Literal["bad", "warn"]

MIN_STEPS = 50  # too early before that to judge how training is going
CHANCE_SHARE = 0.97
SPIKE_SIGMAS = 8
NORM_JUMP = 10
OVERFITTING = 1.15  # times the lowest validation loss
MEMORISED = 0.95  # of the best R@1: what is found at the end, if the model forgets what is common
KNOWN_BY_HEART = 0.9  # accuracy in training
KNOWN_IN_PART = 0.5  # the same: less is not memorising
HARDLY_FOUND = 0.3  # R@1 on unseen pictures
UNSEEN_CAPTIONS = 0.05  # share of held-out captions that occur in training
DATA_SHARE = 0.30
SLOWDOWN = 0.15
FAR_SLOWER = 2.0  # times the upper end of the planned time per step
WARM_UP_STEPS = 10
OTHERS_CORES = 0.5  # kept busy by other programs: above this, they are what slows a run down
LATELY_S = 30.0
PRESSURE_SHARE = 0.05  # of the memory, still available
PRESSURE_BYTES = 256 << 20
SWAP_GROWTH_BYTES = 256 << 20
COLLAPSED_SCALE = 2.0


@dataclass(frozen=True)
class Alert:
    name: str
    severity: Severity
    what: str
    why: str
    todo: str


@dataclass(frozen=True)
class RunFacts:
    """What is known about a run besides its rows."""

    total_steps: int
    warmup_steps: int
    loss: str = "softmax"  # only for this one is ln B the chance loss
    loss_floor: float = 0.0  # the lowest loss that equal captions in a batch allow; 0 where they meet on purpose
    max_bad: float = 0.05  # share of pictures that may be unusable
    seen_captions: float | None = None  # share of the held-out captions that occur in training; None: not known
    lr: float = 0.0
    planned_step_s: float | None = None  # the most that the plan allowed for
    micro_batch: int = 1  # pairs kept in memory at once
    silence_s: float = 0.0  # time without progress, by the watcher's own clock; 0: making progress
    state: str = "running"
    handle: str = "RUN"  # what to type to refer to it
    lost_rows: int = 0  # of metrics that could not be written

    @property
    def is_live(self) -> bool:
        return self.state in ("running", "stalled")


def diagnose(view: RunView, facts: RunFacts) -> list[Alert]:
    """Every alert that currently applies, bad ones first."""
    alerts = [alert for check in CHECKS for alert in check(view, facts)]
    return sorted(alerts, key=lambda alert: alert.severity != "bad")


def _long_enough(view: RunView, facts: RunFacts) -> bool:
    return view.step >= MIN_STEPS and view.step > 1.2 * facts.warmup_steps


def _before(series: Series, step: int) -> list[Bucket]:
    """The buckets up to a step."""
    return [bucket for bucket in series.buckets if bucket.last <= step]


def _recent(view: RunView, key: str, steps: int) -> list[tuple[float, int]]:
    """The finite values of the last steps, each with its step number."""
    values = [(number(row.get(key)), row["step"]) for row in view.recent if row["step"] > view.step - steps]
    return [(value, step) for value, step in values if math.isfinite(value)]


def loss_at_chance(view: RunView, facts: RunFacts) -> Iterator[Alert]:
    loss, chance = view.loss_now, view.chance_loss
    if facts.loss != "softmax" or not _long_enough(view, facts) or loss is None or not chance:
        return
    if loss > CHANCE_SHARE * chance:
        yield Alert(
            "loss_at_chance",
            "bad",
            f"the loss is {loss:.2f} after {view.step} steps, and random guessing gives ln B = {chance:.2f}",
            "nothing has been learnt yet: the learning rate is wrong, or captions do not match their pictures",
            f"try --lr {facts.lr / 3:.2g} or --lr {facts.lr * 3:.2g}, and look at the captions: clipctl data inspect",
        )


def loss_at_floor(view: RunView, facts: RunFacts) -> Iterator[Alert]:
    loss = view.loss_now
    if facts.loss != "softmax" or facts.loss_floor <= 0.05 or not _long_enough(view, facts) or loss is None:
        return
    if loss < 1.15 * facts.loss_floor:
        yield Alert(
            "loss_at_floor",
            "warn",
            f"the loss is {loss:.2f}, close to its floor of {facts.loss_floor:.2f}",
            "equal captions in a batch all count as right and share the target probability, so the loss cannot reach 0",
            "the loss can't fall much further: judge by R@1; batches already keep equal captions apart where possible",
        )


def scale_at_its_limits(view: RunView, facts: RunFacts) -> Iterator[Alert]:
    scale = view.scale
    if scale is None or not _long_enough(view, facts):
        return
    if scale >= 0.995 * MAX_SCALE:
        yield Alert(
            "scale_pinned",
            "warn",
            f"the scale is at its limit of {MAX_SCALE:.0f}",
            "the model is as confident as it can be; often it has memorised the training pairs",
            "watch the validation loss; more pictures or more augmentation help",
        )
    elif scale < COLLAPSED_SCALE:
        yield Alert(
            "scale_collapsed",
            "bad",
            f"the scale has fallen to {scale:.2f}",
            "the model scores all pairs alike; usually the learning rate is too high",
            f"start over with --lr {facts.lr / 3:.2g}",
        )


def not_finite(view: RunView, facts: RunFacts) -> Iterator[Alert]:
    recent = [step for step in view.skipped if step > view.step - 200]
    if recent:
        yield Alert(
            "not_finite",
            "bad",
            f"{len(recent)} of the last 200 steps had a non-finite loss or gradient, most recently step {recent[-1]}",
            "values overflowed; those steps were skipped",
            f"lower the learning rate: --lr {facts.lr / 2:.2g}",
        )


def spike(view: RunView, facts: RunFacts) -> Iterator[Alert]:
    """Compares the largest recent loss with the mean and spread of earlier losses."""
    if not _long_enough(view, facts):
        return
    before = _before(view.loss, view.step - 50)[-100:]
    recent = _recent(view, "loss", 50)
    count = sum(bucket.count for bucket in before)
    if count < 20 or not recent:
        return
    mean = sum(bucket.total for bucket in before) / count
    spread = math.sqrt(max(0.0, sum(bucket.squares for bucket in before) / count - mean * mean))
    top, step = max(recent)
    if top > mean + max(SPIKE_SIGMAS * spread, 0.5 * mean, 0.3):
        yield Alert(
            "spike",
            "warn",
            f"the loss jumped to {top:.2f} at step {step}, from about {mean:.2f}",
            "an unusual batch, or a learning rate that is barely stable",
            f"a single spike is harmless; if it happens again, use --lr {facts.lr / 2:.2g}",
        )


def grad_norm_jump(view: RunView, facts: RunFacts) -> Iterator[Alert]:
    if not _long_enough(view, facts):
        return
    before = _before(view.grad_norm, view.step - 20)[-200:]
    recent = _recent(view, "grad_norm", 20)
    if len(before) < 10 or not recent:
        return
    now, usual = statistics.median(norm for norm, _ in recent), statistics.median(bucket.mean for bucket in before)
    if usual > 0 and now > NORM_JUMP * usual:
        yield Alert(
            "grad_norm_jump",
            "warn",
            f"the gradient norm is {now:.2g}, more than ten times the usual {usual:.2g}",
            "training is about to diverge, or the data has changed",
            f"watch the loss; if it rises, use --lr {facts.lr / 2:.2g}",
        )


def validation(view: RunView, facts: RunFacts) -> Iterator[Alert]:
    points = [point for point in view.evaluations if math.isfinite(point.val_loss)]
    if len(points) < 4:
        return
    first, last = points[0], points[-1]
    lowest = min(points, key=lambda point: point.val_loss)
    since = [point for point in points if point.step > lowest.step]
    if max(point.score for point in points[-3:]) > MEMORISED * max(point.score for point in points):
        return  # a model grows surer of its mistakes, too: as long as it finds as much as ever, nothing is wrong
    if not _long_enough(view, facts) or any(what_was_learnt(view, facts)):  # which is the verdict at the end
        return
    is_memorising = _accuracy(view) >= KNOWN_IN_PART
    if last.val_loss > 1.05 * first.val_loss and not is_memorising:
        yield Alert(
            "validation_worse_than_start",
            "bad",
            f"the validation loss is {last.val_loss:.2f}; at step {first.step} it was {first.val_loss:.2f}",
            "the model is getting worse on unseen pictures",
            "lower the learning rate, add pictures, or stop: the best checkpoint is kept",
        )
    elif (
        is_memorising
        and len(since) >= 3
        and last.val_loss > OVERFITTING * lowest.val_loss
        and _falls(view, lowest.step)
    ):
        yield Alert(
            "overfitting",
            "warn",
            f"the validation loss has risen since step {lowest.step} ({lowest.val_loss:.2f} to {last.val_loss:.2f}) "
            "while the training loss falls",
            "the model is memorising its training pictures (overfitting)",
            "stop here (the best checkpoint is kept), or use more pictures or more augmentation",
        )


def below_start(view: RunView, facts: RunFacts) -> Iterator[Alert]:
    """A pretrained model that forgets."""
    start, last = view.start, view.evaluations[-1] if view.evaluations else None
    if start is None or last is None or not last.score < start.score:
        return
    yield Alert(
        "below_start",
        "warn",
        f"R@1 on unseen pictures is {last.score:.0%}; before training it was {start.score:.0%}",
        "the model forgets what it knew (the learning rate is too high), or has not recovered from the warm-up yet",
        f"--lr {facts.lr / 3:.1g}, --lock image, or fewer epochs; RUN@best never scores lower than the start",
    )


def what_was_learnt(view: RunView, facts: RunFacts) -> Iterator[Alert]:
    """At the end: memorised, learnt too little, or asked about captions it has never seen."""
    best, accuracy = view.best, _accuracy(view)
    if facts.state != "finished" or best is None or not _long_enough(view, facts):
        return
    scores = [point.score for point in view.evaluations if math.isfinite(point.score)]
    is_unseen = facts.seen_captions is not None and facts.seen_captions < UNSEEN_CAPTIONS
    if accuracy >= (KNOWN_IN_PART if is_unseen else KNOWN_BY_HEART) and best.score < HARDLY_FOUND:
        what = f"accuracy in training is {accuracy:.0%}, R@1 on unseen pictures {best.score:.0%}"
        if is_unseen:
            why = "the held-out captions do not occur in training: the model is asked about captions it has never seen"
            todo = "evaluate on known captions (--val DATA), or train on more captions that share words"
            yield Alert("unseen_captions", "warn", what, why, todo)
        else:
            why = "the model knows its training pictures by heart (overfitting)"
            todo = "more pictures, and more different ones for each caption, help most"
            yield Alert("overfitting", "warn", what, why, todo)
    elif accuracy < KNOWN_BY_HEART and len(scores) >= 4 and scores[-1] > max(1.05 * scores[-4], scores[-4] + 0.01):
        yield Alert(
            "underfitting",
            "warn",
            f"R@1 was still rising when the run ended: {scores[-4]:.0%}, then {scores[-1]:.0%}",
            f"the model can still learn more (accuracy in training {accuracy:.0%})",
            "give it more time: --time, or --epochs",
        )


def _accuracy(view: RunView) -> float:
    """In training, lately."""
    return statistics.fmean([value for value, _ in _recent(view, "accuracy", 20)] or [0.0])


def _falls(view: RunView, since_step: int) -> bool:
    points = [loss for step, loss in view.loss.smoothed(50) if step >= since_step]
    return len(points) >= 2 and points[-1] < points[0]


def data_bound(view: RunView, facts: RunFacts) -> Iterator[Alert]:
    share = _data_share(view)
    if len(view.recent) >= 20 and share > DATA_SHARE:
        yield Alert(
            "data_bound",
            "warn",
            f"{share:.0%} of the step time is spent waiting for pictures",
            "decoding and augmentation take longer than the model",
            "use more --workers, smaller picture files or a faster disk",
        )


def _data_share(view: RunView) -> float:
    """Of a step's time, what was spent waiting for pictures; the median, as the first step also waits for workers to
    start."""
    shares = [data_s / step_s for data_s, step_s in view.data_times() if step_s > 0]
    return statistics.median(shares) if shares else 0.0


def slow_rank(view: RunView, facts: RunFacts) -> Iterator[Alert]:
    slowest = view.slowest_rank
    if slowest is not None:
        waiting = max(one.wait_share for one in view.ranks.values())
        yield Alert(
            "slow_rank",
            "warn",
            f"rank {slowest.rank} on {slowest.host} is slow: others wait for it up to {waiting:.0%} of the time",
            "every step takes as long as its slowest process",
            "see what else that machine is doing, or train without it",
        )


def slowdown(view: RunView, facts: RunFacts) -> Iterator[Alert]:
    now, start = view.images_per_s, view.images_per_s_at_start
    if now is None or start is None or len(view.recent) < 40 or now > (1 - SLOWDOWN) * start:
        return
    why, todo = _why_slow(view)
    yield Alert("slowdown", "warn", f"{now:.0f} images/s, down from {start:.0f} at the start", why, todo)


def slower_than_planned(view: RunView, facts: RunFacts) -> Iterator[Alert]:
    """Far beyond what the plan allowed for: now, from the first steps on, or on average once the run has ended."""
    found_s = view.step_s if facts.is_live else view.usual_step_s
    planned = facts.planned_step_s
    if found_s is None or planned is None or len(view.recent) < WARM_UP_STEPS:
        return
    if found_s > FAR_SLOWER * planned:
        took = "a step takes" if facts.is_live else "a step took on average"
        why, todo = _why_slow(view, LATELY_S if facts.is_live else view.elapsed_s)
        yield Alert(
            "slower_than_planned",
            "warn",
            f"{took} {found_s:.2g} s, {found_s / planned:.0f} times the planned maximum of {planned:.2g} s",
            why,
            todo,
        )


def _why_slow(view: RunView, lately_s: float = LATELY_S) -> tuple[str, str]:
    """The likely reason, and what to do about it."""
    # Of several processes that train together only one is measured; the others are no strangers.
    if not view.ranks and _busy_others(view.machine.others, lately_s) > OTHERS_CORES:
        return "another program is using the CPU", "close other programs"
    if number(view.system.get("swap_used_bytes")) - number(view.first_system.get("swap_used_bytes")) > 0:
        return "memory is being swapped to disk", "close other programs, or use a smaller --micro-batch"
    if _data_share(view) > DATA_SHARE:
        return "steps wait for pictures", "use more --workers, smaller picture files or a faster disk"
    return "the machine is hot, on battery, or shared with others", "improve its cooling and plug in its power adapter"


def _busy_others(others: Series, lately_s: float) -> float:
    """Cores that other programs kept busy on average."""
    buckets = others.buckets[-1:] and others.since(others.buckets[-1].last - lately_s).buckets
    count = sum(bucket.count for bucket in buckets)
    return sum(bucket.total for bucket in buckets) / count if count else 0.0


def bad_pictures(view: RunView, facts: RunFacts) -> Iterator[Alert]:
    counts = {reason: count for reason, count in view.bad_pictures.items() if isinstance(count, int)}
    if total := sum(counts.values()):
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
        yield Alert(
            "bad_pictures",
            "warn",
            f"{total:,} {'picture' if total == 1 else 'pictures'} cannot be used: {reasons}",
            f"they are replaced by others; if more than {facts.max_bad:.0%} are unusable, the run ends with an error",
            "clipctl data inspect DATA --deep lists them",
        )


def memory_pressure(view: RunView, facts: RunFacts) -> Iterator[Alert]:
    available, rss = number(view.system.get("available_bytes")), number(view.system.get("rss_bytes"))
    swap, swap_before = (number(row.get("swap_used_bytes")) for row in (view.system, view.first_system))
    if facts.is_live and available < max(PRESSURE_SHARE * (available + rss), PRESSURE_BYTES):
        yield Alert(
            "memory_pressure",
            "bad",
            f"only {available / 2**20:.0f} MiB of memory left",
            "the system is about to swap or to kill the process",
            _less_memory(facts),
        )
    if facts.is_live and swap - swap_before > SWAP_GROWTH_BYTES:
        yield Alert(
            "swap_growing",
            "warn",
            f"{(swap - swap_before) / 2**20:.0f} MiB more swap in use than at the start",
            "there is not enough memory, and swapping to disk is much slower",
            _less_memory(facts),
        )


def _less_memory(facts: RunFacts) -> str:
    if facts.micro_batch < 2:
        return "close other programs"
    half = f"clipctl train --resume {facts.handle} --micro-batch {facts.micro_batch // 2}"
    return f"close other programs, or stop and continue with less memory and the same result: {half}"


def disk_nearly_full(view: RunView, facts: RunFacts) -> Iterator[Alert]:
    free = number(view.system.get("disk_free_bytes"))
    size = number(view.checkpoints[-1].get("size_bytes")) if view.checkpoints else math.nan
    if free < 2 * size:
        yield Alert(
            "disk_nearly_full",
            "bad",
            f"{free / 2**20:.0f} MiB free on the disk, and a checkpoint takes {size / 2**20:.0f} MiB",
            "the next checkpoints may not be saved",
            "free some space: clipctl checkpoint prune shows what can be deleted",
        )
    if facts.lost_rows:
        yield Alert(
            "lost_rows",
            "warn",
            f"{facts.lost_rows:,} rows of metrics could not be written",
            "most likely the disk was full",
            "the curves have gaps; the training itself is not affected",
        )
    failed = [row for row in view.events if row.get("event") == "save_failed"]
    last_saved = number(view.checkpoints[-1].get("step")) if view.checkpoints else -1.0
    if failed and number(failed[-1].get("step")) > last_saved:
        yield Alert(
            "save_failed", "bad", str(failed[-1].get("message")), "writing to the disk failed", "free some disk space"
        )


def silent(view: RunView, facts: RunFacts) -> Iterator[Alert]:
    if facts.is_live and facts.silence_s > 0:
        yield Alert(
            "silent",
            "bad",
            f"no progress for {facts.silence_s:.0f} s",
            "the process is hung, suspended, or waiting for a disk",
            "look at it with top or Activity Monitor; if you kill it, clipctl train --resume continues",
        )


def ended_badly(view: RunView, facts: RunFacts) -> Iterator[Alert]:
    if facts.state == "crashed":
        yield Alert(
            "crashed",
            "bad",
            "the process ended unexpectedly",
            "it was killed, memory ran out, or the machine went down",
            f"clipctl train --resume {facts.handle} continues from its newest intact checkpoint",
        )
    elif facts.state == "failed":
        yield Alert(
            "failed",
            "bad",
            "training ended with an error",
            "the error is in its terminal, or in train.log in its directory",
            f"fix it, then run clipctl train --resume {facts.handle}",
        )


def warmup_too_long(view: RunView, facts: RunFacts) -> Iterator[Alert]:
    if facts.total_steps > 1 and facts.warmup_steps >= facts.total_steps:
        yield Alert(
            "warmup_too_long",
            "bad",
            f"the warm-up takes {facts.warmup_steps} steps, but the run has only {facts.total_steps}",
            "the learning rate never reaches its peak",
            f"--set optim.warmup_steps={max(1, facts.total_steps // 10)}",
        )


CHECKS: tuple[Callable[[RunView, RunFacts], Iterator[Alert]], ...] = (
    loss_at_chance,
    loss_at_floor,
    scale_at_its_limits,
    not_finite,
    spike,
    grad_norm_jump,
    validation,
    below_start,
    what_was_learnt,
    data_bound,
    slow_rank,
    slowdown,
    slower_than_planned,
    bad_pictures,
    memory_pressure,
    disk_nearly_full,
    silent,
    ended_badly,
    warmup_too_long,
)
