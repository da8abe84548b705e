"""What training needs of data, wherever they come from. No torch."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Keys = NDArray[np.uint64]  # equal for equal things


def key_of(content: bytes) -> int:
    """64 bits that are equal for equal bytes, and for others once in 10^19."""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def mix(values: Keys, *salt: int) -> Keys:
    """Each value to 64 random-looking bits that depend on it and on the salt: splitmix64's finaliser, once for each."""
    with np.errstate(over="ignore"):
        for number in (0, *salt):
            values = values + np.uint64((number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**64)
            values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            values = values ^ (values >> np.uint64(31))
    return values


class Source(Protocol):
    """Pictures with captions, by index. Workers get a copy, so it must pickle."""

    name: str
    is_drawn: bool  # pictures come in any size that is asked for, square

    def __len__(self) -> int: ...
    @property
    def fingerprint(self) -> str:
        """Changes when pictures or captions do."""

    @property
    def state(self) -> str:
        """Changes whenever a picture's file was written, even with what it held before."""

    @property
    def caption_counts(self) -> NDArray[np.int64]:
        """(N,)"""

    def caption_count(self, index: int) -> int: ...
    @property
    def picture_keys(self) -> Keys:
        """(N,)"""

    def picture_key(self, index: int) -> int: ...

    def all_caption_keys(self) -> Keys:
        """Of every caption of every picture, in order."""

    def label(self, index: int) -> str:
        """What a person calls the picture: its file."""

    def captions(self, index: int) -> Sequence[str]: ...
    def caption(self, index: int, which: int) -> str: ...
    def caption_keys(self, choice: NDArray[np.int64]) -> Keys:
        """(N,): of caption number choice[i] of picture i."""

    def caption_key(self, index: int, which: int) -> int: ...

    # Of all captions that there are, in any order, those of the other side of a division maybe included.
    def alphabet(self) -> str:
        """Their characters, in lower case."""

    def caption_lengths(self) -> NDArray[np.int64]:
        """In characters."""

    def caption_sizes(self) -> NDArray[np.int64]:
        """In bytes."""

    def caption_row(self, row: int) -> str: ...

    def picture(self, index: int, least_px: int) -> Image.Image:
        """In its own shape, with no side below `least_px` unless it is smaller. Raises BadPictureError."""

    def square(self, index: int, size_px: int) -> Image.Image:
        """The middle of it, size_px × size_px. Raises BadPictureError."""
