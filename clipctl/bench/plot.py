"""Plots a benchmark. matplotlib is an optional dependency, imported only here."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipctl.bench.results import BenchResult, BenchRow
from clipctl.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib", "pip install 'clipctl[plot]'")


def draw(result: BenchResult, path: Path) -> None:
    """One panel per operation: speed over size, one line per setting, spread as bars; training steps in the last."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not result.results:
        raise ConfigError("nothing was measured, so there is nothing to plot")
    micro = [row for row in result.results if row.suite != "step"]
    steps = [row for row in result.results if row.suite == "step"]
    names = list(dict.fromkeys(row.operation for row in micro))
    settings = list(dict.fromkeys(row.setting for row in result.results))
    colours = {setting: f"C{number % 10}" for number, setting in enumerate(settings)}
    panels = len(names) + bool(steps)
    columns = min(2, panels)
    lines = -(-panels // columns)
    figure = Figure(figsize=(5.2 * columns, 3.7 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(result.machine.title, fontsize=10)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, name in zip(axes, names, strict=False):
        _draw_operation(axis, result, [row for row in micro if row.operation == name], colours)
    if steps:
        _draw_steps(axes[len(names)], steps, colours)
    for axis in axes[panels:]:
        axis.set_axis_off()
    handles = [axes[0].plot([], [], color=colour, marker="o", label=name)[0] for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def _draw_operation(axis: "Axes", result: BenchResult, rows: list[BenchRow], colours: dict[str, str]) -> None:
    counts_flops = rows[0].gflops is not None
    scale = "gflops" if counts_flops else "gbytes_per_s"
    for setting in dict.fromkeys(row.setting for row in rows):
        line = [row for row in rows if row.setting == setting]
        values = [getattr(row, scale) for row in line]
        # Speeds that correspond to times of median ± IQR/2.
        spread = [value * min(0.9, row.iqr_s / row.median_s / 2) for value, row in zip(values, line, strict=True)]
        sizes = [row.size for row in line]
        axis.errorbar(sizes, values, yerr=spread, marker="o", markersize=4, capsize=3, color=colours[setting])
    for one in result.crossover:
        if one.operation == rows[0].operation and one.size and one.data == "resident":
            axis.axvline(one.size, linestyle=":", color="grey")
            axis.text(one.size, axis.get_ylim()[1], f" {one.device} wins", va="top", fontsize=8, color="grey")
    axis.set(xscale="log", yscale="log", title=rows[0].operation, xlabel="elements")
    axis.set_ylabel("GFLOP/s" if counts_flops else "GB/s")
    _plain_numbers(axis.yaxis)
    axis.grid(True, which="both", alpha=0.2)


def _draw_steps(axis: "Axes", rows: list[BenchRow], colours: dict[str, str]) -> None:
    labels = [f"{row.operation}, {row.size} pairs, {row.dtype}" for row in rows]
    speeds = [row.size / row.median_s for row in rows]
    bars = axis.barh(range(len(rows)), speeds, color=[colours[row.setting] for row in rows])
    axis.bar_label(bars, [f"{speed:.3g}" for speed in speeds], fontsize=7, padding=2)
    axis.set_yticks(range(len(rows)), labels, fontsize=7)
    axis.invert_yaxis()
    axis.set(xscale="log", title="training step", xlabel="pairs/s")
    axis.margins(x=0.2)
    _plain_numbers(axis.xaxis)
    axis.grid(True, axis="x", alpha=0.2)


def _plain_numbers(axis: Any) -> None:
    """Labels such as 30 and 200 instead of powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
