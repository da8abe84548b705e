"""A run, or several side by side, as one self-contained HTML file. No torch."""

import html
import json
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files as resources
from typing import TYPE_CHECKING, Any, NamedTuple

from clipctl.monitor.reader import number
from clipctl.monitor.series import Series
from clipctl.monitor.view import PHASES
from clipctl.report.charts import Line, compact, heat_strip, line_chart, percent, size
from clipctl.report.history import BANDS, History, band_of, points_of, thinned

if TYPE_CHECKING:
    from clipctl.report.retrieval import Find

MOST_RUNS = 6  # colours
PHASE_NAMES = dict(zip(PHASES, ("data", "transfer", "forward", "backward", "optimizer"), strict=True))


def report(histories: Sequence[History], finds: "Sequence[Find] | None" = None, note: str = "") -> str:
    """`finds` are retrievals of the first run; None: there are none, and `note` says why."""
    content = "\n".join(
        [
            *_header(histories),
            *_diagnosis(histories),
            "<h2>Learning</h2>",
            f'<div class="grid-of-charts">{"".join(_learning(histories))}</div>',
            *_retrieval(finds, note),
            *_difficulty(histories),
            "<h2>Machine</h2>",
            f'<div class="grid-of-charts">{"".join(_machine(histories))}</div>',
            *_phases(histories),
            *_blocks(histories),
            *_settings(histories),
        ]
    )
    title = ", ".join(one.run.name for one in histories)
    page = resources("clipctl.report").joinpath("report.html").read_text(encoding="utf-8")
    before, after = page.split("CONTENT")
    return f"{before.replace('TITLE', html.escape(title))}{content}{after}"


# --- in words -------------------------------------------------------------------------------------------------


def _header(histories: Sequence[History]) -> Iterator[str]:
    names = " and ".join(html.escape(one.run.name) for one in histories)
    yield f"<h1>{names}</h1>"
    rows = [_summary(one) for one in histories]
    yield '<div class="card scroll"><table><thead><tr><th></th>'
    yield "".join(f'<th class="c{n}">{html.escape(one.run.name)}</th>' for n, one in enumerate(histories))
    yield "</tr></thead><tbody>"
    for key in dict.fromkeys(key for row in rows for key in row):
        cells = "".join(f"<td>{html.escape(row.get(key, '–'))}</td>" for row in rows)
        yield f"<tr><th>{html.escape(key)}</th>{cells}</tr>"
    yield "</tbody></table></div>"


def _summary(history: History) -> dict[str, str]:
    view, snapshot, environment = history.snapshot.view, history.snapshot, history.environment
    best, last = history.best_evaluation, history.last_evaluation
    losses = points_of(history.steps.get("loss"))
    speed = points_of(history.steps.get("images_per_s"))
    device = environment.get("device")
    name = str(device.get("name", "")) if isinstance(device, dict) else ""
    watt_hours = history.energy_j / 3600
    return {
        "state": snapshot.state,
        "steps": f"{view.step:,} of {snapshot.total_steps:,}",
        "time": _duration(view.elapsed_s),
        "device": f"{name}, {_inner(environment, 'precision')}, {_inner(environment, 'threads')} threads",
        "images/s": f"{sum(y for _, y in speed) / len(speed):,.0f}" if speed else "–",
        "loss": f"{losses[-1][1]:.3f}" if losses else "–",
        **({"R@1, before training": _recalls(history.start_evaluation)} if history.start_evaluation else {}),
        "R@1, best": _recalls(best),
        "R@1, last": _recalls(last),
        **(
            {"R@1, nearest pixels": f"{percent(view.baseline)} picture to caption"} if view.baseline is not None else {}
        ),
        "peak memory": size(max(one.high for one in history.machine["rss_bytes"].buckets))
        if "rss_bytes" in history.machine
        else "–",
        "energy": f"{watt_hours:.2f} Wh" if history.energy_j else "–",
        "R@1 per Wh": f"{100 * number(best.get('score')) / watt_hours:.1f} points"
        if history.energy_j and best
        else "–",
    }


