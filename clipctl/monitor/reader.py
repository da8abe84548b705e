"""Follows a metrics.jsonl that another process writes: whole lines only, from where it was left."""

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from clipctl.runs import metrics
from clipctl.runs.files import open_plain

BLOCK_BYTES = 1 << 20
# Of a long past only every n-th step is read in full; loss and gradient norm, in which a single step can matter, are
# read of all. So a million rows take two seconds instead of ten.
LONG_PAST_BYTES = 32 << 20
STRIDE = 16
RECENT_ROWS = 64
LINE_LIMIT_BYTES = 4 << 20

_STEP_ROW, _SYSTEM_ROW, _RESUME_ROW = b'{"kind":"step"', b'{"kind":"system"', b'{"kind":"resume"'
_NUMBERS = re.compile(  # in the order in which the trainer writes them
    rb'"step":(\d+),"epoch":[^,]+,"loss":([^,]+),"accuracy":[^,]+,"lr":[^,]+,"temperature":[^,]+,"grad_norm":([^,}]+)'
)


@dataclass(frozen=True)
class Rows:
    """Some rows in the order of the file, none of which a later resume has undone."""

    steps: Sequence[int]
    losses: list[float]  # of each of these steps; null is NaN
    grad_norms: list[float]
    samples: list[dict[str, Any]]  # step rows in full: all, or every n-th of a long past, and the latest
    systems: list[dict[str, Any]]  # the latest ones
    others: list[dict[str, Any]]  # every other row


@dataclass(frozen=True)
class Resume:
    """A resume in the file: rows before it whose step lies beyond its step no longer count."""

    offset: int
    step: int


class MetricsTail:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._offset = 0

    def poll(self) -> tuple[bool, Iterator[Rows]]:
        """Whether all that was read before must be forgotten, and the rows that are new.

        It starts over when the file was replaced or cut, and when a resume has changed the past.
        """
        try:
            file = open_plain(self._path)
        except OSError:
            was_there, self._identity, self._offset = self._identity is not None, None, 0
            return was_there, iter(())
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        is_other = self._identity is not None and (identity != self._identity or status.st_size < self._offset)
        begins = self._offset if identity == self._identity and not is_other else 0
        if begins and next(_resumes(file, begins), None):
            begins, is_other = 0, True
        self._identity, self._offset = identity, begins
        return is_other, self._rows(file)

    def _rows(self, file: BinaryIO) -> Iterator[Rows]:
        with file:
            stride = STRIDE if os.fstat(file.fileno()).st_size - self._offset > LONG_PAST_BYTES else 1
            resumes = list(_resumes(file, self._offset))
            for offset, block in _blocks(file, self._offset):
                self._offset = offset + len(block)
                for part_offset, part in _split(offset, block, resumes):
                    limit = min((one.step for one in resumes if one.offset > part_offset), default=math.inf)
                    yield _parse(part, limit, stride)


def _blocks(file: BinaryIO, offset: int) -> Iterator[tuple[int, bytes]]:
    """Blocks of whole lines with their places; a line without its end is left for the next time."""
    file.seek(offset)
    rest = b""
    while block := file.read(BLOCK_BYTES):
        block = rest + block
        end = block.rfind(b"\n") + 1
        if end:
            yield offset, block[:end]
            offset += end
        rest = block[end:]
        if len(rest) > LINE_LIMIT_BYTES:  # no line of ours: its end, when it comes, is read as a broken one
            offset, rest = offset + len(rest), b""


def _resumes(file: BinaryIO, offset: int) -> Iterator[Resume]:
    for place, block in _blocks(file, offset):
        start = block.find(_RESUME_ROW)
        while start >= 0:
            row = _row(block[start : block.index(b"\n", start)])
            if row and isinstance(row.get("step"), int):
                yield Resume(place + start, row["step"])
            start = block.find(_RESUME_ROW, start + 1)


def _split(offset: int, block: bytes, resumes: list[Resume]) -> Iterator[tuple[int, bytes]]:
    """The parts of a block between resumes, so that one rule holds for each part."""
    cuts = [one.offset - offset for one in resumes if 0 < one.offset - offset < len(block)]
    for begin, end in zip([0, *cuts], [*cuts, len(block)], strict=True):
        yield offset + begin, block[begin:end]


def _parse(block: bytes, limit: float, stride: int) -> Rows:
    """The rows of a block up to the step `limit`."""
    lines = block.split(b"\n")
    step_lines = [line for line in lines if line.startswith(_STEP_ROW)]
    rest = [line for line in lines if not line.startswith(_STEP_ROW)]
    steps, losses, grad_norms = _columns(block, step_lines)
    if steps and steps[-1] > limit:
        kept = [index for index, step in enumerate(steps) if step <= limit]
        steps, losses = [steps[index] for index in kept], [losses[index] for index in kept]
        grad_norms = [grad_norms[index] for index in kept]
    samples = _rows([*step_lines[:-RECENT_ROWS:stride], *step_lines[-RECENT_ROWS:]])
    systems = _rows([line for line in rest if line.startswith(_SYSTEM_ROW)][-RECENT_ROWS:])
    others = _rows([line for line in rest if not line.startswith(_SYSTEM_ROW)])
    return Rows(
        steps,
        losses,
        grad_norms,
        [row for row in samples if isinstance(row.get("step"), int) and row["step"] <= limit],
        systems,
        [row for row in others if _counts(row, limit)],
    )


def _columns(block: bytes, step_lines: list[bytes]) -> tuple[Sequence[int], list[float], list[float]]:
    """Step, loss and gradient norm of every step."""
    found = _NUMBERS.findall(block)
    if len(found) != len(step_lines):  # rows of another make, or damaged ones: slower, but read
        rows = [row for row in _rows(step_lines) if isinstance(row.get("step"), int)]
        losses, grad_norms = ([number(row.get(name)) for row in rows] for name in ("loss", "grad_norm"))
        return [row["step"] for row in rows], losses, grad_norms
    if not found:
        return [], [], []
    first, last = int(found[0][0]), int(found[-1][0])
    step_texts, loss_texts, norm_texts = zip(*found, strict=True)
    in_sequence = last - first == len(found) - 1
    steps = range(first, last + 1) if in_sequence else list(map(int, step_texts))
    return steps, _numbers(loss_texts), _numbers(norm_texts)


def _counts(row: dict[str, Any], limit: float) -> bool:
    return row.get("kind") in (metrics.RESUME, metrics.HEADER, metrics.END) or not number(row.get("step")) > limit


def _numbers(column: tuple[bytes, ...]) -> list[float]:
    try:
        return list(map(float, column))
    except ValueError:
        return [number(_json(text)) for text in column]


def number(value: Any) -> float:
    """A value of a row as a number; NaN for whatever is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _rows(lines: list[bytes]) -> list[dict[str, Any]]:
    return [row for line in lines if (row := _row(line))]


def _row(line: bytes) -> dict[str, Any] | None:
    row = _json(line)
    return row if isinstance(row, dict) else None


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
