"""Pairs that look wrong."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from clipctl.cli.output import aligned, plain
from clipctl.cli.views.paths import shown

if TYPE_CHECKING:
    from clipctl.inference.suspects import Suspect, Suspicion

CAPTION_WIDTH = 48
SHOWN_DUPLICATES = 5


def parts(found: "Suspicion", top: int) -> Iterator[Text]:
    judge = (
        f"judged by {found.folds} models, each on pictures that it was not trained on"
        if found.folds
        else "judged by the run itself, which may have memorised wrong captions: with --folds 3, each picture is "
        "judged by a model that has not seen it"
    )
    yield plain(f"{len(found.suspects):,} pairs, worst first; {judge}\n")
    rows = [("misfit", "split", "caption", "fits better", "picture")]
    rows += [
        (f"{one.misfit:.2f}", one.side, _cut(one.caption), _cut(one.suggestion), shown(one.path))
        for one in found.suspects[:top]
    ]
    yield aligned(rows)
    if found.duplicates:
        yield plain(f"\n{len(found.duplicates):,} held-out pictures look just like a training picture:")
        for one in found.duplicates[:SHOWN_DUPLICATES]:
            yield plain(f"  {shown(one.held_out)} and {shown(one.training)}")


def _cut(caption: str) -> str:
    return caption if len(caption) <= CAPTION_WIDTH else f"{caption[: CAPTION_WIDTH - 1]}…"


def write_sheet_of(suspects: "Sequence[Suspect]", places: Sequence[str], path: Path) -> None:
    """A contact sheet of the worst pairs."""
    from clipctl.data.sheet import Cell, write_sheet
    from clipctl.inference.gallery import Originals

    originals = Originals(places)
    write_sheet(
        [Cell(partial(originals.square, one.path), one.caption, os.path.basename(one.path)) for one in suspects], path
    )
