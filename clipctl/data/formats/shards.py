"""WebDataset shards: tar files read in place. The index records where each picture is; nothing is extracted.
No torch."""

import fnmatch
import io
import os
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from glob import has_magic
from pathlib import Path, PurePath
from typing import BinaryIO

from clipctl.data.formats.documents import texts_in
from clipctl.data.formats.rows import Layout, Row, is_picture, side_of
from clipctl.data.formats.tar import Member, TarError, members
from clipctl.errors import DataError, unreadable
from clipctl.files import open_plain, parse_json

MEMBER_LIMIT_BYTES = 1_000_000  # of a caption or a JSON document
SHARD_LIMIT = 1_000_000

NAMES_LIMIT_CHARACTERS = 200_000_000  # of all of them
MOST_GROUPS = 100  # in braces, in a pattern
SEARCH_LIMIT, SEARCH_LIMIT_S = 500_000, 20.0  # names looked at for a pattern

_GROUP, _NESTED = re.compile(r"\{[^{}]*\}"), re.compile(r"\{[^{}]*\{[^{}]*\}")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")


def is_pattern(text: str) -> bool:
    return any(_RANGE.fullmatch(group[1:-1]) or "," in group for group in _GROUP.findall(text))


def expand(pattern: str) -> Iterator[str]:
    """`{00000..00099}` and `{a,b}` as a shell expands them, one by one."""
    match = next((match for match in _GROUP.finditer(pattern) if _parts(match)), None)
    if match is None:
        yield pattern
        return
    for part in _parts(match):
        yield from expand(pattern[: match.start()] + part + pattern[match.end() :])


def _parts(match: re.Match[str]) -> Sequence[str]:
    """What a group in braces stands for; nothing if it is neither a range nor a list."""
    inner = match[0][1:-1]
    ends = _RANGE.fullmatch(inner)
    if not ends:
        return inner.split(",") if "," in inner else ()
    first, last = int(ends[1]), int(ends[2])
    if abs(last - first) >= SHARD_LIMIT:
        raise _too_many(match.string)
    width = len(ends[1]) if ends[1].startswith("0") or len(ends[1]) == len(ends[2]) else 0
    numbers = range(first, last + 1) if first <= last else range(first, last - 1, -1)
    return [f"{number:0{width}d}" for number in numbers]


def _too_many(pattern: str) -> DataError:
    return DataError(
        f"{pattern[:200]} expands to more than {SHARD_LIMIT:,} shards, or to too long names",
        "check the ranges and lists",
    )


def find_shards(text: str) -> list[Path]:
    """Every file that a pattern stands for, in order; a name that matches nothing stands for itself."""
    _check_extent(text)
    search, found = Search(text), list[Path]()
    for pattern in expand(text):
        found += map(Path, search.find(pattern) or [pattern])
    return found


def _check_extent(text: str) -> None:
    """Before anything is expanded."""
    if _NESTED.search(text):
        raise DataError(f"{text[:200]} has braces within braces", "write out the inner ones")
    groups = list(_GROUP.finditer(text))
    names, longest = 1, len(text)
    for match in groups[:MOST_GROUPS]:
        parts = _parts(match) or [match[0]]
        names *= len(parts)
        longest += max(map(len, parts)) - len(match[0])
        if names > SHARD_LIMIT:
            raise _too_many(text)
    if len(groups) > MOST_GROUPS or names * longest > NAMES_LIMIT_CHARACTERS:
        raise _too_many(text)


class Search:
    """Finds files by patterns with `*`, `?` and `[]`, as `glob` does, but gives up on one that leads everywhere."""

    def __init__(self, text: str) -> None:
        self._text, self._entries, self._began_s = text, 0, time.monotonic()

    def find(self, pattern: str) -> list[str]:
        path = PurePath(pattern)
        found = [path.anchor]
        for part in path.parts[1 if path.anchor else 0 :]:
            if has_magic(part):
                found = [os.path.join(place, name) for place in found for name in self._matching(place, part)]
            else:
                found = [os.path.join(place, part) for place in found]
        return sorted(filter(os.path.lexists, found))

    def _matching(self, place: str, part: str) -> list[str]:
        names = []
        with suppress(OSError), os.scandir(place or ".") as entries:
            for entry in entries:
                self._entries += 1
                if self._entries > SEARCH_LIMIT or time.monotonic() - self._began_s > SEARCH_LIMIT_S:
                    raise DataError(
                        f"{self._text[:200]} leads through too many directories: gave up after {self._entries:,} names",
                        "write out more of the path, or pass the directory",
                    )
                if not entry.name.startswith(".") or part.startswith("."):
                    names.append(entry.name)
        return fnmatch.filter(names, part)


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
