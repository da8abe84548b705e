"""Random views of pictures, for a whole batch at once: where each pixel of the model's input is read. No torch.

A view is an affine map (2 × 3) from the model's input, whose corners are (±1, ±1), to pixels of the picture. Crop,
shift, zoom, turn, stretch and mirror are combined in one map, so that the picture is sampled once, on the model's
device.
"""

import numpy as np
from numpy.typing import NDArray

from clipctl.data.images import CROP_RATIO, Augmentation
from clipctl.data.source import Keys, mix

Floats = NDArray[np.float64]
_SALT = 0x71E3
_CROP_SHARE, _CROP_SHAPE, _ACROSS, _DOWN, _SHIFT_X, _SHIFT_Y, _ZOOM, _TURN, _STRETCH, _FLIP, _JITTER = range(11)
DRAWS = _JITTER + 3


def draws(indices: Keys, seed: int, epoch: int) -> Floats:
    """(B, DRAWS): numbers in [0, 1) for each picture, a function of seed, epoch and picture only."""
    columns = [mix(indices, seed, epoch, _SALT + column) for column in range(DRAWS)]
    return np.asarray((np.stack(columns, axis=1) >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


def random_views(drawn: Floats, sizes: NDArray[np.int64], how: Augmentation, may_flip: NDArray[np.bool_]) -> Floats:
    """(B, 2, 3) for pictures of `sizes` (B, 2), width and height."""
    width, height = sizes.T.astype(np.float64)
    crop_width, crop_height, left, top = _crops(drawn, width, height, how.min_crop)
    # Shift and zoom are shares of the crop, in both directions: 2u - 1 is uniform between -1 and 1.
    shift_x, shift_y, zoom, turn, stretch = (2 * drawn[:, column] - 1 for column in range(_SHIFT_X, _STRETCH + 1))
    scale, wider = 1 / (1 + how.max_zoom * zoom), np.exp(how.max_stretch * stretch)
    half_width, half_height = scale * wider * crop_width / 2, scale / wider * crop_height / 2
    mirror = np.where(may_flip & how.flip & (drawn[:, _FLIP] < 0.5), -1.0, 1.0)
    angle = np.radians(how.max_turn) * turn
    views = np.empty((len(drawn), 2, 3))
    views[:, 0, 0], views[:, 0, 1] = mirror * half_width * np.cos(angle), -half_width * np.sin(angle)
    views[:, 1, 0], views[:, 1, 1] = mirror * half_height * np.sin(angle), half_height * np.cos(angle)
    views[:, 0, 2] = left + crop_width * (0.5 - how.max_shift * shift_x)
    views[:, 1, 2] = top + crop_height * (0.5 - how.max_shift * shift_y)
    return views


def _crops(drawn: Floats, width: Floats, height: Floats, min_share: float) -> tuple[Floats, Floats, Floats, Floats]:
    """Width, height, left and top of a crop: a share of the area between `min_share` and 1, of a shape between 3:4 and
    4:3, shrunk if it would not fit. Without cropping (share 1), the centre square."""
    if min_share >= 1:
        side = np.minimum(width, height)
        return side, side, (width - side) / 2, (height - side) / 2
    area = (min_share + (1 - min_share) * drawn[:, _CROP_SHARE]) * width * height
    ratio = CROP_RATIO ** (2 * drawn[:, _CROP_SHAPE] - 1)
    crop_width, crop_height = np.sqrt(area * ratio), np.sqrt(area / ratio)
    shrink = np.minimum(1.0, np.minimum(width / crop_width, height / crop_height))
    crop_width, crop_height = crop_width * shrink, crop_height * shrink
    return crop_width, crop_height, drawn[:, _ACROSS] * (width - crop_width), drawn[:, _DOWN] * (height - crop_height)


def random_jitter(drawn: Floats, how: Augmentation) -> Floats | None:
    """(B, 3): factors for brightness, contrast and saturation."""
    return 1 + how.jitter * (2 * drawn[:, _JITTER:] - 1) if how.jitter else None
