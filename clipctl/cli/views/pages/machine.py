"""What the machine is doing: every core, memory, heat, and what uses them."""

from collections.abc import Callable

from rich.text import Text

from clipctl.cli.views import units
from clipctl.cli.views.chart import Axes, Curve, chart, meter, sparkline
from clipctl.cli.views.frame import beside, framed, shares_of, size, styled, value
from clipctl.cli.views.pages.overview import machine_lines
from clipctl.cli.views.scene import Scene
from clipctl.monitor.series import Series

GIB = 2**30


def page(scene: Scene, width: int, height: int) -> list[Text]:
    machine = scene.view.machine
    if not machine.trainer.buckets:
        return framed("machine", [Text(" nothing measured yet", scene.palette.dim)], width, height, scene.palette)
    cores = machine.cores
    core_rows = min(len(cores), max(2, height // 3 - 2))
    top = _cores(scene, width, core_rows + 2)
    room = height - len(top)
    if room < 6 or width < 60:
        return [*top, *machine_lines(scene, width)][:height]
    columns = 3 if width >= 120 else 2
    panels = _panels(scene)
    rows = max(1, min(-(-len(panels) // columns), room // 6))
    lines = list(top)
    for row, row_height in enumerate(shares_of(room, *(1,) * rows)):
        part = panels[row * columns : (row + 1) * columns]
        widths = shares_of(width, *(1,) * len(part))
        lines += beside(*(panel(share, row_height) for panel, share in zip(part, widths, strict=True)))
    return lines


def _cores(scene: Scene, width: int, height: int) -> list[Text]:
    """A line per core: its history, and how busy it is now."""
    palette, cores, ascii_only = scene.palette, scene.view.machine.cores, scene.options.ascii_only
    two = width >= 100 and len(cores) > height - 2
    part = (width - 2) // (2 if two else 1)
    history = max(4, part - 34)
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
    note = f"{shown} of {len(cores)} cores" if shown < len(cores) else "one second per bar"
    return framed("cpu", lines, width, height, palette, note)


def _panels(scene: Scene) -> list[Callable[[int, int], list[Text]]]:
    """Panels for whatever was measured."""
    machine, palette = scene.view.machine, scene.palette
    others, _, blue, purple, _ = palette.phases
    rss_bytes, available_bytes = machine.rss_bytes.latest or 0.0, machine.available_bytes.latest or 0.0
    both = [
        (own.middle, own.mean, own.mean + other.mean)
        for own, other in zip(machine.trainer.buckets, machine.others.buckets, strict=False)
    ]
    core_curves = [_filled(machine.trainer, blue), Curve(both, others)]
    busy = f"trainer {value(machine.trainer.latest, '.1f')}, others {value(machine.others.latest, '.1f')}"
    found = [
        _area(scene, "cores", core_curves, "{:.1f}", busy, len(machine.cores)),
        _area(
            scene,
            "memory",
            [_filled(machine.rss_bytes, purple, GIB)],
            None,
            f"{size(rss_bytes)} of {size(rss_bytes + available_bytes)}",
            (rss_bytes + available_bytes) / GIB,
        ),
    ]
    for title, series, form in (
        ("device memory", machine.device_bytes, None),
        ("swap", machine.swap_bytes, None),
        ("temperature, °C", machine.temperature_c, "{:.0f}"),
        ("power, W", machine.power_w, "{:.0f}"),
        ("free on disk", machine.disk_free_bytes, None),
    ):
        if series.buckets and any(bucket.high > 0 for bucket in series.buckets):
            words = size(series.latest) if form is None else form.format(series.latest)
            curve = _filled(series, palette.raw, GIB if form is None else 1.0)
            found.append(_area(scene, title, [curve], form, words))
    return found


def _filled(series: Series, style: str, unit: float = 1.0) -> Curve:
    """From zero up to the series."""
    return Curve([(one.middle, 0.0, one.mean / unit) for one in series.buckets], style)


def _area(
    scene: Scene, title: str, curves: list[Curve], form: str | None, note: str, ceiling: float | None = None
) -> Callable[[int, int], list[Text]]:
    """Curves over the seconds of the run, up to a ceiling if there is one; GiB if there is no `form`."""
    axes = Axes(
        floor=0.0,
        ceiling=ceiling,
        words="{:.3g} G".format if form is None else form.format,
        x_words=units.duration,
        ascii_only=scene.options.ascii_only,
        dim=scene.palette.dim,
    )

    def draw(width: int, height: int) -> list[Text]:
        return framed(title, chart(curves, width - 2, height - 2, axes), width, height, scene.palette, note)

    return draw
