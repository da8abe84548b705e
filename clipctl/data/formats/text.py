"""Text files of unknown origin: any byte order mark, invalid UTF-8, any line endings. No torch."""

import codecs
import re
from pathlib import Path
from typing import TextIO

SAMPLE_BYTES = 256 * 1024

_LINE_ENDS = re.compile(r"\r\n|\r|\n")  # str.splitlines knows ten, some of which occur in captions


def encoding_of(head: bytes) -> str:
    """From the byte order mark; otherwise UTF-8, or cp1252 (Windows) if most non-ASCII bytes are invalid UTF-8."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    text = head.decode("utf-8", errors="replace").rstrip("\ufffd")  # the last character may be cut off
    wrong = text.count("\ufffd")
    right = sum(not character.isascii() for character in text) - wrong
    return "cp1252" if wrong > right else "utf-8-sig"  # with or without a byte order mark


def open_text(path: Path) -> TextIO:
    """Open for reading, with line endings unchanged; undecodable bytes become the replacement character."""
    return path.open(encoding=encoding_of(_head(path)), errors="replace", newline="")


def sample_lines(path: Path) -> list[str]:
    """The first complete lines."""
    head = _head(path)
    lines = split_lines(head.decode(encoding_of(head), errors="replace"))
    return lines[:-1] if len(head) == SAMPLE_BYTES and len(lines) > 1 else lines


def split_lines(text: str) -> list[str]:
    return _LINE_ENDS.split(text)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(SAMPLE_BYTES)
