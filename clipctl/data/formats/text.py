"""Text files of unknown origin: any byte order mark, bytes that are no UTF-8, any line ends. No torch."""

import codecs
import re
from pathlib import Path
from typing import TextIO

SAMPLE_BYTES = 256 * 1024

_LINE_ENDS = re.compile(r"\r\n|\r|\n")  # str.splitlines knows ten, of which some stand in captions


def encoding_of(head: bytes) -> str:
    """By the mark at the start; else UTF-8, unless what is not ASCII is mostly no UTF-8: then what Windows writes."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    text = head.decode("utf-8", errors="replace").rstrip("\ufffd")  # the last character may be cut
    wrong = text.count("\ufffd")
    right = sum(not character.isascii() for character in text) - wrong
    return "cp1252" if wrong > right else "utf-8-sig"  # takes a mark or none


def open_text(path: Path) -> TextIO:
    """For reading, with line ends as they are; what cannot be decoded becomes the replacement character."""
    return path.open(encoding=encoding_of(_head(path)), errors="replace", newline="")


def sample_lines(path: Path) -> list[str]:
    """The first lines, whole."""
    head = _head(path)
    lines = split_lines(head.decode(encoding_of(head), errors="replace"))
    return lines[:-1] if len(head) == SAMPLE_BYTES and len(lines) > 1 else lines


def split_lines(text: str) -> list[str]:
    return _LINE_ENDS.split(text)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(SAMPLE_BYTES)
