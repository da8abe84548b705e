"""Which checkpoints of a run count, which is the best, and which are kept. Pure functions over manifests.

A run that is resumed from an older step abandons its checkpoints after that step: they are no longer part of its
course. The rows of metrics.jsonl follow the same rule.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import TypeGuard

from clipctl.runs.checkpoint import Checkpoint


def course(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """The newest checkpoint and those that led to it, by step."""
    everything = _newest_of_each_step(checkpoints)
    if not everything:
        return []
    newest = max(everything, key=lambda one: (one.manifest.attempt, one.step))
    beginnings = newest.manifest.beginnings
    ends = {attempt: step for (attempt, _), (_, step) in itertools.pairwise(beginnings)}
    ends[newest.manifest.attempt] = newest.step
    return sorted(
        (one for one in everything if one.step <= ends.get(one.manifest.attempt, -1)), key=lambda one: one.step
    )


def ranked(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Checkpoints with a score, best last. An abandoned course can still hold the best."""
    scored = [one for one in checkpoints if _is_number(one.manifest.metrics.get("score"))]
    return sorted(scored, key=lambda one: (*merit(one.manifest.metrics), one.step, one.manifest.attempt, one.again))


def kept(checkpoints: Iterable[Checkpoint], *, last: int, best: int) -> list[Checkpoint]:
    """The newest `last` and the best `best` checkpoints."""
    everything = list(checkpoints)
    newest = course(everything)[-last:] if last else []
    return newest + [one for one in (ranked(everything)[-best:] if best else []) if one not in newest]


def merit(metrics: Mapping[str, float | None]) -> tuple[float, float]:
    """Sort key for evaluations: higher score (mean of both recalls at 1) first; at equal scores, lower loss."""
    score, val_loss = metrics.get("score"), metrics.get("val_loss")
    return (score if _is_number(score) else -1.0), (-val_loss if _is_number(val_loss) else -math.inf)


def _newest_of_each_step(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """A step may have been saved again, by the same attempt or by a later one."""
    by_age = sorted(checkpoints, key=lambda one: (one.manifest.attempt, one.again))
    return list({one.step: one for one in by_age}.values())


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
