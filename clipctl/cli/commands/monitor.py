"""clipctl monitor, runs and stop: watch and control runs from a second terminal."""

import sys
from pathlib import Path

import typer

from clipctl.cli import options, output
from clipctl.errors import ConfigError, RunError


def monitor(
    run: options.Run = None,
    once: options.Once = False,
    all: options.All = False,
    interval: options.Interval = 1.0,
    svg: options.Svg = None,
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Watch a training from a second terminal, and see what is wrong with it."""
    from clipctl.cli import screen
    from clipctl.cli.terminal import ends_by_exception
    from clipctl.monitor.runs import find_run, look_surely
    from clipctl.monitor.watch import RunWatcher
    from clipctl.runs.rundir import runs_root

    root, console = runs_root(runs_dir), output.data()
    if all:
        list_runs(root, as_json=json)
        return
    looks_once = once or json or svg is not None
    with ends_by_exception():
        found = find_run(root, run, waits=not looks_once, interval_s=interval, tell=say)
        watcher = RunWatcher(found)
        if looks_once:
            screen.show_once(console, look_surely(watcher), svg=svg, as_json=json)
        elif console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty():
            screen.Screen(console, root, watcher, interval).show()
        else:
            screen.follow(console, watcher, interval)


def runs(context: typer.Context, runs_dir: options.RunsDir = None, json: options.Json = False) -> None:
    """List all runs: state, step, score, age, size."""
    from clipctl.runs.rundir import runs_root

    if context.invoked_subcommand is None:
        list_runs(runs_root(runs_dir), as_json=json)


def export(
    run: options.RunToExport,
    to: options.ExportTo = "csv",
    out: options.ExportOut = None,
    runs_dir: options.RunsDir = None,
) -> None:
    """Write the metrics of a run for other tools: CSV files, or TensorBoard."""
    from clipctl.report.export import TARGETS, export_csv, export_tensorboard
    from clipctl.runs.rundir import RunDir, runs_root

    if to not in TARGETS:
        raise ConfigError(f"--to must be csv or tensorboard, got {to!r}")
    found = RunDir.find(runs_root(runs_dir), run)
    directory = out or Path(f"{found.name}-{to}")
    for path in (export_csv if to == "csv" else export_tensorboard)(found, directory):
        output.data().print(output.plain(f"wrote {path}"), soft_wrap=True)


def stop(run: options.RunToStop, timeout: options.WaitSeconds = 120.0, runs_dir: options.RunsDir = None) -> None:
    """Ask a run to finish its step, save and exit, and wait until it has."""
    from clipctl.monitor.runs import stop_run
    from clipctl.runs.rundir import RunDir, runs_root

    words = stop_run(RunDir.find(runs_root(runs_dir), run), timeout)
    output.data().print(output.plain(words), soft_wrap=True)


def list_runs(root: Path, *, as_json: bool) -> None:
    from clipctl.cli.views.runs import run_table
    from clipctl.monitor.runs import run_rows

    rows = list(run_rows(root))
    if as_json:
        output.print_json("runs", {"runs": rows})
    elif rows:
        output.data().print(run_table(rows), soft_wrap=True)
    else:
        raise RunError(f"there are no runs in {root}", "start one: clipctl train")


def say(words: str) -> None:
    output.prose().print(output.plain(words), soft_wrap=True)
