"""Displays the list of runs."""

from typing import Any

from rich.text import Text

from clipctl.cli.output import aligned
from clipctl.cli.views import units

RUN_COLUMNS = ("run", "state", "step", "of", "score", "age", "size")


def run_table(rows: list[dict[str, Any]]) -> Text:
    return aligned([RUN_COLUMNS, *(run_cells(row) for row in rows)])


def run_cells(row: dict[str, Any]) -> tuple[str, ...]:
    score, age, size = units.percent(row["best_score"]), units.age(row["heartbeat_s"]), units.size(row["size_bytes"])
    return row["run"], row["state"], str(row["step"]), str(row["total_steps"]), score, age, size
