"""The monitor's view of a run, for any terminal size: snapshot in, lines out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from clipctl.cli import output
from clipctl.cli.views import units
from clipctl.cli.views.chart import Curve, chart, gauge
from clipctl.monitor.reader import number
from clipctl.monitor.view import RunView
from clipctl.monitor.watch import Snapshot

STATE_STYLES = {
    "running": "bold green",
    "finished": "bold green",
    "waiting": "bold yellow",
    "stalled": "bold yellow",
    "stopped": "bold yellow",
    "crashed": "bold red",
    "failed": "bold red",
}
SMOOTHINGS = (50, 200, 10, 0)  # steps; the key `s` cycles through them
KEYS = "q quit  space pause  tab next run  s smoothing  l log  x axis  ? help"
HELP = (
    "q      quit; training continues",
    "space  pause the display",
    "tab    next run",
    "s      loss smoothing: 50, 200, 10 steps, none",
    "l      logarithmic scale",
    "x      steps or time on the x axis",
    "?      this help",
    "",
    "grey: every step, smallest to largest; cyan: smoothed; ◆ validation; dotted: ln B, the loss of random guessing",
)


_ASCII = str.maketrans("–─◆…×→°", "--o.x> ")


@dataclass(frozen=True)
class Options:
    """What the keys change."""

    smoothing: int = SMOOTHINGS[0]
    log: bool = False
    over_time: bool = False
    ascii_only: bool = False
    paused: bool = False
    help: bool = False
    show_keys: bool = True


def dashboard(snapshot: Snapshot, others: Sequence[str], options: Options, width: int, height: int) -> list[Text]:
    """Exactly `height` lines of at most `width` characters. `others`: one line per other run."""
    if options.help and height > 3:
        lines = [*_header(snapshot, options, width)[:1], *(Text(line) for line in HELP)]
    elif height < 6 or width < 30:
        lines = [_one_line(snapshot)]
    elif width >= 110 and height >= 24:
        lines = _wide(snapshot, others, options, width, height)
    else:
        lines = _narrow(snapshot, others, options, width, height)
    return _fit(lines, width, height, ascii_only=options.ascii_only)


def _wide(snapshot: Snapshot, others: Sequence[str], options: Options, width: int, height: int) -> list[Text]:
    """Loss on the left; accuracy, machine, time and checkpoints on the right; alerts below."""
    header, numbers = _header(snapshot, options, width), _numbers(snapshot)
    alerts = _alerts(snapshot, width, max(2, min(8, height // 4)))
    below = [*alerts, *_others(others, 3), *_keys(options)]
    room = height - len(header) - len(numbers) - len(below) - 2
    right_width = max(40, width * 2 // 5)
    left_width = width - right_width - 2
    machine = [*_machine(snapshot.view, right_width, options), *_checkpoints(snapshot.view)]
    accuracy_height = max(0, room - len(machine) - 2)
    left = [_title("loss", left_width), *_loss_chart(snapshot, options, left_width, room - 1)]
    right = machine
    if accuracy_height >= 4:
        right = [
            _title("accuracy", right_width),
            *_accuracy_chart(snapshot, options, right_width, accuracy_height),
            *right,
        ]
    return [*header, *numbers, Text(""), *_beside(left, right, left_width, room), Text(""), *below]


def _narrow(snapshot: Snapshot, others: Sequence[str], options: Options, width: int, height: int) -> list[Text]:
    """One column: whatever fits, with the chart taking the remaining space."""
    header = _header(snapshot, options, width)
    numbers = _wrapped(_numbers(snapshot), width, 2 if height < 20 else 4)
    machine = _machine(snapshot.view, width, options)[: 0 if height < 12 else 2 if height < 20 else 5]
    alerts = _alerts(snapshot, width, 1 if height < 20 else 3)
    below = [*machine, *alerts, *(_others(others, 1) if height >= 20 else []), *_keys(options)]
    room = height - len(header) - len(numbers) - len(below)
    picture = _loss_chart(snapshot, options, width, room) if room >= 3 else []
    return [*header, *numbers, *picture, *below]


# --- parts ----------------------------------------------------------------------------------------------------


def _one_line(snapshot: Snapshot) -> Text:
    return Text.assemble(
        (snapshot.state, STATE_STYLES[snapshot.state]),
        output.plain(f" {summary(snapshot)}"),
    )


def summary(snapshot: Snapshot) -> str:
    """A run in one line; also what is printed at every interval without a terminal."""
    view = snapshot.view
    parts = [
        snapshot.run,
        f"step {view.step}/{snapshot.total_steps}",
        f"loss {_value(view.smoothed_loss, '.3f')}",
        f"R@1 {units.percent(view.evaluations[-1].score) if view.evaluations else '–'}",
        f"{_value(view.images_per_s, '.0f')} images/s",
    ]
    if snapshot.eta_s is not None:
        parts.append(f"left {units.duration(snapshot.eta_s)}")
    return "  ".join(parts + [f"! {alert.what}" for alert in snapshot.alerts[:1]])


def _header(snapshot: Snapshot, options: Options, width: int) -> list[Text]:
    view = snapshot.view
    attempt = f"  attempt {view.attempt}" if view.attempt > 1 else ""
    paused = "  paused" if options.paused else ""
    first = output.plain(f"{snapshot.run}  ", style="bold") + Text(snapshot.state, style=STATE_STYLES[snapshot.state])
    first.append(f"{attempt}{paused}", style="yellow")
    share = view.step / snapshot.total_steps if snapshot.total_steps else 0.0
    eta = "" if snapshot.eta_s is None else f"  left {units.duration(snapshot.eta_s)}"
    left = f"epoch {view.epoch}/{snapshot.epochs}  step {view.step}/{snapshot.total_steps}  "
    right = f" {share:4.0%}  took {units.duration(view.elapsed_s)}{eta}"
    bar = gauge(share, max(4, min(60, width - len(left) - len(right))), ascii_only=options.ascii_only)
    return [first, Text(left) + Text(bar, style="cyan") + Text(right)]


def _numbers(snapshot: Snapshot) -> list[Text]:
    view = snapshot.view
    last, best = view.evaluations[-1] if view.evaluations else None, view.best
    start, now = view.images_per_s_at_start, view.images_per_s
    learning = Text.assemble(
        ("loss ", "dim"),
        (_value(view.smoothed_loss, ".3f"), "bold cyan"),
        (f" (chance {_value(view.chance_loss, '.3f')})", "dim"),
        ("  validation ", "dim"),
        (_value(last.val_loss if last else None, ".3f"), "magenta"),
        ("  R@1 ", "dim"),
        (units.percent(last.score) if last else "–", "bold"),
        (f" (best {units.percent(best.score)} at {best.step})" if best else "", "dim"),
        (f", before training {units.percent(view.start.score)}" if view.start else "", "dim"),
    )
    course = Text.assemble(
        ("rate ", "dim"),
        _value(view.latest("lr"), ".2e"),
        ("  scale ", "dim"),
        _value(view.scale, ".1f"),
        ("  temperature ", "dim"),
        _value(view.latest("temperature"), ".4f"),
        ("  gradient ", "dim"),
        _value(view.latest("grad_norm"), ".3g"),
        ("  images/s ", "dim"),
        _value(now, ".1f"),
        (f" (start {_value(start, '.1f')})", "dim"),
    )
    return [learning, course]


def _loss_chart(snapshot: Snapshot, options: Options, width: int, height: int) -> list[Text]:
    view = snapshot.view
    place = _axis(view, options)
    raw = [(place(bucket.last), bucket.low, bucket.high) for bucket in view.loss.buckets]
    smooth = [(place(step), value, value) for step, value in view.loss.smoothed(options.smoothing)]
    points = [
        (place(point.step), point.val_loss, point.val_loss)
        for point in view.evaluations
        if math.isfinite(point.val_loss)
    ]
    curves = [Curve(raw, "grey50"), Curve(smooth, "bold cyan"), Curve(points, "magenta", is_joined=False)]
    if not raw:
        return [Text("no steps yet", style="dim"), *(Text("") for _ in range(height - 1))]
    level = view.chance_loss if snapshot.facts.loss == "softmax" else None
    label = _labels(view, options)
    return chart(curves, width, height, level=level, log=options.log, ascii_only=options.ascii_only, x_label=label)


def _accuracy_chart(snapshot: Snapshot, options: Options, width: int, height: int) -> list[Text]:
    view = snapshot.view
    place = _axis(view, options)
    train = [(place(step), value, value) for step, value in view.accuracy.smoothed(options.smoothing or 1)]
    scores = [(place(point.step), point.score, point.score) for point in view.evaluations if math.isfinite(point.score)]
    curves = [Curve(train, "cyan"), Curve(scores, "magenta", is_joined=False)]
    return chart(curves, width, height, ascii_only=options.ascii_only, floor=0.0, x_label=_labels(view, options))


def _axis(view: RunView, options: Options) -> Callable[[float], float]:
    return view.seconds_at if options.over_time else float


def _labels(view: RunView, options: Options) -> tuple[str, str]:
    if not view.loss.buckets:
        return "", ""
    first, last = view.loss.buckets[0].first, view.loss.buckets[-1].last
    if options.over_time:
        return units.duration(view.seconds_at(first)), units.duration(view.seconds_at(last))
    return f"step {first:.0f}", f"{last:.0f}"


def _machine(view: RunView, width: int, options: Options) -> list[Text]:
    """Cores, memory, sensors, and where the time of a step goes."""
    system = view.system
    cores = system.get("cpu_per_core")
    loads = [number(load) for load in cores] if isinstance(cores, list) else []
    rss, available = number(system.get("rss_bytes")), number(system.get("available_bytes"))
    swap, device = number(system.get("swap_used_bytes")), number(system.get("device_memory_bytes"))
    bar_width = max(4, min(16, (width - 12) // max(1, min(4, len(loads))) - 6))
    bars = "  ".join(
        f"{gauge(load, bar_width, ascii_only=options.ascii_only)} {load:4.0%}" for load in loads[:4] if load == load
    )
    more = f"  +{len(loads) - 4} cores" if len(loads) > 4 else ""
    lines = [Text.assemble(("cpu     ", "dim"), f"{bars or '–'}{more}")]
    share = rss / (rss + available) if rss + available > 0 else math.nan
    memory = f"{gauge(share, bar_width, ascii_only=options.ascii_only)} {_size(rss)} of {_size(rss + available)}"
    lines.append(
        Text.assemble(
            ("memory  ", "dim"),
            memory if math.isfinite(share) else "–",
            f"  swap {_size(swap)}" if swap > 0 else "",
            f"  device {_size(device)}" if device > 0 else "",
        )
    )
    split = [f"{phase.removesuffix('_s')} {value:.0%}" for phase, value in view.phase_shares().items()]
    cut = len(split) if width >= 76 else 3
    lines.append(
        Text.assemble(("step    ", "dim"), "  ".join([f"{_value(view.latest('step_s'), '.3f')} s", *split[: cut - 1]]))
    )
    if split[cut - 1 :]:
        lines.append(Text(f"{'':<8}{'  '.join(split[cut - 1 :])}"))
    temperature, power = number(system.get("temperature_c")), number(system.get("power_w"))
    if math.isfinite(temperature) or math.isfinite(power):
        parts = [
            f"{temperature:.0f} °C" if math.isfinite(temperature) else "",
            f"{power:.1f} W" if math.isfinite(power) else "",
        ]
        lines.append(Text.assemble(("sensors ", "dim"), "  ".join(part for part in parts if part)))
    return lines


def _checkpoints(view: RunView) -> list[Text]:
    if not view.checkpoints:
        return [Text.assemble(("saved   ", "dim"), "nothing yet")]
    last = view.checkpoints[-1]
    size, seconds = _size(number(last.get("size_bytes"))), _value(number(last.get("save_s")), ".2f")
    return [Text.assemble(("saved   ", "dim"), output.plain(f"step {last.get('step')}, {size} in {seconds} s"))]


def _alerts(snapshot: Snapshot, width: int, lines: int) -> list[Text]:
    if not snapshot.alerts:
        is_well = snapshot.view.step > 0 and snapshot.state in ("running", "finished", "stopped")
        return [Text("no problems found", style="green")] if is_well else []
    texts = []
    for alert in snapshot.alerts:
        style = "bold red" if alert.severity == "bad" else "yellow"
        text = Text.assemble(("! ", style), output.plain(alert.what, style=style))
        text.append_text(output.plain(f": {alert.why}; {alert.todo}"))
        texts.append(text)
    return _wrapped(texts, width, lines)


def _keys(options: Options) -> list[Text]:
    return [Text(KEYS, style="dim")] if options.show_keys else []


def _others(others: Sequence[str], limit: int) -> list[Text]:
    return [output.plain(line, style="dim") for line in others[:limit]]


# --- layout ---------------------------------------------------------------------------------------------------


def _title(words: str, width: int) -> Text:
    return Text(f"{words} ".ljust(width, "─")[:width], style="dim")


def _beside(left: list[Text], right: list[Text], left_width: int, height: int) -> list[Text]:
    lines = []
    for row in range(height):
        line = left[row].copy() if row < len(left) else Text("")
        line.truncate(left_width)
        line.pad_right(left_width - line.cell_len + 2)
        lines.append(line + right[row] if row < len(right) else line)
    return lines


def _wrapped(texts: Sequence[Text], width: int, limit: int) -> list[Text]:
    from rich.console import Console

    console = Console(width=width, legacy_windows=False)
    lines = [line for text in texts for line in text.wrap(console, width)]
    return lines[:limit]


def _fit(lines: list[Text], width: int, height: int, *, ascii_only: bool) -> list[Text]:
    fitted = []
    for line in lines[:height]:
        if line.cell_len > width:
            line = line.copy()
            line.truncate(width, overflow="ellipsis" if width > 1 else "crop")
        if ascii_only:
            line = line.copy()
            line.plain = line.plain.translate(_ASCII).encode("ascii", "replace").decode()
        fitted.append(line)
    return fitted + [Text("")] * (height - len(fitted))


def _value(value: float | None, form: str) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:{form}}"


def _size(count_bytes: float) -> str:
    return units.size(count_bytes) if math.isfinite(count_bytes) else "–"
