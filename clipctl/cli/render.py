"""How things look: values in, text out. Bytes and seconds become MiB and minutes here and nowhere else."""

import json
import math
import re
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clipctl.runs.checkpoints import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.console import RenderableType

    from clipctl.training.loop import Progress, TrainSummary
    from clipctl.training.plan import TrainPlan


class PlainConsole(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the program; whoever prints shall decide."""
        raise BrokenPipeError


def prose() -> Console:
    """For people: progress, warnings, errors."""
    return PlainConsole(stderr=True, highlight=False)


def data() -> Console:
    """For what a command was asked to tell."""
    return PlainConsole(highlight=False)


SAY_INTERVAL_S = 2.0


@contextmanager
def saying(what: str) -> "Iterator[Callable[[str], None]]":
    """Says what takes long: in one line that changes where somebody watches, else in plain lines now and then, the
    first of them only after a while."""
    console = prose()
    if console.is_terminal:
        with console.status(what) as status:
            yield lambda words: status.update(plain(words))
        return
    said = time.monotonic()

    def say(words: str) -> None:
        nonlocal said
        if time.monotonic() - said >= SAY_INTERVAL_S:
            said = time.monotonic()
            console.print(plain(words), soft_wrap=True)

    yield say


def print_json(command: str, document: dict[str, Any]) -> None:
    json.dump(finite({"schema": f"clipctl.{command}/1", **document}), sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def finite(value: Any) -> Any:
    """The same document with null for numbers that JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


def seconds(value: float) -> str:
    """12 µs, 3.4 ms, 1.25 s, 140 s: three digits."""
    for limit, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= limit or unit == "µs":
            scaled = value / limit
            return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f} {unit}"
    raise AssertionError


def count(number: int) -> str:
    """950, 1.3M, 77.0M, 1.0B."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return str(number)


def plain(text: str, style: str = "") -> Text:
    """Text from outside: no markup, and no codes that the terminal would obey."""
    return Text(
        re.sub(r"[^\n -~\u00a0-\ud7ff\ue000-\U0010ffff]", lambda match: ascii(match[0])[1:-1], text), style=style
    )


def percent(share: float | None) -> str:
    """Whole per cents; one digit below 1 %, where guessing and the first recalls among many pictures lie."""
    if share is None:
        return "–"
    return f"{share * 100:.1g} %" if 1e-6 <= share < 0.01 else f"{share * 100:.0f} %"


def aligned(rows: "Sequence[tuple[str, ...]]", styles: "Sequence[str] | None" = None) -> Text:
    """Columns, the first one to the left, the others to the right, the last one as it comes. By hand, because a Rich
    table of 200 rows takes a quarter of a second."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for (first, *cells, last), style in zip(rows, styles or ["bold", *[""] * (len(rows) - 1)], strict=True):
        middle = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:-1], strict=True))
        lines.append(plain(f"{first:<{widths[0]}}{middle}  {last}".rstrip(), style=style))
    return Text("\n").join(lines)


def show_parts(parts: "Iterable[Text]") -> None:
    """Tables as they are, whatever the width of the terminal; sentences folded to it."""
    console = data()
    for part in parts:
        console.print(part, soft_wrap="\n" in part.plain)


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
        "data": f"{', '.join(plan.config.data.source)}: {len(plan.train_source):,} pictures to train on, "
        f"{len(plan.val_source):,} held out",
        **({} if plan.train_source.is_drawn else {"understood": "\n".join(plan.data.words)}),
        "device": f"{plan.device.kind} ({plan.device.name}) – {plan.device.reason}",
        "precision": f"{plan.precision.value} – {plan.precision.reason}",
        "threads": f"{plan.threads.value} – {plan.threads.reason}",
        "workers": f"{plan.workers.value} – {plan.workers.reason}",
        **({} if plan.train_source.is_drawn else {"cache": f"{plan.cache.value} – {plan.cache.reason}"}),
        "steps": f"{plan.total_steps:,}: {plan.epochs:,} epochs of {plan.steps_per_epoch:,}, "
        f"batch {plan.batch_pairs}, peak rate {config.optim.lr:g}",
        "time": time_line(plan),
        "memory": memory_line(plan),
        "checkpoints": f"every {save_interval(config.save.every)}, about {size(plan.checkpoint_bytes)} each; "
        f"kept: the last {config.save.keep_last}, the best {config.save.keep_best}",
    }
    if config.train.loss == "softmax":
        rows["chance loss"] = (
            f"ln {plan.batch_pairs} = {plan.chance_loss:.3f}; a loss that stays there has learnt nothing"
        )
    for label, value in rows.items():
        table.add_row(label, plain(value))
    problem = plan.memory_problem()
    for note in (*plan.notes, *([f"{problem}; {problem.hint}"] if problem else [])):
        table.add_row("note", plain(note, style="yellow"))
    return table


