"""Builds an index: reads the rows, groups them by picture, and looks for the pictures. No torch."""

import os
import unicodedata
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from clipctl import files
from clipctl.data.formats.recognise import recognise
from clipctl.data.formats.roots import are_windows_paths, find_old_home, find_roots, is_below
from clipctl.data.formats.rows import CAPTION_LIMIT_CHARACTERS, Hints, Layout, Row, clean_caption, side_of
from clipctl.data.index.columns import META, IndexFacts, column_sums, file_facts, read_part, skipped_words, stamps_of
from clipctl.data.source import Keys, key_of, mix
from clipctl.errors import DataError, unreadable
from clipctl.progress import Tell

HASHED_PICTURES = 20_000  # up to this many are compared by content; more, by name and size
HASHED_BYTES = 2**20  # hashed per picture: all of it up to this size, three parts of a larger one
TOLD_ROWS = 100_000  # rows between progress messages
_ALPHABET_CAPTIONS = 4096  # captions whose characters are collected at a time

Columns = dict[str, NDArray[Any]]


def build(source: str, hints: Hints, directory: Path, tell: Tell, *, needs_captions: bool = True) -> IndexFacts:
    """Write the index of the data at a path into an empty directory. Pictures without a caption are left out if
    captions are needed."""
    rows = _RowWriter(directory, needs_captions=needs_captions)
    try:
        layout = recognise(source, hints)
        stamps = stamps_of(str(path) for path in layout.files)  # before reading, so later changes are noticed
    except OSError as error:
        raise unreadable(error.filename or source, error) from None
    with rows:
        for number, row in enumerate(_rows(source, layout)):
            rows.add(row)
            if number % TOLD_ROWS == 0:
                tell(f"reading {source}: {number:,} rows")
    if not rows.runs:
        raise _without(source, layout, rows.skipped, "captions" if needs_captions else "pictures")
    columns = rows.columns()
    names = _Names((directory / "names.bin").read_bytes(), columns["name_start"], columns["name_end"])
    tell(f"looking for the {len(names):,} pictures of {source}")
    notes: list[str] = []
    if layout.shards:
        roots = [str(path) for path in layout.shards]
    else:
        names, notes = _brought_home(directory, columns, names, layout.roots)
        roots = _find_pictures(columns, names, layout)
    missing = int((columns["size"] < 0).sum())
    if missing:  # watch the directories where they might appear
        stamps += stamps_of({path: None for root in roots for path in (root, os.path.dirname(root))})
    hashed = len(names) <= HASHED_PICTURES
    if hashed:
        tell(f"comparing the {len(names):,} pictures of {source}")
        keys = (_content_key(columns, names, roots, picture) for picture in range(len(names)))
        columns["picture_key"] = np.fromiter(keys, dtype=np.uint64, count=len(names))
    else:
        columns["picture_key"] = mix(np.bitwise_xor(columns["picture_key"], columns["size"].astype(np.uint64)))
    for name, column in columns.items():
        np.save(directory / f"{name}.npy", column)
    facts = IndexFacts(
        source=source,
        format=layout.format,
        words=layout.words,
        roots=roots,
        sharded=bool(layout.shards),
        stamps=stamps,
        listing=layout.listing,
        alphabet="".join(sorted(rows.alphabet)),
        skipped=rows.skipped,
        missing=missing,
        side_counts=np.bincount(columns["side"], minlength=4).tolist(),
        hashed=hashed,
        sums=column_sums(directory),
        fingerprint=_digest(directory, *FINGERPRINTED),
        notes=notes,
        state=_digest(directory, "mtime.npy") if not layout.shards else sha256(repr(stamps).encode()).hexdigest(),
    )
    files.write_sealed(directory / META, asdict(facts))
    return facts


def _rows(source: str, layout: Layout) -> Iterator[Row]:
    """What cannot be read is the data's fault; what cannot be written is not."""
    try:
        yield from layout.rows()
    except OSError as error:
        raise unreadable(error.filename or source, error) from None


def _without(source: str, layout: Layout, skipped: dict[str, int], noun: str) -> DataError:
    reasons = ", ".join(skipped_words(skipped)) or "it has no rows"
    flag = "--caption-column" if noun == "captions" else "--image-column"
    hint = f"fill in the {noun}, or name another column with {flag} NAME"
    return DataError(f"{source} ({layout.format}: {layout.words}) has no {noun}: {reasons}", hint)


