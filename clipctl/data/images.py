"""Pictures as arrays: uint8, height × width × 3, until they are on the device."""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from clipctl.config.sections import DataConfig
from clipctl.data.decoding import Pixels

MAX_RATIO = 2.0  # largest aspect ratio of a cached picture; longer ones are cropped to the middle
CROP_RATIO = 4 / 3  # largest aspect ratio of a random crop, wide or tall
KEPT_SHARE = 8 / 7  # side of a cached picture, relative to the model's input, so that crops stay sharp


@dataclass(frozen=True)
class Augmentation:
    """Random changes to a picture before the model sees it."""

    max_shift: float  # of the side
    max_zoom: float
    flip: bool
    min_crop: float  # smallest share of the area that a crop keeps; 1: no crop
    jitter: float  # of brightness, contrast and saturation; not hue, because captions name colours
    on_device: bool = False  # for a whole batch at once, by `data.views`; only there:
    max_turn: float = 0.0  # in degrees
    max_stretch: float = 0.0  # wider and lower, or the other way round

    @classmethod
    def of(cls, config: DataConfig, *, drawn: bool) -> "Augmentation":
        """As configured; anything left open gets a default that suits synthetic scenes or pictures from files."""
        shift, zoom, crop, jitter = (0.08, 0.1, 1.0, 0.0) if drawn else (0.0, 0.0, 0.6, 0.1)
        return cls(
            max_shift=shift if config.max_shift is None else config.max_shift,
            max_zoom=zoom if config.max_zoom is None else config.max_zoom,
            flip=config.flip,
            min_crop=crop if config.min_crop is None else config.min_crop,
            jitter=jitter if config.jitter is None else config.jitter,
            on_device=config.augment_on == "device",
            max_turn=config.max_turn,
            max_stretch=config.max_stretch,
        )


def kept_side(size_px: int, *, drawn: bool) -> int:
    """Side of a cached picture. Synthetic ones are drawn at exactly the size needed."""
    return size_px if drawn else math.ceil(size_px * KEPT_SHARE)


def resized(pixels: Pixels, box: tuple[int, int, int, int], width: int, height: int) -> Pixels:
    """Resize the part of a picture in `box` (left, top, right, bottom): bicubic, antialiased when shrinking. Torch's
    uint8 kernel gives the same result as Pillow's, in a quarter of the time."""
    left, top, right, bottom = box
    part = torch.from_numpy(np.array(pixels[top:bottom, left:right]))[None].permute(0, 3, 1, 2)  # a private copy
    view = F.interpolate(part, size=(height, width), mode="bicubic", antialias=True)
    return view[0].permute(1, 2, 0).numpy()


def to_area(pixels: Pixels, side_px: int) -> Pixels:
    """Shrink a picture to about side_px² pixels, keeping its aspect ratio; never enlarge it.

    Random crops take a share of the area, so what pictures should have in common is their area, not one side. It also
    means that all cached pictures take the same space.
    """
    full_height, full_width, _ = pixels.shape
    width, height = min(full_width, int(full_height * MAX_RATIO)), min(full_height, int(full_width * MAX_RATIO))
    left, top = (full_width - width) // 2, (full_height - height) // 2
    scale = min(1.0, side_px / math.sqrt(width * height))
    size = max(1, int(width * scale)), max(1, int(height * scale))
    if size == (full_width, full_height):
        return pixels
    return np.ascontiguousarray(resized(pixels, (left, top, left + width, top + height), *size))


def augment(pixels: Pixels, rng: np.random.Generator, size_px: int, how: Augmentation, *, flip: bool) -> Pixels:
    """A random view of a picture, size_px × size_px; mirrored half of the time if `flip`."""
    if how.min_crop < 1 or pixels.shape[:2] != (size_px, size_px):
        box = crop_box(rng, pixels.shape[1], pixels.shape[0], how.min_crop)
        pixels = resized(pixels, box, size_px, size_px)
    if how.max_shift or how.max_zoom:
        pixels = shifted(pixels, rng, max_shift=how.max_shift, max_zoom=how.max_zoom)
    if flip and rng.integers(2):
        pixels = pixels[:, ::-1]
    return pixels


def crop_box(rng: np.random.Generator, width: int, height: int, min_share: float) -> tuple[int, int, int, int]:
    """A random crop: its share of the area is between `min_share` and 1 and its shape between 3:4 and 4:3, shrunk if it
    would not fit. Without cropping (share 1), the centre square."""
    if min_share >= 1:
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        return left, top, left + side, top + side
    share, shape, across, down = rng.random(4)
    area = (min_share + share * (1 - min_share)) * width * height
    ratio = CROP_RATIO ** (2 * shape - 1)
    crop_width, crop_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
    shrink = min(1.0, width / crop_width, height / crop_height)
    columns, rows = max(1, int(crop_width * shrink)), max(1, int(crop_height * shrink))
    left, top = int(across * (width - columns + 1)), int(down * (height - rows + 1))
    return left, top, left + columns, top + rows


def shifted(pixels: Pixels, rng: np.random.Generator, *, max_shift: float, max_zoom: float) -> Pixels:
    """Shifted by up to `max_shift` of the side and zoomed by up to `max_zoom`.

    Rows and columns are picked from the original by index, with the edge repeated: no blending, so colours are exact.
    """
    side = len(pixels)
    zoom = 1 + rng.uniform(-max_zoom, max_zoom)
    from_middle = (np.arange(side) - (side - 1) / 2) / zoom + (side - 1) / 2
    down, right = rng.uniform(-max_shift, max_shift, size=2) * side
    rows = np.clip(np.rint(from_middle - down), 0, side - 1).astype(np.intp)
    columns = np.clip(np.rint(from_middle - right), 0, side - 1).astype(np.intp)
    return np.asarray(pixels[rows][:, columns])
