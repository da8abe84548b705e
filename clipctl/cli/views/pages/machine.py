"""What the machine is doing: every core, memory, heat, and what uses them."""

from collections.abc import Callable

from rich.text import Text

from clipctl.cli.views import units
from clipctl.cli.views.chart import Axes, Curve, chart, meter, sparkline
from clipctl.cli.views.frame import beside, framed, grid, size, styled, value
from clipctl.cli.views.pages.overview import machine_lines
from clipctl.cli.views.scene import Scene
from clipctl.monitor.series import Series

GIB, LEAST_HEIGHT = 2**30, 6


def page(scene: Scene, width: int, height: int) -> list[Text]:
    machine = scene.view.machine
    if not machine.trainer.buckets:
        return framed("machine", [Text(" nothing measured yet", scene.palette.dim)], width, height, scene.palette)
    cores = machine.cores
    core_rows = min(len(cores), max(2, height // 3 - 2))
    top = _cores(scene, width, core_rows + 2)
    room = height - len(top)
    if room < LEAST_HEIGHT:
        return [*top, *machine_lines(scene, width)][:height]
    columns = 3 if width >= 120 else 2 if width >= 60 else 1
    return [*top, *grid(_panels(scene), columns, LEAST_HEIGHT, (width, room), scene.options.scroll)]


def _cores(scene: Scene, width: int, height: int) -> list[Text]:
    """A line per core: its history, and how busy it is now."""
    palette, cores, ascii_only = scene.palette, scene.view.machine.cores, scene.options.ascii_only
    two = width >= 100 and len(cores) > height - 2
    part = (width - 2) // (2 if two else 1)
    history = max(4, part - 34)
    seconds = min(history, round(scene.view.machine.trainer.buckets[-1].last))
    lines = []
    for index, core in enumerate(cores):
        now = core.latest or 0.0
        loads = [bucket.mean for bucket in core.since(core.buckets[-1].last - history).buckets] if core.buckets else []
        line = styled(f" core {index:<3}", palette.dim)
        line.append_text(sparkline(loads, history, palette.load, 1.0, ascii_only=ascii_only)).append(" ")
        line.append_text(meter(now, 12, palette.load, palette.frame, ascii_only=ascii_only)).append(f" {now:4.0%} ")
        lines.append(line)
    rows = height - 2
    if two:
        lines = beside(lines[:rows], lines[rows : 2 * rows])
    shown = min(len(cores), rows * (2 if two else 1))
    note = f"{shown} of {len(cores)} cores" if shown < len(cores) else f"the last {seconds} s"
    return framed("cpu", lines, width, height, palette, note)


def _panels(scene: Scene) -> list[Callable[[int, int, str], list[Text]]]:
    """Panels for whatever was measured."""
    machine, palette = scene.view.machine, scene.palette
    found = [_core_panel(scene), _memory_panel(scene)]
    for title, series, form in (
        ("device memory", machine.device_bytes, None),
        ("swap", machine.swap_bytes, None),
        ("temperature, °C", machine.temperature_c, "{:.0f}"),
        ("power, W", machine.power_w, "{:.0f}"),
    ):
        if series.buckets and any(bucket.high > 0 for bucket in series.buckets):
            words = size(series.latest) if form is None else form.format(series.latest)
            curve = _filled(scene, series, palette.raw, GIB if form is None else 1.0)
            found.append(_area(scene, title, [curve], form, words))
    if machine.disk_free_bytes.buckets:
        free = machine.disk_free_bytes
        line = [(one.middle, one.mean / GIB, one.mean / GIB) for one in free.since(scene.first_s).buckets]
        found.append(_area(scene, "free on disk", [Curve(line, palette.phases[2])], None, size(free.latest)))
    return found


def _core_panel(scene: Scene) -> Callable[[int, int, str], list[Text]]:
    """Cores that the trainer keeps busy, and on top of them those that other programs do."""
    machine = scene.view.machine
    own, other = (series.since(scene.first_s) for series in (machine.trainer, machine.others))
    curves = _stacked(scene, own, [one.mean for one in other.buckets], 1.0)
    words = value(machine.trainer.latest, ".1f"), value(machine.others.latest, ".1f")
    return _area(scene, "cores", curves, "{:.1f}", _both(scene, *words), len(machine.cores))


def _memory_panel(scene: Scene) -> Callable[[int, int, str], list[Text]]:
    """What the trainer takes, and what others do; the latter is known if the run says how much there is."""
    machine, total = scene.view.machine, scene.snapshot.machine_bytes
    own, free = (series.since(scene.first_s) for series in (machine.rss_bytes, machine.available_bytes))
    own_bytes, free_bytes = machine.rss_bytes.latest or 0.0, machine.available_bytes.latest or 0.0
    if total is None:
        short = Text(f"trainer {size(own_bytes)}", scene.palette.dim)
        words = (short + Text(f", {size(free_bytes)} free", scene.palette.dim), short)
        curves = [_filled(scene, machine.rss_bytes, scene.palette.phases[2], GIB)]
        return _area(scene, "memory", curves, None, words, (own_bytes + free_bytes) / GIB)
    others = [max(0.0, total - left.mean - mine.mean) for left, mine in zip(free.buckets, own.buckets, strict=False)]
    others_bytes = max(0.0, total - free_bytes - own_bytes)
    note = _both(scene, size(own_bytes), size(others_bytes)).append(f" of {size(total)}", scene.palette.dim)
    short = _both(scene, f"{own_bytes / GIB:.1f}", f"{others_bytes / GIB:.1f} G")
    return _area(scene, "memory", _stacked(scene, own, others, GIB), None, (note, short), total / GIB)


def _stacked(scene: Scene, own: Series, others: list[float], unit: float) -> list[Curve]:
    """The trainer's share from zero up, and what others take on top."""
    both = [
        (mine.middle, mine.mean / unit, (mine.mean + other) / unit)
        for mine, other in zip(own.buckets, others, strict=False)
    ]
    return [_filled_from(own, scene.palette.phases[2], unit), Curve(both, scene.palette.phases[0], is_area=True)]


def _both(scene: Scene, trainer: str, others: str) -> Text:
    """Two figures in the colours of their curves."""
    line = styled(f"trainer {trainer}", scene.palette.phases[2])
    return line.append(", ", scene.palette.dim).append(f"others {others}", scene.palette.phases[0])


def _filled(scene: Scene, series: Series, style: str, unit: float = 1.0) -> Curve:
    """From zero up to the visible part of a series."""
    return _filled_from(series.since(scene.first_s), style, unit)


def _filled_from(series: Series, style: str, unit: float) -> Curve:
    return Curve([(one.middle, 0.0, one.mean / unit) for one in series.buckets], style, is_area=True)


def _area(
    scene: Scene,
    title: str,
    curves: list[Curve],
    form: str | None,
    note: str | Text | tuple[Text, ...],
    ceiling: float | None = None,
) -> Callable[[int, int, str], list[Text]]:
    """Curves over the seconds of the run, up to a ceiling if there is one; GiB if there is no `form`."""
    axes = Axes(
        floor=0.0,
        ceiling=ceiling,
        words="{:.3g} G".format if form is None else form.format,
        x_words=units.duration,
        ascii_only=scene.options.ascii_only,
        dim=scene.palette.dim,
    )
    notes = note if isinstance(note, tuple) else (note,)

    def draw(width: int, height: int, foot: str) -> list[Text]:
        body = chart(curves, width - 2, height - 2, axes)
        return framed(title, body, width, height, scene.palette, *notes, foot=foot)

    return draw
