"""What every format is reduced to: rows with a picture, its captions and, if the data give one, its split. No torch."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from clipctl.config.sections import DataConfig
from clipctl.data.decoding import NO_HEIF, reads_heif

PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".ppm")
HEIF_SUFFIXES = (".heic", ".heif")  # read if pillow-heif is installed
UNREAD_SUFFIXES = {
    **dict.fromkeys((".cr2", ".cr3", ".nef", ".arw", ".dng"), "camera raw: save as JPEG"),
    ".jxl": "JPEG XL: save as JPEG",
}
UNSAID, TRAIN, VAL, TEST = range(4)  # sides (splits), as an index stores them
SIDE_WORDS = {
    **dict.fromkeys(("train", "training", "restval", "trainval"), TRAIN),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), VAL),
    **dict.fromkeys(("test", "testing"), TEST),
}
CAPTION_LIMIT_CHARACTERS = 10_000

_ABSOLUTE = re.compile(r"([A-Za-z]:)?[/\\]")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class Row(NamedTuple):
    """A picture and some of its captions. A picture may have several rows."""

    picture: str  # a path, or the name of a member of a shard
    captions: Sequence[str]
    side: int = UNSAID
    shard: int = -1  # number of the tar file that holds it, and where in it; -1: a separate file
    offset: int = 0
    size_bytes: int = 0


@dataclass(frozen=True)
class Layout:
    """How data are laid out on disk, as far as it was understood."""

    format: str
    words: str  # the same in words, for the user
    rows: Callable[[], Iterator[Row]]
    files: Sequence[Path]  # caption files and directories: if one of them changes, the data have changed
    roots: Sequence[Path] = ()  # directories that picture paths may start from, the most likely first
    shards: Sequence[Path] = ()
    listing: str = ""  # digest of a survey, if the files themselves are the data


@dataclass(frozen=True)
class Hints:
    """What the user specified about the data; None: detect it."""

    format: str | None = None
    image_column: str | None = None
    caption_column: str | None = None
    image_root: str | None = None
    separator: str | None = None
    template: str = DataConfig.template

    @property
    def of_pictures(self) -> dict[str, str]:
        """Those that decide which pictures there are; they make the same hints elsewhere: `Hints(**of_pictures)`."""
        root = None if self.image_root is None else os.path.abspath(self.image_root)
        found = {**asdict(self), "image_root": root}
        del found["template"]
        return {key: value for key, value in found.items() if value is not None}


def is_picture(name: str) -> bool:
    """Whether the name is that of a picture that can be read."""
    lowered = name.lower()
    return lowered.endswith(PICTURE_SUFFIXES) or (lowered.endswith(HEIF_SUFFIXES) and reads_heif())


def why_unread(name: str) -> str | None:
    """Why a picture with this name cannot be read, and what to do; None if it can, or is not a picture."""
    lowered = name.lower()
    if lowered.endswith(HEIF_SUFFIXES):
        return None if reads_heif() else NO_HEIF
    return UNREAD_SUFFIXES.get("".join(lowered.rpartition(".")[1:]))


def looks_like_picture(name: str) -> bool:
    """Whether the name is that of a picture, readable or not."""
    return is_picture(name) or why_unread(name) is not None


def is_absolute(path: str) -> bool:
    """On any system: /home/me/1.jpg, C:\\me\\1.jpg, \\\\server\\1.jpg."""
    return _ABSOLUTE.match(path) is not None


def side_of(word: object) -> int:
    """The side (split) that a word such as `validation`, `train2017` or `test-dev` names."""
    first = re.match(r"[a-z]+", str(word).strip().lower())
    return SIDE_WORDS.get(first[0], UNSAID) if first else UNSAID


def clean_caption(text: str) -> str:
    """One line of bounded length, without control characters or repeated spaces; empty if nothing is left."""
    if not text.isprintable():
        text = _CONTROLS.sub(" ", text[: 4 * CAPTION_LIMIT_CHARACTERS])
    return " ".join(text.split())[:CAPTION_LIMIT_CHARACTERS]