def save_interval(every: str) -> str:
    """5 epochs, 1 step, 10 minutes."""
    from clipctl.config import Interval

    interval = Interval.parse(every)
    noun = {"e": "epoch", "s": "step", "m": "minute"}[interval.unit]
    return noun if interval.count == 1 else f"{interval.count:g} {noun}s"


def memory_line(plan: "TrainPlan") -> str:
    need = plan.memory
    program = f", program {size(need.process_bytes)}" if need.process_bytes else ""
    return (
        f"about {size(plan.memory_need.value)} of {size(plan.device.memory_bytes)} free – {plan.memory_need.basis} "
        f"(weights {size(need.weights_bytes)}, gradients {size(need.gradients_bytes)}, "
        f"optimizer {size(need.optimizer_bytes)}, activations {size(need.activations_bytes)}{program})"
    )


def time_line(plan: "TrainPlan") -> str:
    if plan.seconds is None or plan.step_s is None:
        return "unknown: nothing was measured on this device yet; clipctl bench does"
    low, high = duration(plan.seconds.low), duration(plan.seconds.high)
    return (
        f"about {duration(plan.seconds.value)} ({low} to {high}), {seconds(plan.step_s.value)} a step – "
        f"{plan.step_s.basis}{BASIS_HINTS.get(plan.step_s.basis, '')}"
    )


BASIS_HINTS = {"prior": "; clipctl bench would make it sure"}


