"""A run as one HTML file, and single plots."""

import base64
import csv
import json
import math
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as ET
import zlib
from contextlib import suppress

import pytest
from PIL import Image
from typer.testing import CliRunner

from clipctl.cli.app import app
from clipctl.config.layers import Layer, resolve
from clipctl.errors import ConfigError
from clipctl.report import charts, history, page
from clipctl.report.export import export_csv, valid_rows
from clipctl.runs.rundir import RunDir
from clipctl.training.plan import make_plan
from tests.chromium import Chromium
from tests.conftest import MICRO, train
from tests.test_browse import CHROMIUM


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of the same model with different seeds."""
    root = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("first-a1f3", "other-b2e4")):
        run = RunDir.create(root, "tiny", name)
        values = {**MICRO, "train.epochs": 6, "train.seed": seed}
        train(make_plan(resolve([Layer("test", values)])), run)
        run.release()
        with run.metrics_file.open("a") as file:  # the run is too short for a look at the machine
            for second in range(3):
                row = {"elapsed_s": second, "cpu_per_core": [0.5, 1.0], "rss_bytes": 3e8 + second, "power_w": 36.0}
                file.write(json.dumps({"kind": "system", **row}, separators=(",", ":")) + "\n")
    return root


def written(runs, tmp_path, *arguments):
    done = CliRunner().invoke(app, ["report", *arguments, "--runs-dir", str(runs), "-o", str(tmp_path / "r.html")])
    assert done.exit_code == 0, done.output
    return (tmp_path / "r.html").read_text(encoding="utf-8")


def test_a_report_needs_nothing_else_and_shows_the_run(runs, tmp_path):
    text = written(runs, tmp_path, "a1f3")
    assert not re.search(r"(src|href|url\()\s*=?\s*[\"']?(https?:)?//", text)
    for title in ("Loss", "R@1 on held-out pictures", "Learning rate", "Temperature", "Images per second", "Memory"):
        assert f"<figcaption>{title}</figcaption>" in text
    rows = [json.loads(line) for line in (runs / "first-a1f3" / "metrics.jsonl").read_text().splitlines()]
    best = max((row for row in rows if row["kind"] == "eval"), key=lambda row: row["score"])
    assert f"{charts.percent(best['i2t_r1'])} picture to caption" in text
    assert text.count("data:image/jpeg") >= 6 and "correct picture ranked" in text and "image.blocks.0" in text
    assert "0.02 Wh" in text  # 36 W for two seconds
    assert "train:" in text and "&quot;torch&quot;" in text  # settings and environment


def test_the_values_to_hover_over_are_those_of_the_metrics_file(runs, tmp_path):
    text = written(runs, tmp_path, "a1f3", "--no-pictures")
    rows = [json.loads(line) for line in (runs / "first-a1f3" / "metrics.jsonl").read_text().splitlines()]
    expected = [row["lr"] for row in rows if row["kind"] == "step"]
    data = re.search(r'data-values="([^"]*)"><figcaption>Learning rate', text)[1].replace("&quot;", '"')
    (line,) = json.loads(data)["lines"]
    assert line["y"] == pytest.approx(expected, rel=1e-3) and line["x"] == list(range(1, len(expected) + 1))
    assert "left out by --no-pictures" in text


def test_runs_are_overlaid(runs, tmp_path):
    text = written(runs, tmp_path, "a1f3", "b2e4", "--no-pictures")
    data = re.search(r'data-values="([^"]*)"><figcaption>Loss', text)[1].replace("&quot;", '"')
    names = {(line["name"], line["style"]) for line in json.loads(data)["lines"]}
    first, other = ("first-a1f3", 0), ("other-b2e4", 1)
    assert names == {(f"{run} {side}", style) for run, style in (first, other) for side in ("training", "held out")}


def test_data_that_are_gone_are_said_to_be(runs, tmp_path):
    shutil.copytree(runs / "first-a1f3", tmp_path / "runs" / "copy-0001", ignore=shutil.ignore_patterns("step-*"))
    text = written(tmp_path / "runs", tmp_path, "0001")
    assert "not shown: " in text and "has no checkpoint" in text


def test_names_and_values_are_escaped(runs, tmp_path):
    shutil.copytree(runs / "first-a1f3", tmp_path / "runs" / "evil-0002")
    run = tmp_path / "runs" / "evil-0002"
    environment = json.loads((run / "environment.json").read_text())
    environment["device"]["name"] = "<script>alert(1)</script>"
    (run / "environment.json").write_text(json.dumps(environment))
    text = written(tmp_path / "runs", tmp_path, "0002", "--no-pictures")
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text


def test_a_run_without_a_step_gives_a_report(tmp_path):
    run = RunDir.create(tmp_path / "runs", "tiny", "empty-0003")
    run.release()
    text = page.report([history.History.read(run, time.monotonic())], None, "nothing yet")
    assert "empty-0003" in text and "<svg" not in text


def test_a_long_run_gives_short_curves():
    series = history.Series()
    for start in range(0, 300_000, 1000):
        series.extend(range(start, start + 1000), [float(step == 123_456) for step in range(start, start + 1000)])
    points, band = history.points_of(series), history.band_of(series)
    assert len(points) <= history.MOST_POINTS and points[-1][0] == 299_999
    assert max(high for _, _, high in band) == 1.0  # a single step stays visible


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (3.2, 3.9), (-5, 1e6), (1e-9, 2e-9), (7, 7)])
def test_ticks_are_round_and_inside(low, high):
    found = charts.ticks(low, high)
    assert 1 <= len(found) <= 12 and all(low - 1e-9 <= tick <= high + 1e-9 * abs(high) for tick in found)
    assert found == sorted(found)


def test_charts_are_well_formed():
    line = charts.Line("a <b> & c", [(1, 0.5), (2, 0.7), (3, 0.6)], band=[(1, 0.4, 0.6), (3, 0.5, 0.8)])
    figure = charts.line_chart("Title & more", [line], reference=(0.9, "chance"))
    root = ET.fromstring(figure.replace("hidden>", 'hidden="">'))
    assert root.find("figcaption").text == "Title & more" and root.find("svg") is not None
    assert charts.line_chart("nothing", [charts.Line("x", [])]) == ""
    assert ET.fromstring(charts.heat_strip("norms", [("block", [(1, 0.1), (2, 10.0)])])).find("svg") is not None


def test_single_plots(runs, tmp_path):
    for name in ("loss.png", "loss.svg"):
        arguments = ["report", "a1f3", "b2e4", "--plot", "loss", "--runs-dir", str(runs), "-o", str(tmp_path / name)]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
    assert Image.open(tmp_path / "loss.png").size[0] > 500 and "<svg" in (tmp_path / "loss.svg").read_text()
    for arguments, words in ((["--plot", "lost"], "unknown plot"), (["--plot", "loss", "-o", "x.doc"], "unknown file")):
        done = CliRunner().invoke(app, ["report", "a1f3", "--runs-dir", str(runs), *arguments])
        assert done.exit_code == 2 and words in done.output
    many = CliRunner().invoke(app, ["report", *["a1f3"] * 7, "--runs-dir", str(runs)])
    assert many.exit_code == ConfigError.exit_code and "at most 6" in many.output


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_hovering_shows_values_in_a_browser(runs, tmp_path):
    text = written(runs, tmp_path, "a1f3", "--no-pictures")
    hover = """<script>
      const svg = document.querySelector("figure.chart svg"), box = svg.getBoundingClientRect();
      const place = {clientX: box.left + box.width / 2, clientY: box.top + 20};
      svg.dispatchEvent(new PointerEvent("pointermove", place));
    </script>"""
    (tmp_path / "hover.html").write_text(text.replace("</body>", f"{hover}</body>"), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
    address = (tmp_path / "hover.html").as_uri()
    done = subprocess.run(
        [CHROMIUM, *flags, "--enable-logging=stderr", "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert re.search(r'<div class="tip"[^>]*><div>step \d+</div><div class="c0">training: [\d.]+', done.stdout)
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_bars_of_a_report_are_printed(runs, tmp_path):
    """Browsers leave out backgrounds unless the page asks for them; the bars are backgrounds."""
    written(runs, tmp_path, "a1f3", "--no-pictures")
    with Chromium(CHROMIUM, tmp_path / "profile") as browser:
        browser.open((tmp_path / "r.html").as_uri())
        browser.wait_for("document.readyState === 'complete' && !!document.querySelector('.bar .c3')")
        document = base64.b64decode(browser.call("Page.printToPDF")["data"])
    drawn = b""
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", document, re.DOTALL):
        with suppress(zlib.error):  # fonts
            drawn += zlib.decompress(stream)
    purple = " ".join(f"{value / 255:.4f}".strip("0") for value in (0x8A, 0x4B, 0xC0))
    assert f"{purple} rg".encode() in drawn  # text is printed darker, so that this is a bar


# --- for other tools ---------------------------------------------------------------------------------------------


def export(runs, tmp_path, *arguments):
    return CliRunner().invoke(app, ["runs", "export", *arguments, "--runs-dir", str(runs), "-o", str(tmp_path / "out")])


def test_metrics_as_csv(runs, tmp_path):
    done = export(runs, tmp_path, "a1f3")
    assert done.exit_code == 0 and done.stdout.count("wrote") == 4, done.output
    rows = [json.loads(line) for line in (runs / "first-a1f3" / "metrics.jsonl").read_text().splitlines()]
    with (tmp_path / "out" / "steps.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in found] == [row["loss"] for row in rows if row["kind"] == "step"]
    with (tmp_path / "out" / "epochs.csv").open() as file:
        assert "grad_norm_by_block/image.blocks.0" in next(csv.reader(file))


def test_rows_that_a_resume_has_undone_are_left_out(tmp_path):
    run = RunDir.create(tmp_path, "tiny", "run")
    run.release()
    rows = [("step", 1), ("step", 2), ("step", 3), ("resume", 1), ("step", 2), ("resume", 2), ("step", 3)]
    lines = (json.dumps({"kind": kind, "step": step, "number": n}) for n, (kind, step) in enumerate(rows))
    run.metrics_file.write_text("".join(f"{line}\n" for line in lines) + '{"kind":"step","st')
    assert [row["number"] for row in valid_rows(run) if row["kind"] == "step"] == [0, 4, 6]


def test_the_clock_of_a_resumed_run_goes_on(tmp_path):
    run = RunDir.create(tmp_path, "tiny", "run")
    run.release()
    rows = [{"kind": "system", "elapsed_s": second, "rss_bytes": 1.0} for second in (1, 2, 3)]
    rows += [{"kind": "resume", "step": 0, "attempt": 2}, *rows]
    run.metrics_file.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    seconds = [x for x, _ in history.points_of(history.History.read(run, time.monotonic()).machine["rss_bytes"])]
    assert seconds == [1, 2, 3, 4, 5, 6]


def test_columns_that_come_later_are_there(tmp_path):
    run = RunDir.create(tmp_path, "tiny", "run")
    run.release()
    rows = [{"kind": "step", "step": 1, "loss": 2.0}, {"kind": "step", "step": 2, "loss": None, "skipped": True}]
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path,) = export_csv(run, tmp_path / "out")
    assert path.read_text().splitlines() == ["step,loss,skipped", "1,2.0,", "2,,True"]


def test_metrics_for_tensorboard(runs, tmp_path):
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    done = export(runs, tmp_path, "a1f3", "--to", "tensorboard")
    assert done.exit_code == 0, done.output
    events = loading.EventAccumulator(str(tmp_path / "out")).Reload()
    rows = [json.loads(line) for line in (runs / "first-a1f3" / "metrics.jsonl").read_text().splitlines()]
    expected = [(row["step"], row["loss"]) for row in rows if row["kind"] == "step"]
    assert [(one.step, pytest.approx(one.value)) for one in events.Scalars("steps/loss")] == expected
    assert export(runs, tmp_path, "a1f3", "--to", "excel").exit_code == 2


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (9999.7, "10k"),
        (999_600, "1M"),
        (999.96e6, "1B"),
        (1.39e-4, "1.4e-4"),
        (2e-5, "2e-5"),
        (0.05, "0.05"),
        (0, "0"),
        (math.nan, "nan"),
    ],
)
def test_figures_roll_over_to_the_next_unit(value, words):
    assert charts.compact(value) == words and charts.compact(-value).lstrip("-") == words
