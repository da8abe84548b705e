"""What happens inside the model: gradients by block, and what it can tell apart."""

import math
import statistics

from rich.text import Text

from clipctl.cli import output
from clipctl.cli.views import units
from clipctl.cli.views.chart import meter, sparkline
from clipctl.cli.views.frame import framed, headed, hidden, shares_of, styled, value, window
from clipctl.cli.views.palette import shade
from clipctl.cli.views.scene import Scene
from clipctl.monitor.view import BANDS, BlockNorms
from clipctl.report.charts import compact

STILL = 1e-3  # of the median block's gradient: a block below hardly changes
VANISHING = " vanishing"
FIGURES = 11  # characters for the latest norm, and around it
LEGEND_CELLS = 8


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
    still = standing_still(epochs[-1].norms)
    label = min(30, width // 3, max(map(len, names)))
    columns = max(1, width - 2 - label - (FIGURES + len(VANISHING) if still else FIGURES))
    shown = _thinned(epochs, columns)
    widths = shares_of(columns, *(1,) * len(shown))
    logs = [math.log10(norm) for one in shown for norm in one.norms.values() if norm > 0]
    low, high = (min(logs), max(logs)) if logs else (0.0, 1.0)
    fitting, foot = _fitting(names, still, height - 3, scene.options.scroll)
    lines = []
    for name in fitting:
        short = name if len(name) <= label else f"…{name[1 - label :]}"
        line = Text().append_text(
            output.plain(f" {short:<{label}} ", style=palette.bad if name in still else palette.dim)
        )
        for one, wide in zip(shown, widths, strict=True):
            line.append_text(_cell(one.norms.get(name, 0.0), low, high, scene, wide))
        line.append(f" {value(epochs[-1].norms[name], '8.2e')}", palette.strong)
        lines.append(line.append(VANISHING if name in still else "", palette.bad))
    lines.append(Text(f" {'':<{label}} {_ends(shown[0].epoch, shown[-1].epoch, columns)}", palette.dim))
    return headed("gradient norm by block", lines, width, height, palette, _legend(scene, low, high), foot=foot)


def _ends(first: int, last: int, columns: int) -> str:
    """Below the strip, the epochs where it begins and ends, as far as there is room."""
    for left in (f"epoch {first}", str(first)):
        if first != last and len(left) + len(str(last)) + 2 <= columns:
            return left.ljust(columns - len(str(last))) + str(last)
    return f"epoch {last}"[:columns] if first == last else ""


def _legend(scene: Scene, low: float, high: float) -> Text:
    """From the smallest to the largest norm, in the colours that stand for them."""
    least, most = (compact(float(f"{10**power:.2g}")) for power in (low, high))
    line = styled(f"{least} ", scene.palette.dim)
    for step in range(LEGEND_CELLS):
        line.append_text(_cell(10 ** (low + (high - low) * step / (LEGEND_CELLS - 1)), low, high, scene, 1))
    return line.append(f" {most}", scene.palette.dim)


def standing_still(norms: dict[str, float]) -> set[str]:
    """Blocks whose gradient is next to nothing compared with the others'."""
    usual = statistics.median(norms.values()) if norms else 0.0
    return {name for name, norm in norms.items() if norm < STILL * usual}


def _cell(norm: float, low: float, high: float, scene: Scene, wide: int) -> Text:
    share = (math.log10(norm) - low) / ((high - low) or 1.0) if norm > 0 else 0.0
    is_plain = scene.options.ascii_only or not scene.options.has_colours
    character = " .:-=+*#%@"[min(9, int(share * 10))] if is_plain else "█"
    return styled(character * wide, shade(scene.palette.heat, share))


def _thinned(epochs: list[BlockNorms], columns: int) -> list[BlockNorms]:
    if len(epochs) <= columns:
        return epochs
    return [epochs[(number + 1) * len(epochs) // columns - 1] for number in range(columns)]


def _fitting(names: list[str], still: set[str], rows: int, scroll: int) -> tuple[list[str], str]:
    """As many as there are rows, and what is hidden; blocks that stand still come first and stay."""
    if len(names) <= rows:
        return names, ""
    first = [name for name in names if name in still][: max(0, rows - 1)]
    rest = [name for name in names if name not in first]
    shown = window(len(rest), max(0, rows - len(first)), scroll)
    return [*first, *(rest[index] for index in shown)], hidden(shown.start, len(rest) - shown.stop)


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
