"""clipctl report"""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from clipctl.cli import options, output
from clipctl.cli.views import units
from clipctl.errors import ClipctlError, ConfigError
from clipctl.files import check_parent

if TYPE_CHECKING:
    from clipctl.progress import Tell
    from clipctl.report.retrieval import Find
    from clipctl.runs.rundir import RunDir


def report(
    runs: options.RunsToReport,
    out: options.ReportOut = None,
    plot: options.PlotName = None,
    no_pictures: options.NoPictures = False,
    runs_dir: options.RunsDir = None,
) -> None:
    """Write a report of one or more runs as an HTML file, or one plot as a picture."""
    from clipctl.report.history import History
    from clipctl.report.page import MOST_RUNS
    from clipctl.report.page import report as page
    from clipctl.report.plots import check_plot, write_plot
    from clipctl.runs.rundir import RunDir, runs_root

    if len(runs) > MOST_RUNS:
        raise ConfigError(f"at most {MOST_RUNS} runs fit into one report, got {len(runs)}")
    path = out or Path(f"{plot}.png" if plot else "report.html")
    check_parent(path)
    if plot:
        check_plot(plot, path)
    root = runs_root(runs_dir)
    found = [RunDir.find(root, name) for name in runs]
    with output.saying("reading the run") as tell:
        histories = [History.read(run, time.monotonic()) for run in found]
        if plot:
            write_plot(plot, histories, path)
        else:
            finds, note = (None, "left out by --no-pictures") if no_pictures else retrievals(found[0], tell)
            path.write_text(page(histories, finds, note), encoding="utf-8", errors="replace")
    output.data().print(output.plain(f"wrote {path} ({units.size(path.stat().st_size)})"), soft_wrap=True)


def retrievals(run: "RunDir", tell: "Tell") -> "tuple[list[Find] | None, str]":
    """What the best model finds; None, and why, if the model or its data no longer exist."""
    tell("embedding the held-out pictures")
    from clipctl.report.retrieval import best_and_worst

    try:
        return best_and_worst(run), ""
    except (ClipctlError, OSError) as error:
        return None, f"not shown: {error}"
