"""Writes the report of one or more runs."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clipctl.errors import ClipctlError, ConfigError
from clipctl.files import check_parent
from clipctl.progress import Tell, silent
from clipctl.report.history import History
from clipctl.report.page import MOST_RUNS
from clipctl.report.page import report as page
from clipctl.report.plots import check_plot, write_plot
from clipctl.runs.rundir import RunDir, runs_root

if TYPE_CHECKING:
    from clipctl.report.retrieval import Find


def write_report(
    runs: str | Path | Sequence[str | Path],
    path: str | Path = "report.html",
    *,
    plot: str | None = None,
    pictures: bool = True,
    runs_dir: str | Path | None = None,
    tell: Tell = silent,
) -> Path:
    """Write runs as one self-contained HTML file; or a single plot of them, such as loss, as a PNG or SVG file."""
    names = [os.fspath(one) for one in ([runs] if isinstance(runs, str | Path) else runs)]
    out = Path(path)
    if not 1 <= len(names) <= MOST_RUNS:
        raise ConfigError(f"at most {MOST_RUNS} runs fit into one report, got {len(names)}")
    check_parent(out)
    if plot:
        check_plot(plot, out)
    elif out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"a report is an HTML file, and {out} would not be one", f"use {out.with_suffix('.html')}")
    found = [RunDir.find(runs_root(runs_dir), name) for name in names]
    histories = [History.read(run, time.monotonic()) for run in found]
    if plot:
        write_plot(plot, histories, out)
    else:
        finds, note = retrievals(found[0], tell) if pictures else (None, "left out by --no-pictures")
        out.write_text(page(histories, finds, note), encoding="utf-8", errors="replace")
    return out


def retrievals(run: RunDir, tell: Tell) -> "tuple[list[Find] | None, str]":
    """What the best model finds; None, and why, if the model or its data no longer exist."""
    tell("embedding the held-out pictures")
    from clipctl.report.retrieval import best_and_worst  # imports torch

    try:
        return best_and_worst(run), ""
    except (ClipctlError, OSError) as error:
        return None, f"not shown: {error}"
