"""What the dashboard shows and how: runs, and what the keys have chosen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from clipctl.cli.views import units
from clipctl.cli.views.chart import Axes, Curve, Style
from clipctl.cli.views.palette import DARK, Palette
from clipctl.monitor.series import Series
from clipctl.monitor.view import RunView
from clipctl.monitor.watch import Snapshot
from clipctl.report.charts import compact

PAGES = ("overview", "metrics", "machine", "model", "retrieval")
SMOOTHINGS: tuple[int | None, ...] = (None, 10, 50, 200, 0)  # steps; None: by the length of the run
MOST_RUNS = 4  # beside each other
MOST_ZOOM = 12  # halvings


@dataclass(frozen=True)
class Options:
    """What the keys change."""

    page: int = 0
    smoothing: int | None = SMOOTHINGS[0]
    log: bool = False
    over_time: bool = False
    zoom: int = 0  # how often the part that is shown was halved; the newest steps stay
    cursor: float | None = None  # place on the x axis, 0–1
    pictures: bool = False  # thumbnails among the retrievals
    ascii_only: bool = False
    paused: bool = False
    help: bool = False
    show_keys: bool = True
    in_trainer: bool = False  # in the terminal of the training itself, which q must not end
    palette: Palette = DARK

    @property
    def states(self) -> str:
        """What differs from the initial options, in words."""
        smoothed = f"smoothed over {self.smoothing} steps" if self.smoothing else "not smoothed"
        found = {
            "log": self.log,
            smoothed: self.smoothing is not None,
            f"newest 1/{1 << self.zoom}": self.zoom > 0,
        }
        return ", ".join(words for words, holds in found.items() if holds)


@dataclass(frozen=True)
class Scene:
    snapshot: Snapshot
    options: Options = field(default_factory=Options)
    others: Sequence[str] = ()  # one line per other run
    rivals: Sequence[Snapshot] = ()  # runs drawn over this one
    notice: str = ""  # what has just happened

    @property
    def view(self) -> RunView:
        return self.snapshot.view

    @property
    def palette(self) -> Palette:
        return self.options.palette

    @property
    def runs(self) -> list[Snapshot]:
        return [self.snapshot, *self.rivals]

    @property
    def first_step(self) -> float:
        """Where the visible part begins."""
        if not self.options.zoom or not self.view.loss.buckets:
            return 0.0
        first, last = self.view.loss.buckets[0].first, self.view.loss.buckets[-1].last
        return last - (last - first) / (1 << self.options.zoom)

    @property
    def cursor_step(self) -> float | None:
        if self.options.cursor is None or not self.view.loss.buckets:
            return None
        first, last = max(self.first_step, self.view.loss.buckets[0].first), self.view.loss.buckets[-1].last
        return first + (last - first) * self.options.cursor

    def shown(self, series: Series) -> Series:
        return series.since(self.first_step) if self.options.zoom else series

    def place(self, view: RunView) -> Callable[[float], float]:
        """From steps to places on the x axis."""
        return view.seconds_at if self.options.over_time else float

    def axes(
        self,
        *,
        words: Callable[[float], str] = compact,
        log: bool | None = None,
        floor: float | None = None,
        ceiling: float | None = None,
        level: float | None = None,
    ) -> Axes:
        cursor = self.cursor_step
        return Axes(
            log=self.options.log if log is None else log,
            floor=floor,
            ceiling=ceiling,
            words=words,
            x_words=units.duration if self.options.over_time else step_words,
            level=level,
            cursor=None if cursor is None else self.place(self.view)(cursor),
            ascii_only=self.options.ascii_only,
            dim=self.palette.dim,
        )

    def line(self, view: RunView, series: Series, style: Style) -> Curve:
        """A series, smoothed."""
        place = self.place(view)
        points = self.shown(series).smoothed(self.options.smoothing)
        return Curve([(place(step), value, value) for step, value in points], style)

    def band(self, view: RunView, series: Series, style: Style) -> Curve:
        """A series from its smallest to its largest value."""
        place = self.place(view)
        return Curve([(place(one.middle), one.low, one.high) for one in self.shown(series).buckets], style)

    def marks(self, view: RunView, points: Sequence[tuple[float, float]], style: Style, *, joined: bool) -> Curve:
        """Single values at steps, such as evaluations; those that are not finite are left out."""
        place = self.place(view)
        kept = [(place(step), value, value) for step, value in points if step >= self.first_step and value == value]
        return Curve(kept, style, is_joined=joined)


def step_words(step: float) -> str:
    return compact(round(step))
