"""Embeddings of pictures on disk, in a directory: vectors that numpy opens, which picture each belongs to, a manifest.

    manifest.json        which files are current, the model they were made with, sha256 of each
    vectors-00000003.npy       (N, E), float16 or float32, each of length one
    pictures-00000003.jsonl    a line for each vector: path, size_bytes, changed
    bad-00000003.jsonl         pictures that could not be used, and why

A new state is written beside the old one; then the manifest is replaced, and the old files are deleted. Whoever reads
sees one state or the other. What an interrupted refresh has embedded is kept in parts, for the next one. No torch.
"""

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from clipctl import files
from clipctl.data.formats.rows import Hints
from clipctl.errors import ClipctlError, DataError, StoreError
from clipctl.inference.gallery import NO_HINTS, BadFile, PictureId

SCHEMA = "clipctl.index/1"
MANIFEST = "manifest.json"
LOCK, PARTS = ".lock", ".parts"
MANIFEST_LIMIT_BYTES = 1_000_000
LINE_LIMIT_BYTES, SHORTEST_LINE_BYTES = 100_000, 30
BLOCK_BYTES = 1 << 22
ROWS_AT_A_TIME = 4096  # when a state is written
TRIES = 3  # to read a state that a refresh may just be replacing

_OWN_FILE = re.compile(r"(vectors|pictures|bad)-\d{8}\.(npy|jsonl)")

DtypeName = Literal["float16", "float32"]


class ModelFacts(NamedTuple):
    """The model that made the vectors."""

    name: str
    path: str
    fingerprint: str
    dimensions: int


@dataclass(frozen=True)
class Manifest:
    generation: int
    model: ModelFacts
    pictures: int
    dtype: str
    places: list[str]  # what was embedded, as it was named
    sums: dict[str, str] = field(default_factory=dict)  # sha256 by kind of file
    hints: dict[str, str] = field(default_factory=dict)  # what the user specified about the pictures

    @property
    def vectors_file(self) -> str:
        return f"vectors-{self.generation:08d}.npy"

    @property
    def pictures_file(self) -> str:
        return f"pictures-{self.generation:08d}.jsonl"

    @property
    def bad_file(self) -> str:
        return f"bad-{self.generation:08d}.jsonl"

    @property
    def names(self) -> dict[str, str]:
        return {"vectors": self.vectors_file, "pictures": self.pictures_file, "bad": self.bad_file}

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self), "model": self.model._asdict(), "files": self.names}

    @classmethod
    def parse(cls, document: Any) -> "Manifest":
        """Raises ValueError."""
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"not a document of schema {SCHEMA}")
        try:
            values = {key: document[key] for key in ("generation", "pictures", "dtype", "places", "sums")}
            hints = document.get("hints", {})  # not in the first indexes
            manifest = cls(model=ModelFacts(**document["model"]), hints=Hints(**hints).of_pictures, **values)
            numbers = (manifest.generation, manifest.pictures, manifest.model.dimensions)
        except (KeyError, TypeError) as error:
            raise ValueError(f"incomplete: {error}") from None
        if not isinstance(manifest.places, list) or not isinstance(manifest.sums, dict):
            raise ValueError("its lists are invalid")
        texts = [*manifest.model[:3], manifest.dtype, *manifest.places, *manifest.sums, *manifest.sums.values()]
        texts += manifest.hints.values()
        if not all(type(number) is int and 0 <= number < 2**40 for number in numbers):
            raise ValueError("its numbers are invalid")
        if not all(isinstance(text, str) for text in texts) or manifest.dtype not in ("float16", "float32"):
            raise ValueError("its texts are invalid")
        return manifest


class EmbeddingStore:
    """One state of an index, for reading."""

    def __init__(self, path: Path, manifest: Manifest, guard: object = None) -> None:
        self.path, self.manifest = path, manifest
        self._guard = guard
        shape = manifest.pictures, manifest.model.dimensions
        self.vectors: NDArray[Any] = _open_vectors(path / manifest.vectors_file, shape, manifest.dtype)
        self._lines = _Lines(path / manifest.pictures_file)
        if len(self._lines) != manifest.pictures:
            raise StoreError(
                f"{path / manifest.pictures_file} is damaged: {len(self._lines):,} of {manifest.pictures:,}"
            )

    @classmethod
    def open(cls, path: Path, guard: object = None) -> "EmbeddingStore":
        """`guard`: a lock that is kept as long as the store is in use."""
        for number in range(TRIES):
            manifest = read_manifest(path)
            try:
                return cls(path, manifest, guard)
            except FileNotFoundError as error:  # replaced since the manifest was read
                if number + 1 == TRIES:
                    raise StoreError(f"{path} is damaged: {Path(error.filename).name} is missing") from None
                time.sleep(0.05)
        raise AssertionError

    def __len__(self) -> int:
        return self.manifest.pictures

    def check_model(self, name: str, fingerprint: str) -> None:
        """Raise if the vectors were made with another model: they mean nothing to this one."""
        theirs = self.manifest.model
        if theirs.fingerprint != fingerprint:
            raise StoreError(
                f"{self.path} was made with another model ({theirs.name}), not with {name}",
                "make another index: clipctl embed MODEL PICTURES -o INDEX",
            )

    def picture(self, row: int) -> PictureId:
        return _parsed(self._lines[row], self.path / self.manifest.pictures_file)

    def all_pictures(self) -> list[PictureId]:
        return [self.picture(row) for row in range(len(self))]

    def bad(self) -> list[BadFile]:
        file = self.path / self.manifest.bad_file
        lines = _Lines(file)
        return [_parsed_bad(lines[row], file) for row in range(len(lines))]


