"""What differs between a run as it began and as it would continue: settings, length, machine."""

from collections.abc import Iterator, Sequence
from typing import Any

from clipctl.config import layers
from clipctl.config.layers import Layer
from clipctl.config.sections import TrainConfig
from clipctl.errors import ConfigError, ConfigErrors
from clipctl.runs.checkpoint import Checkpoint
from clipctl.training.environment import describe_environment
from clipctl.training.optim import lr_at
from clipctl.training.plan import TrainPlan

# Settings that may change without asking: they do not change what is computed, or only for how long.
FREE_KEYS = (
    "data.max_bad",
    *("runtime.device", "runtime.workers", "runtime.threads", "runtime.recompute", "runtime.cache"),
    "runtime.shard",
    *("train.epochs", "train.steps", "train.micro_batch", "train.eval_every", "train.patience"),
    *("save.every", "save.keep_last", "save.keep_best"),
    *("data.source", "data.val", "data.image_root"),  # what lies there is compared instead
)
# What the last bits of a sum depend on, in environment.json.
BIT_FACTS = {
    "device": ("device", "name"),
    "precision": ("precision", "value"),
    "threads": ("threads", "value"),
    "torch": ("torch",),
    "numpy": ("numpy",),
    "pillow": ("pillow",),
}


def changed_keys(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Settings that differ, by key."""
    old, new = (layers.to_layer(config).values for config in (before, after))
    return {key: (old[key], new[key]) for key in old if old[key] != new[key]}


def compare_settings(
    before: TrainConfig, after: TrainConfig, asked: Sequence[Layer], *, allow_change: bool
) -> list[str]:
    notes, problems = [], []
    for key, (old, new) in changed_keys(before, after).items():
        if key in FREE_KEYS or allow_change:
            notes.append(f"{key} changed from {old} to {new}")
        else:
            was_asked = any(key in layer.values for layer in asked)
            way_back = "leave it out" if was_asked else f"write {old} into the run's config.yaml"
            hint = f"{way_back} to continue as before, or pass --allow-change"
            problems.append(ConfigError(f"the checkpoint was made with {key} {old}, not {new}", hint))
    if problems:
        raise ConfigErrors(problems)
    return notes


def compare_lengths(checkpoint: Checkpoint, before: TrainConfig, plan: TrainPlan) -> Iterator[str]:
    total_steps = plan.schedule.total_steps
    old_total = before.train.steps or before.train.epochs * plan.schedule.steps_per_epoch
    if total_steps < checkpoint.step:
        raise ConfigError(
            f"the run has already made {checkpoint.step} steps, more than the {total_steps} it would have now",
            "train for longer than that, or resume an earlier checkpoint: --resume RUN@STEP",
        )
    if total_steps != old_total:
        rates = [lr_at(checkpoint.step + 1, total, plan.config.optim) for total in (old_total, total_steps)]
        yield (
            f"the run now has {total_steps} steps instead of {old_total}: the learning rate continues at "
            f"{rates[1]:.2e} instead of {rates[0]:.2e}"
        )


def compare_environments(before: dict[str, Any], plan: TrainPlan) -> Iterator[str]:
    """Why the last bits may differ from those of an unbroken run."""
    now = describe_environment(plan)
    for noun, path in BIT_FACTS.items():
        old, new = (_at(document, path) for document in (before, now))
        if old is not None and old != new:
            yield f"{noun} changed from {old} to {new}: the last bits of the weights may differ from an unbroken run"


def _at(document: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        document = document.get(key) if isinstance(document, dict) else None
    return document
