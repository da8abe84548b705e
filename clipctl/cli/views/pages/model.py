"""What happens inside the model: gradients by block, and what it can tell apart."""

import math
import statistics

from rich.text import Text

from clipctl.cli import output
from clipctl.cli.views import units
from clipctl.cli.views.chart import meter, sparkline
from clipctl.cli.views.frame import framed, styled, value
from clipctl.cli.views.palette import shade
from clipctl.cli.views.scene import Scene
from clipctl.monitor.view import BANDS, BlockNorms

STILL = 1e-3  # of the median block's gradient: a block below hardly changes


def page(scene: Scene, width: int, height: int) -> list[Text]:
    below = _difficulty(scene, width)
    if height < len(below) + 6:
        below = []
    return [*_blocks(scene, width, height - len(below)), *below]


def _blocks(scene: Scene, width: int, height: int) -> list[Text]:
    """A row per block, a column per epoch; bright is a large gradient, on a scale that all blocks share."""
    palette, epochs = scene.palette, scene.view.blocks
    names = list(epochs[-1].norms) if epochs else []
    if not names:
        words = " the first epoch has not ended yet" if scene.snapshot.state != "finished" else " not recorded"
        return framed("gradient norm by block", [Text(words, palette.dim)], width, height, palette)
    label = min(30, max(map(len, names)))
    columns = max(1, width - 2 - label - 22)
    shown = _thinned(epochs, columns)
    wide = max(1, columns // len(shown))  # characters for each epoch
    logs = [math.log10(norm) for one in shown for norm in one.norms.values() if norm > 0]
    low, high = (min(logs), max(logs)) if logs else (0.0, 1.0)
    still = standing_still(epochs[-1].norms)
    lines = []
    for name in _fitting(names, height - 3):
        short = name if len(name) <= label else f"…{name[1 - label :]}"
        line = Text().append_text(
            output.plain(f" {short:<{label}} ", style=palette.bad if name in still else palette.dim)
        )
        for one in shown:
            line.append_text(_cell(one.norms.get(name, 0.0), low, high, scene, wide))
        line.append(f" {value(epochs[-1].norms[name], '8.2e')}", palette.strong)
        lines.append(line.append(" vanishing" if name in still else "", palette.bad))
    ends = f"epoch {shown[0].epoch}".ljust(max(1, wide * len(shown) - len(str(shown[-1].epoch)))) + str(shown[-1].epoch)
    lines.append(Text(f" {'':<{label}} {ends}", palette.dim))
    note = f"from {10**low:.0e} to {10**high:.0e}, by epoch"
    return framed("gradient norm by block", lines, width, height, palette, note)


def standing_still(norms: dict[str, float]) -> set[str]:
    """Blocks whose gradient is next to nothing compared with the others'."""
    usual = statistics.median(norms.values()) if norms else 0.0
    return {name for name, norm in norms.items() if norm < STILL * usual}


def _cell(norm: float, low: float, high: float, scene: Scene, wide: int) -> Text:
    share = (math.log10(norm) - low) / ((high - low) or 1.0) if norm > 0 else 0.0
    character = " .:-=+*#%@"[min(9, int(share * 10))] if scene.options.ascii_only else "█"
    return styled(character * wide, shade(scene.palette.heat, share))


def _thinned(epochs: list[BlockNorms], columns: int) -> list[BlockNorms]:
    if len(epochs) <= columns:
        return epochs
    return [epochs[(number + 1) * len(epochs) // columns - 1] for number in range(columns)]


def _fitting(names: list[str], rows: int) -> list[str]:
    """As many as there are rows, spread evenly."""
    if len(names) <= rows:
        return names
    return [names[number * len(names) // max(1, rows)] for number in range(max(0, rows))]


def _difficulty(scene: Scene, width: int) -> list[Text]:
    """Accuracy against negatives that share few, some or many words with the caption."""
    palette, ascii_only = scene.palette, scene.options.ascii_only
    points = [point for point in scene.view.evaluations if point.difficulty]
    if not points:
        return []
    bar_width, history = max(8, min(40, width // 3)), max(8, width // 3)
    lines = []
    for index, band in enumerate(BANDS):
        values = [point.difficulty[index] for point in points]
        if values[-1] != values[-1]:
            continue
        line = styled(f" {band:<7}", palette.dim)
        line.append_text(meter(values[-1], bar_width, palette.found, palette.frame, ascii_only=ascii_only))
        line.append(f" {units.percent(values[-1]):>5}  ", palette.strong)
        lines.append(line + sparkline(values, history, palette.found, 1.0, ascii_only=ascii_only))
    title = "accuracy by difficulty of the negatives"
    return framed(title, lines, width, len(lines) + 2, palette, "easy: few words shared") if lines else []
