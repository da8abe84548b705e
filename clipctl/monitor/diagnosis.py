"""What is wrong with a run, why, and what to do: pure functions over its view, shared by trainer and monitor."""

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

MIN_STEPS = 50  # before that, nothing is said about the course of the training
CHANCE_SHARE = 0.97
SPIKE_SIGMAS = 8
NORM_JUMP = 10
OVERFITTING = 1.15  # of the lowest validation loss
DATA_SHARE = 0.30
SLOWDOWN = 0.15
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
class Facts:
    """What is known of a run besides its rows."""

    total_steps: int
    warmup_steps: int
    loss: str = "softmax"  # ln B is the chance loss of this one only
    loss_floor: float = 0.0  # below which equal captions in a batch do not let the loss fall
    lr: float = 0.0
    silence_s: float = 0.0  # since anything happened, as the watcher's own clock says; 0: it goes on
    state: str = "running"
    handle: str = "RUN"  # what to type to mean it

    @property
    def is_live(self) -> bool:
        return self.state in ("running", "stalled")


def diagnose(view: RunView, facts: Facts) -> list[Alert]:
    """Every alert that holds now, the bad ones first."""
    alerts = [alert for check in CHECKS for alert in check(view, facts)]
    return sorted(alerts, key=lambda alert: alert.severity != "bad")


def _long_enough(view: RunView, facts: Facts) -> bool:
    return view.step >= MIN_STEPS and view.step > 1.2 * facts.warmup_steps


def _before(series: Series, step: int) -> list[Bucket]:
    """The buckets up to a step."""
    return [bucket for bucket in series.buckets if bucket.last <= step]


def _recent(view: RunView, key: str, steps: int) -> list[tuple[float, int]]:
    """The finite values of the last steps, each with its step."""
    values = [(number(row.get(key)), row["step"]) for row in view.recent if row["step"] > view.step - steps]
    return [(value, step) for value, step in values if math.isfinite(value)]


def loss_at_chance(view: RunView, facts: Facts) -> Iterator[Alert]:
    loss, chance = view.smoothed_loss, view.chance_loss
    if facts.loss != "softmax" or not _long_enough(view, facts) or loss is None or not chance:
        return
    if loss > CHANCE_SHARE * chance:
        yield Alert(
            "loss_at_chance",
            "bad",
            f"the loss is {loss:.2f} after {view.step} steps, and guessing gives ln B = {chance:.2f}",
            "the model has learnt nothing yet: the rate is too high or too low, or captions do not belong to pictures",
            f"try --lr {facts.lr / 3:.2g} and --lr {facts.lr * 3:.2g}; look at the pairs",
        )


def loss_at_floor(view: RunView, facts: Facts) -> Iterator[Alert]:
    loss = view.smoothed_loss
    if facts.loss != "softmax" or facts.loss_floor <= 0.05 or not _long_enough(view, facts) or loss is None:
        return
    if loss < 1.15 * facts.loss_floor:
        yield Alert(
            "loss_at_floor",
            "warn",
            f"the loss is {loss:.2f}, and equal captions in a batch do not let it fall below {facts.loss_floor:.2f}",
            "pairs with the same caption are each other's wrong answers",
            "remove duplicate captions, or take smaller batches",
        )


def scale_at_its_limits(view: RunView, facts: Facts) -> Iterator[Alert]:
    scale = view.scale
    if scale is None or not _long_enough(view, facts):
        return
    if scale >= 0.995 * MAX_SCALE:
        yield Alert(
            "scale_pinned",
            "warn",
            f"the scale is at its limit of {MAX_SCALE:.0f}",
            "the model is as sure as it may be; often it has learnt the training pairs by heart",
            "watch the validation; more pictures or more augmentation help",
        )
    elif scale < COLLAPSED_SCALE:
        yield Alert(
            "scale_collapsed",
            "bad",
            f"the scale has fallen to {scale:.2f}",
            "the model makes all pairs alike, because being sure costs it too much: the rate is too high",
            f"start again with --lr {facts.lr / 3:.2g}",
        )


