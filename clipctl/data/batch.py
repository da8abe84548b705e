"""What a training step takes: pictures, captions, and which belong together."""

from typing import NamedTuple

import torch
from torch import Tensor

from clipctl.data.bad import BadPicture


class Batch(NamedTuple):
    images: Tensor  # (B, H, W, 3) uint8
    tokens: Tensor  # (B, N) int64, N up to the context
    jitter: Tensor | None = None  # (B, 3): factors of brightness, contrast and saturation; None: as they are
    positives: Tensor | None = None  # (B, B) bool: captions (column) that are right for a picture (row); None: its own
    bad: tuple[BadPicture, ...] = ()  # pictures that others stand in for

    def to(self, image: torch.device, text: torch.device) -> "Batch":
        """Pictures and captions where their towers are."""
        images, jitter, positives = (
            tensor if tensor is None else tensor.to(image, non_blocking=True)
            for tensor in (self.images, self.jitter, self.positives)
        )
        assert images is not None
        return Batch(images, self.tokens.to(text, non_blocking=True), jitter, positives, self.bad)
