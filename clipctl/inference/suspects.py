"""Find what is wrong with data by a model: captions that do not fit their picture, pictures on both sides of a split.

A model that has seen a pair in training may know a wrong caption by heart. So each pair is best judged by a model that
has not: the data are cut into folds, and each fold is judged by a model trained on the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clipctl import files
from clipctl.data import tokenizers
from clipctl.data.baseline import BLOCK
from clipctl.data.catalog import Data, read_data
from clipctl.data.index.source import IndexedSource
from clipctl.data.source import Source, mix
from clipctl.errors import DataError
from clipctl.hardware.profile import cache_dir
from clipctl.inference.embedder import Embedder, Vectors
from clipctl.inference.evaluation import EmbeddedData, embed_data
from clipctl.model.weights import load_model
from clipctl.progress import Count, Tell, silent
from clipctl.runs.checkpoint import Checkpoint
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from clipctl.training.plan import make_plan
from clipctl.training.session import Session

DUPLICATE = 0.995  # cosine of two thumbnails, from which on pictures look the same
MOST_COMPARED = 20_000  # training pictures looked through for duplicates
_FOLD_SALT = 0xF01D


@dataclass(frozen=True)
class Suspect:
    """A pair and how badly it fits."""

    path: str
    caption: str
    misfit: float  # mean of -log p(caption | picture) and -log p(picture | caption): high is bad
    suggestion: str  # the caption in the data that fits best
    side: str  # train, val, or the fold


@dataclass(frozen=True)
class Duplicate:
    held_out: str
    training: str
    similarity: float


@dataclass(frozen=True)
class Suspicion:
    suspects: list[Suspect]  # worst first
    duplicates: list[Duplicate]
    folds: int  # 0: judged by the run itself


def find_suspects(
    checkpoint: Checkpoint,
    folds: int = 0,
    tell: Tell = silent,
    progress: Count = lambda done, total: None,
) -> Suspicion:
    embedder = Embedder.of(checkpoint)
    data = read_data(embedder.config.data, tell)
    tell("embedding the pictures")
    sides = {"train": embed_data(embedder, data.train, progress), "val": embed_data(embedder, data.val, progress)}
    sources = {"train": data.train, "val": data.val}
    labels = {side: _labels(sources[side], embedded) for side, embedded in sides.items()}
    if folds:
        suspects = _by_folds(checkpoint, data, folds, tell, progress)
    else:
        suspects = [one for side in sides for one in _judged(sides[side], labels[side], embedder.scale, side)]
    suspects.sort(key=lambda one: -one.misfit)
    return Suspicion(suspects, _duplicates(sides, labels), folds)


def _labels(source: Source, embedded: EmbeddedData) -> list[str]:
    bad = {one.picture for one in embedded.bad}
    return [source.label(number) for number in range(len(source)) if number not in bad]


# --- how badly a caption fits ---------------------------------------------------------------------------------


def _judged(data: EmbeddedData, labels: Sequence[str], scale: float, side: str) -> list[Suspect]:
    """Every caption of every picture, against all different captions and all pictures."""
    different, inverse = np.unique(data.captions, return_inverse=True)
    first = np.unique(inverse, return_index=True)[1]
    text = data.text[first]  # (D, E)
    to_caption, best = _minus_log(data.image, text, inverse, data.owners, scale)
    to_picture = _minus_log_pictures(data, scale)
    return [
        Suspect(
            path=labels[owner],
            caption=data.captions[caption],
            misfit=float((to_caption[caption] + to_picture[caption]) / 2),
            suggestion=str(different[best[owner]]),
            side=side,
        )
        for caption, owner in enumerate(data.owners)
    ]


def _minus_log(
    image: Vectors, text: Vectors, inverse: NDArray[np.int64], owners: NDArray[np.int64], scale: float
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """-log p(caption | picture) of each caption, and the most likely caption of each picture."""
    found, best = np.empty(len(owners)), np.empty(len(image), dtype=np.int64)
    for start in range(0, len(image), BLOCK):
        logits = scale * (image[start : start + BLOCK] @ text.T).astype(np.float64)  # (B, D)
        best[start : start + BLOCK] = logits.argmax(axis=1)
        total = _log_sum(logits)
        mine = np.flatnonzero((owners >= start) & (owners < start + BLOCK))
        found[mine] = total[owners[mine] - start] - logits[owners[mine] - start, inverse[mine]]
    return found, best


def _minus_log_pictures(data: EmbeddedData, scale: float) -> NDArray[np.float64]:
    """-log p(picture | caption): the probability is shared by all pictures that the caption is right for."""
    found = np.empty(len(data.captions))
    for start in range(0, len(data.captions), BLOCK):
        logits = scale * (data.text[start : start + BLOCK] @ data.image.T).astype(np.float64)  # (B, N)
        own = logits[np.arange(len(logits)), data.owners[start : start + BLOCK]]
        found[start : start + BLOCK] = _log_sum(logits) - own
    return found


def _log_sum(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    highest = logits.max(axis=1)
    return np.asarray(highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1)))


# --- folds ----------------------------------------------------------------------------------------------------


def _by_folds(checkpoint: Checkpoint, data: Data, folds: int, tell: Tell, progress: Count) -> list[Suspect]:
    """Each part of the data, judged by a model that was trained on the others as the run was."""
    whole = _joined(data)
    if len(whole) < 4 * folds:
        raise DataError(f"{len(whole):,} pictures are too few for {folds} folds", "use fewer folds")
    # By the picture's content: equal pictures are in the same fold.
    fold_of = mix(whole.picture_keys, _FOLD_SALT) % np.uint64(folds)
    config, tokenizer = load_model(checkpoint)[1:]
    what = f"{checkpoint.manifest.run_id} {checkpoint.step} {whole.fingerprint} {folds}"
    root = cache_dir("folds") / sha256(what.encode()).hexdigest()[:20]
    suspects = []
    for fold in range(folds):
        mine = np.flatnonzero(fold_of == fold)
        source = whole.select(mine)
        rest = whole.select(np.flatnonzero(fold_of != fold))
        run = RunDir(root / f"fold-{fold + 1}")
        status = run.status() if run.path.is_dir() else None
        if status is None or status.state != "finished":
            tell(f"training on all but fold {fold + 1} of {folds}")
            files.delete(run.path)
            plan = make_plan(config, tokenizer=tokenizers.from_dict(tokenizer), found=Data(rest, source, data.words))
            Session(plan, root, run.name).train()
        judge = Embedder.of(CheckpointStore(run).named("last"))
        embedded = embed_data(judge, source, progress)
        suspects += _judged(embedded, _labels(source, embedded), judge.scale, f"fold {fold + 1}")
    files.delete(root)
    return suspects


def _joined(data: Data) -> IndexedSource:
    """All pictures of both sides."""
    train, val = data.train, data.val
    if not isinstance(train, IndexedSource) or not isinstance(val, IndexedSource):
        raise DataError("built-in pictures are drawn from their captions: none can be wrong", "judge data of your own")
    if train.parts == val.parts:
        return IndexedSource(train.parts, np.concatenate([train.pictures, val.pictures]), train.name)
    pictures = np.concatenate([train.pictures, val.pictures + np.int32(sum(map(len, train.parts)))])
    return IndexedSource((*train.parts, *val.parts), pictures, train.name)


# --- both sides of a split ------------------------------------------------------------------------------------


def _duplicates(sides: dict[str, EmbeddedData], labels: dict[str, list[str]]) -> list[Duplicate]:
    """Held-out pictures that look just like a training picture: scores on them are too good."""
    training = sides["train"].thumbnails[:MOST_COMPARED]
    found = []
    for start in range(0, len(sides["val"].thumbnails), BLOCK):
        similarity = sides["val"].thumbnails[start : start + BLOCK] @ training.T
        for row, nearest in enumerate(similarity.argmax(axis=1)):
            if similarity[row, nearest] >= DUPLICATE:
                names = labels["val"][start + row], labels["train"][nearest]
                found.append(Duplicate(*names, round(float(similarity[row, nearest]), 4)))
    return sorted(found, key=lambda one: -one.similarity)


def write_csv(suspicion: Suspicion, path: Path) -> None:
    """To be edited and used as data: path, caption, then what the model thinks."""
    import csv

    with files.replaced(path, durable=False) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["filepath", "caption", "misfit", "suggestion", "side"])
        for one in suspicion.suspects:
            writer.writerow([one.path, one.caption, f"{one.misfit:.4f}", one.suggestion, one.side])
