"""Displays runs: as a list, and side by side."""

from collections.abc import Callable
from typing import Any

from rich.text import Text

from clipctl.cli.output import aligned
from clipctl.cli.views import units

RUN_COLUMNS = ("run", "state", "steps", "score", "age", "size")


def run_table(rows: list[dict[str, Any]]) -> Text:
    return aligned([RUN_COLUMNS, *(run_cells(row) for row in rows)])


def run_cells(row: dict[str, Any]) -> tuple[str, ...]:
    score, age, size = units.percent(row["best_score"]), units.age(row["heartbeat_s"]), units.size(row["size_bytes"])
    steps = f"{row['step']:,} of {row['total_steps']:,}"
    return row["run"], row["state"], steps, score, age, size


def comparison_table(document: dict[str, Any]) -> Text:
    """A column for each run; the settings that differ come first, then the results."""
    runs = document["runs"]
    rows = [("", *(run["run"] for run in runs), "")]
    rows += [(key, *(units.value(one) for one in values), "") for key, values in document["settings"].items()]
    rows += [(label, *(show(run) for run in runs), "") for label, show in RESULTS.items()]
    return aligned(rows)


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


RESULTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "state": lambda run: str(run["state"]),
    "steps": lambda run: f"{run['step']:,} of {run['total_steps']:,}",
    "loss": lambda run: _or_dash(run["loss"], ".3f"),
    "R@1, last": lambda run: units.percent(run["score"]),
    "R@1, best": lambda run: units.percent(run["best_score"]),
    "images/s": lambda run: _or_dash(run["images_per_s"], ".0f"),
    "time": lambda run: units.duration(run["seconds"]),
    "size": lambda run: units.size(run["size_bytes"]),
}