def not_finite(view: RunView, facts: Facts) -> Iterator[Alert]:
    recent = [step for step in view.skipped if step > view.step - 200]
    if recent:
        yield Alert(
            "not_finite",
            "bad",
            f"{len(recent)} of the last 200 steps had no finite loss or gradient, the latest was step {recent[-1]}",
            "numbers have overflowed; those steps changed nothing",
            f"lower the rate: --lr {facts.lr / 2:.2g}",
        )


def spike(view: RunView, facts: Facts) -> Iterator[Alert]:
    """The largest loss of the last steps, against mean and spread of those before them."""
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
            f"the loss jumped to {top:.2f} at step {step}; before it was about {mean:.2f}",
            "a batch the model had no answer to, or a rate at the edge of what works",
            f"one spike heals; if they come again, --lr {facts.lr / 2:.2g}",
        )


def grad_norm_jump(view: RunView, facts: Facts) -> Iterator[Alert]:
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
            f"the gradient norm is {now:.2g}, ten times and more of the usual {usual:.2g}",
            "the training is about to diverge, or the data has changed",
            f"watch the loss; --lr {facts.lr / 2:.2g} if it rises",
        )


def validation(view: RunView, facts: Facts) -> Iterator[Alert]:
    points = [point for point in view.evaluations if math.isfinite(point.val_loss)]
    if len(points) < 4:
        return
    first, last = points[0], points[-1]
    lowest = min(points, key=lambda point: point.val_loss)
    since = [point for point in points if point.step > lowest.step]
    if last.val_loss > 1.05 * first.val_loss and _long_enough(view, facts):
        yield Alert(
            "validation_worse_than_start",
            "bad",
            f"the validation loss is {last.val_loss:.2f}; at step {first.step} it was {first.val_loss:.2f}",
            "the model gets worse on pictures it has not seen",
            "lower the rate, take more pictures, or stop: the best checkpoint is kept",
        )
    elif len(since) >= 3 and last.val_loss > OVERFITTING * lowest.val_loss and _falls(view, lowest.step):
        yield Alert(
            "overfitting",
            "warn",
            f"the validation loss rises since step {lowest.step} ({lowest.val_loss:.2f} to {last.val_loss:.2f}), "
            "the training loss falls",
            "the model learns its pictures by heart",
            "stop here (the best checkpoint is kept), or take more pictures and more augmentation",
        )


def _falls(view: RunView, since_step: int) -> bool:
    points = [loss for step, loss in view.loss.smoothed(50) if step >= since_step]
    return len(points) >= 2 and points[-1] < points[0]


def data_bound(view: RunView, facts: Facts) -> Iterator[Alert]:
    # The usual step, not the mean: the first one waits until workers have started.
    shares = [data_s / step_s for data_s, step_s in view.data_times() if step_s > 0]
    share = statistics.median(shares) if shares else 0.0
    if len(shares) >= 20 and share > DATA_SHARE:
        yield Alert(
            "data_bound",
            "warn",
            f"{share:.0%} of a step is waiting for pictures",
            "decoding and augmenting take longer than the model does",
            "more --workers, smaller picture files, or a faster disk",
        )


def slowdown(view: RunView, facts: Facts) -> Iterator[Alert]:
    now, start = view.images_per_s, view.images_per_s_at_start
    if now is None or start is None or len(view.recent) < 40 or now > (1 - SLOWDOWN) * start:
        return
    load = view.system.get("cpu_per_core")
    own = number(view.system.get("process_cpu"))
    busy = sum(map(number, load)) if isinstance(load, list) else math.nan
    other = busy - own > 0.5  # half a core that is not ours
    yield Alert(
        "slowdown",
        "warn",
        f"{now:.0f} images/s, at the start it was {start:.0f}",
        "another program is using the processor" if other else "the machine has got warm and slowed down, or was busy",
        "close other programs" if other else "give it air and its power adapter",
    )


