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
LEAST_STEPS = 10  # that zooming leaves
LETTERS = "ABCD"  # of runs beside each other, for terminals without colours


@dataclass(frozen=True)
class Options:
    """What the keys change."""

    page: int = 0
    smoothing: int | None = SMOOTHINGS[0]
    log: bool = False
    over_time: bool = False
    zoom: int = 0  # how often the part that is shown was halved; the newest steps stay
    cursor: float | None = None  # place on the x axis, 0–1
    scroll: int = 0  # rows of a page that is longer than the terminal is high
    pictures: bool | None = None  # thumbnails among the retrievals; None: if there is room
    ascii_only: bool = False
    colours: str | None = "truecolor"  # Rich's name for what the terminal can show
    paused: bool = False
    help: bool = False
    show_keys: bool = True
    in_trainer: bool = False  # in the terminal of the training itself, which q must not end
    palette: Palette = DARK

    @property
    def has_colours(self) -> bool:
        return self.colours is not None


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
    def compared(self) -> list[tuple[Snapshot, Style, str]]:
        """The runs that are drawn over each other, each with its colour and letter."""
        return list(zip(self.runs, self.palette.runs, LETTERS, strict=False))

    @property
    def first_step(self) -> float:
        """Where the visible part begins."""
        return self._first_step(self.options.zoom)

    def _first_step(self, zoom: int) -> float:
        if not zoom or not self.view.loss.buckets:
            return 0.0
        first, last = self.view.loss.buckets[0].first, self.view.loss.buckets[-1].last
        return max(first, last - max(LEAST_STEPS, (last - first) / (1 << zoom)))

    @property
    def first_s(self) -> float:
        """The same in seconds of the run."""
        return self.view.seconds_at(self.first_step) if self.options.zoom else 0.0

    @property
    def is_closest(self) -> bool:
        """Whether zooming further would show no less."""
        zoom = self.options.zoom
        return zoom > 0 and self._first_step(zoom + 1) == self._first_step(zoom)

    @property
    def states(self) -> str:
        """What differs from the initial options, in words."""
        options, smoothed = self.options, "not smoothed"
        if options.smoothing:
            smoothed = f"smoothed over {options.smoothing} steps"
        found = {
            "log": options.log,
            smoothed: options.smoothing is not None,
            f"last {self.view.step - self.first_step:,.0f} steps": options.zoom > 0,
        }
        return ", ".join(words for words, holds in found.items() if holds)

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

    def line(self, view: RunView, series: Series, style: Style, letter: str = "") -> Curve:
        """A series, smoothed."""
        place = self.place(view)
        points = self.shown(series).smoothed(self.options.smoothing)
        return Curve([(place(step), value, value) for step, value in points], style, letter=letter)

    def band(self, view: RunView, series: Series, style: Style) -> Curve:
        """A series from its smallest to its largest value."""
        place = self.place(view)
        return Curve([(place(one.middle), one.low, one.high) for one in self.shown(series).buckets], style)

    def marks(
        self, view: RunView, points: Sequence[tuple[float, float]], style: Style, *, joined: bool, letter: str = ""
    ) -> Curve:
        """Single values at steps, such as evaluations; those that are not finite are left out."""
        place = self.place(view)
        kept = [(place(step), value, value) for step, value in points if step >= self.first_step and value == value]
        return Curve(kept, style, is_joined=joined, letter=letter)


def step_words(step: float) -> str:
    return compact(round(step))
