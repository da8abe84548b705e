"""What a run prints on the terminal: the plan, rows of progress, warnings, the result and what to do next."""

import shlex
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from clipctl.cli import output
from clipctl.cli.views import training, units
from clipctl.config.quantities import counted

if TYPE_CHECKING:
    from clipctl.monitor.watch import RunWatcher
    from clipctl.runs.rundir import RunDir
    from clipctl.training.attempt import TrainSummary
    from clipctl.training.journal import Progress
    from clipctl.training.session import Session

NEXT_COMMANDS = (
    ("the whole run on one screen", "clipctl monitor --once"),
    ("more pictures, harder to tell apart", "clipctl train synthetic:2000 --epochs 20"),
    ("a 77M-parameter model: see the plan first", "clipctl train --preset small --dry-run"),
    ("your own pictures: how they would be read", "clipctl data inspect --help"),
)
NEXT_WITH_OWN_DATA = (
    ("find pictures by words", "clipctl search {place} 'a red boat' --model {run}"),
    ("recall with intervals, next to a baseline without training", "clipctl eval {run}"),
    ("every picture decoded, duplicates, bad files", "clipctl data inspect {data} --deep"),
    ("what more time would choose: see the plan first", "clipctl train {data}{val} --time 1h --dry-run"),
)


def say(console: Console, words: str) -> None:
    console.print(output.plain(words, style="yellow" if words.startswith("warning") else ""), soft_wrap=True)


def show_plan(session: "Session", *, as_json: bool) -> None:
    if as_json:
        output.print_json("train-plan", training.plan_document(session.plan))
    else:
        output.print_unpadded(output.data(), training.plan_table(session.plan))


def show_start(console: Console, session: "Session") -> None:
    assert session.run is not None
    if session.is_finished:
        made = counted(session.step, "step")
        console.print(f"{session.run.path} is already finished: {made}, nothing left to do", markup=False)
    output.print_unpadded(console, training.plan_table(session.plan))
    where = f", from step {session.step}" if session.checkpoint else ""
    console.print(f"run          {session.run.path}{where}", markup=False)


def show_warnings(console: Console, session: "Session", summary: "TrainSummary") -> None:
    """The alerts that still hold at the end, and pictures that could not be used."""
    from clipctl.monitor.watch import RunWatcher

    assert session.run is not None
    for alert in RunWatcher(session.run).look(time.monotonic()).alerts:
        if alert.name != "bad_pictures":  # those are listed by name
            say(console, f"warning: {alert.what}: {alert.why}; {alert.todo}")
    if summary.bad_pictures:
        console.print(training.bad_pictures_text(summary.bad_pictures), soft_wrap=True)


def show_summary(session: "Session", summary: "TrainSummary", typed: Sequence[str]) -> None:
    """The result, then what to do next."""
    answer = output.data()
    answer.print(f"\n{training.summary_text(summary)}\n", markup=False, soft_wrap=not answer.is_terminal)
    show_examples(session)
    assert session.run is not None
    run = session.run.handle
    places = list(typed or session.plan.config.data.source)
    val = session.plan.config.data.val
    is_drawn, data, place = session.plan.data.train.is_drawn, shlex.join(places), shlex.quote(places[0])
    for purpose, command in NEXT_COMMANDS if is_drawn else NEXT_WITH_OWN_DATA:
        if data in command.split():  # it was just done
            continue
        words = command.format(data=data, val=f" --val {shlex.quote(val)}" if val else "", place=place, run=run)
        answer.print(f"  {words:<44} # {purpose}", markup=False, soft_wrap=True)


def show_examples(session: "Session") -> None:
    """What the model finds for a few captions of unseen pictures: the three best, and the three worst."""
    from clipctl.cli.views.training import example_lines

    assert session.run is not None
    found = session.run.retrieval()
    if found is not None:
        answer = output.data()
        for line in example_lines(found):
            answer.print(output.plain(line), soft_wrap=not answer.is_terminal)


def watcher_for(console: Console, session: "Session", *, live: bool) -> "TerminalWatcher | LiveWatcher":
    """The dashboard if it was asked for and there is a terminal for it, else rows of progress."""
    from clipctl.cli.terminal import reads_keys

    assert session.run is not None
    shows_live = live and console.is_terminal and not console.is_dumb_terminal and reads_keys()
    return LiveWatcher(console, session.run) if shows_live else TerminalWatcher(console, session.run)


class TerminalWatcher:
    """A row now and then; in a terminal also a bar below them. Warnings in between."""

    def __init__(self, console: Console, run: "RunDir") -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        columns = (BarColumn(bar_width=None), TaskProgressColumn(), TextColumn("{task.fields[left]}"))
        self._console, self._run = console, run
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("training", total=None, left="")
        self._rows = training.RowRhythm()
        self._monitor: RunWatcher | None = None
        self._has_warned = False

    def __enter__(self) -> "TerminalWatcher":
        self._bar.start()
        self._console.print(training.PROGRESS_HEADER, style="bold")
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the terminal may be gone
            self._bar.stop()

    def progress(self, progress: "Progress") -> None:
        left = f"{units.duration(progress.eta_s)} left"  # as in the row: the bar would guess from its own few updates
        self._bar.update(self._task, completed=progress.step, total=progress.total_steps, left=left)
        if self._rows.is_due(progress, time.monotonic()):
            self._console.print(training.progress_row(progress), markup=False)
            self._warn_if_slow()

    def _warn_if_slow(self) -> None:
        """Once, in the words of the monitor."""
        from clipctl.monitor.watch import RunWatcher

        if self._has_warned:
            return
        self._monitor = self._monitor or RunWatcher(self._run)
        for alert in self._monitor.look(time.monotonic()).alerts:
            if alert.name == "slower_than_planned":
                self._has_warned = True
                self.warn(f"{alert.what}: {alert.why}; {alert.todo}")

    def say(self, message: str) -> None:
        self._console.print(message, markup=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        self._console.print(f"warning: {message}", style="yellow", markup=False, soft_wrap=True)


class LiveWatcher:
    """The monitor's dashboard in the trainer's own terminal, in a thread of its own: it is there before the first step,
    and its keys work during a long one. Messages are shown for a while, and printed at the end."""

    INTERVAL_S = 1.0

    def __init__(self, console: Console, run: "RunDir") -> None:
        from clipctl.cli.screen import Screen, options_for
        from clipctl.monitor.watch import RunWatcher

        options = replace(options_for(console), in_trainer=True)
        self._console, self._said = console, list[str]()
        self._screen = Screen(console, run.path.parent, RunWatcher(run), self.INTERVAL_S, options, follows=False)
        self._thread = threading.Thread(target=self._show, name="dashboard", daemon=True)

    def __enter__(self) -> "LiveWatcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._screen.close()
        self._thread.join()
        with suppress(OSError):  # the terminal may be gone
            for words in self._said:
                say(self._console, words)

    def _show(self) -> None:
        try:
            self._screen.show()
        except Exception as problem:  # training goes on without it
            self._said.append(f"warning: the dashboard ended: {problem}")

    def progress(self, progress: "Progress") -> None:
        """The dashboard reads what the run writes."""

    def say(self, message: str) -> None:
        self._said.append(message)
        self._screen.notify(message)

    def warn(self, message: str) -> None:
        self.say(f"warning: {message}")
