"""Which pairs go into which batch, and with which caption: functions of (seed, epoch) and nothing else. No torch."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clipctl.data.source import Keys, Source, mix

MIN_PAIRS = 2  # on each side: a single pair has nothing to be contrasted with


class Key(NamedTuple):
    """A pair to load."""

    epoch: int
    picture: int
    which: int  # which of the picture's captions


def batch_count(pairs: int, batch_size: int) -> int:
    return -(-pairs // batch_size)


def chosen_captions(indices: NDArray[np.int64], counts: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.int64]:
    """For each picture, the number of the caption to use in this epoch."""
    shares = (mix(indices.astype(np.uint64), seed, epoch) >> np.uint64(11)) * 2.0**-53  # in [0, 1)
    return (shares * counts).astype(np.int64)


def epoch_batches(
    pairs: int,
    batch_size: int,
    seed: int,
    epoch: int,
    groups: NDArray[np.int64] | None = None,
    *,
    partners: bool = False,
) -> list[NDArray[np.int64]]:
    """Every pair once, in as few batches as `batch_size` allows, with sizes that differ by at most one. Pairs in the
    same group should not share a batch, so each batch gets as few of them as possible; or, with `partners`, they meet
    two by two, so that each batch has as many different groups as it can have with partners.

    A last batch of three pairs would have a chance loss of ln 3 next to batches at ln B; equal batches keep the loss
    comparable from step to step and leave no pair out.
    """
    order = np.random.default_rng([seed, epoch]).permutation(pairs)
    batches = batch_count(pairs, batch_size)
    if groups is None:
        return np.array_split(order, batches)
    if partners:
        return np.array_split(_two_by_two(order, groups), batches)
    # Groups in random order, each group's members in a row; then dealt out like cards, so that m members go to m
    # different batches, or are spread evenly if there are fewer batches.
    place = np.empty(pairs, dtype=np.int64)
    place[order] = np.arange(pairs)
    first = np.full(int(groups.max()) + 1, pairs)
    np.minimum.at(first, groups, place)
    dealt = np.lexsort((place, first[groups]))
    return [dealt[number::batches] for number in range(batches)]


def _two_by_two(order: NDArray[np.int64], groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same order, but the second, fourth, … member of a group comes right after the one before it."""
    by_group = order[np.argsort(groups[order], kind="stable")]  # members of a group in a row, as the order has them
    starts = np.flatnonzero(np.diff(groups[by_group], prepend=-1))
    number = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))  # in its group
    leader = by_group[np.arange(len(order)) - number % 2]
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return np.asarray(by_group[np.lexsort((number, place[leader]))])


def conflict_groups(caption_keys: Keys, picture_keys: Keys) -> NDArray[np.int64] | None:
    """(N,): a group number for each pair; pairs share one if their captions or pictures are equal, directly or through
    other pairs. None if all captions and all pictures are different."""
    if _all_different(caption_keys) and _all_different(picture_keys):
        return None
    captions, of_caption = np.unique(caption_keys, return_inverse=True)
    pictures, of_picture = np.unique(picture_keys, return_inverse=True)
    groups = of_caption.astype(np.int64)
    while True:  # each round spreads the lowest number among equal pictures, then among equal captions
        before = groups
        for members, count in ((of_picture, len(pictures)), (of_caption, len(captions))):
            lowest = np.full(count, len(caption_keys))
            np.minimum.at(lowest, members, groups)
            groups = lowest[members]
        if np.array_equal(groups, before):
            return groups


def _all_different(keys: Keys) -> bool:
    ordered = np.sort(keys)
    return not bool((ordered[1:] == ordered[:-1]).any())


def equal_pairs(caption_keys: Keys, picture_keys: Keys) -> NDArray[np.bool_]:
    """(B, B): True where two pairs have the same caption or the same picture."""
    return np.asarray((caption_keys[:, None] == caption_keys) | (picture_keys[:, None] == picture_keys))


class EpochPlan(NamedTuple):
    batches: list[NDArray[np.int64]]
    choice: NDArray[np.int64]  # (N,): which caption of each picture
    has_repeats: bool  # some captions or pictures are equal


def plan_epoch(source: Source, batch_size: int, seed: int, epoch: int, *, partners: bool = False) -> EpochPlan:
    """Captions are chosen first, because they determine which pairs would be false negatives of each other."""
    choice = chosen_captions(np.arange(len(source)), source.caption_counts, seed, epoch)
    groups = conflict_groups(source.caption_keys(choice), source.picture_keys)
    batches = epoch_batches(len(source), batch_size, seed, epoch, groups, partners=partners)
    return EpochPlan(batches, choice, groups is not None)


FLOOR_BATCHES = 1000  # examined to estimate how often equal captions or pictures share a batch


def loss_floor(source: Source, plan: EpochPlan) -> float:
    """The mean of ln m, where m is the number of pairs in its batch that match a pair, itself included.

    With m equal captions no model can tell which picture is meant, so the softmax gives each of them at most 1/m.
    """
    if not plan.has_repeats:
        return 0.0
    caption_keys, picture_keys = source.caption_keys(plan.choice), source.picture_keys
    batches = plan.batches[:: -(-len(plan.batches) // FLOOR_BATCHES)]
    right = [equal_pairs(caption_keys[batch], picture_keys[batch]).sum(axis=1) for batch in batches]
    return round(float(np.log(np.concatenate(right)).mean()), 6)


class EpochSampler:
    """Batches of keys for a loader, from wherever `start` was told to begin. With several `ranks`, the part of each
    batch that one of them loads: the content of a batch does not depend on how many there are."""

    def __init__(
        self, source: Source, batch_size: int, seed: int, *, partners: bool = False, rank: int = 0, ranks: int = 1
    ) -> None:
        self._source, self._batch_size, self._seed, self._partners = source, batch_size, seed, partners
        self._rank, self._ranks = rank, ranks
        self._epoch, self._first_batch = 0, 0

    def start(self, epoch: int, first_batch: int = 0) -> None:
        self._epoch, self._first_batch = epoch, first_batch

    def __len__(self) -> int:
        return batch_count(len(self._source), self._batch_size) - self._first_batch

    def __iter__(self) -> Iterator[list[Key]]:
        plan = plan_epoch(self._source, self._batch_size, self._seed, self._epoch, partners=self._partners)
        for batch in plan.batches[self._first_batch :]:
            own = np.array_split(batch, self._ranks)[self._rank]
            yield [Key(self._epoch, int(index), int(plan.choice[index])) for index in own]