def bad_pictures(view: RunView, facts: Facts) -> Iterator[Alert]:
    counts = {reason: count for reason, count in view.bad_pictures.items() if isinstance(count, int)}
    if total := sum(counts.values()):
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
        yield Alert(
            "bad_pictures",
            "warn",
            f"{total:,} {'picture' if total == 1 else 'pictures'} cannot be used: {reasons}",
            "others stand in for them; above 5 % the run would stop",
            "clipctl data inspect DATA --deep lists them",
        )


def memory_pressure(view: RunView, facts: Facts) -> Iterator[Alert]:
    available, rss = number(view.system.get("available_bytes")), number(view.system.get("rss_bytes"))
    swap, swap_before = (number(row.get("swap_used_bytes")) for row in (view.system, view.first_system))
    if facts.is_live and available < max(PRESSURE_SHARE * (available + rss), PRESSURE_BYTES):
        yield Alert(
            "memory_pressure",
            "bad",
            f"{available / 2**20:.0f} MiB of memory are left",
            "the system is about to swap or to end the training",
            "close other programs, or resume with a smaller --batch-size (--allow-change)",
        )
    if facts.is_live and swap - swap_before > SWAP_GROWTH_BYTES:
        yield Alert(
            "swap_growing",
            "warn",
            f"{(swap - swap_before) / 2**20:.0f} MiB more are swapped out than at the start",
            "memory does not suffice, and the disk is much slower",
            "close other programs, or resume with a smaller --batch-size (--allow-change)",
        )


def disk_nearly_full(view: RunView, facts: Facts) -> Iterator[Alert]:
    free = number(view.system.get("disk_free_bytes"))
    size = number(view.checkpoints[-1].get("size_bytes")) if view.checkpoints else math.nan
    if free < 2 * size:
        yield Alert(
            "disk_nearly_full",
            "bad",
            f"{free / 2**20:.0f} MiB are free on the disk, a checkpoint takes {size / 2**20:.0f} MiB",
            "the next checkpoints may not be saved",
            "make room: clipctl checkpoint prune shows what can go",
        )
    failed = [row for row in view.events if row.get("event") == "save_failed"]
    last_saved = number(view.checkpoints[-1].get("step")) if view.checkpoints else -1.0
    if failed and number(failed[-1].get("step")) > last_saved:
        yield Alert(
            "save_failed", "bad", str(failed[-1].get("message")), "the disk refused it", "make room on the disk"
        )


def silent(view: RunView, facts: Facts) -> Iterator[Alert]:
    if facts.is_live and facts.silence_s > 0:
        yield Alert(
            "silent",
            "bad",
            f"nothing has happened for {facts.silence_s:.0f} s",
            "the process hangs, was put to sleep, or waits for a disk",
            "look at it with top or Activity Monitor; after a kill, clipctl train --resume goes on",
        )


def ended_badly(view: RunView, facts: Facts) -> Iterator[Alert]:
    if facts.state == "crashed":
        yield Alert(
            "crashed",
            "bad",
            "the process is gone without a word",
            "it was killed, the memory ran out, or the machine went down",
            f"clipctl train --resume {facts.handle} goes on from its newest whole checkpoint",
        )
    elif facts.state == "failed":
        yield Alert(
            "failed",
            "bad",
            "the training ended with an error",
            "its terminal, or train.log in its directory, says which",
            f"then clipctl train --resume {facts.handle}",
        )


def warmup_too_long(view: RunView, facts: Facts) -> Iterator[Alert]:
    if facts.total_steps > 1 and facts.warmup_steps >= facts.total_steps:
        yield Alert(
            "warmup_too_long",
            "bad",
            f"the warm-up takes {facts.warmup_steps} steps, the run has {facts.total_steps}",
            "the learning rate never reaches its peak",
            f"--set optim.warmup_steps={max(1, facts.total_steps // 10)}",
        )


CHECKS: tuple[Callable[[RunView, Facts], Iterator[Alert]], ...] = (
    loss_at_chance,
    loss_at_floor,
    scale_at_its_limits,
    not_finite,
    spike,
    grad_norm_jump,
    validation,
    data_bound,
    slowdown,
    bad_pictures,
    memory_pressure,
    disk_nearly_full,
    silent,
    ended_badly,
    warmup_too_long,
)