def is_store(path: Path) -> bool:
    """Whether its manifest says that it is an index, intact or not: a folder may have an unrelated manifest.json."""
    try:
        return SCHEMA.encode() in files.read_bounded(path / MANIFEST, MANIFEST_LIMIT_BYTES)
    except OSError:
        return False


def problems_of(path: Path) -> list[str]:
    """How an index differs from what its manifest says; empty means that every byte is as written."""
    try:
        manifest = read_manifest(path)
        found = [problem for kind in manifest.names if (problem := _file_problem(path, manifest, kind))]
        is_replaced = bool(found) and read_manifest(path) != manifest  # by a refresh, meanwhile
    except ClipctlError as error:
        return [str(error)]
    return problems_of(path) if is_replaced else found


def _file_problem(path: Path, manifest: Manifest, kind: str) -> str | None:
    name = manifest.names[kind]
    try:
        is_right = files.sha256_of(path / name) == manifest.sums.get(kind)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    return None if is_right else f"{name} has changed: its sha256 does not match"


def read_manifest(path: Path) -> Manifest:
    try:
        return Manifest.parse(files.read_json(path / MANIFEST, MANIFEST_LIMIT_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{path} is not an index of embeddings: it has no {MANIFEST}",
            f"make one: clipctl embed MODEL {path} -o INDEX",
        ) from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path / MANIFEST} cannot be read: {error}") from None


class _Lines:
    """The lines of a file, by number, without reading it into memory. Raises StoreError if they cannot be ours."""

    def __init__(self, path: Path) -> None:
        with files.open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            self._ends = _line_ends(file, path)
            self._bytes = np.memmap(file, dtype=np.uint8, mode="r") if size else np.zeros(0, np.uint8)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> bytes:
        start = int(self._ends[number - 1]) + 1 if number else 0
        return self._bytes[start : min(int(self._ends[number]), start + LINE_LIMIT_BYTES)].tobytes()


def _line_ends(file: BinaryIO, path: Path) -> NDArray[np.int64]:
    """Where each line ends. Neither a hole of gigabytes nor as many empty lines get far."""
    ends, place, last = [np.zeros(0, np.int64)], 0, -1
    while block := file.read(BLOCK_BYTES):
        found = place + np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
        lengths = np.diff(found, prepend=last)
        place += len(block)
        last = int(found[-1]) if len(found) else last
        if len(found) and not SHORTEST_LINE_BYTES <= lengths.min() <= lengths.max() <= LINE_LIMIT_BYTES:
            raise StoreError(f"{path} is damaged: it has a line of {lengths.max():,} bytes, or one that is too short")
        if place - last > LINE_LIMIT_BYTES:
            raise StoreError(f"{path} is damaged: a line has more than {LINE_LIMIT_BYTES:,} bytes")
        ends.append(found)
    return np.concatenate(ends)


def _parsed(line: bytes, file: Path) -> PictureId:
    try:
        values = files.parse_json(line)
        return PictureId(str(values["path"]), int(values["size_bytes"]), int(values["changed"]))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise StoreError(f"{file} is damaged: {error}") from None


def _parsed_bad(line: bytes, file: Path) -> BadFile:
    picture = _parsed(line, file)
    try:
        return BadFile(picture, str(files.parse_json(line)["reason"]))
    except KeyError:
        raise StoreError(f"{file} is damaged: a picture has no reason") from None


def _open_vectors(path: Path, shape: tuple[int, int], dtype: str) -> NDArray[Any]:
    """Mapped, not read. Never unpickled, nor unpacked. Copied on write, because torch wants writable memory."""
    with files.open_plain(path) as file:
        try:
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError("it is not a plain .npy file")
            found, is_fortran, kind = np.lib.format.read_array_header_1_0(file)
            if (found, str(kind), is_fortran) != (shape, dtype, False):
                raise ValueError(f"it does not hold {shape[0]:,} vectors of {shape[1]:,} numbers in {dtype}")
            return np.memmap(file, dtype=kind, mode="c", offset=file.tell(), shape=shape)
        except (ValueError, EOFError, SyntaxError, TokenError) as error:  # numpy reads the header as Python
            raise StoreError(f"{path} is damaged: {str(error)[:200]}") from None


