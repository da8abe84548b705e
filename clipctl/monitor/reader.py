"""Follows a metrics.jsonl that another process is writing: complete lines only, from where it left off."""

import bisect
import errno
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO

from clipctl.errors import RunError
from clipctl.files import open_plain, parse_json
from clipctl.runs import metrics

BLOCK_BYTES = 1 << 18  # blocks that fit in the CPU cache are fastest
# In a long history only every n-th row is parsed in full; the loss, where a single step can matter, is read from every
# row. So a million rows take two seconds instead of ten.
LONG_PAST_BYTES = 8 << 20
RECENT_BYTES = 2 << 20
STRIDE = 64
SIGNATURE_BYTES = 200

MOST_UNREADABLE, MOST_RESUMES = 10_000, 10_000  # a kill or a full disk tears a line, but not thousands

_STEP_ROW, _SYSTEM_ROW = b'{"kind":"step"', b'{"kind":"system"'
_RESUME, _RESUME_ROW = b'"kind":"resume"', re.compile(rb'^\{"kind":"resume"[^\n]*', re.MULTILINE)
_EMPTY_LINES = re.compile(rb"\n{2,}")
# Keys are in the order in which the trainer writes them; an epoch row has its step before its loss.
_LOSS = re.compile(rb'"epoch":\d+,"loss":([^,}]+)')
_STEP = re.compile(rb'"step":(\d{1,15})[,}]')


@dataclass(frozen=True)
class Rows:
    """Some rows in file order, without those that a later resume has undone."""

    steps: Sequence[int]
    losses: list[float]  # of each of these steps; null is NaN
    samples: list[dict[str, Any]]  # full step rows: all of them, or every n-th in a long history
    systems: list[dict[str, Any]]  # likewise
    others: list[dict[str, Any]]  # every other row
    unreadable: int = 0  # lines among them that are no rows


@dataclass(frozen=True)
class Resume:
    """A resume in the file: earlier rows with a later step no longer count."""

    offset: int
    step: int


class MetricsTail:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._unreadable = 0
        self._head, self._tail = b"", b""  # the file's first bytes, and those before the offset

    def poll(self) -> tuple[bool, Iterator[Rows]]:
        """Whether everything read before must be discarded, and the new rows.

        It starts over if the file was replaced or truncated, or if a resume has undone earlier steps.
        """
        try:
            file = open_plain(self._path)
        except OSError:
            was_there, self._identity, self._offset = self._identity is not None, None, 0
            return was_there, iter(())
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        is_other = self._identity is not None and (identity != self._identity or not self._is_continued(file))
        begins = self._offset if identity == self._identity and not is_other else 0
        if begins and next(_resumes(file, begins, status.st_size), None):
            begins, is_other = 0, True
        self._identity, self._offset = identity, begins
        self._unreadable = self._unreadable if begins else 0
        return is_other, self._rows(file, status.st_size)

    def _is_continued(self, file: BinaryIO) -> bool:
        """True if what was read is still there: a file may be truncated, or recreated with the same inode, and grow."""
        head = file.read(len(self._head))
        file.seek(max(0, self._offset - len(self._tail)))
        return head == self._head and file.read(len(self._tail)) == self._tail

    def _rows(self, file: BinaryIO, size: int) -> Iterator[Rows]:
        """The rows up to `size`. Anything added meanwhile is left for next time, or a resume in it would be missed."""
        with file:
            recent = size - RECENT_BYTES if size - self._offset > LONG_PAST_BYTES else 0
            resumes = _Resumes(_resumes(file, self._offset, size), self._path)
            for offset, block in _blocks(file, self._offset, size):
                self._head = self._head if offset else block[:SIGNATURE_BYTES]
                self._offset, self._tail = offset + len(block), block[-SIGNATURE_BYTES:]
                for part_offset, part in resumes.split(offset, block):
                    rows = _parse(part, resumes.limit(part_offset), STRIDE if part_offset < recent else 1)
                    self._unreadable += rows.unreadable
                    if self._unreadable > MOST_UNREADABLE:
                        raise _damaged(self._path, f"{MOST_UNREADABLE:,} lines that cannot be read")
                    yield rows


