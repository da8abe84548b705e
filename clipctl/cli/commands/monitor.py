"""clipctl monitor, runs and stop: watch and control runs from a second terminal."""

import time
from pathlib import Path

import typer

from clipctl.cli import options, output
from clipctl.errors import ConfigError, RunError
from clipctl.files import check_parent


def monitor(
    run: options.Run = None,
    once: options.Once = False,
    all: options.All = False,
    interval: options.Interval = 1.0,
    page: options.Page = "overview",
    theme: options.Theme = "auto",
    pictures: options.Pictures = False,
    svg: options.Svg = None,
    png: options.Png = None,
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Watch a run from a second terminal; warns if something goes wrong."""
    from clipctl.cli import screen
    from clipctl.cli.terminal import ends_by_exception, reads_keys
    from clipctl.monitor.runs import find_run, has_run, look_surely
    from clipctl.monitor.watch import RunWatcher
    from clipctl.runs.rundir import runs_root

    root, console = runs_root(runs_dir), output.data()
    if all:
        list_runs(root, as_json=json)
        return
    check_pictures(svg, png)
    terminal = None if svg or png else console
    look = screen.options_for(terminal, theme=theme_of(theme), page=page_of(page), pictures=pictures or None)
    looks_once = once or json or svg is not None or png is not None
    with ends_by_exception():
        if not looks_once and not has_run(root, run):
            wait_for_run(root, run, interval)
        watcher = RunWatcher(find_run(root, run))
        if looks_once:
            snapshot = look_surely(watcher)
            for path in (svg, png):
                if path is not None:
                    screen.write_picture(snapshot, look, path)
            if json:
                output.print_json("monitor", snapshot.to_dict())
            elif svg is None and png is None:
                screen.show_once(console, snapshot, look)
        elif console.is_terminal and not console.is_dumb_terminal and reads_keys():
            screen.Screen(console, root, watcher, interval, look, follows=run is None).show()
        else:
            screen.follow(console, watcher, interval)


def wait_for_run(root: Path, run: str | None, interval_s: float) -> None:
    from clipctl.monitor.runs import has_run, planning_words

    with output.saying("") as tell:
        while not has_run(root, run):
            tell(planning_words(root) or f"waiting for a run in {root}; start one: clipctl train")
            time.sleep(interval_s)


def page_of(name: str) -> int:
    from clipctl.cli.views.scene import PAGES

    numbers = [str(number + 1) for number in range(len(PAGES))]
    if name not in (*PAGES, *numbers):
        raise ConfigError(f"--page must be one of {', '.join(PAGES)}, or its number; got {name!r}")
    return PAGES.index(name) if name in PAGES else int(name) - 1


def theme_of(name: str) -> str:
    from clipctl.cli.views.palette import THEMES

    if name not in THEMES:
        raise ConfigError(f"--theme must be one of {', '.join(THEMES)}; got {name!r}")
    return name


def check_pictures(svg: Path | None, png: Path | None) -> None:
    """Raise if a picture cannot be saved there, or would be with the suffix of another format."""
    for path, kind, other in ((svg, "svg", "png"), (png, "png", "svg")):
        if path is not None and path.suffix.lower() != f".{kind}":
            hint = f"--{other} {path}" if path.suffix.lower() == f".{other}" else f"--{kind} {path.name}.{kind}"
            raise ConfigError(f"--{kind} writes a .{kind} file, got {path}", f"did you mean {hint}?")
        if path is not None:
            check_parent(path)


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


def stop(run: options.RunToStop = None, timeout: options.WaitSeconds = 120.0, runs_dir: options.RunsDir = None) -> None:
    """Stop a run: it finishes its step, saves and exits. Waits until it has."""
    from clipctl.monitor.runs import stop_run, the_live_run
    from clipctl.runs.rundir import RunDir, runs_root

    root = runs_root(runs_dir)
    found = RunDir.find(root, run) if run else the_live_run(root)
    if not run:
        say(f"stopping {found.name}")
    words = stop_run(found, timeout)
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
