"""The monitor's reader, view and judgement of life, on files as the trainer writes them."""

import json
import math
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import time

import psutil
import pytest

from clipctl.cli.views.chart import log_ticks
from clipctl.cli.views.dashboard import dashboard
from clipctl.cli.views.frame import framed
from clipctl.cli.views.pages import overview
from clipctl.cli.views.pages.metrics import PANELS
from clipctl.cli.views.palette import DARK
from clipctl.cli.views.scene import PAGES, Options, Scene
from clipctl.config.sections import LoopConfig
from clipctl.errors import RunError
from clipctl.monitor import liveness
from clipctl.monitor.diagnosis import RunFacts, slow_rank
from clipctl.monitor.liveness import Quiet, probe, run_state
from clipctl.monitor.reader import BLOCK_BYTES, MetricsTail
from clipctl.monitor.runs import likeliest_run, the_live_run
from clipctl.monitor.series import MAX_BUCKETS, Series
from clipctl.monitor.view import RunView
from clipctl.monitor.watch import RunWatcher
from clipctl.runs import metrics
from clipctl.runs.metrics import MetricsWriter
from clipctl.runs.retrieval import Near, Query, Retrieval
from clipctl.runs.rundir import RunDir, RunStatus


def step_row(step, **values):
    row = {
        "step": step,
        "epoch": (step - 1) // 10 + 1,
        "loss": 3.0 / step**0.5,
        "accuracy": 0.1,
        "lr": 1e-3,
        "temperature": 0.07,
        "grad_norm": 1.0,
        "batch_size": 27,
        "images_per_s": 270.0,
        "step_s": 27 / values["images_per_s"] if "images_per_s" in values else 0.1,
        "data_s": 0.005,
        "transfer_s": 0.001,
        "forward_s": 0.03,
        "backward_s": 0.06,
        "optimizer_s": 0.004,
    }
    return {**row, **values}


