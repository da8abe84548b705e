"""What every format comes down to: rows of a picture, its captions and, where the data say so, its side. No torch."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from clipctl.config.sections import DataConfig

PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".ppm")
UNSAID, TRAIN, VAL, TEST = range(4)  # sides, as an index stores them
SIDE_WORDS = {
    **dict.fromkeys(("train", "training", "restval", "trainval"), TRAIN),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), VAL),
    **dict.fromkeys(("test", "testing"), TEST),
}
CAPTION_LIMIT_CHARACTERS = 10_000

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class Row(NamedTuple):
    """A picture and captions of it. A picture may have several rows."""

    picture: str  # a path, or the name of a member of a shard
    captions: Sequence[str]
    side: int = UNSAID
    shard: int = -1  # the number of the tar file it lies in, and where; -1: it is a file of its own
    offset: int = 0
    size_bytes: int = 0


@dataclass(frozen=True)
class Layout:
    """How data lie on disk, as far as it was understood."""

    format: str
    words: str  # what was understood, for people
    rows: Callable[[], Iterator[Row]]
    files: Sequence[Path]  # those that say what there is, and directories; when one of them changes, so have the data
    roots: Sequence[Path] = ()  # directories that picture paths may start from, the likeliest first
    shards: Sequence[Path] = ()
    listing: str = ""  # the digest of a survey, where the files themselves are the data


@dataclass(frozen=True)
class Hints:
    """What the user says about the data; None: find out."""

    format: str | None = None
    image_column: str | None = None
    caption_column: str | None = None
    image_root: str | None = None
    separator: str | None = None
    template: str = DataConfig.template


def is_picture(name: str) -> bool:
    return name.lower().endswith(PICTURE_SUFFIXES)


def side_of(word: object) -> int:
    """The side that a word such as `validation`, `train2017` or `test-dev` names."""
    first = re.match(r"[a-z]+", str(word).strip().lower())
    return SIDE_WORDS.get(first[0], UNSAID) if first else UNSAID


def clean_caption(text: str) -> str:
    """One line without control characters, single spaces, of bounded length; empty where nothing is left."""
    if not text.isprintable():
        text = _CONTROLS.sub(" ", text[: 4 * CAPTION_LIMIT_CHARACTERS])
    return " ".join(text.split())[:CAPTION_LIMIT_CHARACTERS]
