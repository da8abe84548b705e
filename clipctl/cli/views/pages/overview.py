"""How the run is doing, at a glance."""

from collections.abc import Sequence

from rich.text import Text

from clipctl.cli import output
from clipctl.cli.views import units
from clipctl.cli.views.chart import Axes, Curve, Style, chart, meter, stacked
from clipctl.cli.views.frame import beside, framed, shares_of, size, styled, value, wrapped
from clipctl.cli.views.scene import Scene
from clipctl.config.quantities import counted
from clipctl.monitor.reader import number
from clipctl.monitor.view import RunView
from clipctl.report.charts import percent

CARDS_HEIGHT = 4
MOST_MARKS = 24  # evaluations that are marked one by one


def page(scene: Scene, width: int, height: int) -> list[Text]:
    if width >= 100 and height >= 18:
        return _wide(scene, width, height)
    figures = wrapped(figure_lines(scene), width, 1 if height < 8 else 2 if height < 14 else 4)
    machine = machine_lines(scene, width)[: 0 if height < 10 else 1 if height < 14 else 3]
    room = height - len(figures) - len(machine)
    if width >= 70 and room >= 6:
        left, right = shares_of(width, 3, 2)
        charts = beside(loss_frame(scene, left, room), recall_frame(scene, right, room))
    elif room >= 6:
        charts = loss_frame(scene, width, room)
    else:
        charts = chart(loss_curves(scene), width, room, loss_axes(scene)) if room >= 3 else [Text()] * room
    return [*figures, *charts, *machine]


def _wide(scene: Scene, width: int, height: int) -> list[Text]:
    """Figures above; the loss on the left; recall and the machine on the right."""
    has_cards = height >= 24
    figures = cards(scene, width) if has_cards else wrapped(figure_lines(scene), width, 2)
    room = height - len(figures)
    left, right = shares_of(width, 3, 2)
    lines = machine_lines(scene, right - 4)
    machine_height = min(len(lines) + 2, room - 6)
    machine = framed("machine", [Text(" ") + line for line in lines], right, machine_height, scene.palette)
    recall = recall_frame(scene, right, room - machine_height)
    return [*figures, *beside(loss_frame(scene, left, room), [*recall, *machine])]


# --- figures --------------------------------------------------------------------------------------------------


def figures(scene: Scene) -> list[tuple[str, str, str]]:
    """Name, value, and what to compare the value with."""
    view = scene.view
    last, best = view.evaluations[-1] if view.evaluations else None, view.best
    start = f", before training {units.percent(view.start.score)}" if view.start else ""
    pixels = f", pixels {units.percent(view.baseline)}" if view.baseline is not None else ""
    return [
        (
            "loss",
            value(view.loss_now, ".3f"),
            f"{counted(view.window_steps, 'step')}, chance {value(view.chance_loss, '.2f')}",
        ),
        (
            "R@1 unseen",
            units.percent(last.score) if last else "–",
            f"best {units.percent(best.score)} at step {best.step}{start}{pixels}" if best else "not evaluated yet",
        ),
        ("validation loss", value(last.val_loss if last else None, ".3f"), f"step {last.step}" if last else ""),
        (
            "images/s",
            value(view.images_per_s, ".0f"),
            f"{units.seconds(view.step_s) if view.step_s else '–'} a step",
        ),
        (
            "learning rate",
            value(view.latest("lr"), ".2e"),
            f"scale {value(view.scale, '.1f')}, grad {value(view.latest('grad_norm'), '.2g')}",
        ),
    ]


def cards(scene: Scene, width: int) -> list[Text]:
    found = figures(scene)
    columns = []
    for (name, words, beneath), share in zip(found, shares_of(width, *(1,) * len(found)), strict=True):
        body = [Text(f" {words}", scene.palette.strong), Text(f" {beneath}"[: share - 2], scene.palette.dim)]
        columns.append(framed(name, body, share, CARDS_HEIGHT, scene.palette))
    return beside(*columns)


def figure_lines(scene: Scene) -> list[Text]:
    line = Text()
    for name, words, beneath in figures(scene):
        line.append(f"{name} ", scene.palette.dim).append(words, scene.palette.strong)
        line.append(f" ({beneath})  " if beneath else "  ", scene.palette.dim)
    return [line]


# --- charts ---------------------------------------------------------------------------------------------------


def loss_curves(scene: Scene) -> list[Curve]:
    palette = scene.palette
    if scene.rivals:
        runs = zip(scene.runs, palette.runs, strict=False)
        return [scene.line(run.view, run.view.loss, style) for run, style in runs]
    view = scene.view
    validation = [(point.step, point.val_loss) for point in view.evaluations]
    return [
        scene.band(view, view.loss, palette.raw),
        scene.line(view, view.loss, palette.smooth),
        *points(scene, validation, palette.found[-1]),
    ]


def points(scene: Scene, values: Sequence[tuple[float, float]], style: Style) -> list[Curve]:
    """Evaluations: a line, and a mark for each while they are few."""
    line = scene.marks(scene.view, values, style, joined=True)
    return [line, scene.marks(scene.view, values, style, joined=False)] if len(line.points) <= MOST_MARKS else [line]


def loss_axes(scene: Scene) -> Axes:
    is_softmax = scene.snapshot.facts.loss == "softmax"
    return scene.axes(level=scene.view.chance_loss if is_softmax else None)


def loss_frame(scene: Scene, width: int, height: int) -> list[Text]:
    body = chart(loss_curves(scene), width - 2, height - 2, loss_axes(scene))
    if scene.rivals:
        return framed("loss", legend(scene, body), width, height, scene.palette, at_cursor(scene, "loss"))
    note = at_cursor(scene, "loss") or "grey: each step, green: validation, dots: chance"
    return framed("loss", body, width, height, scene.palette, note)


