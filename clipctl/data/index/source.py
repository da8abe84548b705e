"""Pictures from files and shards, accessed through their indexes. No torch."""

import errno
import os
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from clipctl.data.bad import BadPictureError
from clipctl.data.decoding import FILE_LIMIT_BYTES, open_picture, to_square
from clipctl.data.index.columns import Index, read_part
from clipctl.data.source import Keys
from clipctl.files import NotPlainError

CHUNK = 2**20
RETRY_S = 0.2
LASTING_ERRORS = {
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.EACCES: "unreadable (permission denied)",
}


class IndexedSource:
    """A selection of the pictures in one or more indexes, numbered from 0."""

    is_drawn = False

    def __init__(self, parts: Sequence[Index], pictures: NDArray[np.int32], name: str) -> None:
        self.parts, self.pictures, self.name = tuple(parts), pictures, name  # pictures: numbers in the joined parts
        self._starts = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return len(self.pictures)

    @classmethod
    def whole(cls, parts: Sequence[Index], name: str) -> "IndexedSource":
        return cls(parts, np.arange(sum(map(len, parts)), dtype=np.int32), name)

    def select(self, chosen: NDArray[np.int64]) -> "IndexedSource":
        return IndexedSource(self.parts, self.pictures[chosen], self.name)

    def without(self, chosen: NDArray[np.int64]) -> "IndexedSource":
        return IndexedSource(self.parts, np.delete(self.pictures, chosen), self.name)

    def thinned(self, limit: int) -> "IndexedSource":
        """At most `limit` pictures, evenly spaced."""
        if len(self) <= limit:
            return self
        return self.select(np.arange(limit) * len(self) // limit)

    @property
    def has_sides(self) -> bool:
        return any(sum(part.facts.side_counts[1:]) for part in self.parts)

    @property
    def fingerprint(self) -> str:
        digest = sha256(" ".join(part.facts.fingerprint for part in self.parts).encode())
        digest.update(np.ascontiguousarray(self.pictures, dtype="<i4").data)
        return digest.hexdigest()

    @property
    def state(self) -> str:
        return sha256(" ".join([self.fingerprint, *(part.facts.state for part in self.parts)]).encode()).hexdigest()

    def _at(self, index: int) -> tuple[Index, int]:
        """The part that a picture belongs to, and its number there."""
        number = int(self.pictures[index])
        if len(self.parts) == 1:
            return self.parts[0], number
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self.parts[part], number - int(self._starts[part])

    def _column(self, name: str) -> NDArray[np.generic]:
        """A column across all parts, for the selected pictures."""
        columns = [getattr(part, name) for part in self.parts]
        return (columns[0] if len(columns) == 1 else np.concatenate(columns))[self.pictures]

    # --- pictures

    @property
    def picture_keys(self) -> Keys:
        return self._column("picture_keys")  # type: ignore[return-value]

    def picture_key(self, index: int) -> int:
        part, number = self._at(index)
        return int(part.picture_keys[number])

    @property
    def sides(self) -> NDArray[np.uint8]:
        return self._column("sides")  # type: ignore[return-value]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Size of each in bytes; -1 if missing."""
        return self._column("sizes")  # type: ignore[return-value]

    def key_chunks(self) -> Iterator[Keys]:
        """`picture_keys` in chunks, for very large datasets."""
        for start in range(0, len(self), CHUNK):
            yield self._chunk(slice(start, start + CHUNK))

    def _chunk(self, window: slice) -> Keys:
        pictures = self.pictures[window]
        keys = np.empty(len(pictures), dtype=np.uint64)
        for part, mine, numbers in self._by_part(pictures):
            # Mapped afresh, so that what was read does not stay in memory.
            keys[mine] = np.load(part.path / "picture_key.npy", mmap_mode="r")[numbers]
        return keys

    def _by_part(self, pictures: NDArray[np.int32]) -> Iterator[tuple[Index, NDArray[np.bool_], NDArray[np.int32]]]:
        """Each part that has some of these pictures, which of them it has, and their numbers there."""
        for part, start, end in zip(self.parts, self._starts, self._starts[1:], strict=False):
            mine = (pictures >= start) & (pictures < end)
            if mine.any():
                yield part, mine, pictures[mine] - np.int32(start)

    def label(self, index: int) -> str:
        part, number = self._at(index)
        return part.label(number)

    def picture(self, index: int, least_px: int) -> Image.Image:
        return open_picture(self.content(index), least_px)

    def square(self, index: int, size_px: int) -> Image.Image:
        return to_square(open_picture(self.content(index)), size_px)

    def content(self, index: int) -> bytes:
        """The file's bytes, undecoded. Raises BadPictureError."""
        part, number = self._at(index)
        return read_patiently(*part.extent(number, FILE_LIMIT_BYTES + 1))

    # --- captions

    @property
    def caption_counts(self) -> NDArray[np.int64]:
        counts = [np.diff(part.first_captions) for part in self.parts]
        return (counts[0] if len(counts) == 1 else np.concatenate(counts))[self.pictures]

    def caption_count(self, index: int) -> int:
        part, number = self._at(index)
        return int(part.first_captions[number + 1] - part.first_captions[number])

    def captions(self, index: int) -> list[str]:
        part, number = self._at(index)
        return part.captions(number)

    def all_caption_keys(self) -> Keys:
        """Keys of every caption of every picture, in order."""
        return np.concatenate(list(self.caption_key_chunks()) or [np.zeros(0, dtype=np.uint64)])

    def caption_key_chunks(self) -> Iterator[Keys]:
        for part, _, mine in self._by_part(self.pictures):
            for window in range(0, len(mine), CHUNK):
                numbers = mine[window : window + CHUNK]
                firsts, lasts = part.first_captions[numbers], part.first_captions[numbers + 1]
                yield part.row_keys[part.caption_rows[_ranges(firsts, lasts)]]

    def caption(self, index: int, which: int) -> str:
        part, number = self._at(index)
        return part.caption_at(int(part.caption_rows[part.first_captions[number] + which]))

    def caption_key(self, index: int, which: int) -> int:
        part, number = self._at(index)
        return int(part.row_keys[part.caption_rows[part.first_captions[number] + which]])

    def caption_keys(self, choice: NDArray[np.int64]) -> Keys:
        keys = np.empty(len(self), dtype=np.uint64)
        for part, mine, numbers in self._by_part(self.pictures):
            keys[mine] = part.row_keys[part.caption_rows[part.first_captions[numbers] + choice[mine]]]
        return keys

    # --- all captions of the parts

    def alphabet(self) -> str:
        return "".join(sorted(set().union(*(part.facts.alphabet for part in self.parts))))

    def caption_lengths(self) -> NDArray[np.int64]:
        return np.concatenate([part.row_lengths for part in self.parts]).astype(np.int64)

    def caption_sizes(self) -> NDArray[np.int64]:
        return np.concatenate([part.row_sizes for part in self.parts])

    def caption_row(self, row: int) -> str:
        for part in self.parts:
            if row < part.caption_count:
                return part.caption_at(row)
            row -= part.caption_count
        raise IndexError(row)


def read_patiently(path: str, offset: int, limit_bytes: int) -> bytes:
    """Part of a file. Raises BadPictureError, for what may be temporary only after a second try."""
    for is_last in (False, True):
        try:
            return read_part(path, offset, limit_bytes)
        except NotPlainError:
            raise BadPictureError("a directory" if os.path.isdir(path) else "not a regular file") from None
        except OSError as error:
            lasting = LASTING_ERRORS.get(error.errno or 0)
            if lasting or is_last:
                raise BadPictureError(lasting or f"unreadable ({error})") from None
        time.sleep(RETRY_S)  # too many open files, a network disk waking up
    raise AssertionError


def _ranges(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers of all ranges start … end - 1, one range after another."""
    lengths = ends - starts
    before = np.cumsum(lengths) - lengths
    return np.asarray(np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths))
