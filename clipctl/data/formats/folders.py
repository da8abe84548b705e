"""Directories: pictures next to a metadata file, pictures next to text files, and folders named after their class.
No torch."""

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from clipctl.data.bad import bad_counts
from clipctl.data.formats.documents import lines_layout
from clipctl.data.formats.rows import UNSAID, Hints, Layout, Row, is_absolute, is_picture, side_of, why_unread
from clipctl.data.formats.tables import table_layout
from clipctl.data.formats.text import encoding_of, split_lines
from clipctl.files import open_plain

METADATA_NAMES = ("metadata.jsonl", "metadata.csv")
CAPTION_SUFFIXES = (".txt", ".caption")
CAPTION_FILE_LIMIT_BYTES = 1_000_000


class File(NamedTuple):
    """A file in a directory."""

    name: str
    size_bytes: int
    mtime_ns: int


class Folder(NamedTuple):
    name: str  # relative, ends with a slash; empty for the directory itself
    files: list[File]
    has_folders: bool


def walk(root: Path) -> Iterator[Folder]:
    """Every folder below `root`, in order. Skips hidden entries, and folders already seen: a symbolic link may lead
    back."""
    waiting, seen = [""], set()
    while waiting:
        name = waiting.pop()
        facts = os.stat(root / name)
        if (facts.st_dev, facts.st_ino) in seen:
            continue
        seen.add((facts.st_dev, facts.st_ino))
        with os.scandir(root / name) as entries:
            found = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda one: one.name)
        folders = [f"{name}{entry.name}/" for entry in found if entry.is_dir()]
        yield Folder(name, [_file(entry) for entry in found if not entry.is_dir()], bool(folders))
        waiting += reversed(folders)


def _file(entry: "os.DirEntry[str]") -> File:
    try:
        facts = entry.stat()
    except OSError:  # a dangling link
        return File(entry.name, -1, 0)
    return File(entry.name, facts.st_size if stat.S_ISREG(facts.st_mode) else -1, facts.st_mtime_ns)


@dataclass(frozen=True)
class Survey:
    """Counts of what a directory holds."""

    files: int
    suffixes: frozenset[str]
    pictures: int
    pairs: int  # pictures with a text file
    classes: frozenset[str]
    unread: Sequence[str]  # for each picture in a format that is not read, why
    digest: str  # changes when a picture or text file is added, removed, renamed or modified, or can be read now


def survey(root: Path) -> Survey:
    files, pictures, pairs, suffixes, classes, digest = 0, 0, 0, set(), set(), hashlib.sha256()
    unread = list[str]()
    for folder in walk(root):
        files += len(folder.files)
        suffixes |= {os.path.splitext(file.name)[1] or "(none)" for file in folder.files}
        here = sum(is_picture(file.name) for file in folder.files)
        pictures += here
        pairs += len(_pairs(folder))
        if here and (label := _class(folder)):
            classes.add(label)
        for file in folder.files:
            why = why_unread(file.name)
            unread += [why] if why else []
            if is_picture(file.name) or why or file.name.endswith(CAPTION_SUFFIXES):
                facts = f"{folder.name}{file.name}\0{file.size_bytes}\0{file.mtime_ns}\0{why or ''}"
                digest.update(facts.encode(errors="surrogateescape"))
    return Survey(files, frozenset(suffixes), pictures, pairs, frozenset(classes), unread, digest.hexdigest())


def metadata_layout(root: Path, hints: Hints) -> Layout | None:
    """HF imagefolder: metadata.jsonl or metadata.csv in the directory, or in folders named after splits."""
    folders = [root, *(root / name for name in sorted(os.listdir(root)) if side_of(name) and (root / name).is_dir())]
    found = [[folder / name for name in METADATA_NAMES if (folder / name).is_file()][:1] for folder in folders]
    files = [file for several in found for file in several]
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
                is_placed = folder == "." or is_absolute(row.picture) or not row.picture
                yield row if is_placed else row._replace(picture=f"{folder}/{row.picture}")

    first = parts[0][1].words
    splits = [folder for folder, _ in parts if folder != "."]
    words = f"{files[0].name}, {first}" + (f", splits {', '.join(splits)}" if splits else "")
    watched = [*files, *folders]
    return Layout("imagefolder", words, rows, watched, [Path(hints.image_root) if hints.image_root else root])


def sidecar_layout(root: Path, found: Survey) -> Layout:
    """0001.png next to 0001.txt, at any depth. Every line of the text file is a caption."""
    alone = found.pictures - found.pairs
    words = f"pictures with text files of the same name{f'; {alone:,} pictures have no text file' if alone else ''}"
    words += _unread(found)

    def rows() -> Iterator[Row]:
        for folder in walk(root):
            for picture, text in _pairs(folder):
                with open_plain(root / folder.name / text, follows_links=True) as file:
                    content = file.read(CAPTION_FILE_LIMIT_BYTES)
                captions = split_lines(content.decode(encoding_of(content), errors="replace"))
                yield Row(f"{folder.name}{picture}", captions, side_of(folder.name))

    return Layout("sidecar", words, rows, [], [root], listing=found.digest)


def class_layout(root: Path, found: Survey, hints: Hints) -> Layout:
    """dog/1.jpg, cat/2.jpg, possibly under train/ and val/: a template turns the folder's name into the caption."""
    words = f"{len(found.classes):,} class folders, captions from the template {hints.template!r}"
    words += _unread(found)

    def rows() -> Iterator[Row]:
        for folder in walk(root):
            label = _class(folder)
            captions = (hints.template.replace("{}", label),) if label else ()
            side = side_of(folder.name) if folder.name.count("/") > 1 else UNSAID
            for file in folder.files:
                if is_picture(file.name):
                    yield Row(f"{folder.name}{file.name}", captions, side)

    return Layout("classes", words, rows, [], [root], listing=found.digest)


def _unread(found: Survey) -> str:
    return f"; not read: {bad_counts(found.unread)}" if found.unread else ""


def _pairs(folder: Folder) -> list[tuple[str, str]]:
    """Pictures of a folder, each with the text file of the same name."""
    texts = {
        _stem(file.name): file.name
        for file in folder.files
        if file.name.endswith(CAPTION_SUFFIXES) and file.size_bytes >= 0
    }
    pictures = (file.name for file in folder.files if is_picture(file.name))
    return [(picture, texts[_stem(picture)]) for picture in pictures if _stem(picture) in texts]


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _class(folder: Folder) -> str:
    """The class that a folder names: the last part of its path, as words. The data's root directory names none, nor
    does a folder of folders named after a split; but a folder of pictures called `train` shows trains."""
    above, _, last = folder.name.rstrip("/").rpartition("/")
    if not above and folder.has_folders and side_of(last):
        return ""
    return " ".join(last.replace("_", " ").replace("-", " ").split())