def _recalls(row: dict[str, Any]) -> str:
    if not row:
        return "–"
    i2t, t2i = number(row.get("i2t_r1")), number(row.get("t2i_r1"))
    return f"{percent(i2t)} picture to caption, {percent(t2i)} caption to picture (epoch {row.get('epoch')})"


def _inner(environment: dict[str, Any], key: str) -> str:
    found = environment.get(key)
    return str(found.get("value", "–")) if isinstance(found, dict) else "–"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _diagnosis(histories: Sequence[History]) -> Iterator[str]:
    yield "<h2>Diagnosis</h2>"
    for history in histories:
        prefix = f"{history.run.name}: " if len(histories) > 1 else ""
        for alert in history.snapshot.alerts:
            words = f"<b>{html.escape(prefix + alert.what)}</b> – {html.escape(alert.why)}."
            yield f'<div class="alert {alert.severity}">{words} What to do: {html.escape(alert.todo)}.</div>'
        if not history.snapshot.alerts:
            yield f"<p>{html.escape(prefix)}nothing stands out.</p>"


# --- curves ---------------------------------------------------------------------------------------------------


def _lines(
    histories: Sequence[History],
    curves: Callable[[History], dict[str, Series]],
    keys: Sequence[tuple[str, str]],
    *,
    band: bool = False,
) -> list[Line]:
    """One line for each key of each run; with several runs, colours are runs and dashes are keys."""
    alone, lines = len(histories) == 1, []
    for number_of_run, history in enumerate(histories):
        for number_of_key, (key, name) in enumerate(keys):
            series = curves(history).get(key)
            label = name if alone else f"{history.run.name} {name}" if len(keys) > 1 else history.run.name
            style = number_of_key if alone else number_of_run
            around = band_of(series) if band and number_of_key == 0 else ()
            lines.append(Line(label, points_of(series), style, not alone and number_of_key > 0, around))
    return lines


class Chart(NamedTuple):
    """A plot of one or more curves over steps."""

    title: str
    keys: tuple[tuple[str, str], ...]  # and what each is called
    words: Callable[[float], str] = compact
    low: float | None = None
    has_band: bool = False  # around the first curve: its smallest and largest values
    has_chance: bool = False


CHARTS = {
    "loss": Chart("Loss", (("loss", "training"), ("val_loss", "held out")), low=0.0, has_band=True, has_chance=True),
    "recall": Chart(
        "R@1 on held-out pictures",
        (("i2t_r1", "picture to caption"), ("t2i_r1", "caption to picture")),
        percent,
        0.0,
    ),
    "recall-at": Chart(
        "Picture to caption, among the first 1, 5, 10",
        (("i2t_r1", "R@1"), ("i2t_r5", "R@5"), ("i2t_r10", "R@10")),
        percent,
        0.0,
    ),
    "accuracy": Chart("Accuracy within a batch", (("accuracy", "accuracy"),), percent, 0.0),
    "lr": Chart("Learning rate", (("lr", "learning rate"),)),
    "temperature": Chart("Temperature", (("temperature", "temperature"),)),
    "grad-norm": Chart("Gradient norm", (("grad_norm", "gradient norm"),), low=0.0),
    "speed": Chart("Images per second", (("images_per_s", "images/s"),), low=0.0),
}


def lines_of(chart: Chart, histories: Sequence[History]) -> list[Line]:
    return _lines(histories, lambda history: history.steps, chart.keys, band=chart.has_band)


def chance_of(chart: Chart, histories: Sequence[History]) -> float | None:
    """ln B, if that is the loss of a model that guesses."""
    facts, view = histories[0].snapshot.facts, histories[0].snapshot.view
    return view.chance_loss if chart.has_chance and facts.loss == "softmax" else None


def _drawn(chart: Chart, histories: Sequence[History]) -> str:
    chance = chance_of(chart, histories)
    reference = (chance, "chance") if chance else None
    return line_chart(chart.title, lines_of(chart, histories), words=chart.words, low=chart.low, reference=reference)


