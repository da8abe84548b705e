"""Traits of a dataset that a recipe depends on: how many pictures, which captions, photographs or drawings. No
torch."""

from dataclasses import dataclass
from statistics import median

import numpy as np

from clipctl.data.bad import BadPictureError
from clipctl.data.decoding import Pixels, to_pixels
from clipctl.data.inspection import sample_of
from clipctl.data.source import Source

LOOKED_AT = 24  # pictures
LOOKED_AT_PX = 128  # smallest side in which they are decoded
DRAWING_SHARE = 0.4  # of neighbouring pixels that are equal: photographs have less, drawings more


@dataclass(frozen=True)
class Traits:
    """Of the training pictures."""

    pictures: int
    captions: int  # different ones
    repeated: float  # share of the pictures whose caption another one has as well
    side_px: int  # the median of shorter sides; 128 stands for that and more
    flat_share: float  # of neighbouring pixels that are equal

    @property
    def are_drawings(self) -> bool:
        """Icons, diagrams, letters: mirrored, one may mean something else; cropped, nothing."""
        return self.flat_share >= DRAWING_SHARE


def traits_of(source: Source) -> Traits:
    first = np.zeros(len(source), dtype=np.int64)  # each picture's first caption
    _, counts = np.unique(source.caption_keys(first), return_counts=True)
    sides, shares = [], []
    for index in sample_of(source, LOOKED_AT):
        try:
            pixels = to_pixels(source.picture(index, LOOKED_AT_PX))
        except BadPictureError:
            continue
        sides.append(min(pixels.shape[:2]))
        shares.append(flat_share(pixels))
    return Traits(
        pictures=len(source),
        captions=len(counts),
        repeated=float(counts[counts > 1].sum() / len(source)),
        side_px=min(LOOKED_AT_PX, int(median(sides))) if sides else LOOKED_AT_PX,
        flat_share=median(shares) if shares else 0.0,
    )


def flat_share(pixels: Pixels) -> float:
    """Share of pixels that equal their right neighbour in every channel."""
    if pixels.shape[1] < 2:
        return 0.0
    return float((pixels[:, 1:] == pixels[:, :-1]).all(axis=2).mean())
