"""Displays the result of `data inspect`."""

from textwrap import shorten
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from clipctl.cli.output import plain
from clipctl.cli.views.paths import shown

if TYPE_CHECKING:
    from clipctl.data.inspection import Inspection, Sample, Spread

PATH_WIDTH, CAPTION_WIDTH = 40, 60  # of a sample, in characters


def view(found: "Inspection", preset: str, model_images_per_s: float | None) -> Table:
    from clipctl.data.bad import bad_lines

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, text in _rows(found, preset, model_images_per_s).items():
        if text:
            table.add_row(label, plain(text))
    for line in bad_lines(found.bad):
        table.add_row("", plain(line, style="red"))
    for note in found.notes:
        table.add_row("note", plain(note, style="yellow"))
    return table


def verdict(found: "Inspection", train_command: str) -> Text:
    """The last line: the command to type next, or what stands in the way."""
    if found.ready:
        return plain(f"ready: {train_command}", style="green")
    return plain("\n".join(f"not ready: {problem}" for problem in found.problems), style="red")


def _rows(found: "Inspection", preset: str, model_images_per_s: float | None) -> dict[str, str]:
    per_picture, characters = found.captions_per_picture, found.caption_characters
    missing = sum(reason == "missing" for reason in found.bad.values())
    return {
        "data": "\n".join(found.source),
        "format": "\n".join(found.understood),
        "pictures": f"{found.pictures:,}: {found.train_pictures:,} to train on, {found.held_out_pictures:,} held out"
        + (f", {missing:,} missing" if missing else ""),
        "captions": f"{found.captions:,}, {_spread(per_picture)} per picture" if per_picture else "none",
        "samples": "\n".join(map(_sample, found.samples)),
        "classes": f"{found.classes:,}, each with a caption of its own" if found.classes else "",
        "lengths": f"{_spread(characters)} characters" if characters else "",
        "tokens": f"{found.tokenizer}: vocabulary {found.vocabulary:,}; {found.distinct_words:,} different words; "
        + (
            f"{found.captions_cut:,} captions are longer than {found.context} tokens and are cut"
            if found.captions_cut
            else f"all captions fit in {found.context} tokens"
        ),
        "duplicates": _both(found, found.equal_captions, found.equal_pictures, "")
        + f" occur more than once (pictures compared by {found.compared_by})",
        "leakage": _both(found, found.leaked_captions, found.leaked_pictures, "held-out ")
        + " are also in the training set",
        "loss floor": f"{found.loss_floor:.3f} at batch {found.batch_size}: batches have equal captions or pictures"
        if found.loss_floor and not found.classes
        else "",
        "sizes": f"width {_spread(found.width_px)} px, height {_spread(found.height_px)} px"
        if found.width_px and found.height_px
        else "",
        "speed": _speed(found, preset, model_images_per_s),
        "bad": f"{_by_reason(found)} ({_looked(found)})",
    }


def _sample(sample: "Sample") -> str:
    path = shown(sample.path)
    tail = path if len(path) <= PATH_WIDTH else f"…{path[1 - PATH_WIDTH :]}"
    return f"{tail}: {shorten(sample.caption, CAPTION_WIDTH, placeholder='…')}"


def _both(found: "Inspection", captions: int, pictures: int, which: str) -> str:
    """Counts of captions and pictures; in class folders, equal captions are normal and not worth a word."""
    words = f"{pictures:,} {which}pictures"
    return words if found.classes else f"{captions:,} {which}captions and {words}"


def _spread(spread: "Spread | None") -> str:
    """5, or 3 to 77 (median 24)."""
    if spread is None:
        return "unknown"
    if spread.least == spread.most:
        return f"{spread.most:,.0f}"
    return f"{spread.least:,.0f} to {spread.most:,.0f} (median {spread.median:,.0f})"


def _speed(found: "Inspection", preset: str, model_images_per_s: float | None) -> str:
    if found.decode_images_per_s is None:
        return ""
    words = f"one core decodes {found.decode_images_per_s:,.0f} pictures per second"
    if model_images_per_s is None:
        return words
    words += f"; on the CPU, {preset} trains on about {model_images_per_s:,.0f}"
    if found.decode_images_per_s < 4 * model_images_per_s:
        words += ": cache the decoded pictures (--cache auto does if they fit)"
    return words


def _by_reason(found: "Inspection") -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in found.bad_by_reason.items()) or "none"


def _looked(found: "Inspection") -> str:
    everything = found.train_pictures + found.held_out_pictures
    if found.decoded >= everything:
        return "all were decoded"
    return f"{found.decoded:,} of {everything:,} were decoded; --deep decodes all"
