"""Pictures and captions as memory-mapped columns: built once, opened instantly, no Python object per row. No torch."""

import os
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipctl import files
from clipctl.data.formats.folders import survey
from clipctl.data.source import Keys
from clipctl.errors import DataError

SCHEMA = "clipctl.index/2"
META = "meta.json"
META_LIMIT_BYTES = 200_000_000  # a million shards have long names
CHECKED_PICTURES = 10_000  # up to this many, all are checked for changes whenever the index is opened
CHECKED_RUNS, RUN_PICTURES = 16, 64  # of more, this many runs of this many neighbours


@dataclass
class IndexFacts:
    """What an index stores besides its columns."""

    source: str
    format: str
    words: str
    roots: list[str]  # directories that names start from, or shards
    sharded: bool
    stamps: list[list[Any]]  # of the files it was built from
    listing: str  # digest of a directory's files, if they are the data
    alphabet: str  # characters of all captions, in lower case
    skipped: dict[str, int]  # rows left out, by reason
    missing: int  # missing pictures
    side_counts: list[int]  # pictures in each split
    hashed: bool  # pictures were compared by content
    sums: dict[str, str]  # sha256 of every column
    fingerprint: str = ""  # of what training sees, regardless of where it is stored
    state: str = ""  # changes whenever a picture file is written
    notes: list[str] = field(default_factory=list)  # what the user should know about how it was read
    schema: str = SCHEMA

    @property
    def is_plausible(self) -> bool:
        """Whether all of it has the right types, and names what files can be called."""
        texts = (self.source, self.format, self.words, self.listing, self.alphabet, self.fingerprint, self.state)
        counts = (self.missing, *self.skipped.values(), *_listed(self.side_counts))
        stamps = [one for one in _listed(self.stamps) if isinstance(one, list) and one]
        return (
            all(isinstance(one, str) for one in (*texts, *_listed(self.notes), *self.skipped))
            and all(type(one) is int and 0 <= one < 2**50 for one in counts)
            and all(type(one) is bool for one in (self.sharded, self.hashed))
            and len(stamps) == len(self.stamps)
            and all(map(_is_path, (*_listed(self.roots), *(one[0] for one in stamps))))
        )


def _listed(values: Any) -> list[Any]:
    if not isinstance(values, list):
        raise TypeError("not a list")
    return values


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value and bool(os.fsencode(value))


