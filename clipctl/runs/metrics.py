"""metrics.jsonl: one JSON object a line, flat keys with units in their names, one writer, any number of readers."""

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMA = 1

# Kinds of rows; every row but the header carries `kind`, `time_s` (since the epoch) and `elapsed_s` (monotonic).
HEADER, STEP, EVAL, EPOCH, SYSTEM, CHECKPOINT, EVENT, RESUME, END = (
    "header",
    "step",
    "eval",
    "epoch",
    "system",
    "checkpoint",
    "event",
    "resume",
    "end",
)


class MetricsWriter:
    """Appends rows from any thread. Losing a row (full disk) is counted and never stops the training."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self.lost_rows = 0
        if os.fstat(self._descriptor).st_size == 0:
            self._append({"kind": HEADER, "schema": SCHEMA, "run_id": run_id})

    def write(self, kind: str, values: dict[str, Any], *, elapsed_s: float | None = None) -> None:
        elapsed_s = time.monotonic() - self._started if elapsed_s is None else elapsed_s
        self._append({"kind": kind, "time_s": round(time.time(), 3), "elapsed_s": round(elapsed_s, 4), **values})

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def close(self) -> None:
        os.close(self._descriptor)

    def _append(self, row: dict[str, Any]) -> None:
        nonfinite = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        if nonfinite:
            row = {**row, **dict.fromkeys(nonfinite), "nonfinite": nonfinite}
        line = json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n"
        with self._lock:
            try:
                os.write(self._descriptor, line.encode())  # one write a line: a reader sees whole lines or a torn tail
            except OSError:
                self.lost_rows += 1


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Complete rows; a line still being written (no newline yet) is left for next time."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)