def _blocks(file: BinaryIO, offset: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Blocks of complete lines with their offsets; an unfinished line is left for next time."""
    file.seek(offset)
    rest, place = b"", offset
    while block := file.read(min(BLOCK_BYTES, size - place)):
        place += len(block)
        if not block.strip(b"\0"):  # a hole, as large as whoever made the file liked
            place = _end_of_hole(file, place, size)
            offset, rest = place, b""
            continue
        block = rest + block
        end = block.rfind(b"\n") + 1
        if end:
            yield offset, block[:end]
            offset += end
        rest = block[end:]
        if len(rest) > metrics.LINE_LIMIT_BYTES:  # not a line of ours: its end, when it comes, is read as a broken line
            offset, rest = offset + len(rest), b""


def _end_of_hole(file: BinaryIO, place: int, size: int) -> int:
    """Where the next bytes that were written begin. Left as they are on systems that cannot say."""
    if hasattr(os, "SEEK_DATA"):
        try:
            place = min(size, os.lseek(file.fileno(), place, os.SEEK_DATA))
        except OSError as error:
            place = size if error.errno == errno.ENXIO else place  # nothing but the hole
    file.seek(place)
    return place


def _resumes(file: BinaryIO, offset: int, size: int) -> Iterator[Resume]:
    for place, block in _blocks(file, offset, size):
        if _RESUME not in block:  # ten times as fast as the expression
            continue
        for found in _RESUME_ROW.finditer(block):
            row = _row(found[0])
            if row and is_step(row):
                yield Resume(place + found.start(), row["step"])


class _Resumes:
    """The resumes in a file, to look up which of them undo the rows at a place."""

    def __init__(self, resumes: Iterator[Resume], path: Path) -> None:
        found = list(islice(resumes, MOST_RESUMES + 1))
        if len(found) > MOST_RESUMES:
            raise _damaged(path, f"{MOST_RESUMES:,} resumes")
        self._offsets = [one.offset for one in found]
        self._limits = list(accumulate((one.step for one in reversed(found)), min))[::-1]  # of each and those after it

    def limit(self, offset: int) -> float:
        """The earliest step that a later resume goes back to: rows after that step do not count."""
        later = bisect.bisect_right(self._offsets, offset)
        return self._limits[later] if later < len(self._limits) else math.inf

    def split(self, offset: int, block: bytes) -> Iterator[tuple[int, bytes]]:
        """The parts of a block between resumes, so that one step limit applies to each part."""
        first, last = bisect.bisect_right(self._offsets, offset), bisect.bisect_left(self._offsets, offset + len(block))
        cuts = [one - offset for one in self._offsets[first:last]]
        for begin, end in zip([0, *cuts], [*cuts, len(block)], strict=True):
            yield offset + begin, block[begin:end]


def _damaged(path: Path, what: str) -> RunError:
    return RunError(f"{path} is damaged: it has more than {what}", "copy the run again, or delete it: clipctl runs rm")


def _parse(block: bytes, limit: float, stride: int) -> Rows:
    """The rows of a block up to the step `limit`."""
    if b"\n\n" in block:  # six times as fast as the expression
        block = _EMPTY_LINES.sub(b"\n", block)
    lines = block.strip(b"\n").split(b"\n") if block.strip(b"\n") else []
    rest = [line for line in lines if not line.startswith(_STEP_ROW)]
    steps, losses = _losses(block, lines, len(lines) - len(rest))
    if steps and steps[-1] > limit:
        pairs = [pair for pair in zip(steps, losses, strict=True) if pair[0] <= limit]
        steps, losses = [step for step, _ in pairs], [loss for _, loss in pairs]
    samples = _rows([line for line in lines[::stride] if line.startswith(_STEP_ROW)])
    systems = _rows([line for line in rest if line.startswith(_SYSTEM_ROW)][::stride])
    lines = [line for line in rest if not line.startswith(_SYSTEM_ROW)]
    others = [row for row in _rows(lines) if "kind" in row]
    return Rows(
        steps,
        losses,
        [row for row in samples if is_step(row) and row["step"] <= limit],
        systems,
        [row for row in others if _counts(row, limit)],
        len(lines) - len(others),
    )


def _losses(block: bytes, lines: list[bytes], count: int) -> tuple[Sequence[int], list[float]]:
    """Step number and loss of all `count` steps."""
    texts = _LOSS.findall(block)
    ends = [_STEP.search(line) for line in (_first_step(lines), _first_step(reversed(lines)))]
    first, last = (int(match[1]) if match else 0 for match in ends)
    if len(texts) == count == last - first + 1:
        return range(first, last + 1), _numbers(texts)
    # Gaps, rows in another format, or damaged ones: slower, but still read.
    rows = _rows([line for line in lines if line.startswith(_STEP_ROW)])
    rows = [row for row in rows if is_step(row)]
    return [row["step"] for row in rows], [number(row.get("loss")) for row in rows]


def _first_step(lines: Iterable[bytes]) -> bytes:
    return next((line for line in lines if line.startswith(_STEP_ROW)), b"")


def _counts(row: dict[str, Any], limit: float) -> bool:
    return row.get("kind") in (metrics.RESUME, metrics.HEADER, metrics.END) or not number(row.get("step")) > limit


def _numbers(column: list[bytes]) -> list[float]:
    try:
        return list(map(float, column))
    except ValueError:
        return [number(_json(text)) for text in column]


def number(value: Any) -> float:
    """A row's value as a number; NaN if it is not a number or too large to calculate with."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
        return math.nan
    return float(value)


def is_step(row: dict[str, Any]) -> bool:
    step = row.get("step")
    return type(step) is int and 0 <= step < 2**50


def _rows(lines: list[bytes]) -> list[dict[str, Any]]:
    return [row for line in lines if (row := _row(line))]


def _row(line: bytes) -> dict[str, Any] | None:
    row = _json(line) if len(line) <= metrics.LINE_LIMIT_BYTES else None
    return row if isinstance(row, dict) else None


def _json(text: bytes) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None
