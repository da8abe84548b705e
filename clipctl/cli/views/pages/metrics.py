"""Every metric, as a grid of small charts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rich.text import Text

from clipctl.cli.views.chart import Curve, Style, chart
from clipctl.cli.views.frame import framed, grid, hidden, styled, window
from clipctl.cli.views.pages.overview import run_names
from clipctl.cli.views.scene import Scene
from clipctl.monitor.series import Series
from clipctl.monitor.view import EvalPoint, RunView
from clipctl.report.charts import compact, percent

LEAST_HEIGHT, LEAST_WIDTH, TITLE_WIDTH = 6, 30, 17


@dataclass(frozen=True)
class Panel:
    """One chart: a series of steps, or values of evaluations."""

    title: str
    series: Callable[[RunView], Series] | None = None
    points: tuple[Callable[[EvalPoint], float], ...] = ()
    now: Callable[[RunView], float | None] | None = None  # the figure that stands elsewhere too, if one does
    words: Callable[[float], str] = compact
    log: bool | None = False  # None: as the key says
    floor: float | None = None
    more_is_better: bool = False
    alone: str = ""  # its title while only the first of its values is shown

    def curves(self, scene: Scene) -> list[Curve]:
        palette, several = scene.palette, bool(scene.rivals)
        found = []
        gradient = palette.found if self.more_is_better else palette.smooth
        for run, style, letter in scene.compared:
            letter = letter if several else ""
            if self.series is not None:
                series = self.series(run.view)
                found += [] if several else [scene.band(run.view, series, palette.raw)]
                found.append(scene.line(run.view, series, style if several else gradient, letter))
            shades: tuple[Style, ...] = (gradient, palette.dim, palette.frame)
            shown = self.points[:1] if several else self.points  # several runs with several lines each are a tangle
            for value, shade in reversed(list(zip(shown, shades, strict=False))):  # the first on top
                points = [(point.step, value(point)) for point in run.view.evaluations]
                found.append(scene.marks(run.view, points, style if several else shade, joined=True, letter=letter))
        return found

    def name(self, scene: Scene) -> str:
        return self.alone or self.title if scene.rivals else self.title

    def figure(self, scene: Scene) -> str:
        """The value at the cursor, or the latest one."""
        step = scene.cursor_step
        if self.now is not None and step is None:
            found = self.now(scene.view)
        elif self.series is not None:
            series = self.series(scene.view)
            found = series.latest if step is None else series.at(step)
        else:
            points = [one for one in scene.view.evaluations if step is None or one.step <= step]
            found = self.points[0](points[-1]) if points else None
        return "–" if found is None or found != found else self.words(found)


PANELS = (
    Panel("loss", lambda view: view.loss, now=lambda view: view.loss_now, log=None),
    Panel("validation loss", points=(lambda point: point.val_loss,), log=None),
    Panel(
        "R@1, R@5, R@10",
        points=(lambda point: point.score, lambda point: point.r5, lambda point: point.r10),
        words=percent,
        floor=0.0,
        more_is_better=True,
        alone="R@1",
    ),
    Panel(
        "batch accuracy",
        lambda view: view.accuracy,
        now=lambda view: view.accuracy_now,
        words=percent,
        floor=0.0,
        more_is_better=True,
    ),
    Panel("gradient norm", lambda view: view.grad_norm, log=None),
    Panel("learning rate", lambda view: view.lr, floor=0.0),
    Panel("temperature", lambda view: view.temperature),
    Panel("images/s", lambda view: view.speed, now=lambda view: view.images_per_s, floor=0.0, more_is_better=True),
    Panel("waiting for data", lambda view: view.data_share, words=percent, floor=0.0),
)


def page(scene: Scene, width: int, height: int) -> list[Text]:
    if height < LEAST_HEIGHT:
        return _figures(scene, width, height)
    top = run_names(scene, width) if scene.rivals else []
    columns = max(1, min(3, width // LEAST_WIDTH))
    panels = [partial(_panel, scene, panel) for panel in PANELS]
    return [*top, *grid(panels, columns, LEAST_HEIGHT, (width, height - len(top)), scene.options.scroll)]


def _figures(scene: Scene, width: int, height: int) -> list[Text]:
    """Where a chart has no room: the figures alone."""
    shown = window(len(PANELS), height, scene.options.scroll)
    lines = []
    for panel in (PANELS[index] for index in shown):
        line = styled(f" {panel.title:<{TITLE_WIDTH}}", scene.palette.dim)
        lines.append(line.append(panel.figure(scene), scene.palette.strong))
    if lines:
        more = hidden(shown.start, len(PANELS) - shown.stop)
        lines[-1].pad_right(max(1, width - lines[-1].cell_len - len(more)))
        lines[-1].append(more, scene.palette.key)
    return lines


def _panel(scene: Scene, panel: Panel, width: int, height: int, foot: str) -> list[Text]:
    axes = scene.axes(words=panel.words, log=panel.log, floor=panel.floor)
    body = chart(panel.curves(scene), width - 2, height - 2, axes)
    step, figure = scene.cursor_step, panel.figure(scene)
    notes = (figure,) if step is None else (f"{figure} at {step:,.0f}", figure)
    return framed(panel.name(scene), body, width, height, scene.palette, *notes, foot=foot)
