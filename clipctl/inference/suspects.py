"""Finds errors in data with a model: captions that do not fit their picture, pictures on both sides of a split.

A model that has seen a pair in training may know a wrong caption by heart. So each pair is best judged by a model that
has not: the data are cut into folds, and each fold is judged by a model trained on the others.
"""

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clipctl import files
from clipctl.data import tokenizers
from clipctl.data.catalog import Data, read_data
from clipctl.data.index.source import IndexedSource
from clipctl.data.source import Source, mix
from clipctl.errors import ConfigError, DataError, Stopped
from clipctl.hardware.profile import cache_dir
from clipctl.inference.embedder import Embedder
from clipctl.inference.evaluation import HELD_VALUES, EmbeddedData, embed_data
from clipctl.model.weights import load_model
from clipctl.progress import Count, Tell, silent
from clipctl.runs.checkpoint import Checkpoint
from clipctl.runs.rundir import RunDir, runs_root
from clipctl.runs.store import CheckpointStore, find_checkpoint
from clipctl.training.journal import Nobody, Progress
from clipctl.training.plan import make_plan
from clipctl.training.session import Session, base_of

DUPLICATE = 0.995  # cosine of two thumbnails, from which on pictures look the same
DRAWN = "built-in pictures are drawn from their captions: none can be wrong"
_FOLD_SALT = 0xF01D


@dataclass(frozen=True)
class Suspect:
    """A pair and how badly it fits."""

    path: str
    caption: str
    misfit: float  # mean of -log p(caption | picture) and -log p(picture | caption): high is bad
    suggestion: str  # the caption in the data that fits better; empty if none does
    side: str  # train or val, in the run
    fold: int = 0  # that judged it, from 1; 0: the run itself


class Unjudged(NamedTuple):
    """A pair that the run does not use: of a test split, above `data.val_limit`, or with a bad picture."""

    path: str
    caption: str
    side: str


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
    places: tuple[str, ...] = ()  # where the pictures are
    unjudged: list[Unjudged] = field(default_factory=list)


def suspects(
    run: str | Path,
    *,
    folds: int = 0,
    csv: str | Path | None = None,
    runs_dir: str | Path | None = None,
    tell: Tell = silent,
    progress: Count = lambda done, total: None,
) -> Suspicion:
    """The pairs of a run's data, those first whose caption fits the picture least; and pictures on both sides of the
    split. `folds`: judge each of so many folds by a model trained on the others. `csv`: a table to write, to edit and
    train on."""
    if csv is not None:
        files.check_parent(Path(csv))
        if Path(csv).exists():  # captions, or an earlier list with corrections
            raise ConfigError(f"{csv} already exists", "name another file")
    checkpoint = find_checkpoint(runs_root(runs_dir), str(run), default="best")
    found = find_suspects(checkpoint, folds, tell, progress, as_table=csv is not None)
    if csv is not None:
        write_csv(found, Path(csv))
    return found


def find_suspects(
    checkpoint: Checkpoint,
    folds: int = 0,
    tell: Tell = silent,
    progress: Count = lambda done, total: None,
    *,
    as_table: bool = False,
) -> Suspicion:
    """`as_table`: the pairs are to be written as a CSV to train on; raises before the work if they cannot be."""
    if folds == 1:
        raise ConfigError("--folds must be 2 or more: each fold is judged by a model trained on the others")
    embedder = Embedder.of(checkpoint)
    data = read_data(embedder.config.data, tell)
    if as_table:
        _check_files(data)
    tell("embedding the pictures")
    sides = {"train": embed_data(embedder, data.train, progress), "val": embed_data(embedder, data.val, progress)}
    sources = {"train": data.train, "val": data.val}
    labels = {side: _labels(sources[side], embedded) for side, embedded in sides.items()}
    if folds:
        suspects = _by_folds(checkpoint, data, folds, tell, progress)
    else:
        suspects = [
            one
            for side, embedded in sides.items()
            for one in _judged(embedded, labels[side], [side] * embedded.pictures, embedder.scale)
        ]
    suspects.sort(key=lambda one: -one.misfit)
    config = embedder.config.data
    places = (*config.source, *([config.val] if config.val else []))
    unjudged = _unjudged(data, {one.path for one in suspects})
    return Suspicion(suspects, _duplicates(sides, labels), folds, places, unjudged)


