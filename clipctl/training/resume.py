"""Going on with a run: which checkpoint, under which settings, and what to tell the user about it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from clipctl.config import layers
from clipctl.config.layers import Layer
from clipctl.config.sections import TrainConfig
from clipctl.data import tokenizers
from clipctl.data.source import Tell, silent
from clipctl.errors import CheckpointError, ConfigError, ConfigErrors, DataError, NewerCheckpointError
from clipctl.runs.checkpoint import Checkpoint
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from clipctl.training.environment import describe_environment, setting_of
from clipctl.training.optim import lr_at
from clipctl.training.plan import TrainPlan, make_plan

# Settings that may change without asking: they do not change what is computed, or only for how long.
FREE_KEYS = (
    *("runtime.device", "runtime.workers", "runtime.threads", "runtime.recompute", "runtime.cache"),
    *("train.epochs", "train.steps"),
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


def prepare_resumption(
    run: RunDir, asked: list[Layer], *, which: str | None, allow_change: bool, tell: Tell = silent
) -> Resumption:
    """Verify the checkpoint and compare settings, data and machine, before anything is touched."""
    saved = layers.load_yaml(run.config_file)
    config = layers.resolve([saved, *asked])
    notes: list[str] = []
    checkpoint = _choose(CheckpointStore(run), which, notes)
    if checkpoint is None:
        plan = make_plan(config, tell=tell)  # nothing is lost if it is made otherwise now
        notes += _compare(layers.resolve([saved]), config, asked, allow_change=allow_change)
        return Resumption(plan, None, tuple(notes))
    facts = checkpoint.read_state()
    try:
        before = layers.from_dict(facts["config"], str(checkpoint.path))
        fingerprint = facts["data_fingerprint"]
        saved_tokenizer = tokenizers.from_dict(facts["tokenizer"])
    except (KeyError, AttributeError):
        raise CheckpointError(f"{checkpoint.path} does not say with which settings it was made") from None
    notes += _compare(before, config, asked, allow_change=allow_change)
    is_same = config.data.tokenizer == before.data.tokenizer and config.model.text == before.model.text
    setting = setting_of(run.read_environment())
    plan = make_plan(config, before=setting, tokenizer=saved_tokenizer if is_same else None, tell=tell)
    if fingerprint != plan.data_fingerprint and not allow_change:
        raise DataError(
            f"{' + '.join(plan.config.data.source)} has changed since the run was stopped: other pictures or captions",
            "bring the old data back, or pass --allow-change to go on with the new",
        )
    notes += [*_compare_lengths(checkpoint, before, plan), *_compare_environments(run.read_environment(), plan)]
    return Resumption(plan, checkpoint, tuple(notes))


def changed_keys(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Settings that differ, by key."""
    old, new = (layers.to_layer(config).values for config in (before, after))
    return {key: (old[key], new[key]) for key in old if old[key] != new[key]}


def _compare(before: TrainConfig, after: TrainConfig, asked: list[Layer], *, allow_change: bool) -> list[str]:
    notes, problems = [], []
    for key, (old, new) in changed_keys(before, after).items():
        if key in FREE_KEYS or allow_change:
            notes.append(f"{key} is {new} now, it was {old}")
        else:
            was_asked = any(key in layer.values for layer in asked)
            way_back = "leave it out" if was_asked else f"write {old} into the run's config.yaml"
            hint = f"{way_back} to go on as before, or pass --allow-change"
            problems.append(ConfigError(f"the checkpoint was made with {key} {old}, not {new}", hint))
    if problems:
        raise ConfigErrors(problems)
    return notes


def _compare_lengths(checkpoint: Checkpoint, before: TrainConfig, plan: TrainPlan) -> Iterator[str]:
    old_total = before.train.steps or before.train.epochs * plan.steps_per_epoch
    if plan.total_steps != old_total:
        rates = [lr_at(checkpoint.step + 1, total, plan.config.optim) for total in (old_total, plan.total_steps)]
        yield (
            f"the run now has {plan.total_steps} steps instead of {old_total}: the learning rate goes on at "
            f"{rates[1]:.2e} where it would have been {rates[0]:.2e}"
        )


def _compare_environments(before: dict[str, Any], plan: TrainPlan) -> Iterator[str]:
    """Where the last bits may come out otherwise than in an unbroken run."""
    now = describe_environment(plan)
    for noun, path in BIT_FACTS.items():
        old, new = (_at(document, path) for document in (before, now))
        if old is not None and old != new:
            yield f"{noun} is {new} now, it was {old}: the last bits of the weights may differ from an unbroken run"


def _at(document: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _choose(store: CheckpointStore, which: str | None, notes: list[str]) -> Checkpoint | None:
    if which is not None:
        return store.verified(store.named(which))
    entries = store.inventory()
    for entry in entries:
        if entry.kind == "newer":
            raise NewerCheckpointError("; ".join(entry.problems), "upgrade clipctl, or name an older one: RUN@STEP")
    checkpoint, skipped = store.newest_valid()
    strange = [f"{entry.path.name}: {'; '.join(entry.problems)}" for entry in entries if entry.kind == "strange"]
    if checkpoint is None and strange:
        raise CheckpointError(f"none of the run's checkpoints can be used: {'; '.join([*strange, *skipped])}")
    notes += [f"skipped damaged checkpoint {problem}" for problem in skipped]
    if checkpoint is None and skipped:
        raise CheckpointError(f"no checkpoint of the run is whole: {'; '.join(skipped)}")
    if checkpoint is None:
        notes.append("the run was ended before its first checkpoint; it starts from the beginning")
    return checkpoint
