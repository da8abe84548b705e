"""Directories: pictures beside a metadata file, pictures beside text files, and folders that name what is in them.
No torch."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from clipctl.data.sources.documents import lines_layout
from clipctl.data.sources.rows import UNSAID, Hints, Layout, Row, is_picture, side_of
from clipctl.data.sources.tables import table_layout

METADATA_NAMES = ("metadata.jsonl", "metadata.csv")
CAPTION_SUFFIXES = (".txt", ".caption")
CAPTION_FILE_LIMIT_BYTES = 1_000_000


class Entry(NamedTuple):
    """A file below a directory."""

    name: str  # relative, with slashes
    size_bytes: int
    mtime_ns: int


def walk(root: Path) -> Iterator[Entry]:
    """All files below `root`, in order; hidden ones and links to directories are left out."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        with os.scandir(root / folder) as entries:
            found = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda one: one.name)
        folders = []
        for entry in found:
            name = f"{folder}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                folders.append(f"{name}/")
            else:
                try:
                    facts = entry.stat()
                except OSError:  # a link to nowhere
                    yield Entry(name, -1, 0)
                    continue
                yield Entry(name, facts.st_size, facts.st_mtime_ns)
        waiting += reversed(folders)


def metadata_layout(root: Path, hints: Hints) -> Layout | None:
    """HF imagefolder: metadata.jsonl or metadata.csv in the directory, or in folders named after splits."""
    folders = [root, *(root / name for name in sorted(os.listdir(root)) if side_of(name) and (root / name).is_dir())]
    files = [folder / name for folder in folders for name in METADATA_NAMES if (folder / name).is_file()]
    if not files:
        return None
    parts = []
    for file in files:
        side = side_of(file.parent.name) if file.parent != root else UNSAID
        part = lines_layout(file, hints, side) if file.suffix == ".jsonl" else table_layout(file, hints, side)
        parts.append((file.parent.relative_to(root).as_posix(), part))

    def rows() -> Iterator[Row]:
        for folder, part in parts:
            for row in part.rows():
                yield row._replace(picture=row.picture if folder == "." else f"{folder}/{row.picture}")

    first = parts[0][1].words
    splits = [folder for folder, _ in parts if folder != "."]
    words = f"{files[0].name}, {first}" + (f", splits {', '.join(splits)}" if splits else "")
    return Layout("imagefolder", words, rows, files, [Path(hints.image_root) if hints.image_root else root])


def sidecar_layout(root: Path, entries: Sequence[Entry]) -> Layout | None:
    """0001.png beside 0001.txt, at any depth. Every line of the text is a caption."""
    texts = {_stem(entry.name): entry.name for entry in entries if entry.name.endswith(CAPTION_SUFFIXES)}
    pairs = [(entry.name, texts[_stem(entry.name)]) for entry in _pictures(entries) if _stem(entry.name) in texts]
    if not pairs:
        return None
    alone = len(_pictures(entries)) - len(pairs)
    words = f"pictures beside text files of the same name{f'; {alone:,} pictures have none' if alone else ''}"

    def rows() -> Iterator[Row]:
        for picture, text in pairs:
            with (root / text).open("rb") as file:
                captions = file.read(CAPTION_FILE_LIMIT_BYTES).decode("utf-8-sig", errors="replace").splitlines()
            yield Row(picture, captions, _folder_side(picture))

    return Layout("sidecar", words, rows, [], [root], listing=digest(entries))


def class_layout(root: Path, entries: Sequence[Entry], hints: Hints) -> Layout | None:
    """dog/1.jpg, cat/2.jpg, maybe below train/ and val/: a folder's name becomes the caption by a template."""
    pictures = [(entry.name, _class(entry.name)) for entry in _pictures(entries)]
    classes = {label for _, label in pictures if label}
    if not classes:
        return None
    words = f"{len(classes):,} class folders, captions by the template {hints.template!r}"

    def rows() -> Iterator[Row]:
        for picture, label in pictures:
            if label:
                yield Row(picture, (hints.template.replace("{}", label),), _folder_side(picture))

    return Layout("classes", words, rows, [], [root], listing=digest(entries))


def digest(entries: Sequence[Entry]) -> str:
    """Changes when a file is added, removed, renamed or written."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(f"{entry.name}\0{entry.size_bytes}\0{entry.mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _pictures(entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if is_picture(entry.name)]


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _folder_side(name: str) -> int:
    first, slash, _ = name.partition("/")
    return side_of(first) if slash else UNSAID


def _class(name: str) -> str:
    """The folder a picture lies in, as words; a folder that names a split is none."""
    folder = name.rpartition("/")[0].rpartition("/")[2]
    return "" if side_of(folder) else " ".join(folder.replace("_", " ").replace("-", " ").split())
