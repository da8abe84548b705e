"""Features of a locked tower in place of pictures and captions: they never change, so they are read, not computed."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clipctl.data.bad import BadPicture
from clipctl.data.loader import Pair, PairDataset
from clipctl.data.sampling import Key
from clipctl.data.source import Keys

Floats = NDArray[np.float32]


class Features(NamedTuple):
    """Of the training data. A tower that is not locked has none."""

    views: list[Floats] | None  # of pictures (N, P), one array for each augmented view
    captions: Floats | None  # (C, D) of different captions
    caption_keys: Keys  # (C,) in rising order
    bad: Mapping[int, str]  # pictures that could not be used, and why

    def of_caption(self, key: int) -> Floats:
        assert self.captions is not None
        return np.asarray(self.captions[np.searchsorted(self.caption_keys, np.uint64(key))])


class FeatureDataset(PairDataset):
    """The pairs of another dataset, in the same order and with the same substitutes, as features."""

    def __init__(self, pairs: PairDataset, features: Features) -> None:
        self.__dict__.update(pairs.__dict__)
        self._features = features
        self._bad = dict(features.bad)

    def __getitem__(self, key: Key) -> Pair:
        pair = self._without_pixels(key) if self._features.views else super().__getitem__(key)
        if self._features.captions is not None:
            pair = pair._replace(tokens=self._features.of_caption(pair.caption_key))
        return pair

    def _without_pixels(self, key: Key) -> Pair:
        epoch, asked, which = key
        assert self._features.views is not None
        index, bad = asked, list[BadPicture]()
        while index in self._bad:
            bad.append(BadPicture(index, self._bad[index]))
            index = (index + 1) % len(self._source)
        if bad:
            which = self._substitute_caption(index, epoch)
        text, view = self._text(index, which), self.view_of(epoch)
        # The row of the picture that was asked for: its augmentation is part of what a substitute's features are.
        features = np.asarray(self._features.views[view - 1][asked])
        return Pair(features, text.tokens, None, view, asked, False, text.caption_key, text.picture_key, tuple(bad))
