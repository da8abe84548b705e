"""Exact search: the pictures of an index that are nearest to a query."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from clipctl.errors import StoreError
from clipctl.inference.embedding_store import EmbeddingStore

BLOCK_VALUES = 1 << 20  # of vectors, converted to fp32 at a time: they stay in the processor's cache


@dataclass(frozen=True)
class Matches:
    """For each of Q queries the rows that match best, best first; fewer than asked for if scores are too low."""

    rows: list[NDArray[np.int64]]
    scores: list[NDArray[np.float32]]  # cosine similarities


def nearest(store: EmbeddingStore, queries: NDArray[np.float32], top: int, threshold: float | None = None) -> Matches:
    """The `top` rows with the highest dot product with each query (Q, E). Of equal scores, the earlier row comes first.

    Every vector is compared. They are stored in half precision and multiplied in single: that is exact, because every
    half is also a single, and faster than doing it in one go, because a block never leaves the cache.
    """
    wanted, count = torch.from_numpy(np.ascontiguousarray(queries.T)), len(store)  # (E, Q)
    rows = max(1, BLOCK_VALUES // store.manifest.model.dimensions)
    scores = torch.empty(count, len(queries))
    for start in range(0, count, rows):
        block = torch.from_numpy(np.asarray(store.vectors[start : start + rows])).float()  # (B, E)
        torch.mm(block, wanted, out=scores[start : start + rows])
    if not bool(torch.isfinite(scores).all()):
        raise _damaged(store)
    found = Matches([], [])
    for column in range(len(queries)):
        best_rows, best = _top(scores[:, column], min(top, count))
        _check_lengths(store, best_rows)
        kept = best >= threshold if threshold is not None else np.ones(len(best), dtype=bool)
        found.rows.append(best_rows[kept])
        found.scores.append(best[kept])
    return found


def _check_lengths(store: EmbeddingStore, rows: NDArray[np.int64]) -> None:
    """Raise if vectors are not of length one. To hash all of an index would take longer than the search; but what is
    too long comes first, and where all are zero, so are the first."""
    lengths = np.linalg.norm(np.asarray(store.vectors[rows], dtype=np.float32), axis=1)
    if not np.allclose(lengths, 1, atol=0.01):
        raise _damaged(store)


def _damaged(store: EmbeddingStore) -> StoreError:
    words = f"{store.path / store.manifest.vectors_file} is damaged: its vectors are not of length one"
    return StoreError(words, "embed the pictures again into a new directory: clipctl embed MODEL PATH -o INDEX")


def _top(scores: torch.Tensor, top: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The best, in order; of equal ones the first."""
    least = torch.topk(scores, top).values[-1]
    rows = torch.nonzero(scores >= least).squeeze(1)  # more than asked for only if scores are equal
    order = torch.sort(scores[rows], descending=True, stable=True).indices[:top]
    chosen = rows[order]
    return chosen.numpy(), scores[chosen].numpy()


MINUS_WEIGHT = 0.5


def without(wanted: NDArray[np.float32], unwanted: NDArray[np.float32]) -> NDArray[np.float32]:
    """Queries (Q, E) that score the similarity to what is wanted, minus half the similarity to each unwanted one (M,
    E). Subtracting all of it would find whatever is least like the unwanted, instead of what was asked for."""
    return np.asarray(wanted - MINUS_WEIGHT * unwanted.sum(axis=0), dtype=np.float32)
