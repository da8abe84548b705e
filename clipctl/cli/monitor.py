"""clipctl monitor, runs and stop: what runs are doing, from a second terminal."""

import sys

from clipctl.cli import options, render
from clipctl.cli.terminal import ends_by_exception
from clipctl.runs.rundir import RunDir, runs_root


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
    from clipctl.cli import watching
    from clipctl.monitor.watch import RunWatcher

    root, console = runs_root(runs_dir), render.data()
    if all:
        watching.list_runs(root, json=json)
        return
    looks_once = once or json or svg is not None
    with ends_by_exception():
        watcher = RunWatcher(watching.find_run(root, run, waits=not looks_once, interval_s=interval))
        if looks_once:
            watching.show_once(console, watching.look_surely(watcher), svg=svg, as_json=json)
        elif console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty():
            watching.Screen(console, root, watcher, interval).show()
        else:
            watching.follow(console, watcher, interval)


def runs(runs_dir: options.RunsDir = None, json: options.Json = False) -> None:
    """List all runs: state, step, score, age, size."""
    from clipctl.cli import watching

    watching.list_runs(runs_root(runs_dir), json=json)


def stop(run: options.RunToStop, timeout: options.WaitSeconds = 120.0, runs_dir: options.RunsDir = None) -> None:
    """Ask a run to finish its step, save and end; wait until it has."""
    from clipctl.cli import watching

    words = watching.stop_run(RunDir.find(runs_root(runs_dir), run), timeout)
    render.data().print(render.plain(words), soft_wrap=True)
