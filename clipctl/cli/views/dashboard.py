"""The monitor's view of a run, for any terminal size: a scene in, lines out."""

from rich.text import Text

from clipctl.cli import output
from clipctl.cli.views import units
from clipctl.cli.views.chart import meter
from clipctl.cli.views.frame import fitted, framed, styled, value, wrapped
from clipctl.cli.views.pages import machine, metrics, model, overview, retrieval
from clipctl.cli.views.scene import PAGES, Scene
from clipctl.monitor.watch import Snapshot
from clipctl.runs.rundir import short_name

KEYS = (
    ("1-5", "page"),
    ("tab", "run"),
    ("c", "compare"),
    ("←→", "values"),
    ("+-", "zoom"),
    ("↑↓", "scroll"),
    ("s", "smooth"),
    ("l", "log"),
    ("x", "time"),
    ("?", "help"),
    ("q", "quit"),
)
STOP_KEY = ("Ctrl-C", "saves and stops")  # instead of q, in the terminal of the training
HELP = (
    "1-5    pages: overview, metrics, machine, model, retrieval",
    "tab    next run; after an automatic switch, back",
    "c      draw another run over this one, up to four; then none",
    "←  →   a cursor with the values at a step; esc removes it",
    "↑  ↓   scroll a page that is longer than the terminal; also j, k",
    "+  -   zoom to the newest half, quarter, …; zoom out",
    "s      smoothing of curves: automatic, 10, 50, 200 steps, none",
    "l      logarithmic scale",
    "x      steps or time on the x axis",
    "p      pictures on the retrieval page, on or off",
    "space  pause the display",
    "q      quit; training continues",
    "",
    "loss: range of the steps in grey, running median in colour,",
    "◆ validation; dotted: ln B, the loss of random guessing",
)
BODIES = (overview.page, metrics.page, machine.page, model.page, retrieval.page)
LEAST_BAR = 4
STATES = {"running": "good", "finished": "good", "waiting": "warn", "stalled": "warn", "stopped": "warn"}


def dashboard(scene: Scene, width: int, height: int) -> list[Text]:
    """Exactly `height` lines of at most `width` characters."""
    options = scene.options
    if height < 6 or width < 30:
        lines = [one_line(scene)]
    elif options.help:
        lines = [*header(scene, width)[:1], Text(), *(Text(line) for line in help_lines(options.in_trainer))]
    else:
        top, below = header(scene, width), footer(scene, width, height)
        body = BODIES[options.page](scene, width, height - len(top) - len(below))
        lines = [*top, *body, *below]
    return fitted(lines, width, height, ascii_only=options.ascii_only)


def help_lines(in_trainer: bool) -> list[str]:
    stop = f"{STOP_KEY[0]} {STOP_KEY[1]}"
    return [stop if in_trainer and line.startswith("q ") else line for line in HELP]


def shows_pictures(scene: Scene, width: int, height: int) -> bool:
    """Whether the retrieval page shows thumbnails on a terminal of this size."""
    beside = len(header(scene, width)) + len(footer(scene, width, height))
    return retrieval.shows_pictures(scene, width, height - beside)


def one_line(scene: Scene) -> Text:
    """What matters most first, because the end may not fit."""
    snapshot, view = scene.snapshot, scene.snapshot.view
    parts = [f"{short_name(snapshot.run)} {view.step}/{snapshot.total_steps}", f"loss {value(view.loss_now, '.3f')}"]
    parts += [f"R@1 {units.percent(view.evaluations[-1].score)}"] if view.evaluations else []
    parts += [f"{units.duration(snapshot.eta_s)} left"] if snapshot.eta_s is not None else []
    parts += [f"! {alert.what}" for alert in snapshot.alerts[:1]]
    return styled(f"{snapshot.state} ", state_style(scene)) + output.plain(" ".join(parts))


def summary(snapshot: Snapshot) -> str:
    """A run in one line; also what is printed at every interval without a terminal."""
    view = snapshot.view
    parts = [
        snapshot.run,
        f"step {view.step}/{snapshot.total_steps}",
        f"loss {value(view.loss_now, '.3f')}",
        f"R@1 {units.percent(view.evaluations[-1].score) if view.evaluations else '–'}",
        f"{value(view.images_per_s, '.0f')} images/s",
    ]
    if snapshot.eta_s is not None:
        parts.append(f"{units.duration(snapshot.eta_s)} left")
    return "  ".join(parts + [f"! {alert.what}" for alert in snapshot.alerts[:1]])


def state_style(scene: Scene) -> str:
    return str(getattr(scene.palette, STATES.get(scene.snapshot.state, "bad")))


