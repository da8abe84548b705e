"""The held-out pairs: read once, in batches, with the captions that are right for each picture."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipctl.data.bad import BadPicture, BadPictureError, too_few_held_out
from clipctl.data.batch import Batch
from clipctl.data.decoding import Pixels
from clipctl.data.sampling import batch_count
from clipctl.data.source import Keys, Source
from clipctl.data.tokenizers import Tokenizer
from clipctl.hardware.cpu import usable_cores


class Matches:
    """Which captions are right for which pictures: those of the picture, equal ones, and those of equal pictures.

    Kept as lists, not as a matrix: memory grows with the number of captions, and a part of the matrix is made when it
    is needed.
    """

    def __init__(self, owners: Sequence[int], texts: Sequence[str], picture_keys: Keys) -> None:
        """`owners[c]` is the picture that caption c is of."""
        self._numbers: dict[str, int] = {}  # of different texts
        numbers = self._numbers
        self._text_of = np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.int64)
        _, self._group_of = np.unique(picture_keys, return_inverse=True)  # equal pictures are one group
        self._texts: list[set[int]] = [set() for _ in range(int(self._group_of.max()) + 1)]
        for owner, text in zip(owners, self._text_of, strict=True):
            self._texts[self._group_of[owner]].add(int(text))

    @property
    def pictures(self) -> int:
        return len(self._group_of)

    @property
    def different(self) -> NDArray[np.int64]:
        """For each distinct text, the first caption that has it."""
        return np.unique(self._text_of, return_index=True)[1]

    @property
    def text_of(self) -> NDArray[np.int64]:
        """The number of each caption's text: its place among the distinct ones."""
        return self._text_of

    @property
    def pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(P,), (P,): each picture with each text that is right for it, by numbers."""
        texts = [sorted(self._texts[group]) for group in self._group_of]
        pictures = np.repeat(np.arange(len(texts)), [len(several) for several in texts])
        return pictures, np.array([text for several in texts for text in several], dtype=np.int64)

    def chance_recalls(self) -> tuple[float, float]:
        """Expected recall at 1 of guessing, from picture to caption and back: the mean share of right candidates, equal
        captions being one."""
        _, texts = self.pairs
        right_pictures = np.bincount(texts)  # of each different text
        i2t = len(texts) / (self.pictures * len(right_pictures))
        return i2t, float(right_pictures[self.text_of].mean()) / self.pictures

    def is_known(self, text: str) -> bool:
        """Whether it is right for any of the pictures."""
        return text in self._numbers

    def is_right(self, picture: int, text: str) -> bool:
        return self._numbers.get(text, -1) in self._texts[self._group_of[picture]]

    def rows(self, pictures: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(pictures, captions) for some of the pictures."""
        right = np.zeros((len(pictures), len(self._numbers)), dtype=bool)
        for row, picture in enumerate(pictures):
            right[row, list(self._texts[self._group_of[picture]])] = True
        return np.asarray(right[:, self._text_of])


class HeldOut(NamedTuple):
    """The held-out pictures, not augmented, each with its first caption; all further captions follow."""

    batches: list[Batch]
    more_tokens: list[Tensor]  # of each picture's further captions
    captions: list[str]  # first captions, then the others: one per row of tokens
    matches: Matches
    bad: tuple[BadPicture, ...]  # left out

    @property
    def pictures(self) -> int:
        return self.matches.pictures


def read_held_out(source: Source, tokenizer: Tokenizer, size_px: int, batch_size: int) -> HeldOut:
    """The whole held-out set, in order. Pictures are decoded by threads: decoders release the GIL."""

    def read(index: int) -> Pixels | BadPicture:
        try:
            return np.array(source.square(index, size_px))
        except BadPictureError as error:
            return BadPicture(index, str(error))

    with ThreadPoolExecutor(usable_cores()) as threads:
        found = list(threads.map(read, range(len(source))))
    good = [(index, pixels) for index, pixels in enumerate(found) if not isinstance(pixels, BadPicture)]
    bad = tuple(pixels for pixels in found if isinstance(pixels, BadPicture))
    if problem := too_few_held_out(len(found), [one.reason for one in bad]):
        raise problem
    texts = [source.captions(index) for index, _ in good]
    others = [(owner, text) for owner, several in enumerate(texts) for text in several[1:]]
    captions = [*(several[0] for several in texts), *(text for _, text in others)]
    picture_keys = np.array([source.picture_key(index) for index, _ in good], dtype=np.uint64)
    matches = Matches([*range(len(good)), *(owner for owner, _ in others)], captions, picture_keys)
    tokens = torch.from_numpy(np.stack([tokenizer.encode(text) for text in captions]))
    # Batches of almost equal size, for the reason given in `epoch_batches`.
    batches = []
    for chunk in np.array_split(np.arange(len(good)), batch_count(len(good), batch_size)):
        images = torch.from_numpy(np.stack([good[number][1] for number in chunk]))
        positives = matches.rows(chunk)[:, chunk]
        several = torch.from_numpy(np.ascontiguousarray(positives)) if positives.sum() > len(chunk) else None
        batches.append(Batch(images, tokens[chunk], positives=several))
    more_tokens = list(torch.split(tokens[len(good) :], batch_size)) if others else []
    return HeldOut(batches, more_tokens, captions, matches, bad)
