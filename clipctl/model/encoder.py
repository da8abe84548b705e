"""From pixels and token ids to embeddings. Normalising pixels is part of it: that belongs to the model."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from clipctl.hardware.devices import DTYPES, Device
from clipctl.model.clip import Clip
from clipctl.model.compiling import uncompiled

# Statistics of OpenAI's training pictures; every CLIP implementation normalises with them.
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
LUMA = (0.299, 0.587, 0.114)  # perceived brightness of red, green and blue
MIDDLE = 115.0  # the grey that contrast is scaled around: the mean of those pictures


class Encoder:
    """A model on its device, for embedding without gradients. B rows, E dimensions."""

    def __init__(self, model: Clip, device: Device, *, precision: str = "fp32", compiled: bool = False) -> None:
        self.model, self.device = model, device
        self._precision, self._compiled = precision, compiled

    @torch.no_grad()
    def images(self, pixels: Tensor) -> Tensor:
        """Pixels (B, H, W, 3), uint8, to unit vectors (B, E) on the image tower's device."""
        images = normalise(pixels.to(self.device.image, non_blocking=True))
        with self._autocast(), uncompiled(self._compiled):
            return self.model.encode_image(images)

    @torch.no_grad()
    def texts(self, tokens: Tensor) -> Tensor:
        """Token ids (B, N) to unit vectors (B, E), also on the image tower's device."""
        with self._autocast():
            return self.model.encode_text(tokens.to(self.device.text, non_blocking=True)).to(self.device.image)

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.device.image, self._precision)


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """The precision in which the towers compute; weights and their updates stay fp32."""
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, dtype=DTYPES[precision])


def normalise(images: Tensor, jitter: Tensor | None = None) -> Tensor:
    """Bytes (B, H, W, 3) to the contiguous floats (B, 3, H, W) that the image tower takes, on the same device.

    `jitter` (B, 3) holds factors for brightness, contrast and saturation: colours move towards or away from grey, then
    towards or away from the middle, then become brighter or darker. Done here because the pixels are floats by now.
    """
    mean, std = _constants(images.device)
    pixels = images.permute(0, 3, 1, 2).contiguous().float()
    if jitter is None:
        return pixels.sub_(mean).div_(std)
    brightness, contrast, saturation = jitter.T.reshape(3, -1, 1, 1, 1)
    red, green, blue = (weight * pixels[:, colour : colour + 1] for colour, weight in enumerate(LUMA))
    pixels = torch.lerp(red + green + blue, pixels, saturation)
    # b (m + c (x - m)), then minus the mean, divided by the deviation: folded into one product and one sum.
    shift = (brightness * (1 - contrast) * MIDDLE - mean) / std
    return torch.addcmul(shift, pixels, brightness * contrast / std)


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation, in byte units. Copied to a device once: copying in every step would stall it."""
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD))
    return mean * 255, std * 255