def recall_frame(scene: Scene, width: int, height: int) -> list[Text]:
    """Recall on unseen pictures, and accuracy in a batch of training pairs: two different things, each named."""
    palette = scene.palette
    if scene.rivals:
        curves = [
            scene.marks(run.view, [(one.step, one.score) for one in run.view.evaluations], style, joined=True)
            for run, style in zip(scene.runs, palette.runs, strict=False)
        ]
        body = chart(curves, width - 2, height - 2, scene.axes(words=percent, log=False, floor=0.0))
        return framed("R@1 on unseen pictures", body, width, height, palette)
    view = scene.view
    scores = [(point.step, point.score) for point in view.evaluations]
    curves = [
        scene.line(view, view.accuracy, palette.raw),
        *points(scene, scores, palette.found),
    ]
    body = chart(curves, width - 2, height - 2, scene.axes(words=percent, log=False, floor=0.0))
    return framed("R@1 unseen", body, width, height, palette, "grey: accuracy in a batch")


def legend(scene: Scene, body: list[Text]) -> list[Text]:
    """Which colour is which run, in the chart's upper right corner."""
    lines = list(body)
    for row, (run, style) in enumerate(zip(scene.runs, scene.palette.runs, strict=False)):
        if row < len(lines):
            name = output.plain(f" {run.run} ", style=style)
            line = lines[row].copy()
            line.truncate(max(0, body[row].cell_len - name.cell_len))
            line.pad_right(max(0, body[row].cell_len - name.cell_len - line.cell_len))
            lines[row] = line + name
    return lines


def at_cursor(scene: Scene, name: str) -> str:
    step = scene.cursor_step
    if step is None:
        return ""
    found = scene.view.loss.at(step) if name == "loss" else None
    return f"step {step:,.0f}: {value(found, '.4g')}"


# --- the machine ----------------------------------------------------------------------------------------------


def machine_lines(scene: Scene, width: int) -> list[Text]:
    """Cores, memory, where the time of a step goes, sensors, and what was saved."""
    view, palette, ascii_only = scene.view, scene.palette, scene.options.ascii_only
    system = view.system
    cores = system.get("cpu_per_core")
    loads = [number(load) for load in cores if number(load) == number(load)] if isinstance(cores, list) else []
    shown = loads[: max(1, min(len(loads), (width - 8) // 12))]
    bar_width = max(3, min(24, (width - 10) // max(1, len(shown)) - 6))
    line = styled("cpu    ", palette.dim)
    for load in shown:
        line.append_text(meter(load, bar_width, palette.load, palette.frame, ascii_only=ascii_only))
        line.append(f"{load:5.0%} ")
    line.append("" if shown else "–").append(f"+{len(loads) - len(shown)}" if len(loads) > len(shown) else "")
    rss, available = number(system.get("rss_bytes")), number(system.get("available_bytes"))
    memory = styled("memory ", palette.dim)
    if rss + available > 0:
        share = rss / (rss + available)
        memory.append_text(meter(share, bar_width, palette.load, palette.frame, ascii_only=ascii_only))
        memory.append(f" {size(rss)} of {size(rss + available)}")
        for name, key in (("swap", "swap_used_bytes"), ("device", "device_memory_bytes")):
            memory.append(f"  {name} {size(number(system.get(key)))}" if number(system.get(key)) > 0 else "")
    else:
        memory.append("–")
    lines = [line, memory, *step_lines(scene, width)]
    temperature, power = number(system.get("temperature_c")), number(system.get("power_w"))
    sensors = [f"{value(temperature, '.0f')} °C", f"{value(power, '.1f')} W"]
    known = [words for words in sensors if not words.startswith("–")]
    if known:
        lines.append(styled("sensor ", palette.dim).append("  ".join(known)))
    if view.ranks:
        lines.append(styled("ranks  ", palette.dim) + output.plain(_ranks(view)))
    return [*lines, styled("saved  ", palette.dim) + output.plain(_saved(view))]


def _ranks(view: RunView) -> str:
    """Several processes: how long they wait for each other, and for whom."""
    waits = [one.wait_share for one in view.ranks.values()]
    words = f"{len(view.ranks)}, waiting {min(waits):.0%} to {max(waits):.0%} of the time"
    slowest = view.slowest_rank
    return f"{words}; slowest: rank {slowest.rank} on {slowest.host}" if slowest else words


def _saved(view: RunView) -> str:
    if not view.checkpoints:
        return "nothing yet"
    last = view.checkpoints[-1]
    seconds = value(number(last.get("save_s")), ".2f")
    return f"step {last.get('step')}, {size(number(last.get('size_bytes')))} in {seconds} s"


def step_lines(scene: Scene, width: int) -> list[Text]:
    """Where the time of a step goes: a bar in parts, and the names of the largest that fit."""
    palette, split = scene.palette, scene.view.phase_shares()
    if not split:
        return [styled("step   ", palette.dim).append("–")]
    bar = stacked(list(split.values()), palette.phases, max(4, width - 8), ascii_only=scene.options.ascii_only)
    names = []
    for (phase, share), style in zip(split.items(), palette.phases, strict=True):
        names.append((share, styled(f"{phase.removesuffix('_s')} ", style).append(f"{share:.0%}  ", palette.dim)))
    while len(names) > 1 and 7 + sum(name.cell_len for _, name in names) > width:
        names.remove(min(names, key=lambda pair: pair[0]))
    return [styled("step   ", palette.dim) + bar, Text.assemble(" " * 7, *(name for _, name in names))]
