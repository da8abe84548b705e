"""How things look: values in, text out. Bytes and seconds become MiB and minutes here and nowhere else."""

import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from clipctl.training.loop import Progress, TrainSummary
    from clipctl.training.plan import TrainPlan


def prose() -> Console:
    """For people: progress, warnings, errors."""
    return Console(stderr=True, highlight=False)


def data() -> Console:
    """For what a command was asked to tell."""
    return Console(highlight=False)


def print_json(command: str, document: dict[str, Any]) -> None:
    json.dump({"schema": f"clipctl.{command}/1", **document}, sys.stdout, indent=2)
    sys.stdout.write("\n")


def size(count_bytes: float) -> str:
    """12 B, 3.4 MiB, 1.2 GiB."""
    value, units = float(count_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" or value >= 100 else f"{value:.1f} {units[0]}"


def duration(seconds: float) -> str:
    """0:48, 12:05, 3:02:11."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def count(number: int) -> str:
    """950, 1.3M, 77.0M, 1.0B."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return str(number)


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}".replace("%", " %")


# --- train ----------------------------------------------------------------------------------------------------


def plan_table(plan: "TrainPlan") -> Table:
    config = plan.config
    image, text = config.model.image, config.model.text
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows = {
        "model": f"{config.preset}, {plan.parameters:,} parameters: "
        f"image {image.width}×{image.depth} at {image.size_px} px in patches of {image.patch_px}, "
        f"text {text.width}×{text.depth} over {text.vocab_size} symbols",
        "data": f"{config.data.source}: {len(plan.train_source):,} pairs to train on, "
        f"{len(plan.val_source):,} held out",
        "device": f"{plan.device.kind} ({plan.device.name}) – {plan.device.reason}",
        "precision": f"{plan.precision.value} – {plan.precision.reason}",
        "threads": f"{plan.threads.value} – {plan.threads.reason}",
        "workers": f"{plan.workers.value} – {plan.workers.reason}",
        "steps": f"{plan.total_steps:,}: {plan.epochs:,} epochs of {plan.steps_per_epoch:,}, "
        f"batch {config.train.batch_size}, peak rate {config.optim.lr:g}",
        "memory": memory_line(plan),
        "checkpoints": f"every {save_interval(config.save.every)}, about {size(plan.checkpoint_bytes)} each; "
        f"kept: the last {config.save.keep_last}, the best {config.save.keep_best}",
    }
    if config.train.loss == "softmax":
        rows["chance loss"] = (
            f"ln {config.train.batch_size} = {plan.chance_loss:.3f}; a loss that stays there has learnt nothing"
        )
    for label, value in rows.items():
        table.add_row(label, Text(value))
    problem = plan.memory_problem()
    for note in (*plan.notes, *([f"{problem}; {problem.hint}"] if problem else [])):
        table.add_row("note", Text(note, style="yellow"))
    return table


def save_interval(every: str) -> str:
    """5 epochs, 1 step, 10 minutes."""
    from clipctl.config import Interval

    interval = Interval.parse(every)
    noun = {"e": "epoch", "s": "step", "m": "minute"}[interval.unit]
    return noun if interval.count == 1 else f"{interval.count:g} {noun}s"


def memory_line(plan: "TrainPlan") -> str:
    need = plan.memory
    return (
        f"about {size(need.total_bytes)} of {size(plan.device.memory_bytes)} free "
        f"(weights {size(need.weights_bytes)}, gradients {size(need.gradients_bytes)}, "
        f"optimizer {size(need.optimizer_bytes)}, activations {size(need.activations_bytes)})"
    )


def plan_document(plan: "TrainPlan") -> dict[str, Any]:
    from dataclasses import asdict

    from clipctl.config import to_dict

    return {
        "parameters": plan.parameters,
        "train_pairs": len(plan.train_source),
        "val_pairs": len(plan.val_source),
        "device": plan.device.kind,
        "device_reason": plan.device.reason,
        "precision": plan.precision.value,
        "threads": plan.threads.value,
        "workers": plan.workers.value,
        "steps": plan.total_steps,
        "epochs": plan.epochs,
        "steps_per_epoch": plan.steps_per_epoch,
        "chance_loss": plan.chance_loss,
        "memory": {**asdict(plan.memory), "total_bytes": plan.memory.total_bytes},
        "memory_free_bytes": plan.device.memory_bytes,
        "notes": list(plan.notes),
        "config": to_dict(plan.config),
    }


PROGRESS_HEADER = f"{'epoch':>9} {'step':>13} {'loss':>8} {'accuracy':>9} {'val R@1':>8} {'images/s':>9} {'left':>8}"


def progress_row(progress: "Progress") -> str:
    score = progress.evaluation.score if progress.evaluation else None
    return (
        f"{f'{progress.epoch}/{progress.epochs}':>9} {f'{progress.step}/{progress.total_steps}':>13} "
        f"{progress.loss:>8.3f} {percent(progress.accuracy):>9} {percent(score):>8} "
        f"{progress.images_per_s:>9.1f} {duration(progress.eta_s):>8}"
    )


def summary_text(summary: "TrainSummary") -> str:
    """The result, then what to do with it."""
    pairs = summary.val_pairs
    found = [round(share * pairs) for share in (summary.t2i_r1, summary.i2t_r1)]
    score, best = (summary.i2t_r1 + summary.t2i_r1) / 2, (summary.best_i2t_r1 + summary.best_t2i_r1) / 2
    return "\n".join(
        [
            f"trained {count(summary.parameters)} parameters in {duration(summary.seconds)} on {summary.device}: "
            f"{summary.steps:,} steps, {summary.images_per_s:.0f} images/s, "
            f"peak memory {size(summary.peak_memory_bytes)}",
            f"of {pairs} captions it had never seen, {found[0]} find their picture and {found[1]} are found by it: "
            f"R@1 {percent(score)} (best {percent(best)}, chance {percent(1 / pairs)})",
            f"everything is in {summary.run}",
        ]
    )
