"""clipctl train"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from clipctl.cli import options, render

if TYPE_CHECKING:
    from clipctl.config import TrainConfig
    from clipctl.training.loop import Progress as TrainProgress
    from clipctl.training.loop import Report

NEXT_COMMANDS = (
    ("more pictures, harder to tell apart", "clipctl train synthetic:2000 --epochs 20"),
    ("the size the notes measured: see the plan first", "clipctl train --preset small --dry-run"),
    ("the same weights again", "clipctl train --seed {seed}"),
)


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
    device: options.Device = None,
    precision: options.Precision = None,
    threads: options.Threads = None,
    workers: options.Workers = None,
    runs_dir: options.RunsDir = None,
    name: options.Name = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Train a CLIP model, by default on built-in pictures in about a minute."""
    flags = {
        "DATA": ("data.source", source),
        "--preset": ("preset", preset),
        "--epochs": ("train.epochs", epochs),
        "--steps": ("train.steps", steps),
        "--batch-size": ("train.batch_size", batch_size),
        "--lr": ("optim.lr", lr),
        "--seed": ("train.seed", seed),
        "--device": ("runtime.device", device),
        "--precision": ("runtime.precision", precision),
        "--threads": ("runtime.threads", threads),
        "--workers": ("runtime.workers", workers),
    }
    asked = asked_config(config, flags, set or [])

    from clipctl.training import loop
    from clipctl.training.plan import make_plan

    plan = make_plan(asked)
    if dry_run:
        if json:
            render.print_json("train-plan", render.plan_document(plan))
        else:
            render.data().print(render.plan_table(plan))
        return
    plan.check_memory()

    from clipctl.runs.rundir import RunDir, runs_root

    run = RunDir.create(runs_root(runs_dir), asked.preset, name)
    console = render.prose()
    console.print(render.plan_table(plan))
    console.print(f"run          {run.path}\n", markup=False, soft_wrap=True)
    with progress_report(console) as report:
        summary = loop.train(plan, run, report)
    if json:
        render.print_json("train", summary.to_dict())
        return
    output = render.data()
    output.print(f"\n{render.summary_text(summary)}\n", markup=False, soft_wrap=True)
    for purpose, command in NEXT_COMMANDS:
        output.print(f"  {command.format(seed=asked.train.seed):<44} # {purpose}", markup=False, soft_wrap=True)


def asked_config(file: Path | None, flags: dict[str, tuple[str, str | None]], assignments: list[str]) -> "TrainConfig":
    """The file's settings, over them the flags (or their environment variables), over them --set."""
    from clipctl import config as configs
    from clipctl.config import Layer

    layers = [configs.load_yaml(file)] if file else []
    layers += [Layer(flag, {key: value}) for flag, (key, value) in flags.items() if value is not None]
    return configs.resolve([*layers, configs.parse_assignments(assignments)])


@contextmanager
def progress_report(console: Console) -> Iterator["Report"]:
    """A row every few seconds; below them, where somebody is watching, a bar."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=None), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=None)
        console.print(render.PROGRESS_HEADER, style="bold")

        def report(progress: "TrainProgress") -> None:
            console.print(render.progress_row(progress), markup=False)
            bar.update(task, completed=progress.step, total=progress.total_steps)

        yield report