class Writer(MetricsWriter):
    """Rows with a clock of their own."""

    def steps(self, first, last, **values):
        for step in range(first, last + 1):
            self.write(metrics.STEP, step_row(step, **values), elapsed_s=step * 0.1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def writer(path):
    return Writer(path, "run")


@pytest.fixture
def run(tmp_path):
    run = RunDir.create(tmp_path, "tiny", "run")
    run.write_config("preset: tiny\n")
    return run


def read(tail, view):
    starts_over, rows = tail.poll()
    view = RunView() if starts_over else view
    for part in rows:
        view.fold(part)
    return view


def fresh(path):
    return read(MetricsTail(path), RunView())


# --- series ---------------------------------------------------------------------------------------------------


def test_a_short_series_is_exact():
    series = Series()
    series.extend(range(1, 101), [float(value) for value in range(100)])
    assert [bucket.mean for bucket in series.buckets] == list(range(100))


@pytest.mark.parametrize("portion", [1, 7, 1000, 100_000])
def test_a_long_series_is_bounded_and_loses_no_spike(portion):
    series, values = Series(), [1.0] * 100_000
    values[54_321] = 9.0
    for begin in range(0, len(values), portion):
        series.extend(range(begin, min(begin + portion, len(values))), values[begin : begin + portion])
    assert len(series.buckets) <= MAX_BUCKETS
    assert sum(bucket.count for bucket in series.buckets) == 100_000
    assert sum(bucket.total for bucket in series.buckets) == pytest.approx(100_008)
    (spike,) = [bucket for bucket in series.buckets if bucket.high > 1]
    assert spike.high == 9.0 and spike.first <= 54_321 <= spike.last


def test_what_is_not_finite_is_left_out_of_a_curve():
    series = Series()
    series.extend([1, 2, 3, 4], [1.0, math.nan, math.inf, 2.0])
    assert [(bucket.first, bucket.mean) for bucket in series.buckets] == [(1, 1.0), (4, 2.0)]


def test_smoothing_has_no_bias_to_the_first_value():
    series = Series()
    series.extend(range(1, 500), [2.0] * 499)
    assert all(value == pytest.approx(2.0) for _, value in series.smoothed(20))


@pytest.mark.parametrize("steps", [60, 400, 5000])
@pytest.mark.parametrize("fall", ["exponential", "power", "cliff"])
def test_the_smoothed_loss_lies_inside_the_data(steps, fall):
    """Against a centred median of eleven steps: on average within 2% of the loss, to neither side."""
    chance, losses = random.Random(0), []
    for step in range(1, steps + 1):
        share = step / steps
        falls = {"exponential": 3.3 * math.exp(-6 * share), "power": 3.3 / step**0.4, "cliff": 3 if share < 0.3 else 1}
        losses.append((falls[fall] + 0.2) * math.exp(chance.gauss(0, 0.1)))
    series = Series()
    series.extend(range(1, steps + 1), losses)
    distances = []
    for place, value in series.smoothed():
        near = min(5, int(place) - 1, steps - int(place))
        around = statistics.median(losses[int(place) - 1 - near : int(place) + near])
        distances.append((value - around) / around)
    assert abs(statistics.mean(distances)) < 0.02
    assert all(min(losses) <= value <= max(losses) for _, value in series.smoothed())
    assert series.smoothed(0)[7][1] == series.buckets[7].median, "without smoothing"


@pytest.mark.parametrize("portion", [1, 700, 20_000])
@pytest.mark.parametrize("steps", [1500, 5000, 20_000])
def test_rare_large_losses_do_not_lift_the_smoothed_loss(steps, portion):
    """Late in a training most losses are tiny and a few are not: the curve lies where most are."""
    chance = random.Random(0)
    losses = [0.01 * math.exp(chance.gauss(0, 1.0)) for _ in range(steps)]
    series = Series()
    for begin in range(0, steps, portion):
        part = losses[begin : begin + portion]
        series.extend(range(begin + 1, begin + 1 + len(part)), part)
    found = statistics.mean(value for _, value in series.smoothed())
    assert found == pytest.approx(0.01, rel=0.06) and statistics.mean(losses) > 0.015


def test_the_last_steps_are_kept_one_by_one_to_look_at_closely():
    series = Series()
    series.extend(range(1, 100_001), [float(step) for step in range(1, 100_001)])
    assert [bucket.mean for bucket in series.since(99_991).buckets] == [float(step) for step in range(99_991, 100_001)]
    assert series.since(50_000).buckets[0].last >= 50_000 and series.at(0) is None and series.at(100_000) > 99_000


def test_only_whole_lines_are_read(path, writer):
    writer.steps(1, 3)
    tail, view = MetricsTail(path), RunView()
    assert read(tail, view).step == 3
    row = {"kind": "step", "time_s": 1, "elapsed_s": 0.4, **step_row(4)}
    line = json.dumps(row, separators=(",", ":")) + "\n"
    with path.open("a") as file:
        file.write(line[:30])
        file.flush()
        assert read(tail, view).step == 3
        file.write(line[30:])
    assert read(tail, view).step == 4


def test_a_file_that_comes_late(path):
    tail, view = MetricsTail(path), RunView()
    assert read(tail, view).step == 0
    Writer(path, "run").steps(1, 5)
    assert read(tail, view).step == 5


@pytest.mark.parametrize("how", ["replaced", "cut"])
def test_a_file_that_is_another_one_now(path, writer, how):
    writer.steps(1, 50)
    tail = MetricsTail(path)
    view = read(tail, RunView())
    if how == "replaced":
        path.rename(path.with_name("old"))
    else:
        os.truncate(path, 0)
    Writer(path, "run").steps(1, 7)
    view = read(tail, view)
    assert view.step == 7 and len(view.loss.buckets) == 7


@pytest.mark.parametrize("how", ["replaced", "cut"])
def test_a_file_that_is_another_one_and_already_as_long(path, writer, how):
    writer.steps(1, 50, loss=1.0)
    tail = MetricsTail(path)
    view = read(tail, RunView())
    if how == "replaced":
        path.unlink()
    else:
        os.truncate(path, 0)
    Writer(path, "another").steps(1, 70, loss=2.0)
    view = read(tail, view)
    assert [bucket.mean for bucket in view.loss.buckets] == [2.0] * 70


def test_a_resume_that_comes_while_the_file_is_read(path, writer):
    writer.steps(1, 10, loss=1.0)
    tail, view = MetricsTail(path), RunView()
    _, rows = tail.poll()
    writer.write(metrics.RESUME, {"step": 6, "attempt": 2})
    writer.steps(7, 8, loss=2.0)
    for part in rows:
        view.fold(part)
    view = read(tail, view)
    assert [bucket.mean for bucket in view.loss.buckets] == [1.0] * 6 + [2.0] * 2


@pytest.mark.parametrize(
    "values",
    [
        '"step":5',
        '"step":true,"loss":1',
        '"step":5,"elapsed_s":1e999,"loss":1e308',
        f'"step":{"9" * 400},"loss":1',
        f'"step":5,"loss":{"9" * 400},"images_per_s":{"9" * 5000}',
        '"step":-5,"loss":-1e308,"temperature":0,"batch_size":-1',
        '"step":5,"epoch":"x","loss":[],"temperature":{}',
    ],
)
@pytest.mark.parametrize("size", [(120, 36), (80, 24), (40, 8), (1, 1)])
def test_odd_rows_do_not_end_the_dashboard(run, values, size):
    writer = Writer(run.metrics_file, "run")
    writer.steps(1, 3)
    with run.metrics_file.open("a") as file:
        file.write(f'{{"kind":"step",{values}}}\n{{"kind":"eval",{values},"val_loss":1e308,"score":1e999}}\n')
        file.write(f'{{"kind":"system",{values},"cpu_per_core":["x",null],"rss_bytes":"y"}}\n')
    run.write_status("running", attempt=1, step=5, total_steps=10)
    for over_time in (False, True):
        snapshot = RunWatcher(run).look(0.0)
        for page in range(len(PAGES)):
            options = Options(page=page, over_time=over_time, log=over_time, cursor=0.5, zoom=1)
            lines = dashboard(Scene(snapshot, options, ["other"], [snapshot]), *size)
            assert len(lines) == size[1] and all(line.cell_len <= size[0] for line in lines)
    json.dumps(snapshot.to_dict())


def test_a_file_that_is_gone(path, writer):
    writer.steps(1, 5)
    tail = MetricsTail(path)
    view = read(tail, RunView())
    path.unlink()
    assert read(tail, view).step == 0


def test_rows_that_a_resume_undid_are_dropped(path, writer):
    writer.steps(1, 10, loss=1.0)
    writer.write(metrics.EVAL, {"step": 10, "epoch": 1, "val_loss": 1.0, "score": 0.9})
    tail = MetricsTail(path)
    view = read(tail, RunView())
    writer.write(metrics.RESUME, {"step": 6, "attempt": 2})
    writer.steps(7, 8, loss=2.0)
    for seen in (read(tail, view), fresh(path)):
        assert [(bucket.first, bucket.mean) for bucket in seen.loss.buckets] == [
            *((step, 1.0) for step in range(1, 7)),
            (7, 2.0),
            (8, 2.0),
        ]
        assert (seen.step, seen.attempt, seen.evaluations) == (8, 2, [])


def test_two_resumes(path, writer):
    writer.steps(1, 10, loss=1.0)
    writer.write(metrics.RESUME, {"step": 8, "attempt": 2})
    writer.steps(9, 12, loss=2.0)
    writer.write(metrics.RESUME, {"step": 4, "attempt": 3})
    writer.steps(5, 6, loss=3.0)
    means = [bucket.mean for bucket in fresh(path).loss.buckets]
    assert means == [1.0] * 4 + [3.0] * 2


def test_garbage_is_passed_over(path, writer):
    writer.steps(1, 3)
    with path.open("ab") as file:
        file.write(b"\xff\xfe garbage\n{}\n[1,2]\n\n" + b"[" * 50_000 + b"\n" + b'{"kind":"step","step":"x"}\n')
        file.write(b'{"kind":"eval","step":null,"val_loss":"?"}\n{"kind":"checkpoint"}\n{"kind":7}\n')
    writer.steps(4, 5)
    view = fresh(path)
    assert view.step == 5 and len(view.loss.buckets) == 5


def test_a_line_without_end_does_not_fill_the_memory(path, writer):
    writer.steps(1, 3)
    with path.open("ab") as file:
        for _ in range(40):
            file.write(b"x" * BLOCK_BYTES)
        file.write(b"\n")
    writer.steps(4, 5)
    assert fresh(path).step == 5


def test_steps_without_a_finite_loss_are_known(path, writer):
    writer.steps(1, 3)
    writer.write(metrics.STEP, step_row(4, loss=math.nan, grad_norm=math.inf, skipped=True))
    writer.steps(5, 6)
    view = fresh(path)
    assert list(view.skipped) == [4] and [bucket.first for bucket in view.loss.buckets] == [1, 2, 3, 5, 6]


def test_rows_of_another_make_are_read_too(path):
    """Keys in another order, as a later version might write them."""
    with path.open("w") as file:
        for step in range(1, 5):
            row = {"kind": "step", **dict(sorted(step_row(step).items()))}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    view = fresh(path)
    assert view.step == 4 and len(view.loss.buckets) == 4


def test_a_long_file_shows_its_spike(path):
    """As the million-row benchmark, smaller: past the size at which only every n-th row is read in full."""
    chance = random.Random(0)
    template = json.dumps({"kind": "step", "time_s": 1.0, "elapsed_s": 0.0, **step_row(1)}, separators=(",", ":"))
    with path.open("w") as file:
        for step in range(1, 120_001):
            loss = 8.5 if step == 70_000 else 1 + chance.random()
            line = template.replace('"step":1,', f'"step":{step},').replace('"loss":3.0', f'"loss":{loss}')
            file.write(line.replace('"elapsed_s":0.0', f'"elapsed_s":{step / 10}') + "\n")
    assert path.stat().st_size > 32 << 20
    view = fresh(path)
    assert view.step == 120_000 and view.elapsed_s == 12_000
    assert max(bucket.high for bucket in view.loss.buckets) == 8.5
    assert len(view.loss.buckets) <= MAX_BUCKETS and view.seconds_at(60_000) == pytest.approx(6000, rel=0.01)


# --- view -----------------------------------------------------------------------------------------------------


def test_the_eta_counts_this_attempts_steps_only(path, writer):
    for step in range(1, 11):
        writer.write(metrics.STEP, step_row(step), elapsed_s=step * 100.0)  # slow, on another machine
    writer.write(metrics.RESUME, {"step": 10, "attempt": 2})
    for step in range(11, 21):
        writer.write(metrics.STEP, step_row(step), elapsed_s=(step - 10) * 2.0)
    view = fresh(path)
    assert view.eta_s(30) == pytest.approx(20.0) and view.eta_s(5) == 0
    assert view.elapsed_s == pytest.approx(1020.0)
    assert view.seconds_at(10) == pytest.approx(1000.0) and view.seconds_at(15) == pytest.approx(1010.0)


def test_speed_now_and_at_the_start(path, writer):
    writer.steps(1, 30, images_per_s=300.0)
    writer.steps(31, 90, images_per_s=150.0)
    view = fresh(path)
    assert (view.images_per_s_at_start, view.images_per_s) == pytest.approx((300.0, 150.0))
    assert view.step_s == pytest.approx(27 / 150), "one window for speed, step and time left"


def test_time_left_follows_the_pace_of_the_last_steps_and_counts_what_lies_beside_them(path, writer):
    for step in range(1, 101):  # 0.1 s a step, then 1 s; every tenth is followed by an evaluation of 2 s
        step_s = 0.1 if step <= 50 else 1.0
        elapsed_s = sum((0.1 if one <= 50 else 1.0) + (2.0 if one % 10 == 0 else 0.0) for one in range(1, step + 1))
        writer.write(metrics.STEP, step_row(step, step_s=step_s), elapsed_s=elapsed_s)
    assert fresh(path).eta_s(200) == pytest.approx(100 * (1.0 + 0.2), rel=0.05)


def test_the_split_of_a_step(path, writer):
    writer.steps(1, 5)
    assert fresh(path).phase_shares() == pytest.approx(
        {"data_s": 0.05, "transfer_s": 0.01, "forward_s": 0.3, "backward_s": 0.6, "optimizer_s": 0.04}
    )


# --- liveness -------------------------------------------------------------------------------------------------


def status(**values):
    known = {
        "state": "running",
        "attempt": 1,
        "step": 1,
        "total_steps": 10,
        "pid": os.getpid(),
        "process_created_s": psutil.Process().create_time(),
        "process_since_boot_s": psutil.Process().create_time() - psutil.boot_time(),
        "progress": 0,
        "host": socket.gethostname(),
        "heartbeat_s": time.time(),
    }
    return RunStatus(**{**known, **values})


BUSY = Quiet(0.5, 0.5)


@pytest.mark.parametrize(
    ("said", "process", "quiet", "step_s", "expected"),
    [
        (None, "dead", BUSY, None, "waiting"),
        ("running", "alive", BUSY, 0.1, "running"),
        ("running", "dead", BUSY, 0.1, "crashed"),
        ("running", "asleep", BUSY, 0.1, "stalled"),
        ("running", "alive", Quiet(9, 9), 0.1, "stalled"),
        ("running", "alive", Quiet(0, 9), 0.1, "stalled"),  # the heart beats, but nothing gets done
        ("running", "alive", Quiet(0, 9), 6.0, "running"),  # steps of six seconds
        ("running", "alive", Quiet(0, 60), None, "running"),  # the first step of a large model
        ("running", "elsewhere", BUSY, 0.1, "running"),
        ("running", "elsewhere", Quiet(9, 9), 0.1, "stalled"),
        ("finished", "dead", Quiet(999, 999), 0.1, "finished"),
        ("stopped", "dead", BUSY, 0.1, "stopped"),
        ("failed", "alive", BUSY, 0.1, "failed"),
    ],
)
def test_states(said, process, quiet, step_s, expected):
    assert run_state(said and status(state=said), process, quiet, step_s) == expected


def test_a_process_is_known_by_its_create_time():
    assert probe(status()) == "alive"
    other = {"process_created_s": psutil.Process().create_time() - 100, "process_since_boot_s": 1.0}
    assert probe(status(**other)) == "dead"  # the number was reused
    assert probe(status(**{**other, "process_created_s": math.nan})) == "dead"
    clock_was_set = psutil.Process().create_time() - 86_400
    assert probe(status(process_created_s=clock_was_set)) == "alive"
    assert probe(status(host="another")) == "elsewhere"


def test_a_stopped_and_a_dead_process():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    created_s = psutil.Process(process.pid).create_time()
    known = status(pid=process.pid, process_created_s=created_s, process_since_boot_s=created_s - psutil.boot_time())
    assert probe(known) == "alive"
    psutil.Process(process.pid).suspend()
    for _ in range(100):
        if probe(known) == "asleep":
            break
        time.sleep(0.01)
    assert probe(known) == "asleep"
    process.kill()
    process.wait()
    assert probe(known) == "dead"


# --- watching -------------------------------------------------------------------------------------------------


def test_silence_is_measured_by_the_watchers_own_clock(run, monkeypatch):
    """A heartbeat a day old by the wall clock is no reason; one that does not change is."""
    writer = Writer(run.metrics_file, "run")
    writer.steps(1, 3)
    monkeypatch.setattr("clipctl.runs.rundir.time.time", lambda: 1e9)
    run.write_status("running", attempt=1, step=3, total_steps=10)
    watcher = RunWatcher(run)
    assert watcher.look(0.0).state == "running"
    assert watcher.look(liveness.SILENCE_S - 1).state == "running"
    late = watcher.look(liveness.SILENCE_S + 1)
    assert late.state == "stalled" and [alert.name for alert in late.alerts] == ["silent"]
    monkeypatch.setattr("clipctl.runs.rundir.time.time", lambda: 1e9 - 86_400)  # and the clock was set back
    run.write_status("running", attempt=1, step=3, total_steps=10)
    writer.steps(4, 4)
    assert watcher.look(liveness.SILENCE_S + 2).state == "running"


def retrieved(step, captions):
    return Retrieval(step, 24, tuple(Query(caption, 1, None, (Near(0, 0.5, True),)) for caption in captions))


@pytest.mark.parametrize("captions", [["short"], ["long " * 180] * 5])
def test_what_was_retrieved_is_written_over_the_evaluation_before(run, captions):
    for found in (retrieved(8, ["a red boat"] * 3), retrieved(16, captions), retrieved(24, ["a red boat"])):
        run.write_retrieval(found)
        assert run.retrieval() == found


def test_what_is_just_being_written_is_read_at_the_next_look(run):
    Writer(run.metrics_file, "run").steps(1, 16)
    run.write_status("running", attempt=1, step=16, total_steps=20)
    run.write_retrieval(retrieved(8, ["a red boat"]))
    watcher = RunWatcher(run)
    assert watcher.look(0.0).retrieval.step == 8
    run.retrieval_file.write_text('{"step": 16, "candi')
    assert watcher.look(1.0).retrieval.step == 8
    run.write_retrieval(retrieved(16, ["a red boat"]))
    assert watcher.look(2.0).retrieval.step == 16


def test_a_snapshot_as_a_document(run):
    writer = Writer(run.metrics_file, "run")
    writer.steps(1, 5)
    writer.write(metrics.EVAL, {"step": 5, "epoch": 1, "val_loss": 2.0, "score": 0.25})
    run.write_status("running", attempt=1, step=5, total_steps=10)
    document = RunWatcher(run).look(0.0).to_dict()
    assert {"run", "state", "step", "total_steps", "loss", "images_per_s", "eta_s", "alerts"} <= set(document)
    assert (document["step"], document["total_steps"], document["best_score"]) == (5, 10, 0.25)
    assert document["eta_s"] == pytest.approx(0.5)
    assert document["window_steps"] == 5, "there are no more yet"
    lines = dashboard(Scene(RunWatcher(run).look(0.0)), 120, 36)
    assert any("5 steps, chance" in line.plain for line in lines)
    json.dumps(document, allow_nan=False)


def test_epochs_are_those_of_the_steps_to_be_made(run):
    """Not of the setting, which --steps overrides."""
    run.write_status("running", attempt=1, step=5, total_steps=444)
    assert RunWatcher(run).look(0.0).epochs == LoopConfig().epochs, "an older run does not say"
    run.write_environment({"steps_per_epoch": 56})
    assert RunWatcher(run).look(0.0).epochs == 8
    run.write_environment({"steps_per_epoch": 0})
    assert RunWatcher(run).look(0.0).epochs == LoopConfig().epochs


def test_a_newer_schema_is_refused(run):
    run.metrics_file.write_text('{"kind":"header","schema":2,"run_id":"run"}\n')
    with pytest.raises(RunError, match="schema 2"):
        RunWatcher(run).look(0.0)


@pytest.mark.parametrize("name", ["config_file", "environment_file", "status_file"])
def test_a_damaged_file_hides_nothing_else(run, name):
    Writer(run.metrics_file, "run").steps(1, 5)
    getattr(run, name).write_bytes(b"\xff{[")
    snapshot = RunWatcher(run).look(0.0)
    assert snapshot.view.step == 5


def test_no_torch_and_no_numpy(run):
    Writer(run.metrics_file, "run").steps(1, 5)
    run.write_status("finished", attempt=1, step=5, total_steps=5)
    code = (
        "import sys\nfrom clipctl.cli.app import app\n"
        "for words in (['monitor', '--once'], ['monitor', '--json'], ['monitor', '--all'], ['runs']):\n"
        "    try:\n        app([*words, '--runs-dir', sys.argv[1]])\n"
        "    except SystemExit as end:\n        assert not end.code, words\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run.path.parent)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- stopping without a name ----------------------------------------------------------------------------------


def test_only_a_live_run_is_stopped_without_a_name(tmp_path, monkeypatch):
    live = set()
    monkeypatch.setattr("clipctl.monitor.runs.is_live", lambda run: run.name in live)
    for name in ("one", "three", "two"):
        RunDir.create(tmp_path, "tiny", name).write_config("preset: tiny\n")
    with pytest.raises(RunError, match="is running"):
        the_live_run(tmp_path)
    live |= {"two"}
    assert the_live_run(tmp_path).name == "two"
    live |= {"one"}
    with pytest.raises(RunError, match="2 runs are running: one, two"):
        the_live_run(tmp_path)


@pytest.mark.parametrize("width", [12, 30, 60, 100])
@pytest.mark.parametrize("note", ["", "a note beside it"])
def test_a_frame_is_closed_however_long_its_title_is(width, note):
    lines = framed("captions of unseen pictures, and where they are found", [], width, 4, DARK, note)
    assert [line.cell_len for line in lines] == [width] * 4
    assert lines[0].plain[-1] == "╮"


def test_the_slowest_of_several_processes_is_named(path, writer):
    for rank, wait_share in enumerate([0.4, 0.02, 0.35]):
        writer.write(
            metrics.RANK,
            {
                "step": 20,
                "rank": rank,
                "host": f"laptop-{rank}",
                "images_per_s": 9.0,
                "wait_share": wait_share,
                "memory_bytes": 1e9,
            },
        )
    view = fresh(path)
    assert view.slowest_rank.host == "laptop-1" and len(view.ranks) == 3
    (alert,) = slow_rank(view, RunFacts(total_steps=100, warmup_steps=5))
    assert "rank 1 on laptop-1" in alert.what and "40%" in alert.what


def test_processes_that_wait_equally_are_not_blamed(path, writer):
    for rank in range(2):
        writer.write(metrics.RANK, {"rank": rank, "host": "here", "wait_share": 0.2 + rank / 100})
    view = fresh(path)
    assert len(view.ranks) == 2 and view.slowest_rank is None


def test_of_two_live_runs_the_one_that_started_last_is_shown(tmp_path):
    """Whichever reported last: both do so every second."""
    later = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    created_s = psutil.Process(later.pid).create_time()
    try:
        for name in ("older", "newer", "over"):
            run = RunDir.create(tmp_path, "tiny", name)
            run.write_config("preset: tiny\n")
            run.write_status("finished" if name == "over" else "running", attempt=1, step=5, total_steps=9)
            if name == "newer":
                status = json.loads(run.status_file.read_text())
                facts = {"pid": later.pid, "process_created_s": created_s, "heartbeat_s": time.time() - 2}
                run.status_file.write_text(json.dumps(status | facts))
        found = likeliest_run(tmp_path)
        assert found is not None and found.name == "newer"
    finally:
        later.kill()
        later.wait()
    found = likeliest_run(tmp_path)
    assert found is not None and found.name == "older"


@pytest.mark.parametrize("size", [(120, 36), (80, 24), (60, 16), (40, 8)])
def test_what_to_type_next_stands_in_lines_of_its_own(tmp_path, size, monkeypatch):
    """However much there is to say about the run."""
    monkeypatch.setenv("CLIPCTL_RUNS", str(tmp_path))
    run = RunDir.create(tmp_path, "tiny", "20261116-060449-tiny-e3c4")
    run.write_config("preset: tiny\n")
    writer = Writer(run.metrics_file, "run")
    writer.steps(1, 300, loss=3.3, data_s=0.09)
    commands = {
        "finished": ['clipctl search FOLDER "a red boat" --model e3c4', "clipctl report e3c4"],
        "stopped": ["clipctl train --resume e3c4"],
        "failed": ["clipctl train --resume e3c4"],
    }
    for state, expected in commands.items():
        run.write_status(state, attempt=1, step=300, total_steps=300)
        snapshot = RunWatcher(run).look(0.0)
        assert len(snapshot.alerts) >= 2
        lines = [line.plain.strip(" │") for line in dashboard(Scene(snapshot), *size)]
        shown = [f"▸ {command}" for command in expected]
        if size[1] < 12:  # one, whole
            shown = [line for line in shown if len(line) <= size[0]][:1]
        assert [line for line in lines if line.startswith("▸")] == shown
        assert any(line.startswith("!") for line in lines)


# --- drawing --------------------------------------------------------------------------------------------------

CAPTIONS = 12


@pytest.fixture
def long_run(run):
    """300 steps from far above chance to far below, evaluated, with gradient norms and what the machine did."""
    writer = Writer(run.metrics_file, "run")
    for step in range(1, 301):
        loss = 4.0 if step < 10 else 1.0 / step
        writer.write(metrics.STEP, step_row(step, loss=loss), elapsed_s=step * 0.1)
        if step % 10 == 0:
            norms = {f"image.blocks.{number}": 1e-9 if number == 13 else 0.1 for number in range(16)}
            writer.write(metrics.EPOCH, {"epoch": step // 10, "step": step, "grad_norm_by_block": norms})
            writer.write(metrics.EVAL, {"step": step, "epoch": step // 10, "val_loss": loss, "score": 0.5})
        system = {"cpu_per_core": [0.9, 0.5], "process_cpu": 1.0, "rss_bytes": 2**30, "available_bytes": 20 * 2**30}
        writer.write(metrics.SYSTEM, {**system, "disk_free_bytes": 2**35}, elapsed_s=step * 0.1)
    run.write_status("finished", attempt=1, step=300, total_steps=300)
    nearest = tuple(Near(picture, 0.5 - picture / 10, picture == 0) for picture in range(3))
    queries = tuple(Query(f"caption {number:02}", 1, None, nearest) for number in range(CAPTIONS))
    run.write_retrieval(Retrieval(300, 24, queries))
    run.write_thumbnails(bytes(16 * 16 * 3 * 24))
    return run


def screen(run, width, height, *rivals, **options):
    found = [RunWatcher(one).look(0.0) for one in (run, *rivals)]
    lines = dashboard(Scene(found[0], Options(**options), rivals=found[1:]), width, height)
    assert len(lines) == height and all(line.cell_len <= width for line in lines)
    return "\n".join(line.plain for line in lines)


def test_zoomed_in_the_loss_fills_its_chart(long_run):
    """The level of chance belongs to the scale only while it is near the data."""
    whole, zoomed = screen(long_run, 120, 36), screen(long_run, 120, 36, zoom=4)
    assert "┄ chance" in whole and "┄ chance" not in zoomed
    assert "last 19 steps" in zoomed and "0.0034┤" in zoomed


def test_a_logarithmic_scale_has_round_labels(long_run):
    labels = re.findall(r"([\d.e-]+)┤", screen(long_run, 120, 36, log=True, zoom=1))
    assert labels and {label.strip("0.") for label in labels} <= {"1", "2", "3", "4", "5", "6", "7", "8"}
    assert log_ticks(0.03, 4.5, 6) == pytest.approx([0.05, 0.1, 0.2, 0.5, 1, 2])
    assert log_ticks(1e-6, 1e6, 4) == pytest.approx([1e-6, 1e-2, 1e2, 1e6])
    assert log_ticks(3.1, 3.4, 3) == pytest.approx([3.1, 3.2, 3.3, 3.4])


def test_recall_without_room_for_a_name_or_without_colours_stands_alone(long_run):
    snapshot = RunWatcher(long_run).look(0.0)
    for options, width, is_drawn in ((Options(), 40, True), (Options(), 20, False), (Options(colours=None), 40, False)):
        frame = overview.recall_frame(Scene(snapshot, options), width, 12)
        styles = {str(span.style) for line in frame[1:-1] for span in line.spans}
        assert ("batch" in frame[0].plain) == (DARK.raw in styles) == is_drawn
    assert "in a batch" in screen(long_run, 80, 24)


@pytest.mark.parametrize("size", [(120, 36), (80, 24), (60, 16), (40, 8)])
@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("metrics", [panel.title for panel in PANELS]),
        ("machine", ["cores ", "memory ", "free on disk"]),
        ("model", [f"blocks.{number} " for number in range(16)]),
        ("retrieval", [f"caption {number:02}" for number in range(CAPTIONS)]),
    ],
)
def test_everything_can_be_scrolled_to(long_run, page, names, size):
    if page == "machine" and size == (40, 8):
        return  # figures instead of charts
    seen = [screen(long_run, *size, page=PAGES.index(page), scroll=scroll) for scroll in range(17)]
    whole = "\n".join(seen).replace("…", "image.")
    found = [name for name in names if name in whole or (size[0] == 40 and name[:3] in whole)]
    assert found == names
    assert "more ↓" in seen[0] or all(name in seen[0] for name in names)
    assert ("more ↑" in seen[1]) == ("more ↓" in seen[0])


@pytest.mark.parametrize("scroll", [0, 3, 9])
def test_a_block_that_stands_still_stays_in_sight(long_run, scroll):
    for size in ((80, 24), (60, 16)):
        shown = screen(long_run, *size, page=PAGES.index("model"), scroll=scroll)
        assert "blocks.13" in shown and "vanishing" in shown and "epoch 1 " in shown and " 30 " in shown


def test_a_heat_strip_fills_its_width_and_has_a_legend(long_run):
    lines = screen(long_run, 120, 36, page=PAGES.index("model")).splitlines()
    assert "████████ 0.1" in lines[2]
    row = next(line for line in lines if "blocks.0 " in line)
    assert row.count("█") >= 120 - 2 - 17 - 11 - 10


@pytest.mark.parametrize("options", [{"colours": None}, {"ascii_only": True}])
def test_runs_beside_each_other_are_told_apart_without_colours(long_run, tmp_path, options):
    other = RunDir.create(tmp_path, "tiny", "other")
    other.write_config("preset: tiny\n")
    writer = Writer(other.metrics_file, "other")
    writer.steps(1, 100)
    writer.write(metrics.EVAL, {"step": 100, "epoch": 10, "val_loss": 2.0, "score": 0.25})
    for page in (0, 1):
        shown = screen(long_run, 120, 36, other, page=page, **options)
        assert "A run" in shown and "B other" in shown
        charts = shown.replace("A run", "").replace("B other", "")
        assert charts.count("A") >= 6 and charts.count("B") >= 4


def test_the_machine_page_follows_the_zoom_and_names_its_colours(long_run):
    page = PAGES.index("machine")
    whole, zoomed = (screen(long_run, 120, 36, page=page, zoom=zoom) for zoom in (0, 2))
    assert "0:00 " in whole and "0:00 " not in zoomed and "0:23" in zoomed
    assert "trainer 1.0, others 0.4" in whole
    wide = screen(long_run, 200, 60, page=page)
    assert "trainer 1.0 GiB, 20.0 GiB free" in wide, "an older run does not say how much memory there is"
    long_run.write_environment({"memory_bytes": 24 * 2**30})
    assert "others 3.0 GiB of 24.0 GiB" in screen(long_run, 200, 60, page=page)
    assert "4.0 GiB of 24.0 GiB" in screen(long_run, 200, 60)


def test_thumbnails_are_read_by_the_watcher_not_while_drawing(long_run):
    snapshot = RunWatcher(long_run).look(0.0)
    long_run.thumbnails_file.unlink()
    options = Options(page=PAGES.index("retrieval"), pictures=True)
    shown = "\n".join(line.plain for line in dashboard(Scene(snapshot, options), 120, 36))
    assert "▀▀▀▀" in shown and "no picture" not in shown
    assert shown.count("caption") == 4 + 6 + 1 and "8 more ↓" in shown, "six without pictures, and the title"


def test_a_card_is_shortened_between_words():
    words = "20 steps, chance 3.30"
    assert overview.shortened(words, 21) == words and overview.shortened(words, 20) == "20 steps"
    assert overview.shortened("672 ms a step", 10) == "672 ms a" and overview.shortened("123456", 3) == ""


def test_an_evaluation_without_a_score_is_not_nan_percent(run):
    writer = Writer(run.metrics_file, "run")
    writer.steps(1, 10)
    writer.write(metrics.EVAL, {"step": 10, "epoch": 1, "val_loss": 2.0})
    assert "nan" not in screen(run, 120, 36) and "nan" not in screen(run, 20, 1)


def test_one_line_has_what_matters_first(long_run):
    words = screen(long_run, 40, 1)
    assert words == "finished run 300/300 loss 0.003 R@1 50%"
