"""How fast a plan really runs here: the first batches of its own data through its own model, timed and discarded."""

import time
from contextlib import closing
from dataclasses import dataclass
from statistics import median

from clipctl.data.batch import Batch
from clipctl.training.attempt import make_loader, make_state
from clipctl.training.features import featured
from clipctl.training.plan import TrainPlan
from clipctl.training.step import train_step

MIN_STEPS = 3  # timed; the first one before them is not, because everything is new to it
_LR = 1e-5


@dataclass(frozen=True)
class Pace:
    step_s: float  # with its data, once pictures are decoded
    first_picture_s: float  # to decode a picture for the first time, as the loader does it


def measure_pace(plan: TrainPlan, limit_s: float, longest_s: float) -> Pace:
    """Go through a few batches again and again: the first time pictures are decoded, later they are there already.

    For `limit_s`, and longer only if that is too short for a few steps; after `longest_s`, whatever was measured must
    do, even a single first step.
    """
    state, loader = make_state(plan), make_loader(plan)
    views = (plan.config.tune.views or 1) if plan.config.tune.has_features else 1
    started = time.perf_counter()
    first_steps, steps = list[float](), list[float]()
    first_s, pictures, kept = 0.0, 0, list[Batch]()
    batches_of_round = 1 if plan.schedule.steps_per_epoch < 4 else 2
    with closing(loader):
        while True:
            is_first_round, last = not first_steps, time.perf_counter()
            for place, batch in enumerate(kept or loader.epoch(1)):
                if plan.config.tune.has_features and is_first_round:  # computed once, like decoding
                    batch = featured(plan, state, batch)
                    kept.append(batch)
                loaded = time.perf_counter()
                train_step(state, batch, lr=_LR)
                plan.placement.device.synchronize()
                ended = time.perf_counter()
                if is_first_round:
                    first_s, pictures = first_s + loaded - last, pictures + len(batch.images)
                    first_steps.append(ended - loaded)
                else:
                    steps.append(ended - last)
                last = ended
                if place + 1 == batches_of_round or ended - started > longest_s:
                    break
            taken_s = time.perf_counter() - started
            if taken_s > longest_s or (len(steps) >= MIN_STEPS and taken_s > limit_s):
                return Pace(median(steps or first_steps), views * first_s / pictures)
