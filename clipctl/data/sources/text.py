"""Text files of unknown origin: any byte order mark, bytes that are no UTF-8, any line ends. No torch."""

import codecs
from pathlib import Path
from typing import TextIO

SAMPLE_BYTES = 256 * 1024


def encoding_of(head: bytes) -> str:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    return "utf-8-sig"  # takes a mark or none


def open_text(path: Path) -> TextIO:
    """For reading, with line ends as they are; what is no UTF-8 becomes the replacement character."""
    with path.open("rb") as file:
        encoding = encoding_of(file.read(4))
    return path.open(encoding=encoding, errors="replace", newline="")


def sample_lines(path: Path) -> list[str]:
    """The first lines, whole."""
    with path.open("rb") as file:
        head = file.read(SAMPLE_BYTES)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        head = head[: len(head) // 2 * 2]
    lines = head.decode(encoding_of(head), errors="replace").splitlines()
    return lines[:-1] if len(head) == SAMPLE_BYTES and len(lines) > 1 else lines
