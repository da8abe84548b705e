"""What to know about a dataset before training on it. No torch."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clipctl.config.sections import DataConfig
from clipctl.data.bad import BadPictureError, too_few_held_out, too_many_bad
from clipctl.data.catalog import Data, is_classes, leakage_notes, leakage_of, read_data, too_few_pairs
from clipctl.data.decoding import picture_size
from clipctl.data.index.source import IndexedSource
from clipctl.data.sampling import loss_floor, plan_epoch
from clipctl.data.source import Source, key_of
from clipctl.data.tokenizers import caption_fit, make_tokenizer
from clipctl.errors import DataError
from clipctl.hardware.cpu import usable_cores
from clipctl.hardware.processes import Helpers
from clipctl.progress import Count, Tell

SAMPLED_PICTURES = 64  # of each split, decoded unless all are
SHOWN_PAIRS = 3
TIMED_PICTURES = 8
SAMPLED_CAPTIONS = 200_000  # whose words are counted
CHUNK = 32  # pictures per task for a helper process


class Look(NamedTuple):
    """One picture, decoded."""

    label: str
    reason: str | None  # why it cannot be used; None if it can
    width: int
    height: int
    seconds: float
    key: int  # equal for equal bytes


@dataclass(frozen=True)
class Sample:
    """One pair, as training gets it."""

    path: str
    caption: str


@dataclass(frozen=True)
class Spread:
    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: "NDArray[Any] | Sequence[float]") -> "Spread | None":
        if not len(values):
            return None
        low, middle, high = (float(value) for value in np.percentile(values, [0, 50, 100]))
        return cls(low, middle, high)


@dataclass(frozen=True)
class Inspection:
    """What `data inspect --json` prints."""

    source: list[str]
    understood: list[str]
    pictures: int
    captions: int
    train_pictures: int
    held_out_pictures: int
    captions_per_picture: Spread | None
    caption_characters: Spread | None
    captions_cut: int
    context: int
    tokenizer: str
    vocabulary: int  # of the tokenizer
    distinct_words: int
    equal_captions: int  # captions that occur more than once
    equal_pictures: int
    compared_by: str  # bytes or names
    leaked_pictures: int
    leaked_captions: int
    loss_floor: float
    batch_size: int
    decoded: int  # pictures that were decoded
    width_px: Spread | None
    height_px: Spread | None
    decode_images_per_s: float | None  # on one core
    bad: dict[str, str]  # pictures that cannot be used, and why
    samples: list[Sample]
    classes: int | None  # if the data are class folders: how many; equal captions are normal then
    notes: list[str]
    problems: list[str]  # why `clipctl train` would refuse the data, and the way out

    @property
    def bad_by_reason(self) -> dict[str, int]:
        return dict(Counter(self.bad.values()).most_common())

    @property
    def ready(self) -> bool:
        """Whether `clipctl train` would take the data."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bad_by_reason": self.bad_by_reason, "ready": self.ready}


def inspect_data(
    config: DataConfig, *, size_px: int, context: int, batch_size: int, deep: bool, progress: Count, tell: Tell
) -> tuple[Data, Inspection]:
    """Look at all captions, and at a sample of the pictures, or at all of them if `deep`."""
    data = read_data(config, tell)
    train, val = data.train, data.val
    looks = list(look_at_all(data, size_px, progress) if deep else _look_at_some(data, size_px))
    bad = dict.fromkeys(data.missing, "missing") | {one.label: one.reason for one in looks if one.reason}
    good = [one for one in looks if not one.reason]

    counts = np.concatenate([train.caption_counts, val.caption_counts])
    picture_keys = np.concatenate([train.picture_keys, val.picture_keys])
    tokenizer = make_tokenizer(config.tokenizer, train, context)
    fit = caption_fit(tokenizer, train)
    leakage = leakage_of(train, val)
    batch_size = min(batch_size, max(2, len(train)))
    return data, Inspection(
        source=list(config.source),
        understood=list(data.words),
        pictures=len(counts) + len(data.missing),
        captions=int(counts.sum()),
        train_pictures=len(train),
        held_out_pictures=len(val),
        captions_per_picture=Spread.of(counts),
        caption_characters=Spread.of(train.caption_lengths()),
        captions_cut=fit.cut,
        context=context,
        tokenizer=config.tokenizer,
        vocabulary=tokenizer.vocab_size,
        distinct_words=_distinct_words(train),
        equal_captions=_repeated(np.concatenate([train.all_caption_keys(), val.all_caption_keys()])),
        equal_pictures=_repeated(np.array([one.key for one in looks]) if deep else picture_keys),
        compared_by="bytes" if deep or _compared_by_bytes(train) else "names",
        leaked_pictures=leakage.pictures,
        leaked_captions=leakage.captions,
        loss_floor=loss_floor(train, plan_epoch(train, batch_size, seed=0, epoch=1)) if len(train) else 0.0,
        batch_size=batch_size,
        decoded=len(looks),
        width_px=Spread.of([one.width for one in good]),
        height_px=Spread.of([one.height for one in good]),
        decode_images_per_s=1 / median(one.seconds for one in good) if good else None,
        bad=bad,
        samples=[Sample(train.label(index), train.caption(index, 0)) for index in sample_of(train, SHOWN_PAIRS)],
        classes=len(np.unique(train.all_caption_keys())) if is_classes(train) else None,
        notes=[*data.notes, *leakage_notes(leakage._replace(captions=0))],
        problems=[f"{problem}; {problem.hint}" for problem in _problems(data, config, bad, len(looks))],
    )


