"""The members of a tar file, from their headers: what they are called and where their bytes are. No torch.

Python's tarfile believes a header: one that claims a name of 3 GB is read into memory, a negative size leads backwards
forever. Here each number is compared with the file before it is used. A header is a block of 512 bytes,

    name 0–99, size 124–135, checksum 148–155, type 156, magic 257–262, prefix of the name 345–499

and is followed by its content, filled up to whole blocks. A member of type x, g, L or K only describes the next one.
"""

import os
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

BLOCK = 512
DESCRIPTION_LIMIT_BYTES = 1_000_000  # of a long name, or a list of properties
MOST_DESCRIPTIONS, MOST_PROPERTIES = 8, 1_000  # of one member; in one list
_PLAIN, _WITHOUT_CONTENT = b"0\x007", b"123456"  # files; links, devices, directories and pipes


class TarError(ValueError):
    """Not a tar file, or a damaged one."""


class Member(NamedTuple):
    name: str
    is_plain: bool  # its bytes are those of a file: it is no link, no directory and has no holes
    is_directory: bool
    offset: int
    size_bytes: int


def members(file: BinaryIO) -> Iterator[Member]:
    """In the order of the file. Raises TarError."""
    file_bytes = os.fstat(file.fileno()).st_size
    described: dict[str, str] = {}
    descriptions = 0
    while block := _header(file):
        offset, kind = file.tell(), block[156:157]
        size_bytes = _number(block[124:136]) if kind not in _WITHOUT_CONTENT else 0
        if kind in b"xgLK":
            descriptions += 1
            if descriptions > MOST_DESCRIPTIONS:
                raise TarError(f"more than {MOST_DESCRIPTIONS} headers that describe the same member")
            described |= _description(file, kind, size_bytes)
            file.seek(offset + _whole_blocks(size_bytes))
            continue
        if "size" in described:
            size_bytes = _decimal(described["size"])
        is_sparse = kind == b"S" or any(key.startswith("GNU.sparse") for key in described)
        if kind == b"S":
            _skip_map(file, block)
            offset = file.tell()
        if offset + _whole_blocks(size_bytes) > file_bytes:
            raise TarError(f"a member of {size_bytes:,} bytes starts at {offset:,}, but the file has {file_bytes:,}")
        name = described.get("path") or _name(block)
        is_directory = kind == b"5" or (kind == b"\0" and name.endswith("/"))
        is_plain = kind in _PLAIN and not is_sparse and not is_directory
        yield Member(name.rstrip("/"), is_plain, is_directory, offset, size_bytes)
        described, descriptions = {}, 0
        file.seek(offset + _whole_blocks(size_bytes))


def _header(file: BinaryIO) -> bytes | None:
    """The next header; None at the end, which is that of the file or a block of zeros."""
    block = file.read(BLOCK)
    if not block.strip(b"\0") and len(block) in (0, BLOCK):
        return None
    if len(block) < BLOCK:
        raise TarError(f"it ends within a header, after {len(block)} of {BLOCK} bytes")
    # The sum of all bytes, those of the sum itself counted as spaces. Some old programs summed signed bytes.
    rest = block[:148] + b" " * 8 + block[156:]
    signed = sum(rest) - 256 * sum(byte > 127 for byte in rest)
    if _number(block[148:156]) not in (sum(rest), signed):
        raise TarError("bad checksum")
    return block


def _number(field: bytes) -> int:
    """In octal digits, or, if it is large, in binary after a byte of 0x80."""
    if field[0] & 0x80:
        value = int.from_bytes(field[1:], "big")
        if field[0] != 0x80 or value >= 2**62:
            raise TarError("a size that no file can have")
        return value
    digits = field.split(b"\0")[0].strip()
    if not digits.isdigit() or b"8" in digits or b"9" in digits:
        if digits:
            raise TarError("a number that is not octal")
        return 0
    return int(digits, 8)


def _decimal(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise TarError(f"a size of {text[:20]!r}")
    return int(text)


def _name(block: bytes) -> str:
    name, prefix = (part.split(b"\0")[0] for part in (block[:100], block[345:500]))
    is_posix = block[257:263] == b"ustar\0"  # GNU's own format uses the place of the prefix for something else
    return _text(prefix + b"/" + name if is_posix and prefix else name)


def _text(content: bytes) -> str:
    return content.decode("utf-8", errors="surrogateescape")


def _description(file: BinaryIO, kind: bytes, size_bytes: int) -> dict[str, str]:
    """What a header says about the next member. A list applies to it (x) or to all that follow (g: nothing we need)."""
    if size_bytes > DESCRIPTION_LIMIT_BYTES:
        raise TarError(f"a header of {size_bytes:,} bytes")
    content = file.read(size_bytes)
    if len(content) < size_bytes:
        raise TarError("it ends within a header")
    if kind == b"L":
        return {"path": _text(content.split(b"\0")[0])}
    return dict(_records(content)) if kind == b"x" else {}


def _records(content: bytes) -> Iterator[tuple[str, str]]:
    """What we need of lines of `LENGTH KEY=VALUE`, where the length is that of the whole line."""
    place, end = 0, len(content.rstrip(b"\0"))
    for _ in range(MOST_PROPERTIES):
        if place >= end:
            return
        length, space, _ = content[place : place + 20].partition(b" ")
        if not space or not length.isdigit() or not len(length) + 1 < int(length) <= len(content) - place:
            raise TarError("a header that is not a list of properties")
        key, _, value = content[place + len(length) + 1 : place + int(length) - 1].partition(b"=")
        if key in (b"path", b"size") or key.startswith(b"GNU.sparse"):
            yield _text(key), _text(value)
        place += int(length)
    raise TarError(f"a header of more than {MOST_PROPERTIES:,} properties")


def _skip_map(file: BinaryIO, block: bytes) -> None:
    """GNU's list of the holes in a sparse member, which goes on in further blocks if the last byte says so."""
    is_continued = block[482]
    while is_continued:
        more = file.read(BLOCK)
        if len(more) < BLOCK:
            raise TarError("it ends within a header")
        is_continued = more[504]


def _whole_blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK) * BLOCK
