"""Going on with a run: which checkpoint, under which settings, and what to tell the user about it."""

from dataclasses import dataclass
from typing import Any

from clipctl import config as configs
from clipctl.config import Layer, TrainConfig
from clipctl.errors import CheckpointError, ConfigError, ConfigErrors
from clipctl.runs.checkpoints import Checkpoint, CheckpointStore
from clipctl.runs.rundir import RunDir
from clipctl.training.optim import lr_at
from clipctl.training.plan import TrainPlan, make_plan

# Settings that may change without asking: they do not change what is computed, or only for how long.
FREE_KEYS = ("runtime.device", "runtime.workers", "runtime.threads", "train.epochs", "train.steps")
BIT_KEYS = ("runtime.device", "runtime.threads")


@dataclass(frozen=True)
class Resumption:
    plan: TrainPlan
    checkpoint: Checkpoint | None  # None: the run was ended before its first checkpoint, and starts over
    notes: tuple[str, ...]

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def is_finished(self) -> bool:
        return self.step >= self.plan.total_steps


def prepare_resumption(run: RunDir, asked: list[Layer], *, step: int | None, allow_change: bool) -> Resumption:
    """Verify the checkpoint and compare the settings, before anything is touched."""
    saved = configs.load_yaml(run.config_file)
    before, config = configs.resolve([saved]), configs.resolve([saved, *asked])
    notes = _compare(before, config, allow_change=allow_change)
    store = CheckpointStore(run.checkpoints_dir, run.name)
    checkpoint = _choose(store, step, notes)
    plan = make_plan(config)
    if checkpoint and plan.total_steps != (old_total := make_plan(before).total_steps):
        rates = [lr_at(checkpoint.step + 1, total, config.optim) for total in (old_total, plan.total_steps)]
        notes.append(
            f"the run now has {plan.total_steps} steps instead of {old_total}: the learning rate goes on at "
            f"{rates[1]:.2e} where it would have been {rates[0]:.2e}"
        )
    return Resumption(plan, checkpoint, tuple(notes))


def changed_keys(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Settings that differ, by key."""
    old, new = (configs.to_layer(config).values for config in (before, after))
    return {key: (old[key], new[key]) for key in old if old[key] != new[key]}


def _compare(before: TrainConfig, after: TrainConfig, *, allow_change: bool) -> list[str]:
    notes, problems = [], []
    for key, (old, new) in changed_keys(before, after).items():
        if key in FREE_KEYS or allow_change:
            notes.append(f"{key} is {new} now, it was {old}" + ("; bits may differ" if key in BIT_KEYS else ""))
        else:
            hint = "leave it out to go on as before, or pass --allow-change"
            problems.append(ConfigError(f"the run was started with {key} {old}, not {new}", hint))
    if problems:
        raise ConfigErrors(problems)
    return notes


def _choose(store: CheckpointStore, step: int | None, notes: list[str]) -> Checkpoint | None:
    if step is not None:
        checkpoint = next((checkpoint for checkpoint in store.all() if checkpoint.step == step), None)
        if checkpoint is None:
            steps = ", ".join(str(checkpoint.step) for checkpoint in store.all()) or "none"
            raise CheckpointError(f"the run has no checkpoint of step {step}", f"there are: {steps}")
        return checkpoint.verified()
    checkpoint, skipped = store.newest_valid()
    notes += [f"skipped damaged checkpoint {problem}" for problem in skipped]
    if checkpoint is None and skipped:
        raise CheckpointError(f"no checkpoint of the run is whole: {'; '.join(skipped)}")
    if checkpoint is None:
        notes.append("the run was ended before its first checkpoint; it starts from the beginning")
    return checkpoint
