"""Which pairs stand in which batch, and with which caption: functions of (seed, epoch) and nothing else. No torch."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clipctl.data.source import Keys, Source


class Key(NamedTuple):
    """One pair to prepare."""

    epoch: int
    picture: int
    which: int  # of the picture's captions


def batch_count(pairs: int, batch_size: int) -> int:
    return -(-pairs // batch_size)


def mix(values: Keys, *salt: int) -> Keys:
    """Each value to 64 random-looking bits that depend on it and on the salt: splitmix64's finaliser, once for each."""
    with np.errstate(over="ignore"):
        for number in (0, *salt):
            values = values + np.uint64((number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**64)
            values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            values = values ^ (values >> np.uint64(31))
    return values


def chosen_captions(indices: NDArray[np.int64], counts: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.int64]:
    """For each picture the number of the caption it is shown with in this epoch."""
    shares = (mix(indices.astype(np.uint64), seed, epoch) >> np.uint64(11)) * 2.0**-53  # in [0, 1)
    return (shares * counts).astype(np.int64)


def epoch_batches(
    pairs: int, batch_size: int, seed: int, epoch: int, groups: NDArray[np.int64] | None = None
) -> list[NDArray[np.int64]]:
    """Every pair once, in as few batches as `batch_size` allows, whose sizes differ by one at most. Of pairs in the
    same group (that no batch should hold together) each batch gets as few as can be.

    A last batch of three pairs would have a chance loss of ln 3 among neighbours at ln B; equal batches keep the loss
    comparable from step to step and leave no pair out.
    """
    order = np.random.default_rng([seed, epoch]).permutation(pairs)
    batches = batch_count(pairs, batch_size)
    if groups is None:
        return np.array_split(order, batches)
    # Members of a group one after the other, groups in random order; then dealt out like cards, so that m members
    # come to m batches, or evenly to all where there are fewer batches.
    place = np.empty(pairs, dtype=np.int64)
    place[order] = np.arange(pairs)
    first = np.full(int(groups.max()) + 1, pairs)
    np.minimum.at(first, groups, place)
    dealt = np.lexsort((place, first[groups]))
    return [dealt[number::batches] for number in range(batches)]


def conflict_groups(caption_keys: Keys, picture_keys: Keys) -> NDArray[np.int64] | None:
    """(N,): a number for each pair; pairs have the same if their captions or pictures are equal, directly or through
    others. None if all captions and all pictures are different."""
    captions, of_caption = np.unique(caption_keys, return_inverse=True)
    pictures, of_picture = np.unique(picture_keys, return_inverse=True)
    if len(captions) == len(pictures) == len(caption_keys):
        return None
    groups = of_caption.astype(np.int64)
    while True:  # each round takes the lowest number among equal pictures, then among equal captions
        before = groups
        for members, count in ((of_picture, len(pictures)), (of_caption, len(captions))):
            lowest = np.full(count, len(caption_keys))
            np.minimum.at(lowest, members, groups)
            groups = lowest[members]
        if np.array_equal(groups, before):
            return groups


class EpochPlan(NamedTuple):
    batches: list[NDArray[np.int64]]
    choice: NDArray[np.int64]  # (N,): which caption
    groups: NDArray[np.int64] | None


def plan_epoch(source: Source, batch_size: int, seed: int, epoch: int) -> EpochPlan:
    """Captions are chosen first: which pairs are false negatives of each other follows from them."""
    choice = chosen_captions(np.arange(len(source)), source.caption_counts, seed, epoch)
    groups = conflict_groups(source.caption_keys(choice), source.picture_keys)
    return EpochPlan(epoch_batches(len(source), batch_size, seed, epoch, groups), choice, groups)


def loss_floor(plan: EpochPlan) -> float:
    """The mean of ln m over all pairs, where m is how many of a pair's batch are equal to it, itself included.

    With m equal captions no model can tell which picture is meant, so the softmax gives each of them at most 1/m.
    """
    if plan.groups is None:
        return 0.0
    total = 0.0
    for batch in plan.batches:
        _, counts = np.unique(plan.groups[batch], return_counts=True)
        total += float((counts * np.log(counts)).sum())
    return round(total / len(plan.groups), 6)


class EpochSampler:
    """Batches of keys for a loader; starts wherever `start` was told to."""

    def __init__(self, source: Source, batch_size: int, seed: int) -> None:
        self._source, self._batch_size, self._seed = source, batch_size, seed
        self._epoch, self._first_batch = 0, 0

    def start(self, epoch: int, first_batch: int = 0) -> None:
        self._epoch, self._first_batch = epoch, first_batch

    def __len__(self) -> int:
        return batch_count(len(self._source), self._batch_size) - self._first_batch

    def __iter__(self) -> Iterator[list[Key]]:
        plan = plan_epoch(self._source, self._batch_size, self._seed, self._epoch)
        for batch in plan.batches[self._first_batch :]:
            yield [Key(self._epoch, int(index), int(plan.choice[index])) for index in batch]
