"""Pictures and captions as memory-mapped columns: built once, opened in no time, no Python object a row. No torch.

An index lies in the user's application directory, one for each place and way of reading it. It is built anew when the
files it was made from have changed; its fingerprint follows from what it holds and from nothing else.
"""

import json
import os
import shutil
import stat
import tempfile
import unicodedata
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from clipctl import files
from clipctl.data.source import Keys, key_of
from clipctl.data.sources.recognise import recognise
from clipctl.data.sources.roots import find_roots
from clipctl.data.sources.rows import CAPTION_LIMIT_CHARACTERS, Hints, Layout, Row, clean_caption
from clipctl.errors import DataError
from clipctl.hardware.profile import application_dir

SCHEMA = "clipctl.index/1"
META = "meta.json"
HASHED_PICTURES = 20_000  # up to so many are compared by their bytes, more by their names
HASHED_BYTES = 2**20  # so many of a picture, and its size
CHECKED_PICTURES = 10_000  # up to so many are looked at again at every opening
CHECKED_RUNS, RUN_PICTURES = 16, 64  # of more, so many runs of so many neighbours
_ALPHABET_CAPTIONS = 4096  # whose characters are collected at a time


@dataclass
class Facts:
    """What an index says about itself, besides its columns."""

    source: str
    format: str
    words: str
    places: list[str]  # directories that names start from, or shards
    sharded: bool
    stamps: list[list[Any]]  # of the files it was made from
    listing: str
    alphabet: str  # characters of all captions, in lower case
    skipped: dict[str, int]  # rows left out, by reason
    missing: int  # pictures that are not there
    side_counts: list[int]  # pictures by side
    side_conflicts: int  # pictures that rows put on several sides
    hashed: bool  # pictures were compared by their bytes
    fingerprint: str = ""
    schema: str = SCHEMA


class Index:
    """P pictures and their C captions, as columns on disk."""

    def __init__(self, path: Path, facts: Facts) -> None:
        self.path, self.facts = path, facts
        # Of pictures: (P,). A name is a slice of `names.bin`.
        self.places = self._column("place")  # int32, the number in facts.places
        self.offsets = self._column("offset")  # int64, in a shard; 0 in a file
        self.sizes = self._column("size")  # int64, bytes; -1 for a picture that is missing
        self.mtimes_ns = self._column("mtime")  # int64
        self.sides = self._column("side")  # uint8
        self.picture_keys: Keys = self._column("picture_key")  # equal for equal pictures
        self._name_starts, self._name_ends = self._column("name_start"), self._column("name_end")  # int64
        self._names = np.memmap(path / "names.bin", dtype=np.uint8, mode="r").data
        # Of captions in the order of pictures: those of picture p are rows[first[p] : first[p + 1]].
        self.first_captions = self._column("first")  # int64, (P + 1,)
        self.caption_rows = self._column("caption_row")  # int64, (C,)
        # Of captions in the order in which they were read. A text is a slice of `captions.bin`.
        self.row_keys: Keys = self._column("caption_key")  # (C,), equal for equal texts
        self.row_lengths = self._column("caption_length")  # uint16, (C,), characters
        self._caption_ends = self._column("caption_end")  # int64, (C + 1,)
        self._texts = np.memmap(path / "captions.bin", dtype=np.uint8, mode="r").data

    def __reduce__(self) -> tuple[Any, ...]:
        """Workers map the files themselves."""
        return Index, (self.path, self.facts)

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

    def place(self, picture: int) -> str:
        """The directory or shard it lies in."""
        return self.facts.places[int(self.places[picture])]

    def captions(self, picture: int) -> list[str]:
        rows = self.caption_rows[int(self.first_captions[picture]) : int(self.first_captions[picture + 1])]
        return [self.caption_at(int(row)) for row in rows]

    def caption_at(self, row: int) -> str:
        return _decoded(self._texts[self._caption_ends[row] : self._caption_ends[row + 1]])

    def is_current(self, layout: Layout) -> bool:
        """Whether what it was made from is still there, unchanged."""
        if self.facts.stamps != stamps_of(layout.files) or self.facts.listing != layout.listing:
            return False
        if self.facts.sharded or layout.listing:
            return True
        if len(self) <= CHECKED_PICTURES:
            return self._is_unchanged(range(len(self)))
        starts = range(0, len(self) - RUN_PICTURES, len(self) // CHECKED_RUNS)
        # Mapped anew for each run: what the system reads around it does not stay in memory.
        return all(Index(self.path, self.facts)._is_unchanged(range(start, start + RUN_PICTURES)) for start in starts)

    def _is_unchanged(self, pictures: range) -> bool:
        for picture in pictures:
            size_bytes, mtime_ns = _stat(os.path.join(self.place(picture), self.name(picture)))
            if size_bytes != self.sizes[picture] or mtime_ns != self.mtimes_ns[picture]:
                return False
        return True


def _decoded(content: memoryview) -> str:
    return bytes(content).decode("utf-8", errors="surrogateescape")


def stamps_of(paths: Iterable[Path]) -> list[list[Any]]:
    """What changes when a file is written: like git, a look at the file's facts instead of its bytes."""
    stamps = []
    for path in paths:
        facts = path.stat()
        stamps.append([str(path), facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns])
    return stamps


def open_index(source: str, hints: Hints) -> Index:
    """The index of the data at a path, built if there is none or if they have changed."""
    layout = recognise(source, hints)
    directory = indexes_dir() / sha256(json.dumps([source, asdict(hints), SCHEMA]).encode()).hexdigest()[:20]
    index = read_index(directory)
    if index is not None and index.is_current(layout):
        return index
    with FileLock(directory.with_name(f"{directory.name}.lock")):
        index = read_index(directory)
        if index is not None and index.is_current(layout):  # another process was faster
            return index
        forget_orphans(directory.parent)
        files.delete(directory)
        with files.replaced(directory, durable=False) as partial:
            partial.mkdir()
            build(source, layout, partial)
    index = read_index(directory)
    assert index is not None
    return index


def indexes_dir() -> Path:
    """Where indexes are kept; a temporary place where the application directory cannot be written."""
    directory = application_dir() / "indexes"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK):
            return directory
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="clipctl-indexes-"))


