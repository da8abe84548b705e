"""A picture of a benchmark. matplotlib is an extra: it is asked for only here."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from clipctl.bench.results import BenchResult, Row
from clipctl.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib", "pip install 'clipctl[plot]'")


def draw(result: BenchResult, path: Path) -> None:
    """One panel an operation: how fast at which size, a line a setting, spread as bars; training steps in the last."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    micro = [row for row in result.results if row.suite != "step"]
    steps = [row for row in result.results if row.suite == "step"]
    names = list(dict.fromkeys(row.operation for row in micro))
    panels = len(names) + bool(steps)
    columns = min(2, panels)
    lines = -(-panels // columns)
    figure = Figure(figsize=(5.2 * columns, 3.7 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(result.machine.title, fontsize=10)
    axes = figure.subplots(lines, columns, squeeze=False).flat
    for axis, name in zip(axes, names, strict=False):
        _draw_operation(axis, result, [row for row in micro if row.operation == name])
    if steps:
        _draw_steps(axes[len(names)], steps)
    for axis in list(axes)[panels:]:
        axis.set_axis_off()
    figure.savefig(path, dpi=150)


def _draw_operation(axis: "Axes", result: BenchResult, rows: list[Row]) -> None:
    counts_flops = rows[0].gflops is not None
    scale = "gflops" if counts_flops else "gbytes_per_s"
    for setting in dict.fromkeys((row.device, row.dtype, row.threads) for row in rows):
        line = [row for row in rows if (row.device, row.dtype, row.threads) == setting]
        values = [getattr(row, scale) for row in line]
        # A time within median ± IQR/2 is a speed within these.
        spread = [value * min(0.9, row.iqr_s / row.median_s / 2) for value, row in zip(values, line, strict=True)]
        device, dtype, threads = setting
        label = f"{device} {dtype}" + (f" ×{threads}" if device == "cpu" else "")
        axis.errorbar([row.size for row in line], values, yerr=spread, marker="o", capsize=3, label=label)
    for one in result.crossover:
        if one.operation == rows[0].operation and one.size and one.data == "resident":
            axis.axvline(one.size, linestyle=":", color="grey")
            axis.text(one.size, axis.get_ylim()[1], f" {one.device} wins", va="top", fontsize=8, color="grey")
    axis.set(
        xscale="log",
        yscale="log",
        title=rows[0].operation,
        xlabel="elements",
        ylabel="GFLOP/s" if counts_flops else "GB/s",
    )
    axis.grid(True, which="major", alpha=0.3)
    axis.legend(fontsize=7)


def _draw_steps(axis: "Axes", rows: list[Row]) -> None:
    labels = [f"{row.operation}, {row.size} pairs, {row.device} {row.dtype}" for row in rows]
    axis.barh(labels, [row.size / row.median_s for row in rows])
    axis.invert_yaxis()
    axis.set(xscale="log", title="training step", xlabel="pairs/s")
    axis.tick_params(axis="y", labelsize=7)
    axis.grid(True, axis="x", which="major", alpha=0.3)
