"""How the run is doing, at a glance."""

from collections.abc import Sequence

from rich.text import Text

from clipctl.cli import output
from clipctl.cli.views import units
from clipctl.cli.views.chart import Axes, Curve, Style, chart, meter, shown_level, stacked
from clipctl.cli.views.frame import beside, framed, note_fits, packed, shares_of, size, styled, value, wrapped
from clipctl.cli.views.scene import Scene
from clipctl.config.quantities import counted
from clipctl.monitor.reader import number
from clipctl.monitor.view import RunView
from clipctl.report.charts import compact, percent
from clipctl.runs.rundir import short_name

CARDS_HEIGHT = 4
MOST_MARKS = 24  # evaluations that are marked one by one
BESIDE_WIDTH = 60  # from which on a bar has its names beside it


def page(scene: Scene, width: int, height: int) -> list[Text]:
    if width >= 100 and height >= 18:
        return _wide(scene, width, height)
    figures = figure_lines(scene, width, 1 if height < 8 else 2 if height < 14 else 4)
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
    figures = cards(scene, width) if has_cards else figure_lines(scene, width, 2)
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
            f"best {units.percent(best.score)}, step {best.step}{start}{pixels}" if best else "not evaluated yet",
        ),
        ("validation loss", value(last.val_loss if last else None, ".3f"), f"step {last.step}" if last else ""),
        (
            "images/s",
            value(view.images_per_s, ".0f"),
            f"{units.seconds(view.step_s) if view.step_s else '–'} a step",
        ),
        (
            "learning rate",
            compact(lr) if (lr := view.latest("lr")) is not None else "–",
            f"scale {value(view.scale, '.1f')}, grad {value(view.latest('grad_norm'), '.2g')}",
        ),
    ]


def cards(scene: Scene, width: int) -> list[Text]:
    found = figures(scene)
    columns = []
    for (name, words, beneath), share in zip(found, shares_of(width, *(1,) * len(found)), strict=True):
        body = [Text(f" {words}", scene.palette.strong), Text(f" {shortened(beneath, share - 3)}", scene.palette.dim)]
        columns.append(framed(shortened(name, share - 6), body, share, CARDS_HEIGHT, scene.palette))
    return beside(*columns)


def shortened(words: str, width: int) -> str:
    """As many of the parts between commas as fit, at least the words of the first; a number is never cut."""
    while len(words) > width:
        cut = max(words.rfind(", "), 0) or words.rfind(" ")
        words = words[:cut] if cut > 0 else ""
    return words


def figure_lines(scene: Scene, width: int, most: int) -> list[Text]:
    """Without cards: the figures with what to compare them with if all fit, else as many of them alone as do."""
    detailed = packed(_figure_words(scene, has_details=True), width)
    return detailed if len(detailed) <= most else packed(_figure_words(scene, has_details=False), width)[:most]


def _figure_words(scene: Scene, *, has_details: bool) -> list[Text]:
    found = []
    for name, words, beneath in figures(scene):
        line = styled(f"{name} ", scene.palette.dim).append(words, scene.palette.strong)
        found.append(line.append(f" ({beneath})" if beneath and has_details else "", scene.palette.dim))
    return found


# --- charts ---------------------------------------------------------------------------------------------------


def loss_curves(scene: Scene) -> list[Curve]:
    palette = scene.palette
    if scene.rivals:
        return [scene.line(run.view, run.view.loss, style, letter) for run, style, letter in scene.compared]
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
    curves, axes, palette = loss_curves(scene), loss_axes(scene), scene.palette
    body = chart(curves, width - 2, height - 2, axes)
    if scene.rivals:
        return framed("loss", legend(scene, body), width, height, palette, at_cursor(scene, "loss"))
    if scene.cursor_step is not None:
        return framed("loss", body, width, height, palette, at_cursor(scene, "loss"))
    words = [("◆", palette.found[-1], "validation")] if scene.view.evaluations else []
    words += [("┄", palette.dim, "chance in training")] if shown_level(curves, axes) is not None else []
    lines = [("⣿", palette.raw, "each step"), ("━", palette.smooth[0], "median")]
    kept = (lines + words, words) if scene.options.has_colours else (words,)  # the lines differ in colour only
    return framed("loss", body, width, height, palette, *(key_to(scene, one) for one in kept))


def key_to(scene: Scene, parts: Sequence[tuple[str, str, str]]) -> Text:
    """What is drawn in which colour: a sign in that colour and its name, for each."""
    line = Text()
    for sign, style, words in parts:
        line.append("  " if line else "").append(sign, style).append(f" {words}", scene.palette.dim)
    return line