def _learning(histories: Sequence[History]) -> Iterator[str]:
    for name, chart in CHARTS.items():
        if name != "speed":
            yield _drawn(chart, histories)


def _machine(histories: Sequence[History]) -> Iterator[str]:
    yield _drawn(CHARTS["speed"], histories)
    charts = (
        ("Memory", (("rss_bytes", "this program"), ("device_memory_bytes", "accelerator")), size),
        ("Processor, all cores", (("cpu", "busy"),), percent),
        ("Machine temperature", (("temperature_c", "°C"),), compact),
        ("Power", (("power_w", "W"),), compact),
    )
    for title, keys, words in charts:
        lines = _lines(histories, lambda history: history.machine, keys)
        yield line_chart(title, lines, words=words, x_words=_duration, x_name="second", low=0.0)


def _phases(histories: Sequence[History]) -> Iterator[str]:
    yield "<h2>Where the time of a step goes</h2>"
    for history in histories:
        total = sum(history.phases.values())
        if not total:
            continue
        shares = {PHASE_NAMES[phase]: seconds / total for phase, seconds in history.phases.items()}
        parts = "".join(
            f'<div class="c{n}" style="flex:{share:.4f}" title="{name} {percent(share)}"></div>'
            for n, (name, share) in enumerate(shares.items())
        )
        legend = "".join(
            f'<span class="c{n}">{name} {percent(share)}</span>' for n, (name, share) in enumerate(shares.items())
        )
        yield f'<p>{html.escape(history.run.name)}</p><div class="bar">{parts}</div><div class="legend">{legend}</div>'


def _blocks(histories: Sequence[History]) -> Iterator[str]:
    yield "<h2>Gradient norms by block</h2>"
    for history in histories:
        rows = [(name, thinned(points)) for name, points in history.blocks.items()]
        yield heat_strip(f"{history.run.name}: brighter is larger, on a logarithmic scale", rows)


def _difficulty(histories: Sequence[History]) -> Iterator[str]:
    """How well the right caption beats those with few, some and many words in common."""
    if not any(history.best_evaluation for history in histories):
        return
    yield "<h2>By difficulty of the wrong captions</h2>"
    heads = "".join(f"<th>{name}</th>" for name in ("", "easy", "medium", "hard"))
    yield f'<div class="card scroll"><table><thead><tr>{heads}</tr></thead><tbody>'
    for history in histories:
        values = [number(history.best_evaluation.get(key)) for key in BANDS]
        cells = "".join(f"<td>{percent(value) if value == value else '–'}</td>" for value in values)
        yield f"<tr><th>{html.escape(history.run.name)}</th>{cells}</tr>"
    yield "</tbody></table></div>"


def _retrieval(finds: "Sequence[Find] | None", note: str) -> Iterator[str]:
    yield "<h2>Best and worst retrievals</h2>"
    if not finds:
        yield f'<p class="faint">{html.escape(note or "nothing to show")}</p>'
        return
    yield '<p class="faint">For each held-out caption, the most similar pictures; the right one has a green frame.</p>'
    yield '<div class="finds">'
    for find in finds:
        pictures = "".join(
            f'<img class="{"right" if one.is_right else "wrong"}" src="{one.source}" alt="{html.escape(one.name)}" '
            f'title="{html.escape(one.name)}">'
            for one in find.pictures
        )
        rank = f"{'✓' if find.rank == 1 else '✗'} correct picture ranked {find.rank:,} of {find.of:,}"
        caption = html.escape(find.caption)
        yield f'<div class="card"><b>{caption}</b><br><span class="faint">{rank}</span>'
        yield f'<div class="pictures">{pictures}</div></div>'
    yield "</div>"


def _settings(histories: Sequence[History]) -> Iterator[str]:
    yield "<h2>Settings and environment</h2>"
    for history in histories:
        environment = json.dumps(history.environment, indent=2, ensure_ascii=False)
        for what, text in (("settings", history.run.read_config()), ("environment", environment)):
            summary = f"<summary>{html.escape(history.run.name)}: {what}</summary>"
            yield f"<details>{summary}<pre>{html.escape(text)}</pre></details>"
