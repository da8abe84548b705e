"""What a training step takes: pictures, captions, and which belong together."""

from typing import NamedTuple

import torch
from torch import Tensor

from clipctl.data.bad import BadPicture


class Batch(NamedTuple):
    images: Tensor  # (B, H, W, 3) uint8
    tokens: Tensor  # (B, N) int64, N up to the context
    jitter: Tensor | None = None  # (B, 3): factors for brightness, contrast and saturation; None: unchanged
    positives: Tensor | None = None  # (B, B) bool: captions (column) that match a picture (row); None: only its own
    bad: tuple[BadPicture, ...] = ()  # pictures that were replaced by others

    def to(self, image: torch.device, text: torch.device) -> "Batch":
        """Move pictures and captions to their towers' devices."""
        images, jitter, positives = (
            tensor if tensor is None else tensor.to(image, non_blocking=True)
            for tensor in (self.images, self.jitter, self.positives)
        )
        assert images is not None
        return Batch(images, self.tokens.to(text, non_blocking=True), jitter, positives, self.bad)