# --- writing --------------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """Where the existing embedding of a picture is."""

    vectors: NDArray[Any]
    row: int


@contextmanager
def locked(path: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Only one process refreshes an index at a time. Only an index, or an empty or new directory, may become one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise DataError(
            f"{path} cannot be created: a file is in the way", "name a new directory for the index"
        ) from None
    if not is_store(path) and any(not file.name.startswith(".") for file in path.iterdir() if not _is_own(file)):
        raise DataError(f"{path} is a directory with other files in it", "name a new directory for the index")
    with _lock(path, wait_s):
        yield


@contextmanager
def _lock(path: Path, wait_s: float) -> Iterator[None]:
    try:
        with FileLock(path / LOCK, timeout=wait_s):
            yield
    except Timeout:
        raise DataError(f"{path} is being refreshed by another process", "wait until it has finished") from None


def clear(path: Path, wait_s: float) -> None:
    """Delete what an index consists of, damaged or not."""
    with _lock(path, wait_s):
        files.delete(path / PARTS)
        for file in path.iterdir():
            if file.name == MANIFEST or _is_own(file):
                files.delete(file)


def _is_own(file: Path) -> bool:
    return _OWN_FILE.fullmatch(file.name) is not None


def unfinished_work(path: Path, model: ModelFacts, dtype: str) -> dict[PictureId, Known]:
    """What an interrupted refresh has embedded. A part torn by a power cut does not count."""
    found: dict[PictureId, Known] = {}
    for file in sorted((path / PARTS).glob(f"{model.fingerprint[:16]}-{dtype}-*.jsonl")):
        with suppress(StoreError, OSError):
            lines = _Lines(file)
            vectors = _open_vectors(file.with_suffix(".npy"), (len(lines), model.dimensions), dtype)
            found |= {_parsed(lines[row], file): Known(vectors, row) for row in range(len(lines))}
    return found


def save_part(
    path: Path, model: ModelFacts, dtype: str, number: int, pictures: Sequence[PictureId], vectors: NDArray[Any]
) -> None:
    """Vectors first: a part without its lines does not count."""
    (path / PARTS).mkdir(exist_ok=True)
    file = path / PARTS / f"{model.fingerprint[:16]}-{dtype}-{number:08d}.jsonl"
    with files.replaced(file.with_suffix(".npy"), durable=False) as partial, partial.open("wb") as stream:
        np.save(stream, vectors.astype(dtype))
    with files.replaced(file, durable=False) as partial:
        partial.write_text("".join(map(_line, pictures)), encoding="utf-8")


def next_part(path: Path) -> int:
    numbers = [int(file.stem.rpartition("-")[2]) for file in (path / PARTS).glob("*.npy")]
    return max(numbers, default=0) + 1


def write_state(
    path: Path,
    model: ModelFacts,
    dtype: str,
    places: Sequence[str],
    rows: Sequence[tuple[PictureId, Known]],
    bad: Sequence[BadFile],
    hints: Hints = NO_HINTS,
) -> Manifest:
    """Write a new state, which replaces the one before."""
    generation = read_manifest(path).generation + 1 if is_store(path) else 1
    manifest = Manifest(generation, model, len(rows), dtype, list(places), hints=hints.of_pictures)
    shape = (len(rows), model.dimensions)
    with files.replaced(path / manifest.vectors_file) as partial, partial.open("wb") as stream:
        descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
        np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": shape})
        for start in range(0, len(rows), ROWS_AT_A_TIME):
            block = [known.vectors[known.row] for _, known in rows[start : start + ROWS_AT_A_TIME]]
            stream.write(np.stack(block).astype(dtype).tobytes())
    with files.replaced(path / manifest.pictures_file) as partial:
        partial.write_text("".join(_line(picture) for picture, _ in rows), encoding="utf-8")
    with files.replaced(path / manifest.bad_file) as partial:
        lines = (json.dumps({**one.picture._asdict(), "reason": one.reason}) + "\n" for one in bad)
        partial.write_text("".join(lines), encoding="utf-8")
    sums = {kind: files.sha256_of(path / name) for kind, name in manifest.names.items()}
    manifest = replace(manifest, sums=sums)
    files.write_json(path / MANIFEST, manifest.to_dict())
    sweep(path, manifest)
    return manifest


def sweep(path: Path, current: Manifest) -> None:
    """Delete older states, and parts that have become part of the current one."""
    for file in path.iterdir():
        if _OWN_FILE.fullmatch(file.name) and file.name not in current.names.values():
            files.delete(file)
    files.delete(path / PARTS)


def _line(picture: PictureId) -> str:
    return json.dumps(picture._asdict()) + "\n"
