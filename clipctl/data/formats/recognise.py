"""Recognises the layout of the data at a path by looking at the files. No torch."""

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import get_args

from clipctl.config.sections import DataFormat
from clipctl.data.bad import bad_counts
from clipctl.data.formats.documents import document_layout, lines_layout
from clipctl.data.formats.elsewhere import archive_error, check_is_local, hub_hint, is_archive
from clipctl.data.formats.folders import Survey, class_layout, metadata_layout, sidecar_layout, survey
from clipctl.data.formats.rows import UNSAID, Hints, Layout, looks_like_picture, side_of
from clipctl.data.formats.shards import Search, find_shards, is_pattern, shard_layout
from clipctl.data.formats.tables import table_layout
from clipctl.errors import DataError, unreadable
from clipctl.files import open_plain

FILE_READERS: dict[str, Callable[[Path, Hints, int], Layout]] = {
    "csv": table_layout,
    "tsv": table_layout,
    "pipe": table_layout,
    "flickr": table_layout,
    "jsonl": lines_layout,
    "coco": document_layout,
    "karpathy": document_layout,
    "json": document_layout,
    "webdataset": lambda path, hints, side: shard_layout([path]),
}
FOLDER_FORMATS = ("imagefolder", "sidecar", "classes", "webdataset")
FORMATS = get_args(DataFormat)

MOVED_HINT = "its directory is not there either: check the path; if the data has moved, pass its new location as DATA"
PASS_FOLDER = "pass the folder that holds the pictures, or the file with their captions"
LOOKED_FOR = (
    "*.tar shards, metadata.jsonl or metadata.csv, a table or JSON file of captions, text files next to pictures, and "
    "class folders"
)