def read_index(directory: Path) -> Index | None:
    """None where there is none that can be used."""
    try:
        values = json.loads(files.read_bounded(directory / META, 200_000_000))
        return Index(directory, Facts(**values)) if values["schema"] == SCHEMA else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def forget_orphans(directory: Path) -> None:
    """Delete indexes of data that are gone."""
    for path in directory.iterdir():
        index = read_index(path) if path.is_dir() else None
        if index is not None and index.facts.stamps and not any(os.path.exists(one[0]) for one in index.facts.stamps):
            shutil.rmtree(path, ignore_errors=True)


# --- building -------------------------------------------------------------------------------------------------


def build(source: str, layout: Layout, directory: Path) -> None:
    """Write the index of a layout into an empty directory."""
    rows = _RowWriter(directory)
    with rows:
        for row in layout.rows():
            rows.add(row)
    if not rows.captions:
        raise DataError(
            f"{source} ({layout.format}: {layout.words}) has no captions: {_reasons(rows.skipped)}",
            "--caption-column NAME says where they are",
        )
    columns = rows.columns()
    places = [str(path) for path in layout.shards] or _find_pictures(directory, columns, layout)
    missing = int((columns["size"] < 0).sum())
    if missing == len(columns["size"]):
        raise DataError(f"none of the {missing:,} pictures exists", "--image-root DIR says where they lie")
    for name, column in columns.items():
        np.save(directory / f"{name}.npy", column)
    facts = Facts(
        source=source,
        format=layout.format,
        words=layout.words,
        places=places,
        sharded=bool(layout.shards),
        stamps=stamps_of(layout.files),
        listing=layout.listing,
        alphabet="".join(sorted(rows.alphabet)),
        skipped=rows.skipped,
        missing=missing,
        side_counts=np.bincount(columns["side"], minlength=4).tolist(),
        side_conflicts=rows.side_conflicts,
        hashed=len(columns["size"]) <= HASHED_PICTURES,
    )
    index = Index(directory, facts)
    if facts.hashed:
        keys = [_picture_key(index, picture) for picture in range(len(index))]
        (directory / "picture_key.npy").unlink()  # it is mapped
        np.save(directory / "picture_key.npy", np.array(keys, dtype=np.uint64))
    facts.fingerprint = _fingerprint(directory)
    (directory / META).write_text(json.dumps(asdict(facts)), encoding="utf-8")


