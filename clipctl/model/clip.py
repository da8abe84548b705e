"""CLIP: two towers that map into one space, and a learnable temperature. Pixel normalisation is part of it."""

import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipctl.config.sections import MAX_SCALE, OPENAI_MEAN, OPENAI_STD, ModelConfig
from clipctl.hardware.devices import DTYPES
from clipctl.model.loss import Embeddings
from clipctl.model.towers import Attention, ImageTower, TextTower

INITIAL_TEMPERATURE = 0.07

LUMA = (0.299, 0.587, 0.114)  # perceived brightness of red, green and blue
MIDDLE = 115.0  # the grey that contrast is scaled around: the mean of those pictures

# Sigmoid loss: logits start at -10 because nearly all pairs of a batch do not belong together.
SIGMOID_LOG_SCALE = math.log(10.0)
SIGMOID_BIAS = -10.0


class Clip(nn.Module):
    """Maps pictures and captions to unit vectors whose dot product, times the scale, says how well they match."""

    def __init__(self, config: ModelConfig, *, loss: str = "softmax") -> None:
        super().__init__()
        self.pixel_statistics = config.image.mean, config.image.std
        self.image = ImageTower(config.image, config.embed_dim, config.activation)
        self.text = TextTower(config.text, config.embed_dim, config.activation)
        # exp(log_scale) is 1 / temperature; learning its logarithm keeps it positive.
        start = SIGMOID_LOG_SCALE if loss == "sigmoid" else math.log(1 / INITIAL_TEMPERATURE)
        self.log_scale = nn.Parameter(torch.tensor(start))
        # Only the sigmoid loss has a bias: a softmax does not change when all logits shift.
        self.bias = nn.Parameter(torch.tensor(SIGMOID_BIAS)) if loss == "sigmoid" else None
        self.image.reset_parameters()
        self.text.reset_parameters()

    def encode_image(self, images: Tensor) -> Tensor:
        """Normalised images (B, 3, H, W), or features of a locked tower, to unit vectors (B, E), in full precision
        whatever the tower computed in."""
        return F.normalize(self.image(images).float(), dim=-1)

    def encode_text(self, tokens: Tensor) -> Tensor:
        """Token ids (B, N), or features of a locked tower, to unit vectors (B, E), in full precision as well."""
        return F.normalize(self.text(tokens).float(), dim=-1)

    def forward(self, images: Tensor, tokens: Tensor) -> Embeddings:
        # Pictures first: an accelerator works on them while a text tower on the CPU reads the captions.
        image, text = self.encode_image(images), self.encode_text(tokens)
        return Embeddings(image, text.to(image.device), self.log_scale.exp(), self.bias)

    def place(self, image: torch.device, text: torch.device) -> "Clip":
        """Move each tower to its device; the temperature goes with the pictures, where the loss is."""
        self.to(image)
        self.text.to(text)
        return self

    def use_attention(self, way: str) -> None:
        """`plain`: separate matrix products; anything else: one fused kernel."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.fused = way != "plain"

    @torch.no_grad()
    def clamp_scale(self) -> None:
        """Keep the scale at its cap or below, where the softmax does not saturate."""
        self.log_scale.clamp_(max=math.log(MAX_SCALE))


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """The precision the towers compute in; weights and their updates stay in fp32."""
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, dtype=DTYPES[precision])


Colour = tuple[float, ...]  # red, green and blue


def normalise(
    images: Tensor, jitter: Tensor | None = None, mean_std: tuple[Colour, Colour] = (OPENAI_MEAN, OPENAI_STD)
) -> Tensor:
    """Pixels (B, H, W, 3), 0–255, to the contiguous floats (B, 3, H, W) that the image tower takes, on the same device.

    `jitter` (B, 3) holds factors for brightness, contrast and saturation: colours move towards or away from grey, then
    towards or away from the middle, then become brighter or darker. Done here because the pixels are floats by now.
    """
    mean, std = _constants(images.device, *mean_std)
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
def _constants(device: torch.device, mean: Colour, std: Colour) -> tuple[Tensor, Tensor]:
    """In byte units. Copied to a device once: copying in every step would stall it."""
    values = (torch.tensor(colour, device=device).view(3, 1, 1) * 255 for colour in (mean, std))
    return next(values), next(values)