def _problems(data: Data, config: DataConfig, bad: dict[str, str], decoded: int) -> Iterator[DataError]:
    """What training would raise, at once or later; of the pictures that exist, `decoded` were looked at."""
    if problem := too_few_pairs(data, config) or too_few_held_out(len(data.val), _bad_of(data.val, bad)):
        yield problem
    missing = len(data.missing)
    broken = (len(bad) - missing) / max(1, decoded)  # share
    estimate = missing + round(broken * (data.pictures - missing))
    if problem := too_many_bad(bad, data.pictures, config.max_bad, estimate):
        yield problem


def _bad_of(source: Source, bad: dict[str, str]) -> list[str]:
    """The reasons of those that belong to the source."""
    return [bad[label] for label in map(source.label, range(len(source))) if label in bad]


# --- pictures -------------------------------------------------------------------------------------------------


def sample_of(source: Source, count: int = SAMPLED_PICTURES) -> list[int]:
    """Evenly spaced indices."""
    count = min(count, len(source))
    return [number * len(source) // count for number in range(count)]


def _look_at_some(data: Data, size_px: int) -> Iterator[Look]:
    for side in (data.train, data.val):
        yield from (look(side, index, size_px) for index in sample_of(side))


def look(source: Source, index: int, size_px: int) -> Look:
    """Decode a picture and report what was found."""
    label, key, size = source.label(index), index, (size_px, size_px)
    started = time.perf_counter()
    try:
        source.picture(index, size_px)
        seconds = time.perf_counter() - started
        if isinstance(source, IndexedSource):
            content = source.content(index)
            key, size = key_of(content), picture_size(content)
        else:
            key = source.picture_key(index)
    except BadPictureError as error:
        return Look(label, str(error), 0, 0, 0.0, source.picture_key(index))
    return Look(label, None, *size, seconds, key)


def decode_seconds(source: Source, side_px: int) -> float:
    """Time to decode a picture on one core, measured on a few of them."""
    times = []
    for index in sample_of(source, TIMED_PICTURES):
        one = look(source, index, side_px)
        if one.reason is None:
            times.append(one.seconds)
    return median(times) if times else 0.0


def look_at_all(data: Data, size_px: int, progress: Count) -> Iterator[Look]:
    """Decode every picture of both splits, on all cores, in order."""
    sides = (data.train, data.val)
    total, done = sum(map(len, sides)), 0
    tasks = [(number, start) for number, side in enumerate(sides) for start in range(0, len(side), CHUNK)]
    with Helpers(usable_cores(), _remember, sides, size_px) as processes:
        for looks in processes.map(_look_at_several, tasks):
            done += len(looks)
            progress(done, total)
            yield from looks


_remembered: tuple[tuple[Source, ...], int]


def _remember(sides: tuple[Source, ...], size_px: int) -> None:
    """Runs once in each helper process: sources may be large, so they are not sent with every task."""
    global _remembered
    _remembered = (sides, size_px)


def _look_at_several(task: tuple[int, int]) -> list[Look]:
    (sides, size_px), (number, start) = _remembered, task
    side = sides[number]
    return [look(side, index, size_px) for index in range(start, min(start + CHUNK, len(side)))]


# --- captions -------------------------------------------------------------------------------------------------


def _repeated(keys: NDArray[Any]) -> int:
    """How many keys occur more than once."""
    _, counts = np.unique(keys, return_counts=True)
    return int(counts[counts > 1].sum())


def _compared_by_bytes(source: Source) -> bool:
    return not isinstance(source, IndexedSource) or all(part.facts.hashed for part in source.parts)


def _distinct_words(source: Source) -> int:
    rows = len(source.caption_sizes())
    words: set[str] = set()
    for row in range(0, rows, -(-rows // SAMPLED_CAPTIONS)):
        words.update(source.caption_row(row).lower().split())
    return len({word.strip(".,;:!?\"'()") for word in words} - {""})
