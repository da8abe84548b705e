"""Pictures as arrays: uint8, height × width × 3, until they are on the device."""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Pixels = NDArray[np.uint8]  # (H, W, 3)

# Of OpenAI's training pictures; every CLIP implementation normalises with these.
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def augment(pixels: Pixels, rng: np.random.Generator, *, max_shift: float, max_zoom: float, flip: bool) -> Pixels:
    """Shift by up to `max_shift` of the side, zoom by up to `max_zoom`, mirror half of the time if `flip`.

    Rows and columns are picked from the original by index, with the edge repeated: no blending, so colours stay.
    """
    side = len(pixels)
    if max_shift or max_zoom:
        zoom = 1 + rng.uniform(-max_zoom, max_zoom)
        from_middle = (np.arange(side) - (side - 1) / 2) / zoom + (side - 1) / 2
        down, right = rng.uniform(-max_shift, max_shift, size=2) * side
        rows = np.clip(np.rint(from_middle - down), 0, side - 1).astype(np.intp)
        columns = np.clip(np.rint(from_middle - right), 0, side - 1).astype(np.intp)
        pixels = pixels[rows][:, columns]
    if flip and rng.integers(2):
        pixels = pixels[:, ::-1]
    return pixels


def normalise(images: Tensor) -> Tensor:
    """Bytes (B, H, W, 3) to the contiguous floats (B, 3, H, W) that the image tower takes, on the same device."""
    mean, std = _constants(images.device)
    return ((images.float() - mean) / std).permute(0, 3, 1, 2).contiguous()


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation of bytes. Copied to a device once: a copy in every step would make it wait."""
    return torch.tensor(MEAN, device=device) * 255, torch.tensor(STD, device=device) * 255
