"""clipctl train"""

import time
from typing import TYPE_CHECKING, Any

from clipctl.cli import options, output
from clipctl.cli.startup import LightCommand

if TYPE_CHECKING:
    from clipctl.config.layers import Layer


INTERPRETER_S = 0.3  # from the prompt to here, which counts if the run has a time limit


class TrainCommand(LightCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`--resume` may stand alone: give it an empty value then."""
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
    detach: options.Detach = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Train a CLIP model, by default on built-in pictures in about a minute."""
    from clipctl.cli import background, talk
    from clipctl.runs.rundir import runs_root

    started_s = time.monotonic() - INTERPRETER_S
    root, console = runs_root(runs_dir), output.prose()
    if resume is None:
        check_settings(asked)  # what was mistyped is said before torch is loaded
    if detach and not dry_run:
        background.start(root, preset_of(asked), name, resume, as_json=json)
        return
    with output.saying("looking at data and machine") as tell:
        from clipctl.training import session as sessions

        if resume is not None:
            session = sessions.resume(root, resume, asked, allow_change=allow_change, tell=tell)
        else:
            session = sessions.prepare(asked, root, name=name, tell=tell, spent_s=time.monotonic() - started_s)
    for note in session.notes:
        console.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)
    if dry_run:
        talk.show_plan(session, as_json=json)
        return
    session = session.checked(
        allow_unverified_device=allow_unverified_device, tell=lambda words: talk.say(console, words)
    )
    session = session.opened()
    talk.show_start(console, session)
    with talk.TerminalWatcher(console) as watcher:
        summary = session.train(watcher)
    talk.show_warnings(console, session, summary)
    if json:
        output.print_json("train", summary.to_dict())
    else:
        talk.show_summary(session, summary, data or ())


def check_settings(asked: "list[Layer]") -> None:
    """Raise if a setting is invalid, or data are not there."""
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
