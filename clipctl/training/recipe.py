"""`--recipe auto`: the settings that were left open, decided from the data, the time and the machine.

Each rule was chosen on several datasets by holding out parts of the training data; docs/log.md has the figures,
including those of what lost. A recipe is a layer of settings below everything that was asked for, so that each part can
be overridden.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clipctl.config import layers
from clipctl.config.layers import Layer
from clipctl.config.quantities import counted, parse_duration
from clipctl.config.sections import LossName
from clipctl.data.catalog import Data, open_data
from clipctl.data.traits import Traits, traits_of
from clipctl.errors import ConfigError
from clipctl.interop.models import Found
from clipctl.model import cost
from clipctl.model.forecast import Estimate
from clipctl.progress import Tell, silent
from clipctl.training.pace import Pace, measure_pace
from clipctl.training.plan import FORWARD_SHARE, RECIPE_LR, START_S, Alternative, TrainPlan, make_plan
from clipctl.training.tuning import tuning_settings

# --- what the data decide ----------------------------------------------------------------------------------------

MAX_BATCH, MIN_BATCH, MIN_STEPS_PER_EPOCH = 512, 16, 4
PEAK_LR, LEAST_LR = RECIPE_LR, 1e-3
REPEATED_SHARE = 0.1  # of pictures that share a caption, from which on a loss between them pays
LABEL_SMOOTHING, FEW_PER_CAPTION = 0.2, 5  # it finds a tenth more where captions have one or two pictures each


def data_settings(traits: Traits, loss: LossName = "softmax") -> tuple[dict[str, Any], list[str]]:
    """Settings that follow from the pictures and captions alone, and why."""
    batch_size = max(MIN_BATCH, min(MAX_BATCH, traits.pictures // MIN_STEPS_PER_EPOCH))
    values: dict[str, Any] = {
        "data.tokenizer": "words",
        "data.augment_on": "device",
        "data.max_shift": 0.06,
        "data.max_zoom": 0.1,
        "data.jitter": 0.1 if traits.are_drawings else 0.3,  # light and cameras differ, ink does not
        "data.min_crop": 1.0 if traits.are_drawings else 0.6,
        "data.flip": not traits.are_drawings,
        "train.batch_size": batch_size,
        # Adam's steps have the size of the rate; the noise in their direction falls with the root of the batch.
        "optim.lr": max(LEAST_LR, PEAK_LR * math.sqrt(batch_size / MAX_BATCH)),
        "save.every": "1min",
    }
    if loss == "softmax" and traits.pictures < FEW_PER_CAPTION * traits.captions:
        values["train.label_smoothing"] = LABEL_SMOOTHING
    kind = "drawings: shifted and zoomed, not mirrored" if traits.are_drawings else "photographs: cropped and mirrored"
    words = [f"{kind} ({traits.flat_share:.0%} of neighbouring pixels are equal)"]
    if traits.repeated >= REPEATED_SHARE:
        values["train.picture_term"] = 1.0
        words.append(f"an image–image loss for pictures with the same caption ({traits.repeated:.0%} of them)")
    return values, words


# --- what the time decides ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rung:
    """An image tower on the ladder from cheap to expensive."""

    size_px: int
    width: int
    patch_px: int = 8
    depth: int = 0  # none: convolutions and a flat pool; with blocks, CLIP's own layout

    def settings(self) -> dict[str, Any]:
        return {
            "model.image.stem": "patches" if self.depth else "conv",
            "model.image.pool": "class" if self.depth else "flat",
            "model.image.size_px": self.size_px,
            "model.image.patch_px": self.patch_px,
            "model.image.width": self.width,
            "model.image.depth": self.depth,
            "model.image.heads": _heads(self.width),
            "model.text.width": 128,
            "model.text.depth": 1,
            "model.text.heads": 2,
            "model.embed_dim": 256,
        }

    def __str__(self) -> str:
        blocks = f" in patches of {self.patch_px}, {self.depth} blocks" if self.depth else ""
        return f"{self.size_px} px{blocks}, width {self.width}"


def _heads(width: int) -> int:
    """Of about 64 values each."""
    return next(heads for heads in range(max(1, width // 64), 0, -1) if width % heads == 0)


# Who sets one of these has a tower in mind that is not on the ladder.
SIZES = ("size_px", "width")
TOWER_KEYS = {"preset", *(f"model.image.{name}" for name in ("stem", "pool", "depth", "patch_px"))}
RUNGS = (Rung(24, 128), Rung(32, 128), Rung(48, 128), Rung(64, 128), Rung(64, 192), Rung(96, 192), Rung(128, 256))
# A single patch of all pixels is a perceptron in CLIP's clothes; few large patches come next.
CLIP_RUNGS = (Rung(16, 256, 16, 2), Rung(32, 256, 16, 2), Rung(48, 256, 16, 3), Rung(64, 256, 16, 4))
# Passes over the pictures: the largest tower that gets so many is the best one. Photographs gain more by more pixels.
WANTED_PASSES, WANTED_PASSES_OF_DRAWINGS = 70, 100
PASSES_TO_LEARN = 14  # on icons, R@1 after p passes was close to 1 - exp(-p / 14) of what it came to

# Without --time nothing is measured, so that the same command gives the same model: a budget for two cores of a laptop.
ENOUGH_PASSES = 200
BUDGET_S, BUDGET_S_PER_PICTURE, MAX_BUDGET_S = 10.0, 0.1, 600.0
NOMINAL_FLOPS_PER_S = 60e9  # what a step of the smallest towers reaches on two cores

# With --time the first steps are timed.
FIRST_RUNG = 1  # timed first
EVALUATIONS = 20  # in a run, at most
EVALUATION_SHARE = 0.05  # of a run, at most
PACE_SHARE, MIN_PACE_S, MAX_PACE_S = 0.015, 0.5, 5.0  # of a run's time that measuring may take
LONG_PACE_SHARE = 0.05  # what it may take if steps are long
FORECAST_TRUST = 10.0  # a forecast that misses the time by more than this is believed without measuring
THUMBNAIL_S = 1e-4  # for the baseline, per picture
IN_A_RUN = 1.02  # steps in a run take longer than when nothing is written down beside them
LEAST_STEPS = 10

FEW_PICTURES = 50_000
FROM_ADVICE = (
    "from scratch; with {:,} pictures, starting from a pretrained model is likely to be better: "
    "--from openai/clip-vit-base-patch32"
)


def plan_by_recipe(
    asked: Sequence[Layer], tell: Tell = silent, spent_s: float = 0.0, base: Found | None = None, ranks: int = 1
) -> TrainPlan:
    """The plan of a new run. `spent_s`: how long the user has been waiting already. `base`: the model to start from.
    `ranks`: how many processes train together."""
    return _Planner(asked, tell, spent_s, base, ranks).plan()


class _Planner:
    def __init__(self, asked: Sequence[Layer], tell: Tell, spent_s: float, base: Found | None, ranks: int) -> None:
        self.asked, self.tell, self.base, self.ranks = asked, tell, base, ranks
        self.started_s = time.monotonic() - spent_s
        self.config = layers.resolve(asked)
        self.keys = keys = {key for layer in asked for key in layer.values}
        lengths = layers.lengths(asked)
        if layers.TIME in lengths and len(lengths) > 1:
            raise ConfigError(f"{' and '.join(lengths[:2])} both say how long to train", "leave out either")
        self.has_length = bool(lengths) and layers.TIME not in lengths
        self.owns_model = bool(keys & TOWER_KEYS)
        self.time_s = parse_duration(self.config.train.time) if self.config.train.time else None
        self.data: Data = open_data(self.config.data, tell)
        self.traits = traits_of(self.data.train)
        is_auto = self.config.recipe == "auto"
        self.values, self.words = (
            data_settings(self.traits, self.config.train.loss) if is_auto else (dict[str, Any](), list[str]())
        )
        if base is not None and is_auto:
            values, words = tuning_settings(self.traits, base, self.config.tune, keys)
            self.values, self.words = self.values | values, [*words, *self.words]
        elif is_auto and not self.data.train.is_drawn and self.traits.pictures < FEW_PICTURES:
            self.words.append(FROM_ADVICE.format(self.traits.pictures))
        self.ladder = self._ladder() if is_auto and not self.owns_model else []
        self.choices: tuple[Alternative, ...] = ()

    def plan(self) -> TrainPlan:
        if self.time_s is not None:
            plan = self._in_time()
            length = [f"as many steps as fit into {self.config.train.time}"]
        else:
            plan, length = self._by_rule()
        words = (*length, *self.words, *self._expectation(plan))
        return replace(plan, recipe=words, alternatives=self.choices)

    # --- without a time ---------------------------------------------------------------------------------------------

    def _by_rule(self) -> tuple[TrainPlan, list[str]]:
        if not self.ladder:
            return self._evaluated(self._in_few_views(self._make({}))), []
        budget_s = min(MAX_BUDGET_S, BUDGET_S + BUDGET_S_PER_PICTURE * self.traits.pictures)
        plan = self._make(self.ladder[0].settings())  # for the length of captions, and what was asked for
        flops = [plan.schedule.steps_per_epoch * self._step_flops(plan, rung) for rung in self.ladder]
        epoch_s = [one / NOMINAL_FLOPS_PER_S for one in flops]
        chosen = self._choose(epoch_s, budget_s)
        if self.has_length:  # of the same model
            return self._evaluated(self._make(self.ladder[chosen].settings())), []
        epochs = max(1, min(ENOUGH_PASSES, int(budget_s / epoch_s[chosen])))
        length = {"train.epochs": epochs, "train.eval_every": self._eval_every(epochs)}
        most = ", the most by rule" if epochs == ENOUGH_PASSES else ""
        seconds = epochs * epoch_s[chosen]
        about = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
        words = f"{counted(epochs, 'epoch')}{most}: about {about} on two cores; to set a limit, pass --time"
        return self._make({**self.ladder[chosen].settings(), **length}), [words]

    def _evaluated(self, plan: TrainPlan) -> TrainPlan:
        """Every epoch is evaluated, unless that would take more than its share."""
        epochs = plan.schedule.epochs
        return plan.with_eval_every(self._eval_every(epochs, evaluations=epochs))

    def _in_few_views(self, plan: TrainPlan) -> TrainPlan:
        """No more views of the pictures than epochs that show them."""
        views, epochs = plan.config.tune.views, plan.schedule.epochs
        return self._make({"tune.views": epochs}) if views and views > epochs else plan

    # --- with one ---------------------------------------------------------------------------------------------------

    def _in_time(self) -> TrainPlan:
        if not self.ladder:
            plan = self._make({})
            return self._timed_in_few_views(plan, self._pace(plan))
        chosen = min(FIRST_RUNG, len(self.ladder) - 1)
        while True:
            timed, plan = chosen, self._make(self.ladder[chosen].settings())
            pace = self._pace(plan)
            # Timed on one rung, forecast from there for the others by their operations.
            flops = [self._step_flops(plan, rung) for rung in self.ladder]
            epoch_s = [plan.schedule.steps_per_epoch * pace.step_s * one / flops[timed] for one in flops]
            is_settled = bool(self.choices)  # the second look settles it: rungs could send to each other for ever
            chosen = self._choose(epoch_s, max(0.0, self._time_left_s(plan, pace)))
            if chosen == timed:
                return self._timed(plan, pace)
            if is_settled:
                plan = self._make(self.ladder[chosen].settings())
                return self._timed(plan, self._pace(plan))

    def _timed_in_few_views(self, plan: TrainPlan, pace: Pace) -> TrainPlan:
        """With more views than there is time for epochs, features would be computed in vain."""
        timed, views = self._timed(plan, pace), plan.config.tune.views
        if not plan.config.tune.has_features or views is None or views <= timed.schedule.epochs:
            return timed
        fewer = timed.schedule.epochs
        sooner = replace(pace, first_picture_s=pace.first_picture_s * fewer / views)
        return self._timed(self._make({"tune.views": fewer}), sooner)

    def _pace(self, plan: TrainPlan) -> Pace:
        """Measured, unless the forecast exceeds the time by far; a forecast can be wrong too."""
        assert self.time_s is not None
        forecast = plan.forecast.step_s
        if forecast and (plan.memory_problem() or LEAST_STEPS * forecast.value > FORECAST_TRUST * self.time_s):
            return Pace(forecast.value, plan.forecast.decode_s)
        self.tell("timing the first steps")
        limit_s = min(MAX_PACE_S, max(MIN_PACE_S, PACE_SHARE * self.time_s))
        return measure_pace(plan, limit_s, max(limit_s, LONG_PACE_SHARE * self.time_s))

    def _time_left_s(self, plan: TrainPlan, pace: Pace) -> float:
        """For steps and evaluations."""
        assert self.time_s is not None
        pictures = len(plan.data.train) + len(plan.data.val)
        once_s = START_S + pictures * (pace.first_picture_s + THUMBNAIL_S)
        return (self.time_s - (time.monotonic() - self.started_s) - once_s) / IN_A_RUN

    def _timed(self, plan: TrainPlan, pace: Pace) -> TrainPlan:
        """The plan with as many steps as fit, and evaluations that take no more than their share."""
        schedule, left_s = plan.schedule, self._time_left_s(plan, pace)
        evaluation_s = FORWARD_SHARE * pace.step_s / schedule.batch_pairs * len(plan.data.val) + plan.save_s
        steps, epochs, eval_every = int((left_s - evaluation_s) / pace.step_s), 1, 1
        for _ in range(3):  # more evaluations, fewer steps: settles at once
            epochs = max(1, math.ceil(steps / schedule.steps_per_epoch))
            eval_every = self._eval_every(epochs)
            steps = int((left_s - math.ceil(epochs / eval_every) * evaluation_s) / pace.step_s)
        assert self.time_s is not None
        if steps < LEAST_STEPS:
            least_s = math.ceil(1.1 * (self.time_s - left_s + evaluation_s + LEAST_STEPS * pace.step_s))
            raise ConfigError(
                f"--time {self.config.train.time} is too short: starting, {LEAST_STEPS} steps and an evaluation take "
                f"{least_s} s here",
                f"use --time {least_s}s or more",
            )
        epochs = math.ceil(steps / schedule.steps_per_epoch)
        plan = plan.with_steps(steps).with_eval_every(self._eval_every(epochs))
        forecast = replace(plan.forecast, step_s=Estimate.around(pace.step_s, 0.1, "measured"))
        return replace(plan, forecast=forecast, deadline_s=self.started_s + self.time_s)

    # --- both -------------------------------------------------------------------------------------------------------

    def _ladder(self) -> list[Rung]:
        """Towers for pictures of this size: none is enlarged. A size or width that was asked for holds for all."""
        rungs: Sequence[Rung] = CLIP_RUNGS if self.config.layout == "clip" else RUNGS
        own = {name: getattr(self.config.model.image, name) for name in SIZES if f"model.image.{name}" in self.keys}
        if "size_px" not in own:
            rungs = [rung for rung in rungs if rung.size_px <= max(rungs[0].size_px, self.traits.side_px)]
        return list(dict.fromkeys(replace(rung, **own) for rung in rungs))

    def _choose(self, epoch_s: Sequence[float], time_s: float) -> int:
        """The highest rung that still makes enough passes over the pictures in this time."""
        passes = [time_s / one for one in epoch_s]
        wanted = WANTED_PASSES_OF_DRAWINGS if self.traits.are_drawings else WANTED_PASSES
        chosen = max((place for place, count in enumerate(passes) if count >= wanted), default=0)
        self.choices = tuple(
            Alternative(str(rung), count, time_s, is_chosen=place == chosen)
            for place, (rung, count) in enumerate(zip(self.ladder, passes, strict=True))
        )
        return chosen

    def _eval_every(self, epochs: int, evaluations: int = EVALUATIONS) -> int:
        """Epochs from one evaluation to the next: `evaluations` in a run, and no more than their share of its time."""
        if "train.eval_every" in self.keys:
            return self.config.train.eval_every
        evaluation = FORWARD_SHARE * len(self.data.val) / len(self.data.train)  # in epochs
        affordable = int(EVALUATION_SHARE * epochs / evaluation)
        return math.ceil(epochs / max(1, min(evaluations, affordable)))

    def _expectation(self, plan: TrainPlan) -> list[str]:
        if plan.config.model.image.is_clip_layout or self.base is not None:
            return []
        passes = plan.schedule.total_steps / plan.schedule.steps_per_epoch
        share = 1 - math.exp(-passes / PASSES_TO_LEARN)
        return [f"{counted(round(passes), 'epoch')} should give about {share:.0%} of the R@1 that more time would"]

    def _make(self, values: Mapping[str, Any]) -> TrainPlan:
        # A preset, or a model of the user's own, comes with its own batch size, targets, rate and checkpoints.
        is_preset = self.owns_model and self.base is None
        own = ("train.batch_size", "train.label_smoothing", "optim.lr", "save.every") if is_preset else ()
        kept = {key: value for key, value in self.values.items() if key not in own}
        config = layers.resolve([Layer("recipe", {**kept, **values}), *self.asked])
        return make_plan(config, found=self.data, tell=self.tell, base=self.base, ranks=self.ranks)

    def _step_flops(self, plan: TrainPlan, rung: Rung) -> float:
        """With another tower, but the same captions and batch."""
        model = layers.resolve([Layer("recipe", rung.settings()), *self.asked]).model
        text = replace(model.text, vocab_size=plan.config.model.text.vocab_size)
        return cost.step_work(replace(plan.forecast.workload, model=replace(model, text=text))).flops