FINGERPRINTED = (
    *("captions.bin", "caption_end.npy", "caption_row.npy", "first.npy", "names.bin", "name_start.npy"),
    *("size.npy", "side.npy", "picture_key.npy"),
)


def _digest(directory: Path, *names: str) -> str:
    digest = sha256()
    for name in names:
        with (directory / name).open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


# --- captions -------------------------------------------------------------------------------------------------


class _RowWriter:
    """Takes rows as they are read, and groups them by picture at the end."""

    def __init__(self, directory: Path, *, needs_captions: bool) -> None:
        self._directory, self._needs_captions = directory, needs_captions
        self._texts: BinaryIO
        self._names: BinaryIO
        self._text_bytes = self._name_bytes = 0
        self._caption_ends, self._caption_keys, self._lengths = array("q", [0]), array("Q"), array("H")
        # A run: consecutive captions of the same picture.
        self._runs, self._digests = array("q"), bytearray()
        self._name_starts, self._name_ends, self._name_keys = array("q"), array("q"), array("Q")
        self._shards, self._offsets, self._sizes, self._sides = array("i"), array("q"), array("q"), array("B")
        self._last: tuple[str, int, int, int] | None = None
        self._recent: list[str] = []
        self.alphabet: set[str] = set()
        self.skipped: dict[str, int] = {}

    def __enter__(self) -> "_RowWriter":
        self._texts = (self._directory / "captions.bin").open("wb", buffering=2**20)
        self._names = (self._directory / "names.bin").open("wb", buffering=2**20)
        return self

    def __exit__(self, *_: object) -> None:
        self._collect_characters()
        self._texts.close()
        self._names.close()

    @property
    def runs(self) -> int:
        return len(self._runs)

    def add(self, row: Row) -> None:
        texts = [text for text in map(clean_caption, row.captions) if text]
        if not row.picture:
            self._skip("no picture")
        elif not texts and self._needs_captions:
            self._skip("no caption")
        elif (row.picture, row.shard, row.offset, row.side) == self._last or self._start_run(row):
            for text in texts:
                self._add_caption(text)

    def _skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def _start_run(self, row: Row) -> bool:
        """False if the name is not a valid file name."""
        try:
            name = row.picture.encode("utf-8", errors="surrogateescape")
        except UnicodeEncodeError:
            self._skip("a name that no file can have")
            return False
        self._last = (row.picture, row.shard, row.offset, row.side)
        # The same name in two splits is two pictures (train/1.jpg, val/1.jpg), and so are two members of a shard.
        identity = b"%d/%d/%d/%b" % (row.shard, row.offset, row.side, name)
        self._digests += blake2b(identity, digest_size=16).digest()
        self._name_keys.append(key_of(b"%d/%b" % (row.shard, name)))
        self._names.write(name)
        self._name_starts.append(self._name_bytes)
        self._name_bytes += len(name)
        self._name_ends.append(self._name_bytes)
        self._shards.append(row.shard)
        self._offsets.append(row.offset)
        self._sizes.append(row.size_bytes)
        self._sides.append(row.side)
        self._runs.append(len(self._caption_keys))
        return True

    def _add_caption(self, text: str) -> None:
        content = text.encode("utf-8", errors="replace")
        self._texts.write(content)
        self._text_bytes += len(content)
        self._caption_ends.append(self._text_bytes)
        self._caption_keys.append(key_of(content))
        normal = text.lower() if text.isascii() else unicodedata.normalize("NFC", text).lower()
        self._lengths.append(min(len(normal), CAPTION_LIMIT_CHARACTERS))
        self._recent.append(normal)
        if len(self._recent) >= _ALPHABET_CAPTIONS:
            self._collect_characters()

    def _collect_characters(self) -> None:
        self.alphabet |= set("".join(self._recent))
        self._recent.clear()

    def columns(self) -> Columns:
        """The columns of an index, pictures in order of first appearance."""
        digests = np.frombuffer(bytes(self._digests), dtype=np.uint64).reshape(-1, 2)
        picture_of_run, first_run = group(digests)
        run_lengths = np.diff(np.append(np.frombuffer(self._runs, dtype=np.int64), len(self._caption_keys)))
        picture_of_caption = np.repeat(picture_of_run, run_lengths)
        sides = np.frombuffer(self._sides, dtype=np.uint8)
        counts = np.bincount(picture_of_caption, minlength=len(first_run))
        return {
            "caption_end": np.frombuffer(self._caption_ends, dtype=np.int64),
            "caption_key": np.frombuffer(self._caption_keys, dtype=np.uint64),
            "caption_length": np.frombuffer(self._lengths, dtype=np.uint16),
            "caption_row": np.argsort(picture_of_caption, kind="stable"),
            "first": np.concatenate([[0], np.cumsum(counts)]),
            "name_start": np.frombuffer(self._name_starts, dtype=np.int64)[first_run],
            "name_end": np.frombuffer(self._name_ends, dtype=np.int64)[first_run],
            "root": np.frombuffer(self._shards, dtype=np.int32)[first_run],
            "offset": np.frombuffer(self._offsets, dtype=np.int64)[first_run],
            "size": np.frombuffer(self._sizes, dtype=np.int64)[first_run],
            "mtime": np.zeros(len(first_run), dtype=np.int64),
            "side": sides[first_run],
            "picture_key": np.frombuffer(self._name_keys, dtype=np.uint64)[first_run],
        }


