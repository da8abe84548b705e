"""Models on the same data: the first one, others that it is compared with, and what their scores must be judged by."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from clipctl.config.sections import DataConfig
from clipctl.data.baseline import Baseline
from clipctl.data.catalog import class_names, leakage_of, open_held_out, read_data, without_shared
from clipctl.data.source import Source
from clipctl.errors import ConfigError, DataError
from clipctl.inference import evaluation
from clipctl.inference.embedder import Embedder
from clipctl.inference.evaluation import Difference, EmbeddedData, ModelScores, ZeroShot
from clipctl.inference.labels import check_templates
from clipctl.progress import Count, Tell, silent
from clipctl.training.distributed import World


@dataclass(frozen=True)
class Comparison:
    """What `eval` reports. Shares are 0–1."""

    data: str
    pictures: int
    captions: int
    chance: dict[str, float]
    baseline: Baseline
    models: list[ModelScores]
    bad: list[dict[str, str]]

    @property
    def scores(self) -> ModelScores:
        return self.models[0]

    @property
    def recalls(self) -> dict[str, float]:
        return self.scores.recalls

    @property
    def differences(self) -> list[Difference]:
        """By how much the first model is better than each of the others."""
        return [evaluation.difference(self.scores, other) for other in self.models[1:]]

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"data": self.data, "pictures": self.pictures, "captions": self.captions}
        found |= {"chance": self.chance, "baseline_r1": self.baseline.recall, **self.scores.to_dict()}
        found["against"] = [
            {**other.to_dict(), "difference": {**gap._asdict(), "more_than_chance": gap.is_more_than_chance}}
            for other, gap in zip(self.models[1:], self.differences, strict=True)
        ]
        return {**found, "bad": self.bad}


class Classes(NamedTuple):
    """What zero-shot classification is asked for."""

    labels: list[str]
    truths: list[str | None]  # of each picture; None: it belongs to none of the classes
    templates: list[str]


class Task(NamedTuple):
    """Models, and the pictures to evaluate them on."""

    embedders: list[Embedder]
    source: Source
    training: list[Source | None]  # of each model; None: unknown, or no longer there
    classes: Classes | None


def prepare(
    embedders: Sequence[Embedder],
    data: DataConfig | None,
    labels: Sequence[str] | None = None,
    templates: Sequence[str] = (),
    tell: Tell = silent,
) -> Task:
    """Without data: what the run of the first model held out. All that can be wrong is raised here, before the work."""
    check_templates(templates)
    first = embedders[0]
    if data is None and not first.identity.is_of_run:
        name = first.identity.name
        raise ConfigError(f"{name} has no held-out pictures of its own", f"name data: clipctl eval {name} DATA")
    config = data or first.config.data
    source = open_held_out(data, tell) if data else read_data(config, tell).val
    classes = _classes(source, config.template, labels, templates)
    return Task(list(embedders), source, [_training_data(one, tell) for one in embedders], classes)


def _training_data(embedder: Embedder, tell: Tell) -> Source | None:
    if not embedder.identity.is_of_run:
        return None
    try:
        return read_data(embedder.config.data, tell).train
    except (DataError, OSError):
        return None


def _classes(source: Source, template: str, labels: Sequence[str] | None, templates: Sequence[str]) -> Classes | None:
    """For class folders, or if labels were given."""
    folders = class_names(source, template)
    if labels is None and folders is None:
        if templates:
            raise ConfigError("--template needs class folders or --classes")
        return None
    names = folders or [source.caption(number, 0) for number in range(len(source))]
    chosen = list(labels or sorted(set(names)))
    lower = {label.lower(): label for label in chosen}
    truths = [lower.get(name.lower()) for name in names]
    if not any(truths):
        raise DataError("no picture has one of these classes as its caption", f"classes: {', '.join(chosen[:10])}")
    return Classes(chosen, truths, list(templates) or [template if folders else "{}"])


def compare(
    task: Task,
    tell: Tell = silent,
    progress: Count = lambda done, total: None,
    world: World | None = None,
) -> Comparison | None:
    """None in processes that only help to embed."""
    models, embedded = list[ModelScores](), None
    for embedder, training in zip(task.embedders, task.training, strict=True):
        tell(f"embedding with {embedder.identity.name}")
        embedded = evaluation.embed_data(embedder, task.source, progress, world)
        if world is None or world.is_first:
            seen = leakage_of(training, task.source).pictures if training else None
            models.append(evaluation.scores_of(embedder, embedded, _zero_shot(embedder, embedded, task.classes), seen))
    if not models:
        return None
    assert embedded is not None
    tell("comparing with pixels")
    return Comparison(
        data=task.source.name,
        pictures=embedded.pictures,
        captions=len(embedded.captions),
        chance=evaluation.chance_recalls(embedded),
        baseline=_baseline(task, embedded),
        models=models,
        bad=[{"path": task.source.label(one.picture), "reason": one.reason} for one in embedded.bad],
    )


def _zero_shot(embedder: Embedder, data: EmbeddedData, classes: Classes | None) -> ZeroShot | None:
    if classes is None:
        return None
    bad = {one.picture for one in data.bad}
    truths = [label for number, label in enumerate(classes.truths) if number not in bad]
    return evaluation.zero_shot(embedder, data, truths, classes.labels, classes.templates)


def _baseline(task: Task, data: EmbeddedData) -> Baseline:
    """From the pictures that the first model was trained on: those to evaluate on would find themselves."""
    training, identity = task.training[0], task.embedders[0].identity
    if training is None:
        known = "is gone" if identity.is_of_run else "is unknown"
        return Baseline(None, f"the training data of {identity.name} {known}")
    if training.is_drawn:
        return Baseline(None, f"{identity.name} was trained on built-in pictures, in which no held-out caption occurs")
    return evaluation.baseline(data, without_shared(training, task.source))
