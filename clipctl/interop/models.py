"""A MODEL argument: whatever can name a model, found and loaded.

RUN (its best checkpoint), RUN@last, RUN@STEP, RUN@base, a checkpoint's directory, what `checkpoint import` or `export`
wrote, a directory or file of transformers, open_clip or OpenAI, or a name on the hub.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from clipctl.errors import CheckpointError, RunError
from clipctl.interop import hub
from clipctl.interop.foreign import ForeignModel, Hints, recognise
from clipctl.interop.onnx_model import has_only_graphs
from clipctl.model.weights import Identity, TrainedModel, identify, load_model
from clipctl.progress import Tell, silent
from clipctl.runs.checkpoint import MANIFEST, Checkpoint
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import find_checkpoint

_ALSO = "a MODEL can also be a checkpoint, a model's directory or file, or a name on the hub: org/name"


class Found(NamedTuple):
    """A model and where it comes from."""

    model: TrainedModel
    identity: Identity
    revision: str | None = None  # of a model from the hub
    metrics: Mapping[str, float] = {}  # on held-out pictures, if it was trained here


def load_any(root: Path, text: str, hints: Hints | None = None, *, default: str = "best", tell: Tell = silent) -> Found:
    """The model that `text` names. `default`: which checkpoint to use if only a run is named."""
    place, revision = find_any(root, text, hints or Hints(), default, tell)
    if isinstance(place, Checkpoint):
        return Found(load_model(place), identify(place), None, place.manifest.metrics)
    model = place.load()
    if revision is None:
        return Found(model, Identity(place.path.name, str(place.path.absolute()), place.fingerprint))
    name = text.removeprefix(hub.PREFIX).partition("@")[0]
    return Found(model, Identity(name, f"{name}@{revision}", place.fingerprint), revision)


def find_any(
    root: Path, text: str, hints: Hints, default: str = "best", tell: Tell = silent
) -> tuple[Checkpoint | ForeignModel, str | None]:
    """Where a model is, and its revision if it is from the hub. Nothing large is read yet."""
    path = Path(text)
    if has_only_graphs(path):
        raise CheckpointError(
            f"{path} has ONNX files, which can be used, but no weights to train or to export",
            "pass the model that it was exported from",
        )
    is_other = path.exists() and not RunDir.is_run(path) and not (path / MANIFEST).exists()
    if is_other and not RunDir.is_named(root, text):
        return recognise(path, hints), None
    if hub.is_name(text) and not path.exists():
        download = hub.download(text, tell=tell)
        return recognise(download.path, hints), download.revision
    try:
        return find_checkpoint(root, text, default), None
    except RunError as error:
        raise RunError(str(error), f"{error.hint}; {_ALSO}" if error.hint else _ALSO) from None
