"""What a training step takes: pictures, captions, and which belong together."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from clipctl.data.bad import BadPicture


class Views(NamedTuple):
    """The random views that are still to be sampled from the pictures of a batch: see `data.views`."""

    maps: Tensor  # (B, 2, 3): from the corners (±1, ±1) of the model's input to pixels
    sizes: Tensor  # (B, 2): width and height of each picture, in the upper left corner of its place in the batch
    side_px: int  # of the model's input

    def to(self, device: torch.device) -> "Views":
        return Views(self.maps.to(device), self.sizes.to(device), self.side_px)

    def of(self, images: Tensor) -> Tensor:
        """Views of pictures (B, H, W, 3): (B, S, S, 3), sampled bilinearly. Beyond a picture, its edge is repeated."""
        pixels = images.permute(0, 3, 1, 2).contiguous().float()
        shape = [len(pixels), 3, self.side_px, self.side_px]
        places = F.affine_grid(self.maps, shape, align_corners=False)  # (B, S, S, 2), in pixels
        edge = self.sizes.to(pixels.dtype).view(-1, 1, 1, 2) - 0.5  # the middle of the last pixel
        places = torch.minimum(places.clamp(min=0.5), edge)
        canvas = places.new_tensor([pixels.shape[3], pixels.shape[2]])
        return F.grid_sample(pixels, 2 * places / canvas - 1, align_corners=False).permute(0, 2, 3, 1)

    def split(self, sizes: list[int]) -> "list[Views]":
        parts = zip(torch.split(self.maps, sizes), torch.split(self.sizes, sizes), strict=True)
        return [Views(maps, sizes, self.side_px) for maps, sizes in parts]


class Batch(NamedTuple):
    images: Tensor  # (B, H, W, 3) uint8; of a locked tower features (B, P)
    tokens: Tensor  # (B, N) int64, N up to the context; of a locked tower features (B, D)
    jitter: Tensor | None = None  # (B, 3): factors for brightness, contrast and saturation; None: unchanged
    positives: Tensor | None = None  # (B, B) bool: captions (column) that match a picture (row); None: only its own
    bad: tuple[BadPicture, ...] = ()  # pictures that were replaced by others
    views: Views | None = None  # None: pictures are what the model sees
    keys: Tensor | None = None  # (B, 2) int64: equal for equal captions, and for equal pictures

    def to(self, image: torch.device, text: torch.device) -> "Batch":
        """Move pictures and captions to their towers' devices."""
        images, jitter, positives = (
            tensor if tensor is None else tensor.to(image, non_blocking=True)
            for tensor in (self.images, self.jitter, self.positives)
        )
        assert images is not None
        views = None if self.views is None else self.views.to(image)
        return Batch(images, self.tokens.to(text, non_blocking=True), jitter, positives, self.bad, views, self.keys)

    @property
    def has_features(self) -> bool:
        """Whether the pictures are features already."""
        return self.images.ndim == 2

    @property
    def seen(self) -> Tensor:
        """What the model sees of the pictures: (B, S, S, 3), bytes or floats between 0 and 255."""
        return self.images if self.views is None else self.views.of(self.images)

    def split(self, pairs: int) -> "list[Batch]":
        """Parts of `pairs` pairs, the last may be smaller. Which captions match which pictures stays with the whole."""
        whole_parts, rest = divmod(len(self.images), pairs)
        return self._split([pairs] * whole_parts + [rest] * (rest > 0))

    def split_evenly(self, count: int) -> "list[Batch]":
        """`count` parts, as equal in size as possible."""
        size, more = divmod(len(self.images), count)
        return self._split([size + 1] * more + [size] * (count - more))

    def _split(self, sizes: list[int]) -> "list[Batch]":
        nothing = [None] * len(sizes)
        jitter = nothing if self.jitter is None else torch.split(self.jitter, sizes)
        views = nothing if self.views is None else self.views.split(sizes)
        parts = zip(torch.split(self.images, sizes), torch.split(self.tokens, sizes), jitter, views, strict=True)
        return [Batch(images, tokens, jitter=factors, views=some) for images, tokens, factors, some in parts]
