"""How good a model is on data: recall as papers count it, with intervals, next to chance and an untrained baseline.

N pictures, C captions, E dimensions. Every caption of every picture counts. A rank is the number of wrong candidates
that are at least as similar as the best right one, so that ties count against the model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipctl.data.bad import USABLE_HINT, BadPicture, BadPictureError, bad_counts
from clipctl.data.baseline import SIDE_PX, Baseline, nearest_pixels_recall, thumbnail
from clipctl.data.decoding import Pixels, to_pixels
from clipctl.data.held_out import Matches
from clipctl.data.source import Source
from clipctl.errors import DataError
from clipctl.inference.embedder import Embedder, Vectors
from clipctl.inference.labels import embed_labels
from clipctl.inference.stream import embed_stream
from clipctl.progress import Count
from clipctl.training.distributed import World, raised_in_all
from clipctl.training.evaluate import BAND_QUERIES, accuracy_by_band, find_ranks, negative_bands

RECALLS = (1, 5, 10)
RESAMPLES, CONFIDENCE = 1000, 0.95
CALIBRATED_ON = 2000  # pictures, at most
LEAST_SHARE = 1e-12  # so that one picture without hope does not decide the temperature
CACHED_VALUES = 500_000  # so few that computing with them again and again does not wait for memory
HELD_VALUES = 30_000_000  # at the same time, at most: what bounds the memory however large the data are


@dataclass(frozen=True)
class EmbeddedData:
    """Pictures and captions of a dataset, as a model sees them."""

    image: Vectors  # (N, E)
    text: Vectors  # (C, E): first captions in the order of pictures, then all others
    owners: NDArray[np.int64]  # (C,): the picture of each caption
    captions: list[str]
    matches: Matches
    thumbnails: NDArray[np.float32]  # (N, 768)
    bad: list[BadPicture]

    @property
    def pictures(self) -> int:
        return len(self.image)


def embed_data(
    embedder: Embedder, source: Source, progress: Count = lambda done, total: None, world: World | None = None
) -> EmbeddedData:
    """Several processes embed a part each, and all get the whole."""
    thumbnails: dict[int, NDArray[np.float32]] = {}

    def decode(number: int) -> Pixels:
        pixels = np.array(source.square(number, embedder.size_px))
        thumbnails[number] = thumbnail(pixels)
        return pixels

    vectors, good, bad = list[Vectors](), list[int](), list[BadPicture]()
    for batch in embed_stream(embedder, decode, range(len(source)), world=world):
        vectors.append(batch.vectors)
        good += batch.numbers.tolist()
        bad += batch.bad
        progress(len(good) + len(bad), len(source))
    if len(good) < 2:
        reasons = bad_counts(one.reason for one in bad)
        with raised_in_all():
            raise DataError(f"too few of the {len(source):,} pictures can be used: {reasons}", USABLE_HINT)
    texts = [source.captions(number) for number in good]
    others = [(owner, text) for owner, several in enumerate(texts) for text in several[1:]]
    captions = [*(several[0] for several in texts), *(text for _, text in others)]
    owners = np.array([*range(len(good)), *(owner for owner, _ in others)], dtype=np.int64)
    different = list(dict.fromkeys(captions))
    numbers = {text: number for number, text in enumerate(different)}
    embedded = _embed_texts(embedder, different, world)[[numbers[text] for text in captions]]
    matches = Matches(owners.tolist(), captions, source.picture_keys[good])
    for others_found in world.all_of(thumbnails) if world else ():
        thumbnails |= others_found
    stacked = np.stack([thumbnails[number] for number in good])
    return EmbeddedData(np.concatenate(vectors), embedded, owners, captions, matches, stacked, bad)


def check_same(world: World, embedders: Sequence[Embedder], source: Source) -> None:
    """Raise in all processes if they do not have the same data and models."""
    facts = [source.fingerprint, *(embedder.identity.fingerprint for embedder in embedders)]
    for rank, other in enumerate(found := world.all_of(facts)):
        if other != found[0]:
            with raised_in_all():
                words = f"rank {rank} has different data or models from rank 0"
                raise DataError(words, "copy the same to every machine")


def _embed_texts(embedder: Embedder, texts: Sequence[str], world: World | None) -> Vectors:
    if world is None:
        return embedder.embed_texts(texts)
    first, last = (len(texts) * rank // world.size for rank in (world.rank, world.rank + 1))
    return np.concatenate(world.all_of(embedder.embed_texts(texts[first:last])))


# --- retrieval ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """Wrong candidates before the best right one: of each picture (N,), and of each caption (C,)."""

    i2t: NDArray[np.int64]
    t2i: NDArray[np.int64]
    owners: NDArray[np.int64]

    def recalls(self) -> dict[str, float]:
        """`i2t_r1` … `t2i_r10`, and median ranks, the best rank being 1."""
        found = {f"{side}_r{k}": float((ranks < k).mean()) for side, ranks in self._sides for k in RECALLS}
        return found | {f"{side}_median_rank": float(np.median(ranks)) + 1 for side, ranks in self._sides}

    @property
    def _sides(self) -> tuple[tuple[str, NDArray[np.int64]], ...]:
        return ("i2t", self.i2t), ("t2i", self.t2i)

    def resampled(self) -> dict[str, NDArray[np.float64]]:
        """Each recall as it might have come out with other pictures of the same kind (bootstrap).

        Pictures are drawn with replacement, each with all its captions. The seed is fixed, so that two models on the
        same data are resampled alike and can be subtracted.
        """
        pictures = len(self.i2t)
        count = np.bincount(self.owners, minlength=pictures).astype(np.float64)
        hits: dict[
            str, tuple[NDArray[np.float64], NDArray[np.float64]]
        ] = {}  # each picture's share in the numerator and in the denominator
        for k in RECALLS:
            right = (self.t2i < k).astype(np.float64)
            found = np.asarray(np.bincount(self.owners, weights=right, minlength=pictures), dtype=np.float64)
            hits[f"i2t_r{k}"] = ((self.i2t < k).astype(np.float64), np.ones(pictures))
            hits[f"t2i_r{k}"] = (found, count)
        rng, drawn = np.random.default_rng(0), list[dict[str, NDArray[np.float64]]]()
        at_a_time = max(1, HELD_VALUES // pictures)
        for start in range(0, RESAMPLES, at_a_time):
            rounds = min(at_a_time, RESAMPLES - start)
            weights = rng.multinomial(pictures, np.full(pictures, 1 / pictures), size=rounds).astype(np.float64)
            drawn.append({key: (weights @ above) / (weights @ below) for key, (above, below) in hits.items()})
        return {key: np.concatenate([part[key] for part in drawn]) for key in hits}


def rank(data: EmbeddedData) -> Ranks:
    i2t, t2i = find_ranks(torch.from_numpy(data.image), torch.from_numpy(data.text), data.matches)
    return Ranks(i2t.numpy(), t2i.numpy(), data.owners)


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """The middle 95% of resampled values."""
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def chance_recalls(data: EmbeddedData) -> dict[str, float]:
    """Expected recall at 1 of a model that guesses."""
    return dict(zip(("i2t_r1", "t2i_r1"), data.matches.chance_recalls(), strict=True))


def _spread(data: EmbeddedData, most: int) -> NDArray[np.int64]:
    """Evenly spaced pictures, few enough to compare each with everything."""
    count = max(2, min(data.pictures, most, HELD_VALUES // len(data.captions)))
    return np.arange(count) * data.pictures // count


def difficulty(data: EmbeddedData) -> list[float | None]:
    """Accuracy against easy, medium and hard negatives: thirds by the words that captions share."""
    queries = _spread(data, BAND_QUERIES)
    right = data.matches.rows(queries)[:, : data.pictures]
    bands = negative_bands(data.captions[: data.pictures], queries, right)
    first = torch.from_numpy(data.text[: data.pictures])
    return accuracy_by_band(torch.from_numpy(data.image), first, queries, bands)


def baseline(data: EmbeddedData, trained_on: Source) -> Baseline:
    """What the nearest training picture by pixels finds."""

    def pixels(index: int) -> Pixels | None:
        try:
            return to_pixels(trained_on.picture(index, SIDE_PX * 2))
        except BadPictureError:
            return None

    return nearest_pixels_recall(data.matches, data.thumbnails, trained_on, pixels)


# --- the space itself -----------------------------------------------------------------------------------------


def modality_gap(data: EmbeddedData) -> float:
    """Distance between the mean picture and the mean caption: 0 if they fill the same part of the sphere, up to 2."""
    return float(np.linalg.norm(data.image.mean(axis=0) - data.text.mean(axis=0)))


class Calibration(NamedTuple):
    """Whether the model is as confident as it is accurate when it picks a caption for each picture."""

    sure: float  # mean probability of what it picks
    right: float  # share of its picks that are right
    error: float  # expected calibration error: mean distance of the two, in ten bins
    temperature: float  # the model's own
    fitting_temperature: float  # at which it would be as sure as it is right


def calibration(data: EmbeddedData, scale: float) -> Calibration:
    """On distinct captions only: equal ones would share a probability."""
    different = data.matches.different
    # Of a grid of temperatures, the one fits at which the right captions have the highest likelihood.
    scales = np.exp(np.linspace(math.log(1.0), math.log(200.0), 60))
    losses = np.zeros(len(scales))
    sure, is_right = list[NDArray[np.float32]](), list[NDArray[np.bool_]]()
    chosen = _spread(data, CALIBRATED_ON)
    for start in range(0, len(chosen), rows := max(1, CACHED_VALUES // len(different))):
        pictures = chosen[start : start + rows]
        similarity = torch.from_numpy((data.image[pictures] @ data.text.T)[:, different])  # (B, D)
        right = torch.from_numpy(data.matches.rows(pictures)[:, different])
        best, picks = similarity.max(dim=1, keepdim=True)
        similarity -= best  # the shares of a softmax stay the same, and no exponential is too large
        sure.append((1 / _weights(similarity, scale)).numpy())
        is_right.append(right.gather(1, picks).squeeze(1).numpy())
        # Only those of right captions; -inf fills up the rows of pictures that have fewer.
        at_right = similarity.masked_fill(~right, -math.inf).topk(int(right.sum(dim=1).max())).values
        for number, one in enumerate(scales.tolist()):
            shares = _weights(at_right, one) / _weights(similarity, one)
            losses[number] -= float(shares.clamp(min=LEAST_SHARE).log().sum())
    fitting = float(scales[int(np.argmin(losses))])
    return _calibrated(np.concatenate(sure), np.concatenate(is_right), 1 / scale, 1 / fitting)


def _calibrated(
    sure: NDArray[np.float32], is_right: NDArray[np.bool_], temperature: float, fitting_temperature: float
) -> Calibration:
    bins = np.minimum((sure * 10).astype(int), 9)
    error = sum(
        (bins == number).mean() * abs(sure[bins == number].mean() - is_right[bins == number].mean())
        for number in np.unique(bins)
    )
    return Calibration(float(sure.mean()), float(is_right.mean()), float(error), temperature, fitting_temperature)


def _weights(similarity: Tensor, scale: float) -> Tensor:
    return (scale * similarity).exp_().sum(dim=1)


# --- zero-shot ------------------------------------------------------------------------------------------------


class ClassScore(NamedTuple):
    label: str
    pictures: int
    top1: float


class ZeroShot(NamedTuple):
    top1: float
    top5: float
    classes: list[ClassScore]
    left_out: int  # pictures whose caption is none of the classes


def zero_shot(
    embedder: Embedder,
    data: EmbeddedData,
    truths: Sequence[str | None],
    labels: Sequence[str],
    templates: Sequence[str],
) -> ZeroShot:
    """Which of the labels each picture gets, against the one it should get; None: it belongs to none of them."""
    numbers = {label: number for number, label in enumerate(labels)}
    known = [(picture, numbers[label]) for picture, label in enumerate(truths) if label in numbers]
    if not known:
        raise DataError("no picture has one of these classes as its caption", f"classes: {', '.join(labels[:10])}")
    pictures, truth = (np.array(column) for column in zip(*known, strict=True))
    similarity = data.image[pictures] @ embed_labels(embedder, labels, templates).T  # (P, L)
    own = similarity[np.arange(len(truth)), truth]
    ranks = (similarity >= own[:, None]).sum(axis=1) - 1
    classes = [
        ClassScore(label, int((truth == number).sum()), float((ranks[truth == number] < 1).mean()))
        for number, label in enumerate(labels)
        if (truth == number).any()
    ]
    return ZeroShot(float((ranks < 1).mean()), float((ranks < 5).mean()), classes, len(truths) - len(known))


# --- all of it ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelScores:
    """What `eval` reports for one model. Shares are 0–1."""

    name: str
    recalls: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    resamples: dict[str, NDArray[np.float64]]
    difficulty: list[float | None]
    modality_gap: float
    calibration: Calibration
    zero_shot: ZeroShot | None = None
    trained_on: int | None = None  # how many of these pictures are in its training data; None: unknown

    @property
    def score(self) -> float:
        """The mean of both recalls at 1."""
        return (self.recalls["i2t_r1"] + self.recalls["t2i_r1"]) / 2

    def to_dict(self) -> dict[str, Any]:
        easy, medium, hard = self.difficulty
        found: dict[str, Any] = {"model": self.name, "score": self.score, **self.recalls}
        found["intervals"] = {key: list(bounds) for key, bounds in self.intervals.items()}
        found |= {"accuracy_easy": easy, "accuracy_medium": medium, "accuracy_hard": hard}
        found["trained_on"] = self.trained_on
        found |= {"modality_gap": self.modality_gap, "calibration": self.calibration._asdict()}
        if self.zero_shot is not None:
            found |= {"zero_shot_top1": self.zero_shot.top1, "zero_shot_top5": self.zero_shot.top5}
            found["classes"] = [one._asdict() for one in self.zero_shot.classes]
        return found


def scores_of(
    embedder: Embedder, data: EmbeddedData, naming: ZeroShot | None = None, trained_on: int | None = None
) -> ModelScores:
    ranks = rank(data)
    resamples = ranks.resampled()
    return ModelScores(
        name=embedder.identity.name,
        recalls=ranks.recalls(),
        intervals={key: interval(values) for key, values in resamples.items()},
        resamples=resamples,
        difficulty=difficulty(data),
        modality_gap=modality_gap(data),
        calibration=calibration(data, embedder.scale),
        zero_shot=naming,
        trained_on=trained_on,
    )


class Difference(NamedTuple):
    """How much better another model is, by the mean of both recalls at 1."""

    value: float
    low: float
    high: float

    @property
    def is_more_than_chance(self) -> bool:
        return self.low > 0 or self.high < 0


def difference(first: ModelScores, other: ModelScores) -> Difference:
    """By how much the first scores higher. Paired: both are resampled alike, so that variation from the data cancels
    out."""
    drawn = [(one.resamples["i2t_r1"] + one.resamples["t2i_r1"]) / 2 for one in (first, other)]
    return Difference(first.score - other.score, *interval(drawn[0] - drawn[1]))
