"""A model ready to embed: pixels and token ids in, unit vectors out, without gradients."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from clipctl.hardware.devices import Device
from clipctl.model.clip import Clip, autocast, normalise
from clipctl.model.compiling import uncompiled


class Engine(Protocol):
    """What computes embeddings, whichever library does it. B rows, E dimensions."""

    @property
    def dimensions(self) -> int: ...

    @property
    def scale(self) -> float:
        """1 / temperature: what the model multiplies similarities by before a softmax."""

    def images(self, pixels: Tensor) -> Tensor:
        """Pixels (B, H, W, 3), uint8, to unit vectors (B, E)."""

    def texts(self, tokens: Tensor) -> Tensor:
        """Token ids (B, N) to unit vectors (B, E)."""


class Encoder:
    """A model on its device, for embedding without gradients. B rows, E dimensions."""

    def __init__(self, model: Clip, device: Device, *, precision: str = "fp32", compiled: bool = False) -> None:
        self.model, self.device = model, device
        self._precision, self._compiled = precision, compiled

    @property
    def dimensions(self) -> int:
        return self.model.image.projection.out_features

    @property
    def scale(self) -> float:
        return float(self.model.log_scale.detach().exp())

    @torch.no_grad()
    def images(self, pixels: Tensor) -> Tensor:
        """Pixels (B, H, W, 3), uint8, or features of a locked tower, to unit vectors (B, E) on its device."""
        images = self._ready(pixels.to(self.device.image, non_blocking=True))
        with self._autocast(), uncompiled(self._compiled):
            return self.model.encode_image(images)

    @torch.no_grad()
    def texts(self, tokens: Tensor) -> Tensor:
        """Token ids (B, N) to unit vectors (B, E), also on the image tower's device."""
        with self._autocast():
            return self.model.encode_text(tokens.to(self.device.text, non_blocking=True)).to(self.device.image)

    @torch.no_grad()
    def image_features(self, pixels: Tensor, jitter: Tensor | None = None) -> Tensor:
        """What the projection reads of pixels (B, H, W, 3): (B, P), fp32."""
        with self._autocast(), uncompiled(self._compiled):
            return self.model.image.features(self._ready(pixels, jitter)).float()

    @torch.no_grad()
    def text_features(self, tokens: Tensor) -> Tensor:
        """What the projection reads of token ids (B, N): (B, D), fp32."""
        with self._autocast():
            return self.model.text.features(tokens.to(self.device.text)).float()

    def _ready(self, pixels: Tensor, jitter: Tensor | None = None) -> Tensor:
        return pixels if pixels.ndim == 2 else normalise(pixels, jitter, self.model.pixel_statistics)

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.device.image, self._precision)
