"""The pictures that a command was given: folders, files, tables, JSON, shards. Captions are not needed. No torch."""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from PIL import Image

from clipctl.config.sections import is_synthetic
from clipctl.data.bad import BadPictureError
from clipctl.data.decoding import FILE_LIMIT_BYTES, open_picture, to_square
from clipctl.data.formats.folders import walk
from clipctl.data.formats.recognise import check_place
from clipctl.data.formats.rows import Hints, is_picture, looks_like_picture, why_unread
from clipctl.data.index.columns import file_facts
from clipctl.data.index.source import IndexedSource, read_patiently
from clipctl.data.index.store import open_index
from clipctl.errors import DataError
from clipctl.progress import Tell, silent

NO_HINTS = Hints()


class PictureId(NamedTuple):
    """A picture as it is now: if size or time changes, it counts as another picture."""

    path: str  # of the file; or of the shard, a slash, and the member
    size_bytes: int
    changed: int  # when, in nanoseconds; in a shard, a key of the content


class BadFile(NamedTuple):
    """A picture that could not be used."""

    picture: PictureId
    reason: str


class Gallery(Protocol):
    """Pictures in an order that stays the same as long as the pictures do."""

    @property
    def pictures(self) -> Sequence[PictureId]: ...

    def content(self, number: int) -> bytes:
        """The file's bytes. Raises BadPictureError."""


@dataclass(frozen=True)
class Files:
    """Pictures that are files of their own."""

    pictures: Sequence[PictureId]

    def content(self, number: int) -> bytes:
        path = self.pictures[number].path
        if why := why_unread(path):
            raise BadPictureError(why)
        return read_patiently(path, 0, FILE_LIMIT_BYTES + 1)


class Indexed:
    """Pictures of a dataset."""

    def __init__(self, source: IndexedSource) -> None:
        self._source = source
        is_sharded = any(part.facts.sharded for part in source.parts)
        sizes, keys = source.sizes.tolist(), source.picture_keys.tolist()
        self.pictures = [
            PictureId(label, *((sizes[number], keys[number]) if is_sharded else file_facts(label)))
            for number, label in enumerate(map(source.label, range(len(source))))
        ]

    def content(self, number: int) -> bytes:
        return self._source.content(number)


class Joined:
    """Several galleries, one after the other; a picture that is in two of them counts once."""

    def __init__(self, parts: Sequence[Gallery]) -> None:
        places = {
            picture.path: (part, number) for part in reversed(parts) for number, picture in enumerate(part.pictures)
        }
        order = dict.fromkeys(picture.path for part in parts for picture in part.pictures)
        self._places = [places[path] for path in order]
        self.pictures = [part.pictures[number] for part, number in self._places]

    def content(self, number: int) -> bytes:
        part, inside = self._places[number]
        return part.content(inside)


def open_gallery(places: Sequence[str], tell: Tell = silent, hints: Hints = NO_HINTS) -> Gallery:
    """Every picture at these places. A folder is searched with all folders below it."""
    parts = [_open(place, tell, hints) for place in places]
    gallery: Gallery = parts[0] if len(parts) == 1 else Joined(parts)
    if not gallery.pictures:
        raise DataError(f"there are no pictures in {', '.join(places)}", "pass the folder that holds them")
    return gallery


def _folder(place: str, tell: Tell, hints: Hints) -> Gallery:
    root, pictures, has_shards = os.path.abspath(place), list[PictureId](), False
    for folder in walk(Path(place)):
        for file in folder.files:
            if looks_like_picture(file.name):
                path = os.path.join(root, folder.name, file.name)
                pictures.append(PictureId(path, file.size_bytes, file.mtime_ns))
            has_shards = has_shards or file.name.endswith(".tar")
    if has_shards and not any(is_picture(one.path) for one in pictures):
        return _indexed(place, tell, hints)
    return Files(pictures)


def _open(place: str, tell: Tell, hints: Hints) -> Gallery:
    if is_synthetic(place) and not os.path.exists(place):
        raise DataError(
            f"{place} names built-in pictures, which are drawn while training and have no files",
            "pass a folder of pictures",
        )
    check_place(place)
    path = Path(place)
    if path.is_dir():
        tell(f"looking for pictures in {place}")
        return _folder(place, tell, hints)
    if looks_like_picture(place):
        return Files([PictureId(os.path.abspath(place), *file_facts(place))])
    return _indexed(place, tell, hints)


def _indexed(place: str, tell: Tell, hints: Hints) -> Gallery:
    """Every picture of a dataset, with or without a caption."""
    index = open_index(os.path.abspath(place), hints, tell, needs_captions=False)
    return Indexed(IndexedSource.whole([index], place))


class Originals:
    """The pictures of an index, opened again by their paths."""

    def __init__(self, places: Sequence[str], hints: Hints = NO_HINTS) -> None:
        self._places, self._hints, self._lock = places, hints, threading.Lock()
        self._found: tuple[Gallery, dict[str, int]] | None = None

    def _members(self) -> tuple[Gallery, dict[str, int]]:
        """Where pictures that are not files of their own lie in shards. Looked up once for all."""
        with self._lock:
            if self._found is None:
                gallery = open_gallery(self._places, hints=self._hints)
                self._found = gallery, {picture.path: number for number, picture in enumerate(gallery.pictures)}
            return self._found

    def content(self, path: str) -> bytes:
        """Raises BadPictureError."""
        if os.path.isfile(path):
            return read_patiently(path, 0, FILE_LIMIT_BYTES + 1)
        try:
            gallery, numbers = self._members()
        except (DataError, OSError):
            raise BadPictureError("missing") from None
        if path not in numbers:
            raise BadPictureError("missing")
        return gallery.content(numbers[path])

    def unchanged(self, picture: PictureId) -> bytes:
        """Only of a file that is still the one that was embedded: a link may have taken its place. Raises
        BadPictureError."""
        content = self.content(picture.path)
        if os.path.isfile(picture.path) and file_facts(picture.path) != (picture.size_bytes, picture.changed):
            raise BadPictureError("changed since it was embedded")
        return content

    def square(self, path: str, size_px: int) -> Image.Image:
        return to_square(open_picture(self.content(path), size_px), size_px)
