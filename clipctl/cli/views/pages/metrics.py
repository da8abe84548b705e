"""Every metric, as a grid of small charts."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.text import Text

from clipctl.cli.views.chart import Curve, Style, chart
from clipctl.cli.views.frame import beside, framed, shares_of
from clipctl.cli.views.scene import Scene
from clipctl.monitor.series import Series
from clipctl.monitor.view import EvalPoint, RunView
from clipctl.report.charts import compact, percent

LEAST_HEIGHT, LEAST_WIDTH = 6, 34


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

    def curves(self, scene: Scene) -> list[Curve]:
        palette, several = scene.palette, bool(scene.rivals)
        found = []
        for run, style in zip(scene.runs, palette.runs, strict=False):
            if self.series is not None:
                series = self.series(run.view)
                found += [] if several else [scene.band(run.view, series, palette.raw)]
                gradient = palette.found if self.more_is_better else palette.smooth
                found.append(scene.line(run.view, series, style if several else gradient))
            shades: tuple[Style, ...] = (palette.found, palette.dim, palette.frame)
            for value, shade in reversed(list(zip(self.points, shades, strict=False))):  # the first on top
                points = [(point.step, value(point)) for point in run.view.evaluations]
                found.append(scene.marks(run.view, points, style if several else shade, joined=True))
        return found

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
    ),
    Panel(
        "accuracy in a batch",
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
    columns = max(1, min(3, width // LEAST_WIDTH))
    rows = max(1, min(-(-len(PANELS) // columns), height // LEAST_HEIGHT))
    shown, lines = PANELS[: rows * columns], list[Text]()
    for row, row_height in enumerate(shares_of(height, *(1,) * rows)):
        panels = shown[row * columns : (row + 1) * columns]
        widths = shares_of(width, *(1,) * len(panels))
        lines += beside(*(_panel(scene, panel, share, row_height) for panel, share in zip(panels, widths, strict=True)))
    return lines


def _panel(scene: Scene, panel: Panel, width: int, height: int) -> list[Text]:
    axes = scene.axes(words=panel.words, log=panel.log, floor=panel.floor)
    body = chart(panel.curves(scene), width - 2, height - 2, axes)
    step = scene.cursor_step
    note = panel.figure(scene) if step is None else f"{panel.figure(scene)} at {step:,.0f}"
    return framed(panel.title, body, width, height, scene.palette, note)
