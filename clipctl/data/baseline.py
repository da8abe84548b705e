"""A baseline without training: a held-out picture gets the caption of the training picture nearest in pixels.

A model that does not find more than this has learnt nothing useful, however low its loss is.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clipctl.data.decoding import Pixels
from clipctl.data.held_out import Matches
from clipctl.data.images import resized
from clipctl.data.source import Source

SIDE_PX = 16
BLOCK = 500  # held-out pictures compared at a time
MOST_PICTURES = 20_000  # training pictures compared with, evenly spaced if there are more


class Baseline(NamedTuple):
    recall: float | None  # share of the held-out pictures that get one of their captions
    why: str = ""  # there is none


def nearest_pixels_recall(
    matches: Matches,
    asked: NDArray[np.float32],
    source: Source,
    pixels_of: Callable[[int], Pixels | None],
    most: int = MOST_PICTURES,
) -> Baseline:
    """`asked` are thumbnails of the held-out pictures, `pixels_of` gives a training picture, or None if it cannot be
    used."""
    count = min(most, len(source))
    chosen = [number * len(source) // count for number in range(count)]
    if not chosen:
        return Baseline(None, "all training pictures are among these pictures")
    if not any(matches.is_known(caption) for index in chosen for caption in source.captions(index)):
        return Baseline(None, "none of these captions occurs in the training data")
    indices, thumbnails = [], []
    for index in chosen:
        pixels = pixels_of(index)
        if pixels is not None:
            indices.append(index)
            thumbnails.append(thumbnail(pixels))
    if not indices:
        return Baseline(None, "none of the training pictures can be used")
    known = np.stack(thumbnails)
    right = 0
    for start in range(0, len(asked), BLOCK):
        nearest = (asked[start : start + BLOCK] @ known.T).argmax(axis=1)
        for picture, index in enumerate(nearest, start):
            right += any(matches.is_right(picture, caption) for caption in source.captions(indices[index]))
    return Baseline(right / len(asked))


def thumbnail(pixels: Pixels) -> NDArray[np.float32]:
    """The centre square in 16 × 16 pixels, without its mean and of length one: brightness and contrast do not count."""
    height, width, _ = pixels.shape
    side = min(height, width)
    left, top = (width - side) // 2, (height - side) // 2
    values = resized(pixels, (left, top, left + side, top + side), SIDE_PX, SIDE_PX).astype(np.float32).ravel()
    values -= values.mean()
    return np.asarray(values / max(float(np.linalg.norm(values)), 1e-6), dtype=np.float32)
