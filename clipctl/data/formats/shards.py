"""WebDataset shards: tar files read in place. The index records where each picture is; nothing is extracted.
No torch."""

import io
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from clipctl.data.formats.documents import texts_in
from clipctl.data.formats.rows import Layout, Row, is_picture, side_of
from clipctl.data.formats.tar import Member, TarError, members
from clipctl.errors import DataError, unreadable
from clipctl.files import open_plain, parse_json

MEMBER_LIMIT_BYTES = 1_000_000  # of a caption or a JSON document
SHARD_LIMIT = 1_000_000

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_LIST = re.compile(r"\{([^{}]*,[^{}]*)\}")


def is_pattern(text: str) -> bool:
    return bool(_RANGE.search(text) or _LIST.search(text))


def expand(pattern: str) -> list[str]:
    """`{00000..00099}` and `{a,b}` as a shell expands them."""
    braces = sorted((match for match in (_RANGE.search(pattern), _LIST.search(pattern)) if match), key=re.Match.start)
    if not braces:
        return [pattern]
    match = braces[0]
    if match.re is _RANGE:
        first, last = int(match[1]), int(match[2])
        if abs(last - first) >= SHARD_LIMIT:
            raise DataError(f"{pattern} expands to more than {SHARD_LIMIT:,} shards", "check the range")
        width = len(match[1]) if match[1].startswith("0") or len(match[1]) == len(match[2]) else 0
        numbers = range(first, last + 1) if first <= last else range(first, last - 1, -1)
        parts = [f"{number:0{width}d}" for number in numbers]
    else:
        parts = match[1].split(",")
    return [name for part in parts for name in expand(pattern[: match.start()] + part + pattern[match.end() :])]


def shard_layout(shards: Sequence[Path]) -> Layout:
    absent = [path for path in shards if not path.is_file()]
    if absent:
        raise DataError(
            f"{len(absent)} of {len(shards)} shards do not exist, such as {absent[0]}",
            "a pattern such as {00000..00099}.tar requires every number in the range",
        )
    words = f"{len(shards):,} WebDataset shard{'s' * (len(shards) > 1)}, read in place"
    return Layout("webdataset", words, lambda: _rows(shards), shards, shards=shards)


def _rows(shards: Sequence[Path]) -> Iterator[Row]:
    for number, path in enumerate(shards):
        side = side_of(path.parent.name) or side_of(re.split(r"[-_.]", path.stem)[0])
        yield from _shard_rows(path, number, side)


def _shard_rows(path: Path, number: int, side: int) -> Iterator[Row]:
    """Members that share a name up to its first dot form a sample; they are adjacent in the file."""
    key: str | None = None
    sample = _Sample()
    try:
        with open_plain(path, follows_links=True) as raw, io.BufferedReader(raw) as file:
            for member in members(file):
                own_key, kind = split_name(member.name)
                if member.is_directory or member.name.rpartition("/")[2].startswith("."):  # macOS adds ._ members
                    continue
                if own_key != key:
                    yield from sample.rows(number, side)
                    key, sample = own_key, _Sample()
                sample.take(file, member, kind)
            yield from sample.rows(number, side)
    except TarError as error:
        raise _no_shard(path, key, str(error)) from None
    except OSError as error:
        raise unreadable(path, error) from None


def _no_shard(path: Path, key: str | None, problem: str) -> DataError:
    with open_plain(path, follows_links=True) as file:
        head = file.read(6)
    if head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
        return DataError(
            f"{path} is compressed and cannot be read in place",
            f"unpack it first: tar -xf {shlex.quote(str(path))}, and pass the directory",
        )
    if key is None:
        return DataError(f"{path} is not a tar file: {problem}", "download it again, or leave it out")
    return DataError(f"{path} is cut off or damaged after {key}: {problem}", "download it again, or leave it out")


def split_name(name: str) -> tuple[str, str]:
    """A sample's key and a member's kind: the file name, split at its first dot."""
    folder, slash, base = name.rpartition("/")
    stem, _, kind = base.partition(".")
    return f"{folder}{slash}{stem}", kind.lower()


class _Sample:
    def __init__(self) -> None:
        self._picture: tuple[str, int, int] | None = None  # name, offset, bytes
        self._text: str | None = None
        self._json: str | None = None

    def take(self, file: BinaryIO, member: Member, kind: str) -> None:
        is_image = "." not in kind and is_picture(f".{kind}")  # a.seg.png belongs to picture a and is something else
        if is_image and self._picture is None and member.is_plain:
            self._picture = (member.name, member.offset, member.size_bytes)
        elif member.is_plain and kind in ("txt", "json"):
            content = file.read(min(member.size_bytes, MEMBER_LIMIT_BYTES)).decode("utf-8-sig", errors="replace")
            if kind == "txt":
                self._text = content
            else:
                self._json = content

    def rows(self, shard: int, side: int) -> Iterator[Row]:
        """One row, unless the sample is empty; a row without a picture is later counted as skipped."""
        if self._picture is not None or self._text is not None or self._json is not None:
            name, offset, size_bytes = self._picture or ("", 0, 0)
            yield Row(name, self._captions(), side, shard, offset, size_bytes)

    def _captions(self) -> Sequence[str]:
        if self._text is not None:
            return (self._text,)
        try:
            document = parse_json(self._json or "null")
        except ValueError:
            return ()
        return texts_in(document.get("caption")) if isinstance(document, dict) else ()
