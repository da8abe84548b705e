"""Where a run stands: what a checkpoint restores besides tensors."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

from clipctl.runs.retention import merit
from clipctl.training.evaluate import Evaluation


@dataclass(frozen=True)
class StepWindow:
    """Sums over several steps, so that windows can be added up."""

    steps: int = 0  # with a finite loss: the others are left out of the last two sums
    images: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    accuracy_sum: float = 0.0

    def __add__(self, other: "StepWindow") -> "StepWindow":
        return StepWindow(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def loss(self) -> float:
        return self.loss_sum / self.steps if self.steps else math.nan

    @property
    def accuracy(self) -> float:
        return self.accuracy_sum / self.steps if self.steps else math.nan

    @property
    def images_per_s(self) -> float:
        return self.images / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Course:
    """A run so far, over all attempts. Tensors and the step are in the state."""

    evaluated_epochs: int = 0  # epochs that are through, each evaluated if that was due
    scored_epoch: int = 0  # the one after which `evaluation` was made
    stale_evaluations: int = 0  # since one found more than all before it
    evaluation: Evaluation | None = None  # the latest
    start: Evaluation | None = None  # of the untouched model, if the run started from one
    best: Evaluation | None = None
    best_epoch: int = 0  # after which it was made
    epoch_window: StepWindow | None = None  # the steps of this epoch
    skipped_in_a_row: int = 0  # steps without a finite loss or gradient
    bad_pictures: Mapping[str, str] = field(default_factory=dict)  # reasons by label
    baseline: float | None = None  # share of held-out pictures that the nearest training picture names; None: no use
    micro_batch: int | None = None  # smaller than planned, because memory ran out; None: as planned

    @property
    def bad_counts(self) -> dict[str, int]:
        return dict(Counter(self.bad_pictures.values()))

    def with_steps(self, window: StepWindow) -> "Course":
        return replace(self, epoch_window=window if self.epoch_window is None else self.epoch_window + window)

    def with_bad(self, reasons: Mapping[str, str]) -> "Course":
        """The first reason found for a picture counts."""
        return replace(self, bad_pictures={**self.bad_pictures, **reasons, **self.bad_pictures})

    def evaluated(self, epoch: int, evaluation: Evaluation) -> "Course":
        """After an epoch was evaluated; epoch 0 is before the first step and sets what training must not fall below."""
        is_best = self.best is None or merit(evaluation.to_dict()) > merit(self.best.to_dict())
        finds_more = self.best is None or evaluation.score > self.best.score
        return replace(
            self,
            evaluated_epochs=epoch,
            scored_epoch=epoch,
            stale_evaluations=0 if finds_more else self.stale_evaluations + 1,
            evaluation=evaluation,
            start=evaluation if epoch == 0 else self.start,
            best=evaluation if is_best else self.best,
            best_epoch=epoch if is_best else self.best_epoch,
        )

    def passed(self, epoch: int) -> "Course":
        """After an epoch that was not evaluated."""
        return replace(self, evaluated_epochs=epoch)

    def is_out_of_patience(self, patience: int | None) -> bool:
        return patience is not None and self.stale_evaluations >= patience

    @property
    def is_scored(self) -> bool:
        """Whether the epoch that has just ended was evaluated."""
        return self.evaluation is not None and self.scored_epoch == self.evaluated_epochs

    @property
    def is_best(self) -> bool:
        """Whether it is the best one, too."""
        return self.is_scored and self.evaluation is self.best

    def to_dict(self) -> dict[str, Any]:
        """As state.json holds it."""
        return {
            "evaluated_epochs": self.evaluated_epochs,
            "scored_epoch": self.scored_epoch,
            "stale_evaluations": self.stale_evaluations,
            "best_epoch": self.best_epoch,
            "evaluation": self.evaluation.to_dict() if self.evaluation else None,
            "start": self.start.to_dict() if self.start else None,
            "best": self.best.to_dict() if self.best else None,
            "epoch_window": asdict(self.epoch_window) if self.epoch_window else None,
            "skipped_in_a_row": self.skipped_in_a_row,
            "bad_pictures": dict(self.bad_pictures),
            "baseline": self.baseline,
            "micro_batch": self.micro_batch,
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> "Course":
        """What `to_dict` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        bad_pictures, window = facts.get("bad_pictures", {}), facts["epoch_window"]
        if not all(isinstance(text, str) for pair in bad_pictures.items() for text in pair):
            raise ValueError("bad_pictures are not texts")
        return cls(
            evaluated_epochs=_count(facts["evaluated_epochs"]),
            scored_epoch=_count(facts.get("scored_epoch", facts["evaluated_epochs"])),
            stale_evaluations=_count(facts.get("stale_evaluations", 0)),
            best_epoch=_count(facts.get("best_epoch", 0)),
            evaluation=Evaluation.from_dict(facts["evaluation"]),
            start=Evaluation.from_dict(facts.get("start")),
            best=Evaluation.from_dict(facts["best"]),
            epoch_window=StepWindow(**{name: _number(value) for name, value in window.items()}) if window else None,
            skipped_in_a_row=_count(facts["skipped_in_a_row"]),
            bad_pictures=bad_pictures,
            baseline=None if facts.get("baseline") is None else _number(facts["baseline"]),
            micro_batch=None if facts.get("micro_batch") is None else max(1, _count(facts["micro_batch"])),
        )


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**50:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value


def _number(value: Any) -> Any:
    if type(value) not in (int, float) or not abs(value) < 1e300:
        raise ValueError(f"{str(value)[:40]!r} is not a number")
    return value