class _RowWriter:
    """Takes rows as they are read, and groups them by picture at the end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._texts: BinaryIO
        self._names: BinaryIO
        self._text_bytes = self._name_bytes = 0
        self._caption_ends, self._caption_keys, self._lengths = array("q", [0]), array("Q"), array("H")
        # A run: captions that come one after the other for one picture.
        self._runs, self._digests = array("q"), bytearray()
        self._name_starts, self._name_ends = array("q"), array("q")
        self._shards, self._offsets, self._sizes, self._sides = array("i"), array("q"), array("q"), array("B")
        self._last: tuple[str, int] | None = None
        self._recent: list[str] = []
        self.alphabet: set[str] = set()
        self.skipped: dict[str, int] = {}
        self.side_conflicts = 0

    def __enter__(self) -> "_RowWriter":
        self._texts = (self._directory / "captions.bin").open("wb", buffering=2**20)
        self._names = (self._directory / "names.bin").open("wb", buffering=2**20)
        return self

    def __exit__(self, *_: object) -> None:
        self._collect_characters()
        self._texts.close()
        self._names.close()

    @property
    def captions(self) -> int:
        return len(self._caption_keys)

    def add(self, row: Row) -> None:
        if not row.picture:
            self._skip("no picture named")
            return
        texts = [text for text in map(clean_caption, row.captions) if text]
        if not texts:
            self._skip("no caption")
            return
        if (row.picture, row.shard) != self._last or row.side != self._sides[-1]:
            self._start_run(row)
        for text in texts:
            self._add_caption(text)

    def _skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def _start_run(self, row: Row) -> None:
        self._last = (row.picture, row.shard)
        name = row.picture.encode("utf-8", errors="surrogateescape")
        self._digests += blake2b(b"%d/%b" % (row.shard, name), digest_size=16).digest()
        self._names.write(name)
        self._name_starts.append(self._name_bytes)
        self._name_bytes += len(name)
        self._name_ends.append(self._name_bytes)
        self._shards.append(row.shard)
        self._offsets.append(row.offset)
        self._sizes.append(row.size_bytes)
        self._sides.append(row.side)
        self._runs.append(len(self._caption_keys))

    def _add_caption(self, text: str) -> None:
        content = text.encode("utf-8", errors="replace")
        self._texts.write(content)
        self._text_bytes += len(content)
        self._caption_ends.append(self._text_bytes)
        self._caption_keys.append(key_of(content))
        normal = text if text.isascii() else unicodedata.normalize("NFC", text)
        self._lengths.append(min(len(normal), CAPTION_LIMIT_CHARACTERS))
        self._recent.append(normal)
        if len(self._recent) >= _ALPHABET_CAPTIONS:
            self._collect_characters()

    def _collect_characters(self) -> None:
        self.alphabet |= set("".join(self._recent).lower())
        self._recent.clear()

    def columns(self) -> dict[str, NDArray[Any]]:
        """The columns of an index, pictures in the order in which they first came."""
        digests = np.frombuffer(bytes(self._digests), dtype=np.uint64).reshape(-1, 2)
        picture_of_run, first_run = group(digests)
        run_lengths = np.diff(np.append(np.frombuffer(self._runs, dtype=np.int64), self.captions))
        picture_of_caption = np.repeat(picture_of_run, run_lengths)
        sides = np.frombuffer(self._sides, dtype=np.uint8)
        self.side_conflicts = len(np.unique(picture_of_run[sides != sides[first_run][picture_of_run]]))
        counts = np.bincount(picture_of_caption, minlength=len(first_run))
        return {
            "caption_end": np.frombuffer(self._caption_ends, dtype=np.int64),
            "caption_key": np.frombuffer(self._caption_keys, dtype=np.uint64),
            "caption_length": np.frombuffer(self._lengths, dtype=np.uint16),
            "caption_row": np.argsort(picture_of_caption, kind="stable"),
            "first": np.concatenate([[0], np.cumsum(counts)]),
            "name_start": np.frombuffer(self._name_starts, dtype=np.int64)[first_run],
            "name_end": np.frombuffer(self._name_ends, dtype=np.int64)[first_run],
            "place": np.frombuffer(self._shards, dtype=np.int32)[first_run],
            "offset": np.frombuffer(self._offsets, dtype=np.int64)[first_run],
            "size": np.frombuffer(self._sizes, dtype=np.int64)[first_run],
            "mtime": np.zeros(len(first_run), dtype=np.int64),
            "side": sides[first_run],
            "picture_key": digests[first_run, 0],
        }


def group(digests: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows with equal digests (R, 2) are one thing. The number of each row's thing, and the first row of each thing;
    things are numbered as they first come."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal rows stay in their order
    ordered = digests[order]
    starts = np.ones(len(order), dtype=bool)
    starts[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first_rows = order[starts]
    by_appearance = np.argsort(first_rows, kind="stable")
    number = np.empty(len(first_rows), dtype=np.int64)
    number[by_appearance] = np.arange(len(first_rows))
    things = np.empty(len(order), dtype=np.int64)
    things[order] = number[np.cumsum(starts) - 1]
    return things, first_rows[by_appearance]


def _find_pictures(directory: Path, columns: dict[str, NDArray[Any]], layout: Layout) -> list[str]:
    """Fill in where each picture lies and how large it is; the roots that were needed."""
    with (directory / "names.bin").open("rb") as file:
        names = _Names(file.read(), columns["name_start"], columns["name_end"])
    roots = [str(root) for root in find_roots(names, layout.roots)]
    places, sizes, mtimes = (np.array(columns[name]) for name in ("place", "size", "mtime"))
    for picture, name in enumerate(names):
        places[picture] = 0
        for number, root in enumerate(roots):
            size_bytes, mtime_ns = _stat(os.path.join(root, name))
            if size_bytes >= 0:
                places[picture] = number
                break
        sizes[picture], mtimes[picture] = size_bytes, mtime_ns
    columns |= {"place": places, "size": sizes, "mtime": mtimes}
    return roots


class _Names(Sequence[str]):
    def __init__(self, content: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        self._content, self._starts, self._ends = content, starts, ends

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: Any) -> Any:
        return self._content[self._starts[number] : self._ends[number]].decode("utf-8", errors="surrogateescape")


def _stat(path: str) -> tuple[int, int]:
    """Bytes and time of change; -1 where there is nothing. What is no file counts as empty: it is there, and bad."""
    try:
        facts = os.stat(path)
    except (OSError, ValueError):
        return -1, 0
    return (facts.st_size if stat.S_ISREG(facts.st_mode) else 0), facts.st_mtime_ns


def read_picture(index: Index, picture: int, limit_bytes: int) -> bytes:
    """The first bytes of a picture as it lies on disk. Raises OSError."""
    path = index.place(picture)
    if not index.facts.sharded:
        path = os.path.join(path, index.name(picture))
    with open(path, "rb", buffering=0) as file:
        if index.facts.sharded:
            file.seek(int(index.offsets[picture]))
            limit_bytes = min(limit_bytes, int(index.sizes[picture]))
        return file.read(limit_bytes)


def _picture_key(index: Index, picture: int) -> int:
    try:
        content = read_picture(index, picture, HASHED_BYTES)
    except OSError:
        content = index.name(picture).encode(errors="surrogateescape")
    return key_of(content + str(index.sizes[picture]).encode())


def _fingerprint(directory: Path) -> str:
    """Of captions, names, sizes, sides and pictures: all that training sees, and nothing of where it lies."""
    digest = sha256()
    names = ("captions.bin", "caption_end.npy", "caption_row.npy", "first.npy", "names.bin", "size.npy", "side.npy")
    for name in (*names, "picture_key.npy"):
        with (directory / name).open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def _reasons(skipped: dict[str, int]) -> str:
    return ", ".join(f"{count:,} rows with {reason}" for reason, count in skipped.items()) or "no rows at all"