class Index:
    """P pictures and their C captions, as columns on disk."""

    def __init__(self, path: Path, facts: IndexFacts, use: object = None) -> None:
        """`use`: a lock that keeps others from deleting it for as long as this object exists."""
        self.path, self.facts, self._use = path, facts, use
        # Per picture: (P,). A name is a slice of `names.bin`.
        self._roots = self._column("root")  # int32, index into facts.roots
        self._offsets = self._column("offset")  # int64, in a shard; 0 for a file
        self.sizes = self._column("size")  # int64, bytes; -1 for a missing picture
        self._mtimes_ns = self._column("mtime")  # int64
        self.sides = self._column("side")  # uint8
        self.picture_keys: Keys = self._column("picture_key")  # equal for equal pictures
        self._name_starts, self._name_ends = self._column("name_start"), self._column("name_end")  # int64
        self._names = _mapped(path / "names.bin")
        # Captions in the order of pictures: those of picture p are rows[first[p] : first[p + 1]].
        self.first_captions = self._column("first")  # int64, (P + 1,)
        self.caption_rows = self._column("caption_row")  # int64, (C,)
        # Captions in the order in which they were read. A text is a slice of `captions.bin`.
        self.row_keys: Keys = self._column("caption_key")  # (C,), equal for equal texts
        self.row_lengths = self._column("caption_length")  # uint16, (C,), characters
        self._caption_ends = self._column("caption_end")  # int64, (C + 1,)
        self._texts = _mapped(path / "captions.bin")

    def __reduce__(self) -> tuple[Any, ...]:
        """Workers map the files themselves instead of receiving a copy."""
        return _reopened, (self.path,)

    def __len__(self) -> int:
        return len(self.sizes)

    def _column(self, name: str) -> Any:
        return np.load(self.path / f"{name}.npy", mmap_mode="r").view(np.ndarray)  # memmap's own slices are slow

    @property
    def caption_count(self) -> int:
        return len(self.caption_rows)

    @property
    def row_sizes(self) -> NDArray[np.int64]:
        """(C,): bytes of each caption, in the order in which they were read."""
        return np.asarray(np.diff(self._caption_ends))

    def name(self, picture: int) -> str:
        return _decoded(self._names[self._name_starts[picture] : self._name_ends[picture]])

    def root(self, picture: int) -> str:
        """The directory or shard that holds it."""
        return self.facts.roots[int(self._roots[picture])]

    @property
    def last_root(self) -> int:
        return int(self._roots.max())

    def label(self, picture: int) -> str:
        """The file, or the shard and the member."""
        root, name = self.root(picture), self.name(picture)
        return f"{root}/{name}" if self.facts.sharded else os.path.join(root, name)

    def extent(self, picture: int, limit_bytes: int) -> tuple[str, int, int]:
        """Where the first bytes of a picture are: the file, from which byte on, and how many."""
        if not self.facts.sharded:
            return self.label(picture), 0, limit_bytes
        return self.root(picture), int(self._offsets[picture]), min(limit_bytes, int(self.sizes[picture]))

    def captions(self, picture: int) -> list[str]:
        rows = self.caption_rows[int(self.first_captions[picture]) : int(self.first_captions[picture + 1])]
        return [self.caption_at(int(row)) for row in rows]

    def caption_at(self, row: int) -> str:
        return _decoded(self._texts[self._caption_ends[row] : self._caption_ends[row + 1]])

    def is_current(self) -> bool:
        """Whether everything it was built from is still there, unchanged."""
        facts = self.facts
        if facts.stamps != stamps_of(stamp[0] for stamp in facts.stamps):
            return False
        if facts.listing:
            with suppress(OSError):
                return facts.listing == survey(Path(facts.source)).digest
            return False
        if facts.sharded:
            return True
        if len(self) <= CHECKED_PICTURES:
            return self._is_unchanged(range(len(self)))
        starts = range(0, len(self) - RUN_PICTURES, len(self) // CHECKED_RUNS)
        # Mapped afresh for each run, so that the pages the system reads ahead do not stay in memory.
        return all(Index(self.path, facts)._is_unchanged(range(start, start + RUN_PICTURES)) for start in starts)

    def _is_unchanged(self, pictures: range) -> bool:
        return all(
            file_facts(self.label(picture)) == (int(self.sizes[picture]), int(self._mtimes_ns[picture]))
            for picture in pictures
        )


def _mapped(path: Path) -> memoryview:
    """A file's bytes. The system maps no empty file."""
    return np.memmap(path, dtype=np.uint8, mode="r").data if path.stat().st_size else memoryview(b"")


def _decoded(content: memoryview) -> str:
    return bytes(content).decode("utf-8", errors="surrogateescape")


def skipped_words(skipped: dict[str, int]) -> list[str]:
    """3 rows have no caption."""
    return [f"{count:,} {'row has' if count == 1 else 'rows have'} {reason}" for reason, count in skipped.items()]


def read_part(path: str, offset: int, limit_bytes: int) -> bytes:
    """Part of a regular file; a pipe would block forever. Raises OSError."""
    with files.open_plain(Path(path), follows_links=True) as file:
        file.seek(offset)
        return file.read(limit_bytes)


def file_facts(path: str) -> tuple[int, int]:
    """Size and modification time; -1 if there is nothing. Anything but a file counts as empty: present, but bad."""
    try:
        facts = os.stat(path)
    except (OSError, ValueError):
        return -1, 0
    return (facts.st_size if stat.S_ISREG(facts.st_mode) else 0), facts.st_mtime_ns


def stamps_of(paths: Iterable[str]) -> list[list[Any]]:
    """Changes when a file is written or a directory gains an entry. Like git, looks at metadata instead of content."""
    stamps: list[list[Any]] = []
    for path in paths:
        try:
            facts = os.stat(path)
        except OSError:
            stamps.append([path])
            continue
        size_bytes = 0 if stat.S_ISDIR(facts.st_mode) else facts.st_size
        stamps.append([path, size_bytes, facts.st_mtime_ns, facts.st_ctime_ns])
    return stamps


def read_facts(directory: Path) -> IndexFacts | None:
    """The facts that the index in a directory records; None if there is no index."""
    try:
        values = files.read_sealed(directory / META, META_LIMIT_BYTES)
        facts = IndexFacts(**values)
        return facts if facts.schema == SCHEMA and facts.is_plausible else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def read_index(directory: Path, use: object = None) -> Index | None:
    """The index in a directory, every byte of it verified; None if there is none. After a power cut, a column may be
    all zeros, and training on the wrong captions would go unnoticed."""
    facts = read_facts(directory)
    try:
        if facts is None or column_sums(directory) != facts.sums:
            return None
        index = Index(directory, facts, use)
        return index if not len(index) or index.last_root < len(facts.roots) else None
    except (OSError, ValueError, EOFError):
        return None


def column_sums(directory: Path) -> dict[str, str]:
    columns = sorted(path for path in directory.iterdir() if path.suffix in (".npy", ".bin"))
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        return dict(zip((path.name for path in columns), pool.map(files.sha256_of, columns), strict=True))


def _reopened(directory: Path) -> Index:
    """In a worker: the process that started it has checked the columns, and keeps them."""
    facts = read_facts(directory)
    if facts is None:
        raise DataError(f"{directory} is gone: the data changed while the training was starting", "start it again")
    return Index(directory, facts)
