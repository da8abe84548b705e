"""What needs no training: a held-out picture gets the caption of the training picture whose pixels are most like its.

A model that does not find more than this has learnt nothing of use, however low its loss is.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from clipctl.data.decoding import Pixels
from clipctl.data.held_out import HeldOut
from clipctl.data.images import resized
from clipctl.data.source import Source

SIDE_PX = 16
MOST_PICTURES = 20_000  # training pictures compared with, evenly spaced if there are more


def nearest_pixels_recall(
    held_out: HeldOut, source: Source, pixels_of: Callable[[int], Pixels | None], most: int = MOST_PICTURES
) -> float | None:
    """Share of the held-out pictures that get one of their captions; None if none of those occurs in `source`.
    `pixels_of` gives a training picture, or None if it cannot be used."""
    indices, thumbnails = [], []
    count = min(most, len(source))
    for index in (number * len(source) // count for number in range(count)):
        pixels = pixels_of(index)
        if pixels is not None:
            indices.append(index)
            thumbnails.append(thumbnail(pixels))
    matches = held_out.matches
    if not any(matches.is_known(caption) for index in indices for caption in source.captions(index)):
        return None
    known = np.stack(thumbnails)
    right, picture = 0, 0
    for batch in held_out.batches:
        asked = np.stack([thumbnail(pixels) for pixels in batch.images.numpy()])
        for nearest in (asked @ known.T).argmax(axis=1):
            right += any(matches.is_right(picture, caption) for caption in source.captions(indices[nearest]))
            picture += 1
    return right / picture


def thumbnail(pixels: Pixels) -> NDArray[np.float32]:
    """The centre square in 16 × 16 pixels, without its mean and of length one: brightness and contrast do not count."""
    height, width, _ = pixels.shape
    side = min(height, width)
    left, top = (width - side) // 2, (height - side) // 2
    values = resized(pixels, (left, top, left + side, top + side), SIDE_PX, SIDE_PX).astype(np.float32).ravel()
    values -= values.mean()
    return np.asarray(values / max(float(np.linalg.norm(values)), 1e-6), dtype=np.float32)