def recall_frame(scene: Scene, width: int, height: int) -> list[Text]:
    """Recall on unseen pictures, and accuracy in a batch of training pairs if there is room to say which is which."""
    palette, view = scene.palette, scene.view
    axes = scene.axes(words=percent, log=False, floor=0.0)
    if scene.rivals:
        curves = [
            scene.marks(run.view, _scores(run.view), style, joined=True, letter=letter)
            for run, style, letter in scene.compared
        ]
        return framed("R@1 on unseen pictures", chart(curves, width - 2, height - 2, axes), width, height, palette)
    curves, title = points(scene, _scores(view), palette.found), "R@1 unseen"
    names = [key_to(scene, [("⣿", palette.raw, words)]) for words in ("batch accuracy", "in a batch")]
    notes = [name for name in names if note_fits(title, name, width)]
    if not (notes and view.accuracy.buckets and scene.options.has_colours):
        return framed(title, chart(curves, width - 2, height - 2, axes), width, height, palette)
    curves = [scene.line(view, view.accuracy, palette.raw), *curves]
    return framed(title, chart(curves, width - 2, height - 2, axes), width, height, palette, *notes)


def _scores(view: RunView) -> list[tuple[float, float]]:
    return [(point.step, point.score) for point in view.evaluations]


def legend(scene: Scene, body: list[Text]) -> list[Text]:
    """Which colour and letter is which run, in the chart's upper right corner."""
    lines = list(body)
    for row, (run, style, letter) in enumerate(scene.compared):
        if row < len(lines):
            width = body[row].cell_len
            known = run.run if len(run.run) <= width // 3 else short_name(run.run)
            name = output.plain(f" {letter} {known} ", style=str(style))
            line = lines[row].copy()
            line.truncate(max(0, width - name.cell_len))
            line.pad_right(max(0, width - name.cell_len - line.cell_len))
            lines[row] = line + name
    return lines


def run_names(scene: Scene, width: int) -> list[Text]:
    """The same as lines above several charts."""
    names = [output.plain(f" {letter} {run.run} ", style=str(style)) for run, style, letter in scene.compared]
    return wrapped([Text.assemble(*names)], width, len(names))


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
    memory = styled("memory ", palette.dim)
    if scene.view.machine.rss_bytes.buckets:
        memory.append_text(_memory(scene, bar_width, width - 7))
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


def _memory(scene: Scene, bar_width: int, width: int) -> Text:
    """How much of the machine's memory is in use, how much by the trainer, and as much else as fits."""
    system, total = scene.view.system, scene.snapshot.machine_bytes
    rss, free = number(system.get("rss_bytes")), number(system.get("available_bytes"))
    whole = total or rss + free
    used = max(0.0, whole - free)
    load, empty = scene.palette.load, scene.palette.frame
    line = meter(used / whole if used == used else 0.0, bar_width, load, empty, ascii_only=scene.options.ascii_only)
    of_all = [f"{size(used)} of {size(total)}", f"trainer {size(rss)}"]
    words = of_all if total else [f"trainer {size(rss)}", f"{size(free)} free"]
    for name, key in (("swap", "swap_used_bytes"), ("device", "device_memory_bytes")):
        words += [f"{name} {size(number(system.get(key)))}"] if number(system.get(key)) > 0 else []
    for part, words_of_part in enumerate(words):
        if line.cell_len + len(words_of_part) + 2 <= width:
            line.append(f"{', ' if part else ' '}{words_of_part}")
    return line


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
    """Where the time of a step goes: a bar in parts, and the names of the largest that fit, beside it or below."""
    palette, options, split = scene.palette, scene.options, scene.view.phase_shares()
    if not split:
        return [styled("step   ", palette.dim).append("–")]
    characters = ["█" if options.has_colours and not options.ascii_only else phase[0] for phase in split]
    names = []
    for (phase, share), style in zip(split.items(), palette.phases, strict=True):
        names.append((share, styled(f"{phase.removesuffix('_s')} ", style).append(f"{share:.0%}  ", palette.dim)))
    bar_width, room = (width - 8, width - 7) if width < BESIDE_WIDTH else (width // 4, width - 9 - width // 4)
    while len(names) > 1 and sum(name.cell_len for _, name in names) > room:
        names.remove(min(names, key=lambda pair: pair[0]))
    words = Text.assemble(*(name for _, name in names))
    bar = stacked(list(split.values()), palette.phases, max(4, bar_width), characters)
    if width < BESIDE_WIDTH:
        return [styled("step   ", palette.dim) + bar, Text(" " * 7) + words]
    return [styled("step   ", palette.dim) + bar + Text("  ") + words]
