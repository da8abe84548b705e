"""Displays checkpoints: listed, verified, shown, compared."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from clipctl.cli.output import aligned, plain
from clipctl.cli.views import units
from clipctl.runs.checkpoint import MODEL
from clipctl.runs.inventory import changed_settings

if TYPE_CHECKING:
    from rich.console import RenderableType


def checkpoint_lines(documents: "list[dict[str, Any]]") -> Text:
    rows = [("run", "step", "epoch", "score", "size", "age", "")]
    for one in documents:
        flags = [word for word in ("best", "last", "incomplete") if one[word]]
        flags += [f"{'damaged: ' if one['damaged'] else ''}{problem}" for problem in one["problems"]]
        epoch = "–" if one["epoch"] is None else str(one["epoch"])
        numbers = (
            str(one["step"]),
            epoch,
            units.percent(one["score"]),
            units.size(one["size_bytes"]),
            units.age(one["saved_s"]),
        )
        rows.append((one["run"], *numbers, ", ".join(flags)))
    styles = ["bold", *("dim" if one["incomplete"] else "red" if one["problems"] else "" for one in documents)]
    return aligned(rows, styles)


def verdict_line(document: dict[str, Any]) -> Text:
    word = "damaged" if document["damaged"] else "not checked"
    name = f"{document['run']}  step {document['step']}"
    return plain(f"{name}  {units.size(document['size_bytes'])}  ") + _verdict(document, word)


def index_line(document: dict[str, Any]) -> Text:
    return plain(f"{document['path']}  {units.size(document['size_bytes'])}  ") + _verdict(document, "damaged")


def _verdict(document: dict[str, Any], word: str) -> Text:
    problems = "; ".join(document["problems"])
    return plain(f"{word}: {problems}", style="red") if problems else Text("ok", style="green")


def pruned_line(document: dict[str, Any], *, deleted: bool) -> Text:
    word = "deleted" if deleted else "would delete"
    return plain(f"{word}  {document['run']}  step {document['step']}  {units.size(document['size_bytes'])}")


def checkpoint_view(
    document: dict[str, Any], *, all_settings: bool = False, tensors: bool = False
) -> "Iterator[RenderableType]":
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    metrics = (f"{key} {units.value(number)}" for key, number in document["metrics"].items())
    rows = {
        "checkpoint": document["path"],
        "run": f"{document['run']}, attempt {document['attempt']}",
        "step": f"{document['step']}, epoch {document['epoch']}, saved {units.age(document['saved_s'])} ago",
        "size": units.size(document["size_bytes"]),
        "metrics": "  ".join(metrics) or "–",
        **{file: _tensor_words(found) for file, found in document["tensors"].items()},
    }
    for label, text in rows.items():
        facts.add_row(plain(label), plain(text))
    yield facts
    yield from _settings_view(document["config"], every=all_settings)
    if tensors:
        yield Text("\ntensors of the model", style="bold")
        yield tensor_table(document["tensors"].get(MODEL, {}))


def _tensor_words(tensors: dict[str, Any]) -> str:
    numbers = sum(math.prod(info["shape"]) for info in tensors.values())
    return f"{len(tensors):,} tensors, {numbers:,} numbers"


def _settings_view(config: dict[str, Any], *, every: bool) -> "Iterator[RenderableType]":
    shown = config if every else changed_settings(config)
    hidden = len(config) - len(shown)
    words = f"settings that differ from preset {config.get('preset')}" if hidden else "settings"
    yield plain(f"\n{words}", style="bold")
    yield settings_table(shown)
    if hidden:
        yield plain(f"{hidden} more as in the preset; --all lists them, and every tensor", style="dim")


def settings_table(config: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for key, setting in config.items():
        table.add_row(plain(key), plain(units.value(setting)))
    return table


def tensor_table(tensors: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, info in tensors.items():
        table.add_row(plain(name), units.shape(info["shape"]), info["dtype"])
    return table


DIFFERENCE_ROWS = 20


def difference_view(document: dict[str, Any]) -> "Iterator[RenderableType]":
    for noun in ("config", "metrics"):
        changes = document[noun]
        yield Text(f"{noun}: {len(changes)} differ" if changes else f"{noun}: no difference", style="bold")
        table = Table.grid(padding=(0, 2))
        for key, (before, after) in changes.items():
            table.add_row(plain(f"  {key}"), plain(units.value(before)), "→", plain(units.value(after)))
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
            sides = [units.shape(one[key]) if one[key] is not None else "absent" for key in ("shape_a", "shape_b")]
            table.add_row(plain(one["name"]), " → ".join(sides), "–", "–")
        else:
            cells = (units.shape(one["shape_a"]), f"{one['relative']:.3g}", f"{one['largest']:.3g}")
            table.add_row(plain(one["name"]), *cells)
    yield table
    if len(moved) > DIFFERENCE_ROWS:
        yield plain(f"… and {len(moved) - DIFFERENCE_ROWS} more; --json shows all")
