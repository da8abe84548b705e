"""Single plots of runs as PNG or SVG, by matplotlib (the extra `plot`). No torch."""

from collections.abc import Sequence
from pathlib import Path

from clipctl.errors import ConfigError
from clipctl.report.history import History
from clipctl.report.page import CHARTS, chance_of, lines_of

SUFFIXES = (".png", ".svg")


def check_plot(name: str, path: Path) -> None:
    if name not in CHARTS:
        raise ConfigError(f"unknown plot {name!r}", f"plots: {', '.join(CHARTS)}")
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"cannot write a plot to {path}: unknown file type", "use .png or .svg")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib", "pip install 'clipctl[plot]'") from None


def write_plot(name: str, histories: Sequence[History], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chart = CHARTS[name]
    figure, axis = pyplot.subplots(figsize=(7, 4))
    for line in lines_of(chart, histories):
        if not line.points:
            continue
        steps, values = zip(*line.points, strict=True)
        axis.plot(steps, values, label=line.name, color=f"C{line.style}", linestyle="--" if line.dashed else "-")
        if line.band:
            places, lows, highs = zip(*line.band, strict=True)
            axis.fill_between(places, lows, highs, color=f"C{line.style}", alpha=0.15, linewidth=0)
    if chance := chance_of(chart, histories):
        axis.axhline(chance, linestyle=":", color="grey", label="chance")
    axis.set(title=chart.title, xlabel="step")
    if chart.low is not None:
        axis.set_ylim(bottom=chart.low)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=144)
    pyplot.close(figure)
