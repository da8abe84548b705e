"""The metrics of a run for other tools: CSV files, or TensorBoard. No torch for CSV."""

import csv
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from clipctl import files
from clipctl.errors import ConfigError
from clipctl.runs import metrics
from clipctl.runs.rundir import RunDir

KINDS = {metrics.STEP: "steps", metrics.EPOCH: "epochs", metrics.EVAL: "evaluations", metrics.SYSTEM: "system"}
TARGETS = ("csv", "tensorboard")


def valid_rows(run: RunDir) -> Iterator[dict[str, Any]]:
    """Rows in order, without those that a later resume has undone."""
    resumes = [
        (number, row["step"])
        for number, row in enumerate(metrics.read_rows(run.metrics_file))
        if isinstance(row, dict) and row.get("kind") == metrics.RESUME and isinstance(row.get("step"), int)
    ]
    for number, row in enumerate(metrics.read_rows(run.metrics_file)):
        while resumes and resumes[0][0] <= number:
            resumes.pop(0)
        step = row.get("step") if isinstance(row, dict) else None
        limit = min((at for _, at in resumes), default=math.inf)
        if isinstance(row, dict) and (not isinstance(step, int) or step <= limit):
            yield row


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """Numbers by name: of lists and objects, each on its own."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= {f"{key}/{name}": inner for name, inner in value.items()}
        elif isinstance(value, list):
            found |= {f"{key}/{number}": inner for number, inner in enumerate(value)}
        elif key != "kind":
            found[key] = value
    return found


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{directory} is a file", "name a directory to write to") from None


def export_csv(run: RunDir, directory: Path) -> list[Path]:
    """One file for each kind of row, with a column for every key that occurs."""
    _make(directory)
    columns: dict[str, dict[str, None]] = {}  # in the order in which they first occur
    for row in valid_rows(run):
        columns.setdefault(str(row.get("kind")), {}).update(dict.fromkeys(flat(row)))
    written: dict[str, Path] = {}
    with ExitStack() as stack:
        writers: dict[str, csv.DictWriter[str]] = {}
        for row in valid_rows(run):
            kind = str(row.get("kind"))
            if kind not in KINDS:
                continue
            if kind not in writers:
                written[kind] = directory / f"{KINDS[kind]}.csv"
                partial = stack.enter_context(files.replaced(written[kind], durable=False))
                file = stack.enter_context(partial.open("w", newline="", encoding="utf-8"))
                writers[kind] = csv.DictWriter(file, list(columns[kind]))
                writers[kind].writeheader()
            writers[kind].writerow(flat(row))
    return list(written.values())


def export_tensorboard(run: RunDir, directory: Path) -> list[Path]:
    """Scalars by step; those of the machine by second."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("this needs tensorboard", "pip install 'clipctl[tensorboard]'") from None
    _make(directory)
    with SummaryWriter(str(directory)) as writer:
        for row in valid_rows(run):
            kind = KINDS.get(str(row.get("kind")))
            if kind is None:
                continue
            at = row.get("step") if kind != "system" else row.get("elapsed_s")
            for key, value in flat(row).items():
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if is_number and key not in ("step", "time_s", "elapsed_s") and isinstance(at, int | float):
                    writer.add_scalar(f"{kind}/{key}", value, int(at), walltime=row.get("time_s"))
    return sorted(directory.glob("events.out.tfevents.*"))
