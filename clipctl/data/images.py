"""Pictures as arrays: uint8, height × width × 3, until they are on the device."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Pixels = NDArray[np.uint8]  # (H, W, 3)

# Of OpenAI's training pictures; every CLIP implementation normalises with these.
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def augment(pixels: Pixels, rng: np.random.Generator, *, max_shift: float, flip: bool) -> Pixels:
    """Shift by up to `max_shift` of the side, repeating the edge, and mirror half of the time if `flip`."""
    side = len(pixels)
    reach_px = round(max_shift * side)
    if reach_px:
        down, right = rng.integers(-reach_px, reach_px + 1, size=2)
        rows = np.clip(np.arange(side) - down, 0, side - 1)
        columns = np.clip(np.arange(side) - right, 0, side - 1)
        pixels = pixels[rows][:, columns]
    if flip and rng.integers(2):
        pixels = pixels[:, ::-1]
    return pixels


def normalise(images: Tensor) -> Tensor:
    """Bytes (B, H, W, 3) to the contiguous floats (B, 3, H, W) that the image tower takes, on the device they are on."""
    mean = torch.tensor(MEAN, device=images.device) * 255
    std = torch.tensor(STD, device=images.device) * 255
    return ((images.float() - mean) / std).permute(0, 3, 1, 2).contiguous()
