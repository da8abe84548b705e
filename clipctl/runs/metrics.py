"""metrics.jsonl: one JSON object per line, flat keys with units in their names, one writer, any number of readers."""

import io
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from clipctl.errors import RunError
from clipctl.files import open_plain, open_to_append, parse_json

SCHEMA = 1
LINE_LIMIT_BYTES = 100_000  # ours have a few hundred bytes, the longest a few thousand
WINDOW_STEPS = 20  # what "now" means wherever a run is shown: the mean of these last steps

# Kinds of rows; every row but the header carries `kind`, `time_s` (since the epoch) and `elapsed_s` (monotonic).
HEADER, STEP, EVAL, EPOCH, SYSTEM, RANK, CHECKPOINT, EVENT, RESUME, END = (
    "header",
    "step",
    "eval",
    "epoch",
    "system",
    "rank",
    "checkpoint",
    "event",
    "resume",
    "end",
)


class MetricsWriter:
    """Appends rows from any thread. A lost row (full disk) is counted and never stops the training."""

    def __init__(self, path: Path, run_id: str) -> None:
        try:
            self._descriptor = open_to_append(path)
        except OSError as error:
            raise RunError(f"{path} cannot be written to: {error.strerror or error}") from None
        self._lock = threading.Lock()
        self.started_s = time.monotonic()
        self._is_torn = False  # the last line is incomplete: the disk became full in the middle of it
        self.lost_rows = 0
        if os.fstat(self._descriptor).st_size == 0:
            self._append({"kind": HEADER, "schema": SCHEMA, "run_id": run_id})
        else:
            with open_plain(path) as file:
                file.seek(-1, os.SEEK_END)
                self._is_torn = file.read(1) != b"\n"  # by a kill; the next line must not be appended to it

    def write(self, kind: str, values: dict[str, Any], *, elapsed_s: float | None = None) -> None:
        """`elapsed_s`: when it happened, in seconds since the writer was created; None: now."""
        elapsed_s = time.monotonic() - self.started_s if elapsed_s is None else elapsed_s
        self._append({"kind": kind, "time_s": round(time.time(), 3), "elapsed_s": round(elapsed_s, 4), **values})

    def close(self) -> None:
        with suppress(OSError):  # some network filesystems report errors only now
            os.close(self._descriptor)

    def _append(self, row: dict[str, Any]) -> None:
        nonfinite: list[str] = []
        row = _finite(row, "", nonfinite)
        if nonfinite:
            row["nonfinite"] = nonfinite
        line = (json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n").encode()
        with self._lock:
            if self._is_torn:
                line = b"\n" + line
            try:
                written = os.write(self._descriptor, line)  # one write per line: readers see whole lines or a torn tail
            except OSError:
                written = 0
            self.lost_rows += written < len(line)
            self._is_torn = 0 < written < len(line) or (self._is_torn and written == 0)


def _finite(values: dict[str, Any], prefix: str, nonfinite: list[str]) -> dict[str, Any]:
    """The same values with null for non-finite numbers, whose keys are added to `nonfinite`."""
    clean: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            clean[key] = _finite(value, f"{prefix}{key}.", nonfinite)
        elif isinstance(value, float) and not math.isfinite(value):
            clean[key] = None
            nonfinite.append(f"{prefix}{key}")
        else:
            clean[key] = value
    return clean


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Complete rows; a line that is still being written (no newline yet) or was torn by a kill is skipped."""
    with open_plain(path) as raw, io.BufferedReader(raw) as lines:
        while (line := lines.readline(LINE_LIMIT_BYTES)).endswith(b"\n"):
            if line == b"\n":
                continue
            try:
                row = parse_json(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def time_left_s(step_s: float, usual_s: float, whole_s: float, steps_left: int) -> float:
    """Time left at the pace of the last steps, `step_s` each, and with as much time for evaluations and saves as there
    was so far: a step took `usual_s` on average, and `whole_s` together with what came between steps."""
    return (step_s + max(0.0, whole_s - usual_s)) * max(0, steps_left)
