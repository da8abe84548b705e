"""Captions to token ids. No torch."""

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipctl.errors import DataError

PAD_ID, START_ID, UNKNOWN_ID = 0, 1, 2
_FIRST_CHARACTER_ID = 3


class CharacterTokenizer:
    """One id a character: padding 0, start 1, unknown 2, the alphabet, and end-of-text as the highest id.

    The highest id is what OpenAI's CLIP and open_clip pool at, and an id other than 2 is what transformers takes
    literally, so every implementation finds the same end.
    """

    kind = "characters"

    def __init__(self, alphabet: Sequence[str], context: int) -> None:
        self.alphabet = tuple(alphabet)
        self.context = context
        self._ids = {character: id for id, character in enumerate(alphabet, start=_FIRST_CHARACTER_ID)}
        self.end_id = _FIRST_CHARACTER_ID + len(self.alphabet)
        self.vocab_size = self.end_id + 1

    @classmethod
    def learn(cls, captions: Iterable[str], context: int) -> "CharacterTokenizer":
        """The alphabet of these captions."""
        characters = set().union(*(normalise(caption) for caption in captions))
        return cls(sorted(characters), context)

    def encode(self, caption: str) -> NDArray[np.int64]:
        """Ids (context,): start, characters, end, padding. What does not fit is cut off before the end."""
        body = [self._ids.get(character, UNKNOWN_ID) for character in normalise(caption)[: self.context - 2]]
        ids = np.full(self.context, PAD_ID, dtype=np.int64)
        ids[: len(body) + 2] = [START_ID, *body, self.end_id]
        return ids

    def length(self, caption: str) -> int:
        """Ids before the padding, start and end included."""
        return min(len(normalise(caption)) + 2, self.context)

    def truncates(self, caption: str) -> bool:
        return len(normalise(caption)) > self.context - 2

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "alphabet": "".join(self.alphabet), "context": self.context}


def from_dict(document: dict[str, Any]) -> CharacterTokenizer:
    """The tokenizer that `to_dict` describes."""
    if document.get("kind") != CharacterTokenizer.kind:
        raise DataError(f"unknown tokenizer kind {document.get('kind')!r}")
    return CharacterTokenizer(document["alphabet"], document["context"])


def normalise(caption: str) -> str:
    """Composed characters, lower case, single spaces."""
    return " ".join(unicodedata.normalize("NFC", caption).lower().split())