def group(digests: Keys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Groups rows with equal digests (R, 2). Returns each row's group and each group's first row; groups are numbered
    in order of first appearance."""
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


# --- pictures -------------------------------------------------------------------------------------------------


class _Names(Sequence[str]):
    """Names of pictures, without a Python object for each."""

    def __init__(self, content: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        self._content, self._starts, self._ends = content, starts, ends

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: Any) -> Any:
        return self._content[self._starts[number] : self._ends[number]].decode("utf-8", errors="surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[number] for number in range(len(self)))


def _brought_home(
    directory: Path, columns: Columns, names: _Names, candidates: Sequence[Path]
) -> tuple[_Names, list[str]]:
    """Names as written on another computer, changed to what they are called here, and notes that say so. A shortened
    name never leads out of the directory it is looked up in."""
    notes = []
    content = (directory / "names.bin").read_bytes()
    starts, ends = columns["name_start"], columns["name_end"]
    if b"\\" in content and are_windows_paths(names, candidates):
        content = content.replace(b"\\", b"/")
        (directory / "names.bin").write_bytes(content)
        names = _Names(content, starts, ends)
        notes.append("Windows paths: backslashes read as slashes")
    if home := find_old_home(names, candidates):
        dropped_bytes = len(home.encode("utf-8", errors="surrogateescape"))
        is_moved = np.fromiter((is_below(name, home) for name in names), dtype=bool, count=len(names))
        columns["name_start"] = starts + dropped_bytes * is_moved
        names = _Names(content, columns["name_start"], ends)
        notes.append(f"the paths are from another computer: found here without {home}")
    return names, notes


def _find_pictures(columns: Columns, names: _Names, layout: Layout) -> list[str]:
    """Fill in each picture's location, size and modification time; returns the roots that were needed. A picture that
    belongs to a split is looked for first in a folder named after that split."""
    roots = [str(root) for root in find_roots(names, layout.roots)]
    numbers = range(len(roots))
    order = {side: sorted(numbers, key=lambda one: side_of(os.path.basename(roots[one])) != side) for side in range(4)}
    root_of, sizes, mtimes = (np.array(columns[name]) for name in ("root", "size", "mtime"))
    for picture, name in enumerate(names):
        found = (0, -1, 0)
        for number in order[int(columns["side"][picture])]:
            size_bytes, mtime_ns = file_facts(os.path.join(roots[number], name))
            if size_bytes >= 0:
                found = (number, size_bytes, mtime_ns)
                break
        root_of[picture], sizes[picture], mtimes[picture] = found
    columns |= {"root": root_of, "size": sizes, "mtime": mtimes}
    return roots


def _content_key(columns: Columns, names: _Names, roots: Sequence[str], picture: int) -> int:
    """Equal for equal content; an unreadable file is keyed by its name."""
    root, size_bytes = roots[columns["root"][picture]], int(columns["size"][picture])
    in_shard = os.path.isfile(root)
    path = root if in_shard else os.path.join(root, names[picture])
    offset = int(columns["offset"][picture])
    parts = [(0, size_bytes)]
    if size_bytes > HASHED_BYTES:  # head, middle and tail
        third = HASHED_BYTES // 3
        parts = [(start, third) for start in (0, (size_bytes - third) // 2, size_bytes - third)]
    try:
        content = b"".join(read_part(path, offset + start, length) for start, length in parts)
    except (OSError, ValueError):
        content = names[picture].encode(errors="surrogateescape")
    return key_of(content + str(size_bytes).encode())
