"""clipctl report"""

from pathlib import Path

from clipctl.cli import options, output
from clipctl.cli.views import units


def report(
    runs: options.RunsToReport,
    out: options.ReportOut = None,
    plot: options.PlotName = None,
    no_pictures: options.NoPictures = False,
    runs_dir: options.RunsDir = None,
) -> None:
    """Write a report of one or more runs as an HTML file, or one plot as a picture."""
    from clipctl.report.writing import write_report

    path = out or Path(f"{plot}.png" if plot else "report.html")
    with output.saying("reading the run") as tell:
        write_report(runs, path, plot=plot, pictures=not no_pictures, runs_dir=runs_dir, tell=tell)
    output.data().print(output.plain(f"wrote {path} ({units.size(path.stat().st_size)})"), soft_wrap=True)
