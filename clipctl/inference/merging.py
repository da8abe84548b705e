"""Merged models, evaluated: which share of which model finds most."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clipctl.config.layers import Layer, resolve
from clipctl.data.catalog import open_held_out, read_data
from clipctl.data.source import Source
from clipctl.errors import ConfigError
from clipctl.inference.embedder import Embedder
from clipctl.inference.evaluation import embed_data, rank
from clipctl.interop.models import Found, load_any
from clipctl.model.merging import merge
from clipctl.model.weights import Identity, TrainedModel
from clipctl.progress import Count
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore


class Candidate(NamedTuple):
    alpha: float | None  # share of the second model; None: the average of several
    model: TrainedModel
    scores: dict[str, float]  # empty if it was not judged

    def to_dict(self) -> dict[str, Any]:
        return {"alpha": self.alpha, **self.scores}


def read_models(root: Path, names: Sequence[str]) -> list[Found]:
    """The models that the names stand for; a single name is a run, all of whose checkpoints are taken."""
    if len(names) > 1:
        return [load_any(root, name) for name in names]
    run = RunDir.find(root, names[0])
    kept = [str(one.path) for one in CheckpointStore(run).all()]
    if len(kept) < 2:
        raise ConfigError(f"{run.name} has fewer than two checkpoints to average", "train with --keep-last 5")
    return [load_any(root, path) for path in kept]


def data_to_judge_by(models: Sequence[Found], places: Sequence[str] | None) -> Source:
    """What was given, or what the last model's run held out."""
    if places:
        return open_held_out(resolve([Layer("--data", {"data.source": list(places)})]).data)
    runs = [one for one in models if one.identity.is_of_run]
    if not runs:
        raise ConfigError("these models have no held-out pictures of their own", "pass --data DATA")
    return read_data(runs[-1].model.config.data).val


def candidates(
    models: Sequence[Found], alphas: Sequence[float | None], source: Source | None, progress: Count
) -> list[Candidate]:
    """A merged model for each alpha, evaluated if there is data for it."""
    found = []
    for alpha in alphas:
        shares = [1 / len(models)] * len(models) if alpha is None else [1 - alpha, alpha]
        model = merge([one.model for one in models], shares)
        found.append(Candidate(alpha, model, {} if source is None else _recalls(model, source, progress)))
    return found


def best_of(found: Sequence[Candidate]) -> Candidate:
    return max(found, key=lambda one: one.scores.get("score", 0.0))


def _recalls(model: TrainedModel, source: Source, progress: Count) -> dict[str, float]:
    embedder = Embedder.ready(model, Identity("merged", "", ""))
    found = rank(embed_data(embedder, source, progress)).recalls()
    return {"score": (found["i2t_r1"] + found["t2i_r1"]) / 2, **found}
