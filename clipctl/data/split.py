"""Which pictures are held out: by picture, never by caption, and mostly the same when others are added. No torch."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clipctl.data.formats.rows import TRAIN, UNSAID, VAL
from clipctl.data.index.source import IndexedSource
from clipctl.data.source import Keys, mix

_SALT = 0x5917


class Sides(NamedTuple):
    train: IndexedSource
    val: IndexedSource
    unused: int  # pictures of the test split, which are not used


def divide(source: IndexedSource, fraction: float, limit: int, seed: int) -> Sides:
    """By the data's own split if there is one; otherwise hold out `fraction` of the pictures, up to `limit`."""
    train, own, unused = own_sides(source)
    if len(own):
        return Sides(train, own, unused)
    chosen = held_out(train, round(len(train) * fraction), limit, seed)
    return Sides(train.without(chosen), train.select(chosen), unused)


def own_sides(source: IndexedSource) -> Sides:
    """The data's own split. If no picture is meant for training, the data are treated as if they had none."""
    if not source.has_sides:
        return Sides(source, source.select(np.zeros(0, dtype=np.int64)), 0)
    sides = source.sides
    train = np.flatnonzero((sides == TRAIN) | (sides == UNSAID))
    if not len(train):
        return Sides(source, source.select(train), 0)
    own = np.flatnonzero(sides == VAL)
    return Sides(source.select(train), source.select(own), len(sides) - len(train) - len(own))


def held_out(source: IndexedSource, count: int, limit: int, seed: int) -> NDArray[np.int64]:
    """The pictures whose hashed keys are lowest: equal pictures stay together, and most pictures stay in their split
    when others are added or removed. Not all: the bound moves with their number."""
    count = min(count, limit)
    if count < 1:
        return np.zeros(0, dtype=np.int64)
    # Keys are evenly spread, so a low bound finds a few more than `count` of the lowest, except with equal pictures.
    share = min(1.0, (count + 8 * count**0.5 + 16) / len(source))
    while True:
        bound = np.uint64(min(2**64 - 1, int(share * 2**64)))
        places, keys = _below(source.key_chunks(), bound, seed)
        if len(keys) >= count or share >= 1:
            break
        share = min(1.0, 2 * share)
    cutoff = np.partition(keys, count - 1)[count - 1]
    return np.asarray(places[keys <= cutoff])


def _below(chunks: Iterator[Keys], bound: np.uint64, seed: int) -> tuple[NDArray[np.int64], Keys]:
    start, places, lowest = 0, [], []
    for chunk in chunks:
        mixed = mix(chunk, seed, _SALT)
        here = np.flatnonzero(mixed <= bound)
        places.append(here + start)
        lowest.append(mixed[here])
        start += len(chunk)
    return np.concatenate(places), np.concatenate(lowest)


class Leakage(NamedTuple):
    """Held-out pictures and captions that are also in the training data."""

    pictures: int
    captions: int  # held-out captions whose text also belongs to a training picture


def find_leakage(train: IndexedSource, val: IndexedSource) -> Leakage:
    pictures, captions = val.picture_keys, val.all_caption_keys()
    return Leakage(_shared(pictures, train.key_chunks()), _shared(captions, train.caption_key_chunks()))


def _shared(keys: Keys, chunks: Iterator[Keys]) -> int:
    """How many of the keys occur in the chunks."""
    seen = np.zeros(len(keys), dtype=bool)
    for chunk in chunks:
        seen |= np.isin(keys, chunk)
    return int(seen.sum())