def plan_document(plan: "TrainPlan") -> dict[str, Any]:
    from dataclasses import asdict

    from clipctl.config import to_dict

    return {
        "parameters": plan.parameters,
        "train_pairs": len(plan.train_source),
        "val_pairs": len(plan.val_source),
        "understood": list(plan.data.words),
        "cache": plan.cache.value,
        "loss_floor": plan.loss_floor,
        "device": plan.device.kind,
        "device_reason": plan.device.reason,
        "precision": plan.precision.value,
        "threads": plan.threads.value,
        "workers": plan.workers.value,
        "decided_s": plan.decided_s,
        "steps": plan.total_steps,
        "epochs": plan.epochs,
        "steps_per_epoch": plan.steps_per_epoch,
        "chance_loss": plan.chance_loss,
        "step_s": plan.step_s.to_dict() if plan.step_s else None,
        "seconds": plan.seconds.to_dict() if plan.seconds else None,
        "memory": {**asdict(plan.memory), "total_bytes": plan.memory_need.value, "basis": plan.memory_need.basis},
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
    captions = round(summary.t2i_r1 * summary.val_captions)
    pictures = round(summary.i2t_r1 * pairs)
    found = (
        f"of {pairs:,} held-out pictures {pictures:,} find {'their' if summary.val_captions == pairs else 'a'} "
        f"caption, and of {summary.val_captions:,} captions {captions:,} find their picture"
    )
    score, best = (summary.i2t_r1 + summary.t2i_r1) / 2, (summary.best_i2t_r1 + summary.best_t2i_r1) / 2
    return "\n".join(
        [
            f"trained {count(summary.parameters)} parameters in {duration(summary.seconds)} on {summary.device}: "
            f"{summary.steps:,} steps, {summary.images_per_s:.0f} images/s, "
            f"peak memory {size(summary.peak_memory_bytes)}",
            f"{found}: R@1 {percent(score)} (best {percent(best)}, chance {percent(1 / pairs)})",
            f"everything is in {summary.run}",
        ]
    )


def bad_pictures_text(reasons: dict[str, str]) -> Text:
    """How many could not be used, and which."""
    from clipctl.data.sources.catalog import bad_counts, bad_lines

    noun = "picture" if len(reasons) == 1 else "pictures"
    first = f"warning: {len(reasons):,} {noun} could not be used ({bad_counts(reasons.values())}):"
    return plain("\n  ".join([first, *bad_lines(reasons)]), style="yellow")


# --- checkpoint -----------------------------------------------------------------------------------------------


def checkpoint_lines(documents: "list[dict[str, Any]]") -> Text:
    rows = [("run", "step", "epoch", "score", "size", "age", "")]
    for one in documents:
        flags = [word for word in ("best", "last", "incomplete") if one[word]]
        flags += [f"{'damaged: ' if one['damaged'] else ''}{problem}" for problem in one["problems"]]
        epoch = "–" if one["epoch"] is None else str(one["epoch"])
        numbers = (str(one["step"]), epoch, percent(one["score"]), size(one["size_bytes"]), age(one["saved_s"]))
        rows.append((one["run"], *numbers, ", ".join(flags)))
    styles = ["bold", *("dim" if one["incomplete"] else "red" if one["problems"] else "" for one in documents)]
    return aligned(rows, styles)


def verdict_line(document: dict[str, Any]) -> Text:
    problems = "; ".join(document["problems"])
    word = "damaged" if document["damaged"] else "not checked"
    verdict = plain(f"{word}: {problems}", style="red") if problems else Text("ok", style="green")
    return plain(f"{document['run']}  step {document['step']}  {size(document['size_bytes'])}  ") + verdict


def pruned_line(document: dict[str, Any], *, deleted: bool) -> Text:
    word = "deleted" if deleted else "would delete"
    return plain(f"{word}  {document['run']}  step {document['step']}  {size(document['size_bytes'])}")


def checkpoint_view(document: dict[str, Any]) -> "Iterator[RenderableType]":
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    metrics = (f"{key} {value(number)}" for key, number in document["metrics"].items())
    rows = {
        "checkpoint": document["path"],
        "run": f"{document['run']}, attempt {document['attempt']}",
        "step": f"{document['step']}, epoch {document['epoch']}, saved {age(document['saved_s'])} ago",
        "size": size(document["size_bytes"]),
        "metrics": "  ".join(metrics) or "–",
    }
    for label, text in rows.items():
        facts.add_row(label, plain(text))
    yield facts
    yield Text("\nsettings", style="bold")
    yield settings_table(document["config"])
    for file, tensors in document["tensors"].items():
        elements = sum(math.prod(info["shape"]) for info in tensors.values())
        yield Text(f"\n{file}: {len(tensors)} tensors, {elements:,} numbers", style="bold")
        if file == MODEL:
            yield tensor_table(tensors)


def settings_table(config: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for key, setting in config.items():
        table.add_row(plain(key), plain(value(setting)))
    return table


def tensor_table(tensors: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, info in tensors.items():
        table.add_row(plain(name), shape(info["shape"]), info["dtype"])
    return table


DIFFERENCE_ROWS = 20


def difference_view(document: dict[str, Any]) -> "Iterator[RenderableType]":
    for noun in ("config", "metrics"):
        changes = document[noun]
        yield Text(f"{noun}: {len(changes)} differ" if changes else f"{noun}: no difference", style="bold")
        table = Table.grid(padding=(0, 2))
        for key, (before, after) in changes.items():
            table.add_row(plain(f"  {key}"), plain(value(before)), "→", plain(value(after)))
        yield table
    tensors = document["tensors"]
    moved = sorted(
        (one for one in tensors if one["relative"] != 0),
        key=lambda one: math.inf if one["relative"] is None else one["relative"],
        reverse=True,
    )
    yield Text(f"tensors: {len(moved)} of {len(tensors)} differ", style="bold")
    table = Table(box=None, pad_edge=False)
    for column in ("tensor", "shape", "relative change", "largest change"):
        table.add_column(column, justify="left" if column == "tensor" else "right", overflow="fold")
    for one in moved[:DIFFERENCE_ROWS]:
        if one["relative"] is None:
            sides = [shape(one[key]) if one[key] is not None else "absent" for key in ("shape_a", "shape_b")]
            table.add_row(plain(one["name"]), " → ".join(sides), "–", "–")
        else:
            cells = (shape(one["shape_a"]), f"{one['relative']:.3g}", f"{one['largest']:.3g}")
            table.add_row(plain(one["name"]), *cells)
    yield table
    if len(moved) > DIFFERENCE_ROWS:
        yield plain(f"… and {len(moved) - DIFFERENCE_ROWS} more; --json has all")


def value(setting: Any) -> str:
    """A setting or a metric: none, 12, 0.0008, softmax."""
    return "none" if setting is None else f"{setting:.4g}" if isinstance(setting, float) else str(setting)


def shape(sides: "Sequence[int]") -> str:
    return "×".join(str(side) for side in sides) or "1"


def age(saved_s: float | None) -> str:
    """How long ago a moment was: 40 s, 5 min, 3 h, 12 d."""
    if saved_s is None:
        return "–"
    seconds = max(0.0, time.time() - saved_s)
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"
