"""clipctl train"""

import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from clipctl.cli import background, options, output
from clipctl.cli.startup import LightCommand
from clipctl.cli.views import training
from clipctl.runs.rundir import runs_root

if TYPE_CHECKING:
    from clipctl.config.layers import Layer
    from clipctl.data.source import Tell
    from clipctl.runs.rundir import RunDir
    from clipctl.training.loop import Progress
    from clipctl.training.plan import TrainPlan
    from clipctl.training.resume import Resumption

NEXT_COMMANDS = (
    ("the whole run on one screen", "clipctl monitor --once"),
    ("more pictures, harder to tell apart", "clipctl train synthetic:2000 --epochs 20"),
    ("the size the notes measured: see the plan first", "clipctl train --preset small --dry-run"),
    ("your own pictures: what would be understood", "clipctl data inspect --help"),
)
NEXT_WITH_OWN_DATA = (
    ("the whole run on one screen", "clipctl monitor --once"),
    ("every picture decoded, duplicates, bad files", "clipctl data inspect {data} --deep"),
    ("a larger model: see the plan first", "clipctl train {data} --preset small --dry-run"),
)


class TrainCommand(LightCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`--resume` may stand alone: give it an empty value then."""
        for position, argument in enumerate(args):
            if argument == "--resume" and (position + 1 == len(args) or args[position + 1].startswith("-")):
                args = [*args[: position + 1], "", *args[position + 1 :]]
                break
        return super().parse_args(ctx, args)


def train(
    source: options.Data = None,
    preset: options.Preset = None,
    config: options.Config = None,
    set: options.Set = None,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    batch_size: options.BatchSize = None,
    lr: options.Lr = None,
    seed: options.Seed = None,
    save_every: options.SaveEvery = None,
    keep_last: options.KeepLast = None,
    keep_best: options.KeepBest = None,
    device: options.Device = None,
    precision: options.Precision = None,
    threads: options.Threads = None,
    workers: options.Workers = None,
    recompute: options.Recompute = False,
    compile: options.Compile = False,
    format: options.DataFormat = None,
    image_column: options.ImageColumn = None,
    caption_column: options.CaptionColumn = None,
    image_root: options.ImageRoot = None,
    separator: options.Separator = None,
    val: options.Val = None,
    val_fraction: options.ValFraction = None,
    tokenizer: options.Tokenizer = None,
    cache: options.Cache = None,
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
    if detach and not dry_run:
        background.start(runs_root(runs_dir), preset or "tiny", name, resume, as_json=json)
        return
    flags = {
        **data_flags(source, format, image_column, caption_column, image_root, separator, val, val_fraction, tokenizer),
        "--cache": ("runtime.cache", cache),
        "--preset": ("preset", preset),
        "--epochs": ("train.epochs", epochs),
        "--steps": ("train.steps", steps),
        "--batch-size": ("train.batch_size", batch_size),
        "--lr": ("optim.lr", lr),
        "--seed": ("train.seed", seed),
        "--save-every": ("save.every", save_every),
        "--keep-last": ("save.keep_last", keep_last),
        "--keep-best": ("save.keep_best", keep_best),
        "--device": ("runtime.device", device),
        "--precision": ("runtime.precision", precision),
        "--threads": ("runtime.threads", threads),
        "--workers": ("runtime.workers", workers),
        "--recompute": ("runtime.recompute", "true" if recompute else None),
        "--compile": ("runtime.compile", "true" if compile else None),
    }
    layers = asked_layers(config, flags, set or [])
    root, console = runs_root(runs_dir), output.prose()
    with output.saying("looking at data and machine") as tell:
        if resume is None:
            check_settings(layers)  # what was mistyped is said before torch is loaded

        from clipctl.config.layers import resolve
        from clipctl.hardware import disk
        from clipctl.monitor.watch import RunWatcher
        from clipctl.runs.rundir import RunDir
        from clipctl.training import loop
        from clipctl.training.plan import make_plan

        if resume is not None:
            run, resumption = find_resumption(root, resume, layers, allow_change, tell)
            plan, checkpoint = resumption.plan, resumption.checkpoint
        else:
            plan, checkpoint = make_plan(resolve(layers), tell=tell), None
    for note in resumption.notes if resume is not None else ():
        console.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)
    if dry_run:
        if json:
            output.print_json("train-plan", training.plan_document(plan))
        else:
            output.data().print(training.plan_table(plan))
        return
    place, copies = (run.path, 1) if checkpoint else (root, 2)  # a run that has one needs room for one more
    if problem := plan.memory_problem() or plan.disk_problem(disk.free_bytes(place), copies):
        raise problem
    plan = verified_plan(plan, console, allow_unverified=allow_unverified_device, may_change=resume is None)
    if resume is None:
        run = RunDir.create(root, plan.config.preset, name)
    elif resumption.is_finished:
        console.print(f"{run.path} is finished: {resumption.step} steps, nothing is left to do", markup=False)
    console.print(training.plan_table(plan))
    console.print(f"run          {run.path}" + (f", from step {checkpoint.step}" if checkpoint else ""), markup=False)
    with TerminalWatcher(console) as watcher:
        summary = loop.train(plan, run, watcher, resume_from=checkpoint)
    for alert in RunWatcher(run).look(time.monotonic()).alerts:
        words = f"warning: {alert.what}: {alert.why}; {alert.todo}"
        if alert.name != "bad_pictures":  # those are listed by name
            console.print(output.plain(words, style="yellow"), soft_wrap=True)
    if summary.bad_pictures:
        console.print(training.bad_pictures_text(summary.bad_pictures), soft_wrap=True)
    if json:
        output.print_json("train", summary.to_dict())
        return
    answer = output.data()
    answer.print(f"\n{training.summary_text(summary)}\n", markup=False, soft_wrap=not answer.is_terminal)
    data = shlex.join(source or plan.config.data.source)
    for purpose, command in NEXT_COMMANDS if plan.train_source.is_drawn else NEXT_WITH_OWN_DATA:
        if data in command.split():  # it was just done
            continue
        answer.print(f"  {command.format(data=data):<44} # {purpose}", markup=False, soft_wrap=True)


def check_settings(layers: "list[Layer]") -> None:
    """Raise where a setting is none, or data are not there."""
    from clipctl.config.layers import resolve
    from clipctl.config.sections import is_synthetic
    from clipctl.data.formats.recognise import check_place

    data = resolve(layers).data
    for place in (*data.source, *([data.val] if data.val else [])):
        if not is_synthetic(place):
            check_place(place)


Flags = dict[str, tuple[str, Any]]  # the setting that a flag stands for, and its value; None: not given


def data_flags(
    source: list[str] | None,
    format: str | None,
    image_column: str | None,
    caption_column: str | None,
    image_root: str | None,
    separator: str | None,
    val: str | None,
    val_fraction: str | None,
    tokenizer: str | None,
) -> Flags:
    """How data are read, for every command that reads them."""
    return {
        "DATA": ("data.source", source or None),
        "--format": ("data.format", format),
        "--image-column": ("data.image_column", image_column),
        "--caption-column": ("data.caption_column", caption_column),
        "--image-root": ("data.image_root", image_root),
        "--separator": ("data.separator", separator),
        "--val": ("data.val", val),
        "--val-fraction": ("data.val_fraction", val_fraction),
        "--tokenizer": ("data.tokenizer", tokenizer),
    }


def asked_layers(file: Path | None, flags: Flags, assignments: list[str]) -> "list[Layer]":
    """The file's settings, over them the flags (or their environment variables), over them --set."""
    from clipctl.config.layers import Layer, load_yaml, parse_assignments

    layers = [load_yaml(file)] if file else []
    layers += [Layer(flag, {key: value}) for flag, (key, value) in flags.items() if value is not None]
    return [*layers, parse_assignments(assignments)]


def verified_plan(plan: "TrainPlan", console: Console, *, allow_unverified: bool, may_change: bool) -> "TrainPlan":
    """The plan with the word whether its device computes what the CPU does. Where it does not, `auto` falls back to the
    CPU if the run has not begun yet; a device that was asked for is an error."""
    from clipctl.training.plan import make_plan
    from clipctl.training.preflight import device_error, verify_device

    verdict = verify_device(plan)
    if verdict is None:
        return plan
    if verdict.passed:
        console.print(f"preflight    {verdict.words} ({verdict.seconds:.1f} s)", markup=False, soft_wrap=True)
        return replace(plan, verified=verdict.state)
    falls_back = may_change and plan.config.runtime.device == "auto"
    if not allow_unverified and not falls_back:
        raise device_error(verdict)
    words = f"warning: {device_error(verdict)}"
    console.print(words, style="yellow", markup=False, soft_wrap=True)
    if allow_unverified:
        return replace(plan, verified=verdict.state)
    console.print("training on the CPU instead", style="yellow")
    return make_plan(replace(plan.config, runtime=replace(plan.config.runtime, device="cpu")))


def find_resumption(
    root: Path, text: str, layers: "list[Layer]", allow_change: bool, tell: "Tell"
) -> "tuple[RunDir, Resumption]":
    """The run that RUN, RUN@best or RUN@STEP names, locked, and how it goes on."""
    from clipctl.runs.store import find_unfinished
    from clipctl.training.resume import prepare_resumption

    run, which = find_unfinished(root, text)
    run.acquire()
    return run, prepare_resumption(run, layers, which=which, allow_change=allow_change, tell=tell)


class TerminalWatcher:
    """A row every few seconds; below them, where somebody is watching, a bar. Warnings in between."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn

        columns = (BarColumn(bar_width=None), TaskProgressColumn(), TimeElapsedColumn())
        self._console = console
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("training", total=None)

    def __enter__(self) -> "TerminalWatcher":
        self._bar.start()
        self._console.print(training.PROGRESS_HEADER, style="bold")
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def progress(self, progress: "Progress") -> None:
        self._console.print(training.progress_row(progress), markup=False)
        self._bar.update(self._task, completed=progress.step, total=progress.total_steps)

    def warn(self, message: str) -> None:
        self._console.print(f"warning: {message}", style="yellow", markup=False, soft_wrap=True)
