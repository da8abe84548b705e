"""Text files of unknown origin: any byte order mark, invalid UTF-8, any line endings. No torch."""

import codecs
import io
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TextIO

from clipctl.errors import DataError
from clipctl.files import open_plain

SAMPLE_BYTES = 256 * 1024
LINE_LIMIT_CHARACTERS = 8_000_000

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
    file = io.BufferedReader(open_plain(path, follows_links=True))
    return io.TextIOWrapper(file, encoding=encoding_of(_head(path)), errors="replace", newline="")


def read_lines(path: Path) -> Iterator[str]:
    """Line by line, each with its ending. Raises DataError for a line that is too long to be one."""
    with open_text(path) as file:
        for number, line in enumerate(iter(partial(file.readline, LINE_LIMIT_CHARACTERS), ""), start=1):
            if len(line) == LINE_LIMIT_CHARACTERS:
                raise DataError(
                    f"{path}, line {number} has more than {LINE_LIMIT_CHARACTERS:,} characters",
                    "a table or .jsonl file needs one line per picture",
                )
            yield line


def sample_lines(path: Path) -> list[str]:
    """The first complete lines."""
    head = _head(path)
    lines = split_lines(head.decode(encoding_of(head), errors="replace"))
    return lines[:-1] if len(head) == SAMPLE_BYTES and len(lines) > 1 else lines


def split_lines(text: str) -> list[str]:
    return _LINE_ENDS.split(text)


def _head(path: Path) -> bytes:
    with open_plain(path, follows_links=True) as file:
        return file.read(SAMPLE_BYTES)