def _labels(source: Source, embedded: EmbeddedData) -> list[str]:
    return [source.label(number) for number in _good(source, embedded)]


def _good(source: Source, embedded: EmbeddedData) -> list[int]:
    bad = {one.picture for one in embedded.bad}
    return [number for number in range(len(source)) if number not in bad]


def _unjudged(data: Data, judged: set[str]) -> list[Unjudged]:
    """All other pairs, each in a split that leaves the run's own two as they are."""
    train, val = data.train, data.val
    if not isinstance(train, IndexedSource) or not isinstance(val, IndexedSource):
        return []
    is_divided = train.parts == val.parts  # one source, by its own split or by ours; else there is one for each side
    names = [("train", "train", "val" if is_divided else "test", "test"), ("val", "test", "val", "test")]
    found = []
    for source, words in zip([train] if is_divided else [train, val], names, strict=False):
        whole = IndexedSource.whole(source.parts, source.name)
        for number, side in enumerate(whole.sides.tolist()):
            if (path := whole.label(number)) not in judged:
                found += [Unjudged(path, caption, words[side]) for caption in whole.captions(number)]
    return found


def _check_files(data: Data) -> None:
    """Raise if a table cannot name the pictures."""
    for source in (data.train, data.val):
        if not isinstance(source, IndexedSource):
            raise DataError(DRAWN, "use data of your own")
        if any(part.facts.sharded for part in source.parts):
            raise DataError(
                "-o writes a CSV to train on, but a CSV cannot name pictures in tar shards",
                "unpack the shards and train on the directory, or leave out -o: --json and --sheet list the pairs too",
            )


# --- how badly a caption fits ---------------------------------------------------------------------------------


def _judged(
    data: EmbeddedData, labels: Sequence[str], sides: Sequence[str], scale: float, fold: int = 0
) -> list[Suspect]:
    """Every caption of every picture, against all different captions and all pictures."""
    different, text_of = data.matches.different, data.matches.text_of
    to_caption, best = _to_captions(data, scale)
    to_picture = _to_pictures(data, scale)
    suspects = []
    for caption, owner in enumerate(data.owners):
        nearest = data.captions[different[best[owner]]]
        suspects.append(
            Suspect(
                path=labels[owner],
                caption=data.captions[caption],
                misfit=float((to_caption[caption] + to_picture[caption]) / 2),
                suggestion="" if text_of[caption] == best[owner] else nearest,
                side=sides[owner],
                fold=fold,
            )
        )
    return suspects


