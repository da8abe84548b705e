"""A table to fill in: one row per picture of a folder. No torch."""

import csv
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from clipctl.data.formats.folders import walk
from clipctl.data.formats.recognise import check_place
from clipctl.data.formats.rows import is_picture
from clipctl.errors import DataError

HEADER = ("image", "caption")
FORMULA_SIGNS = ("=", "+", "-", "@")  # a spreadsheet would compute a cell that starts with one
# What cameras, phones and programs call pictures.
_CAMERA_WORDS = {
    *("img", "image", "images", "pic", "picture", "photo", "dsc", "dscn", "dscf", "pxl", "mvimg", "vid", "wa"),
    *("screenshot", "screen", "shot", "scan", "copy", "untitled", "download", "edited", "final", "whatsapp", "at"),
}
_WORD = re.compile(r"[^\W\d_]+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True)
class Template:
    rows: Sequence[tuple[str, str]]  # path and caption; an empty caption is to be filled in
    odd_names: int  # pictures left out: their names cannot be written in a table


def template_of(directory: str, *, from_names: bool) -> Template:
    """A row for every picture below a directory, with paths relative to the working directory."""
    check_place(directory)
    if not os.path.isdir(directory):
        raise DataError(f"{directory} is not a directory", "pass the folder that holds the pictures")
    try:
        start = os.path.relpath(directory)
    except ValueError:  # another drive of Windows
        start = os.path.abspath(directory)
    names = [
        f"{folder.name}{file.name}"
        for folder in walk(Path(directory))
        for file in folder.files
        if is_picture(file.name)
    ]
    if not names:
        raise DataError(f"{directory} contains no pictures", "pass the folder that holds them")
    rows = [
        (_cell(start, name), caption_from(name) if from_names else "")
        for name in names
        if name.isprintable() and start.isprintable()
    ]
    return Template(rows, len(names) - len(rows))


def caption_from(name: str) -> str:
    """The words in a file name; empty if it has none, as in IMG_1234.jpg or 693b08cb0e.jpg."""
    stem = name.rpartition("/")[2].rpartition(".")[0]
    parts = [part for part in re.split(r"[\s_.,+()-]+", _CAMEL.sub(" ", stem)) if _WORD.fullmatch(part)]
    words = [part.lower() for part in parts if part.lower() not in _CAMERA_WORDS]
    return " ".join(words) if any(len(word) > 2 for word in words) else ""


def write_template(template: Template, file: TextIO) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows(template.rows)


def _cell(start: str, name: str) -> str:
    path = Path(start, name).as_posix()
    return f"./{path}" if path.startswith(FORMULA_SIGNS) else path
