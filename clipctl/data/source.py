"""The interface that training expects of a data source. No torch."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Keys = NDArray[np.uint64]  # equal for equal content


def key_of(content: bytes) -> int:
    """64 bits that are equal for equal bytes, and for different bytes with a probability of about 10^-19."""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def mix(values: Keys, *salt: int) -> Keys:
    """Hash each value with the salt to 64 random-looking bits: splitmix64's finaliser, once per salt."""
    with np.errstate(over="ignore"):
        for number in (0, *salt):
            values = values + np.uint64((number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**64)
            values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            values = values ^ (values >> np.uint64(31))
    return values


class Source(Protocol):
    """Pictures with captions, by index. Workers get a copy, so it must be picklable."""

    name: str
    is_drawn: bool  # pictures are square and come in any requested size

    def __len__(self) -> int: ...
    @property
    def fingerprint(self) -> str:
        """Changes when pictures or captions do."""

    @property
    def state(self) -> str:
        """Changes whenever a picture file is written, even with the same content."""

    @property
    def caption_counts(self) -> NDArray[np.int64]:
        """(N,)"""

    def caption_count(self, index: int) -> int: ...
    @property
    def picture_keys(self) -> Keys:
        """(N,)"""

    def picture_key(self, index: int) -> int: ...

    def all_caption_keys(self) -> Keys:
        """Keys of every caption of every picture, in order."""

    def label(self, index: int) -> str:
        """The picture's name for the user: its file."""

    def captions(self, index: int) -> Sequence[str]: ...
    def caption(self, index: int, which: int) -> str: ...
    def caption_keys(self, choice: NDArray[np.int64]) -> Keys:
        """(N,): the key of caption number choice[i] of picture i."""

    def caption_key(self, index: int, which: int) -> int: ...

    # About all captions, in any order; may include those of the other split.
    def alphabet(self) -> str:
        """Their characters, in lower case."""

    def caption_lengths(self) -> NDArray[np.int64]:
        """In characters."""

    def caption_sizes(self) -> NDArray[np.int64]:
        """In bytes."""

    def caption_row(self, row: int) -> str: ...

    def picture(self, index: int, least_px: int) -> Image.Image:
        """The picture in its own aspect ratio, with no side below `least_px` unless it is smaller.
        Raises BadPictureError."""

    def square(self, index: int, size_px: int) -> Image.Image:
        """The centre crop, size_px × size_px. Raises BadPictureError."""
