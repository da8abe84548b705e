"""clipctl train"""

import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from clipctl.cli import options, output
from clipctl.cli.startup import LightCommand
from clipctl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from clipctl.config.layers import Layer
    from clipctl.progress import Tell
    from clipctl.training.distributed import World
    from clipctl.training.session import Session


INTERPRETER_S = 0.3  # from the prompt to here, which counts if the run has a time limit


class TrainCommand(LightCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`--resume` may stand alone; it then gets an empty value."""
        for position, argument in enumerate(args):
            if argument == "--resume" and (position + 1 == len(args) or args[position + 1].startswith("-")):
                args = [*args[: position + 1], "", *args[position + 1 :]]
                break
        return super().parse_args(ctx, args)


@options.takes(*options.TRAIN_FLAGS)
def train(
    asked: "list[Layer]",
    data: options.Data = None,
    runs_dir: options.RunsDir = None,
    name: options.Name = None,
    resume: options.Resume = None,
    allow_change: options.AllowChange = False,
    allow_unverified_device: options.AllowUnverifiedDevice = False,
    nproc: options.Processes = None,
    detach: options.Detach = False,
    live: options.Live = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Train a CLIP model, by default on built-in pictures in about a minute."""
    from clipctl.cli import background, talk, torchrun
    from clipctl.config.layers import ambiguities, check_length
    from clipctl.runs.rundir import planning, runs_root

    started_s = time.monotonic() - INTERPRETER_S
    world = torchrun.joined(None)
    if world is not None and not world.is_first and dry_run:
        return
    if world is not None and not world.is_first:
        from clipctl.training import joint

        with torchrun.following():
            joint.follow(world, asked).train()
        return
    root, console = runs_root(runs_dir), output.prose()
    check_length(asked)
    if detach and live:
        raise ConfigError("--detach and --live contradict each other", "leave out either; watch with clipctl monitor")
    if resume is None:
        check_settings(asked)  # what was mistyped is said before torch is loaded
    show_notes(ambiguities(asked))
    with torchrun.leading(world), output.stops_said():
        if detach and not dry_run:
            background.start(root, preset_of(asked), name, resume, as_json=json)
            return
        if nproc is not None and nproc > 1 and not dry_run:
            torchrun.start(nproc, torchrun.without_processes(sys.argv[1:]))
        with output.saying("looking at the data and the machine") as tell, nullcontext() if dry_run else planning(root):
            session = make_session(asked, root, name, resume, world, nproc, allow_change, tell, started_s)
        show_notes(session.notes)
        if dry_run:
            talk.show_plan(session, as_json=json)
            return
        session = session.checked(
            allow_unverified_device=allow_unverified_device, tell=lambda words: talk.say(console, words)
        )
        session = session.opened()
        if world is not None:
            session = share(session, world, asked)
        talk.show_start(console, session)
        with talk.watcher_for(console, session, live=live) as watcher:
            summary = session.train(watcher)
        talk.show_warnings(console, session, summary)
        if json:
            output.print_json("train", summary.to_dict())
        else:
            talk.show_summary(session, summary, data or ())


def make_session(
    asked: "list[Layer]",
    root: "Path",
    name: str | None,
    resume: str | None,
    world: "World | None",
    nproc: int | None,
    allow_change: bool,
    tell: "Tell",
    started_s: float,
) -> "Session":
    """A new run or a resumed one, in one process or several."""
    from clipctl.training import session as sessions

    ranks = nproc or 1
    if world is not None:
        from clipctl.training import joint

        ranks = world.size
        if resume is None and (run := joint.interrupted_run(root)):
            resume = run.name
    if resume is not None:
        return sessions.resume(root, resume, asked, allow_change=allow_change, tell=tell, ranks=ranks)
    spent_s = time.monotonic() - started_s
    return sessions.prepare(asked, root, name=name, tell=tell, spent_s=spent_s, ranks=ranks)


def share(session: "Session", world: "World", asked: "list[Layer]") -> "Session":
    from clipctl.training import joint

    return joint.share(session, world, asked)


def show_notes(notes: "Iterable[str]") -> None:
    for note in notes:
        output.prose().print(output.plain(f"note: {note}", style="yellow"), soft_wrap=True)


def check_settings(asked: "list[Layer]") -> None:
    """Raise if a setting is invalid or the data do not exist."""
    from clipctl.config.layers import resolve
    from clipctl.config.sections import is_synthetic
    from clipctl.data.formats.recognise import check_place

    data = resolve(asked).data
    for place in (*data.source, *([data.val] if data.val else [])):
        if not is_synthetic(place):
            check_place(place)


def preset_of(asked: "list[Layer]") -> str:
    """The preset that flags or the config file name."""
    return str(next((layer.values["preset"] for layer in reversed(asked) if "preset" in layer.values), "tiny"))