_BY_SUFFIX = {
    **dict.fromkeys((".csv", ".tsv", ".psv", ".txt", ".token"), "csv"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".json": "json",
    ".tar": "webdataset",
}
# Files that often come with pictures but hold no captions.
_OTHER_NAMES = (
    *("readme", "license", "licence", "requirements", "sizes", "dataset_info", "stats", "classes", "labels", "words"),
    *("wnids", "instances_", "person_keypoints_"),
)


def recognise(text: str, hints: Hints) -> Layout:
    """The layout of the data at a path or a pattern of shards. Raises a DataError that says what was looked for."""
    check_place(text)
    path = Path(text)
    if not path.exists():
        return shard_layout(find_shards(text))
    if hints.image_root is not None and not Path(hints.image_root).is_dir():
        raise DataError(
            f"--image-root {hints.image_root} is not a directory",
            "pass the directory that the picture paths in the captions start from",
        )
    return _folder(path, hints) if path.is_dir() else _file(path, hints)


def check_place(text: str) -> None:
    """Raise DataError if there is nothing at the path."""
    path = Path(text)
    try:
        if path.exists() or is_pattern(text) or Search(text).find(text):
            return
    except OSError as error:
        raise unreadable(text, error) from None
    check_is_local(text)
    is_file_name = path.suffix.lower() in _BY_SUFFIX
    hint = _neighbours(path) or (None if is_file_name else hub_hint(text)) or MOVED_HINT
    raise DataError(f"no such file or directory: {text}", hint)


def _neighbours(path: Path) -> str | None:
    try:
        names = sorted(name for name in os.listdir(path.parent) if not name.startswith("."))
    except OSError:
        return None
    if close := get_close_matches(path.name, [*names, "synthetic"], n=1):
        return f"did you mean {close[0]}?"
    return f"{path.parent} contains {', '.join(names[:8]) or 'nothing'}{', …' if len(names) > 8 else ''}"


def _file(path: Path, hints: Hints) -> Layout:
    """A file's name may say that all of it belongs to one split, such as train.csv or captions_val2017.json."""
    if not path.is_file():
        raise DataError(f"{path} is neither a file nor a directory", "pass a table, a JSON file, a directory or shards")
    if is_archive(path):
        raise archive_error(path)
    format = hints.format or _BY_SUFFIX.get(path.suffix.lower()) or _by_content(path)
    if format not in FILE_READERS:
        raise DataError(
            f"--format {format} needs a directory, but {path} is a file",
            f"pass its directory, {path.parent}, or leave out --format",
        )
    return FILE_READERS[format](path, hints, file_side(path))


def file_side(path: Path) -> int:
    words = path.stem.lower().replace("-", "_").split("_")
    return next((side for side in map(side_of, reversed(words)) if side), UNSAID)


def _by_content(path: Path) -> str:
    with open_plain(path, follows_links=True) as file:
        head = file.read(512)
    if head[257:262] == b"ustar":
        return "webdataset"
    if b"\0" in head and not head.startswith((b"\xff\xfe", b"\xfe\xff")):
        if looks_like_picture(path.name):
            raise DataError(f"{path} is a picture, not a list of captions", f"pass its directory: {path.parent}")
        raise DataError(f"{path} is a binary file, not a list of captions", f"formats: {', '.join(FORMATS)}")
    return "json" if head.lstrip()[:1] in (b"{", b"[") else "csv"


def _folder(root: Path, hints: Hints) -> Layout:
    """Tries, in this order: a metadata file, a file of captions, shards, pictures with text files, class folders."""
    if hints.format is not None and hints.format not in FOLDER_FORMATS:
        return _file(_caption_file(root), hints)
    problem = None
    if hints.format in (None, "imagefolder") and (metadata := metadata_layout(root, hints)):
        return metadata
    if hints.format is None:
        try:
            if annotated := _annotated(root, hints):
                return annotated
        except DataError as error:  # the file may hold something other than captions
            problem = error
    if hints.format in (None, "webdataset") and (shards := sorted(root.glob("*.tar")) or sorted(root.glob("*/*.tar"))):
        layout = shard_layout(shards)
        return replace(layout, files=[root, *layout.files])
    found = survey(root)
    if hints.format in (None, "sidecar") and found.pairs:
        return sidecar_layout(root, found)
    if hints.format == "classes" and found.classes:
        return class_layout(root, found, hints)
    if hints.format is None and problem is None and len(found.classes) > 1:  # a single folder may just be called images
        return class_layout(root, found, hints)
    raise problem or _nothing_found(root, found, hints)


def _annotated(root: Path, hints: Hints) -> Layout | None:
    """A directory whose captions are in a separate file, or in one file per split, as in COCO."""
    files = _caption_files(root)
    if not files:
        return None
    sides = [file_side(path) for path in files]
    if len(files) > 1 and (UNSAID in sides or len(set(sides)) < len(sides)):
        return _single(files, root, hints)
    parts = [_file(path, hints) for path in files]
    return replace(
        parts[0],
        words=f"{', '.join(path.name for path in files)}: {parts[0].words}",
        rows=lambda: chain.from_iterable(part.rows() for part in parts),
        files=[root, *(file for part in parts for file in part.files)],
    )


def _single(files: Sequence[Path], root: Path, hints: Hints) -> Layout:
    """The one file that reads as captions. If several do, the user has to choose."""
    readable = []
    for path in files:
        try:
            readable.append((path, _file(path, hints)))
        except DataError:
            continue
    if len(readable) == 1:
        path, layout = readable[0]
        return replace(layout, words=f"{path.name}: {layout.words}", files=[root, *layout.files])
    names = ", ".join(path.name for path in [path for path, _ in readable] or files)
    which = "several files could hold the captions" if readable else "none of these files holds readable captions"
    raise DataError(f"{root}: {which}: {names}", "pass the right file instead of the directory")


def _caption_files(root: Path) -> list[Path]:
    """Tables and JSON files in a directory or its `annotations`, unless each belongs to a picture of the same name."""
    found = []
    for place in (root, root / "annotations"):
        if not place.is_dir():
            continue
        names = sorted(os.listdir(place))
        stems = {name.rpartition(".")[0] for name in names if looks_like_picture(name)}
        for name in names:
            stem, dot, suffix = name.rpartition(".")
            known = f".{suffix.lower()}" in _BY_SUFFIX and suffix.lower() != "tar"
            other = stem.lower().startswith(_OTHER_NAMES) or stem.endswith("_stats") or name.startswith(".")
            if dot and known and not other and stem not in stems and (place / name).is_file():
                found.append(place / name)
    return found


def _caption_file(root: Path) -> Path:
    files = _caption_files(root)
    if len(files) == 1:
        return files[0]
    if not files:
        raise DataError(f"{root} has no file that could hold captions", "pass the file itself, or leave out --format")
    names = ", ".join(path.name for path in files)
    raise DataError(f"{root} has {len(files)} files that could hold captions: {names}", "pass the file itself")


def _packed(root: Path, found: Survey) -> str | None:
    """What to do if the pictures are in files that are not read."""
    if archives := [path for path in sorted(root.iterdir()) if is_archive(path)]:
        return archive_error(archives[0]).hint
    if found.suffixes & {".parquet", ".arrow"}:
        return "Parquet and Arrow are not read: save the pictures as files, and their captions as metadata.csv"
    return None


def _nothing_found(root: Path, found: Survey, hints: Hints) -> DataError:
    looked_for = f"what --format {hints.format} needs" if hints.format else LOOKED_FOR
    if found.unread and not found.pictures:
        return DataError(
            f"{root}: no picture can be read: {bad_counts(found.unread)}",
            "convert them to JPEG or PNG first; HEIC is read after pip install pillow-heif",
        )
    if not found.pictures:
        what = f"{found.files:,} files ({', '.join(sorted(found.suffixes)[:8])})" if found.files else "nothing"
        return DataError(
            f"{root} contains no pictures: found {what}; looked for {looked_for}", _packed(root, found) or PASS_FOLDER
        )
    table = "new-captions.csv" if os.path.lexists("captions.csv") else "captions.csv"  # the shell would empty it
    way_out = f"make a table and fill in the captions: clipctl data template {shlex.quote(str(root))} > {table}"
    if ".xlsx" in found.suffixes:
        way_out = "if the captions are in the .xlsx file, save it as CSV"
    return DataError(f"{root} has {found.pictures:,} pictures and no captions; looked for {looked_for}", way_out)
