"""Which pairs stand in which batch: a function of (seed, epoch) and nothing else."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def batch_count(pairs: int, batch_size: int) -> int:
    return -(-pairs // batch_size)


def epoch_batches(pairs: int, batch_size: int, seed: int, epoch: int) -> list[NDArray[np.int64]]:
    """Every pair once, in as few batches as `batch_size` allows, whose sizes differ by one at most.

    A last batch of three pairs would have a chance loss of ln 3 among neighbours at ln B; equal batches keep the loss
    comparable from step to step and leave no pair out.
    """
    order = np.random.default_rng([seed, epoch]).permutation(pairs)
    return np.array_split(order, batch_count(pairs, batch_size))


class EpochSampler:
    """Batches of (epoch, index) keys for a loader; starts wherever `start` was told to."""

    def __init__(self, pairs: int, batch_size: int, seed: int) -> None:
        self._pairs, self._batch_size, self._seed = pairs, batch_size, seed
        self._epoch, self._first_batch = 0, 0

    def start(self, epoch: int, first_batch: int = 0) -> None:
        self._epoch, self._first_batch = epoch, first_batch

    def __len__(self) -> int:
        return batch_count(self._pairs, self._batch_size) - self._first_batch

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        batches = epoch_batches(self._pairs, self._batch_size, self._seed, self._epoch)
        for batch in batches[self._first_batch :]:
            yield [(self._epoch, int(index)) for index in batch]