def _to_captions(data: EmbeddedData, scale: float) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """-log p(caption | picture) of each caption, and the most likely text of each picture."""
    text, text_of, owners = data.text[data.matches.different], data.matches.text_of, data.owners
    found, best = np.empty(len(owners)), np.empty(data.pictures, dtype=np.int64)
    rows = max(1, HELD_VALUES // len(text))
    for start in range(0, data.pictures, rows):
        logits = np.float32(scale) * (data.image[start : start + rows] @ text.T)  # (B, D)
        best[start : start + rows] = logits.argmax(axis=1)
        total = _log_sum(logits)
        mine = np.flatnonzero((owners >= start) & (owners < start + rows))
        found[mine] = total[owners[mine] - start] - logits[owners[mine] - start, text_of[mine]]
    return found, best


def _to_pictures(data: EmbeddedData, scale: float) -> NDArray[np.float64]:
    """-log p(picture | caption). Pictures of equal captions share the probability, so that each of m can reach 1/m at
    most: ln m is subtracted, or the pairs of a common caption would look worse than others."""
    text_of = data.matches.text_of
    sharing = np.log(np.bincount(text_of))[text_of]
    found = np.empty(len(data.captions))
    rows = max(1, HELD_VALUES // data.pictures)
    for start in range(0, len(data.captions), rows):
        logits = np.float32(scale) * (data.text[start : start + rows] @ data.image.T)  # (B, N)
        own = logits[np.arange(len(logits)), data.owners[start : start + rows]]
        found[start : start + rows] = _log_sum(logits) - own
    return found - sharing


def _log_sum(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    highest = logits.max(axis=1)
    return np.asarray(highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1, dtype=np.float64)))


class _Teller(Nobody):
    """Reports how far a training run has got."""

    def __init__(self, tell: Tell, what: str) -> None:
        self._tell, self._what = tell, what

    def progress(self, progress: Progress) -> None:
        self._tell(f"{self._what}: step {progress.step:,} of {progress.total_steps:,}")


# --- folds ----------------------------------------------------------------------------------------------------


def _by_folds(checkpoint: Checkpoint, data: Data, folds: int, tell: Tell, progress: Count) -> list[Suspect]:
    """Each fold of the data, judged by a model trained on the others with the settings of the run."""
    whole = _joined(data)
    if len(whole) < 4 * folds:
        raise DataError(f"{len(whole):,} pictures are too few for {folds} folds", "use fewer folds")
    # By the picture's content: equal pictures are in the same fold.
    fold_of = mix(whole.picture_keys, _FOLD_SALT) % np.uint64(folds)
    config, tokenizer = load_model(checkpoint)[1:]
    base = base_of(RunDir(checkpoint.path.absolute().parents[1]), config)
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
            files.delete(run.path)
            found = Data(rest, source, data.words)
            plan = make_plan(config, tokenizer=tokenizers.from_dict(tokenizer), found=found, base=base)
            try:
                Session(plan, root, run.name).train(_Teller(tell, f"training without fold {fold + 1} of {folds}"))
            except Stopped as error:
                words = f"stopped while training without fold {fold + 1} of {folds}; finished folds are kept"
                raise Stopped(words, "The same command continues from there", error.exit_code) from None
        judge = Embedder.of(CheckpointStore(run).named("last"))
        embedded = embed_data(judge, source, progress)
        sides = ["train" if mine[number] < len(data.train) else "val" for number in _good(source, embedded)]
        suspects += _judged(embedded, _labels(source, embedded), sides, judge.scale, fold + 1)
    files.delete(root)
    return suspects


def _joined(data: Data) -> IndexedSource:
    """All pictures of both sides."""
    train, val = data.train, data.val
    if not isinstance(train, IndexedSource) or not isinstance(val, IndexedSource):
        raise DataError(DRAWN, "use data of your own")
    if train.parts == val.parts:
        return IndexedSource(train.parts, np.concatenate([train.pictures, val.pictures]), train.name)
    pictures = np.concatenate([train.pictures, val.pictures + np.int32(sum(map(len, train.parts)))])
    return IndexedSource((*train.parts, *val.parts), pictures, train.name)


# --- both sides of a split ------------------------------------------------------------------------------------


def _duplicates(sides: dict[str, EmbeddedData], labels: dict[str, list[str]]) -> list[Duplicate]:
    """Held-out pictures that look just like a training picture: scores on them are too high."""
    training, held_out = sides["train"].thumbnails, sides["val"].thumbnails
    best, nearest = np.full(len(held_out), -1.0, dtype=np.float32), np.zeros(len(held_out), dtype=np.int64)
    rows = max(1, HELD_VALUES // len(held_out))
    for start in range(0, len(training), rows):
        similarity = held_out @ training[start : start + rows].T
        found_here = similarity.argmax(axis=1)
        here = similarity[np.arange(len(held_out)), found_here]
        nearest = np.where(here > best, start + found_here, nearest)
        best = np.maximum(best, here)
    found = [
        Duplicate(labels["val"][row], labels["train"][nearest[row]], round(float(best[row]), 4))
        for row in np.flatnonzero(best >= DUPLICATE)
    ]
    return sorted(found, key=lambda one: -one.similarity)


def write_csv(suspicion: Suspicion, path: Path) -> None:
    """A CSV to edit and train on: every pair of the data, in the split that it was in, and what the model thinks."""
    with (
        files.replaced(path, durable=False) as partial,
        partial.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(["filepath", "caption", "misfit", "suggestion", "split"])
        for one in suspicion.suspects:
            writer.writerow([os.path.abspath(one.path), one.caption, f"{one.misfit:.4f}", one.suggestion, one.side])
        for other in suspicion.unjudged:
            writer.writerow([os.path.abspath(other.path), other.caption, "", "", other.side])