def header(scene: Scene, width: int) -> list[Text]:
    """Which run, how it is doing, which page; and how far it has got."""
    snapshot, palette, options = scene.snapshot, scene.palette, scene.options
    view = snapshot.view
    first = Text().append_text(output.plain(f"{snapshot.run} ", style=palette.strong))
    first.append(f"● {snapshot.state}", state_style(scene))
    if view.attempt > 1:
        first.append(f"  attempt {view.attempt}", palette.dim)
    if options.paused:
        first.append("  paused", palette.warn)
    if scene.states:
        first.append(f"  {scene.states}", palette.dim)
    tabs = _tabs(scene, width - first.cell_len - 2)
    first.pad_right(max(1, width - first.cell_len - tabs.cell_len))
    share = view.step / snapshot.total_steps if snapshot.total_steps else 0.0
    left, right = _progress_words(snapshot, share, width)
    room = max(LEAST_BAR, width - len(left) - len(right))
    bar = meter(share, room, palette.found, palette.frame, ascii_only=options.ascii_only)
    return [first + tabs, styled(left, palette.dim) + bar + Text(right)]


def _progress_words(snapshot: Snapshot, share: float, width: int) -> tuple[str, str]:
    """What stands on either side of the progress bar: as much as leaves room for a bar."""
    view = snapshot.view
    epochs = f"/{snapshot.epochs}" if view.epoch <= snapshot.epochs else ""  # --steps may go beyond
    epoch, step = f"epoch {view.epoch}{epochs}  ", f"step {view.step}/{snapshot.total_steps}  "
    done, elapsed = f" {share:4.0%}", f"  elapsed {units.duration(view.elapsed_s)}"
    eta = "" if snapshot.eta_s is None else f"  {units.duration(snapshot.eta_s)} left"
    pairs = [(epoch + step, done + elapsed + eta), (epoch + step, done + eta), (step, done + eta), (step, done)]
    return next((pair for pair in pairs if len(pair[0]) + len(pair[1]) + LEAST_BAR <= width), pairs[-1])


def _tabs(scene: Scene, room: int) -> Text:
    """The pages, named if there is room, else by number."""
    line, is_named = Text(), room >= sum(len(name) + 4 for name in PAGES)
    for number, name in enumerate(PAGES):
        is_open = number == scene.options.page
        line.append(f" {number + 1}", scene.palette.key if is_open else scene.palette.dim)
        if is_named or is_open:
            line.append(f" {name} ", scene.palette.title if is_open else scene.palette.dim)
    return line if line.cell_len <= room else Text()


def footer(scene: Scene, width: int, height: int) -> list[Text]:
    """What to do next, each command unbroken in a line of its own; what is wrong, other runs, and the keys."""
    following = next_lines(scene)
    if height < 12:  # room for one, if possible one that is not cut off
        following = [*(line for line in following if line.cell_len <= width), *following][:1]
    limit = 1 if height < 20 else 3 if height < 30 else max(4, height // 6)
    words = wrapped(alerts(scene), width - 4 if height >= 30 else width, max(1, limit - len(following)))
    told = [*following, *words]
    if height >= 30 and told:
        title = "diagnosis" if scene.snapshot.alerts else "state"
        told = framed(title, [Text(" ") + line for line in told], width, len(told) + 2, scene.palette)
    others = [output.plain(line, style=scene.palette.dim) for line in scene.others[: 3 if height >= 36 else 1]]
    return [*told, *(others if height >= 24 else []), *_keys(scene, width)]


def alerts(scene: Scene) -> list[Text]:
    snapshot, palette = scene.snapshot, scene.palette
    if not snapshot.alerts:
        is_well = snapshot.view.step > 0 and snapshot.state in ("running", "finished", "stopped")
        return [Text("✓ no problems found", palette.good)] if is_well else []
    texts = []
    for alert in snapshot.alerts:
        style = palette.bad if alert.severity == "bad" else palette.warn
        text = styled("! ", style).append_text(output.plain(alert.what, style=style))
        text.append_text(output.plain(f": {alert.why}; {alert.todo}"))
        texts.append(text)
    return texts


def next_lines(scene: Scene) -> list[Text]:
    """What to type now that a run has ended."""
    snapshot, palette = scene.snapshot, scene.palette
    handle = snapshot.facts.handle
    resume = f"clipctl train --resume {handle}"
    commands = {
        "stopped": [resume],
        "crashed": [resume],
        "failed": [resume],
        "finished": [f'clipctl search FOLDER "a red boat" --model {handle}', f"clipctl report {handle}"],
    }.get(snapshot.state, [])
    return [styled("▸ ", palette.key) + output.plain(command) for command in commands]


def _keys(scene: Scene, width: int) -> list[Text]:
    if scene.notice:
        return [output.plain(scene.notice, style=scene.palette.warn)]
    if not scene.options.show_keys:
        return []
    keys = [*KEYS[:-1], STOP_KEY] if scene.options.in_trainer else KEYS
    line, last = Text(), keys[-2:]  # how to get help and how to leave are there at any width
    room = width - sum(len(key) + len(word) + 3 for key, word in last)
    for key, word in keys:
        if (key, word) in last or line.cell_len + len(key) + len(word) + 3 <= room:
            line.append(f"{key} ", scene.palette.key).append(f"{word}  ", scene.palette.dim)
    line.rstrip()
    return [line]
