"""The real monitor in a real (pseudo-)terminal, beside a real training."""

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress

import psutil
import pyte
import pytest
from PIL import Image

from clipctl.monitor.liveness import probe
from clipctl.runs.metrics import END, EVAL
from clipctl.runs.retrieval import Near, Query, Retrieval
from clipctl.runs.rundir import RunDir, planning
from tests.faults.trainer import SETTINGS, finish, start, wait_for_epochs
from tests.test_monitor import Writer

PATIENCE_S = 30


class Terminal:
    """A program in a terminal of its own, and what a person would see there."""

    def __init__(self, *arguments, columns=80, rows=24, **environment):
        self._master, self._slave = pty.openpty()
        self.screen = pyte.Screen(columns, rows)
        self._stream, self.output = pyte.ByteStream(self.screen), b""
        self.resize(columns, rows)
        self.settings = termios.tcgetattr(self._slave)
        plain = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "TTY_COMPATIBLE", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "clipctl", *arguments],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env={**plain, "TERM": "xterm-256color", **environment},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return
            if not data:
                return
            self.output += data
            self._stream.feed(data)

    def resize(self, columns, rows):
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    def press(self, keys):
        os.write(self._master, keys.encode())

    @property
    def text(self):
        return "\n".join(self.screen.display)

    def wait_for(self, *words, seconds=PATIENCE_S):
        deadline = time.monotonic() + seconds
        while not all(word in self.text for word in words):
            assert time.monotonic() < deadline, f"{words} not in\n{self.text}"
            time.sleep(0.02)

    def end(self, seconds=10):
        code = self.process.wait(seconds)
        time.sleep(0.1)  # for what is still on its way
        return code

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        with suppress(OSError):
            os.close(self._slave)
        self._reader.join(5)  # or it would read from the next terminal, whose descriptor has the same number
        with suppress(OSError):
            os.close(self._master)


@pytest.fixture
def terminal():
    opened = []

    def open_terminal(*arguments, **options):
        opened.append(Terminal(*arguments, **options))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


@pytest.fixture
def finished(tmp_path):
    """A run that is over, without having trained."""
    run = RunDir.create(tmp_path, "tiny", "over")
    run.write_config("preset: tiny\n")
    writer = Writer(run.metrics_file, "over")
    writer.steps(1, 300)
    writer.write(EVAL, {"step": 300, "epoch": 30, "val_loss": 1.0, "score": 0.5})
    writer.write(END, {"state": "finished", "step": 300})
    nearest = tuple(Near(picture, 0.5, picture == 0) for picture in range(3))
    queries = tuple(Query(f"caption {number}", 1, None, nearest) for number in range(12))
    run.write_retrieval(Retrieval(300, 24, queries))
    run.write_thumbnails(bytes(range(256)) * (3 * 24))
    run.write_status("finished", attempt=1, step=300, total_steps=300)
    run.release()
    return run


def test_a_run_from_birth_to_death_and_back(tmp_path, terminal):
    """Waiting, running at four sizes, killed, resumed, finished."""
    watching = terminal("monitor", "--runs-dir", str(tmp_path), columns=120, rows=36)
    watching.wait_for("waiting for a run in")
    trainer = start(tmp_path, *SETTINGS, "--set=train.epochs=4000", "--name", "run")
    watching.wait_for("run ● running", "R@1 unseen ─", "cpu    ", "saved  step ", "q quit")
    for columns, rows, words in (
        (80, 24, ("run ● running", "cpu    ", "q quit", "loss ")),
        (60, 16, ("run ● running", "q quit", "loss ")),
        (20, 5, ("running run",)),
        (120, 36, ("R@1 unseen ─", "q quit")),
    ):
        watching.resize(columns, rows)
        watching.wait_for(*words, seconds=5)
        assert len(watching.screen.display) == rows
    os.killpg(trainer.pid, signal.SIGKILL)
    trainer.communicate()
    watching.wait_for("run ● crashed", seconds=10)
    step = int(watching.text.split("  step ")[1].split("/")[0])
    trainer = start(tmp_path, "--resume", "run", "--steps", str(step + 300))
    watching.wait_for("run ● running  attempt 2")
    assert finish(trainer)[0] == 0
    watching.wait_for("run ● finished", f"{step + 300}/{step + 300}", "100%")
    watching.press("q")
    assert watching.end() == 0


def test_keys(finished, terminal):
    other = RunDir.create(finished.path.parent, "tiny", "zother")
    other.write_config("preset: tiny\n")
    other.write_status("stopped", attempt=1, step=3, total_steps=9)
    seen = terminal("monitor", "over", "--runs-dir", str(finished.path.parent))
    seen.wait_for("over ● finished", "step 300/300", "zother")
    seen.press("x")
    seen.wait_for("0:30")  # 300 steps of a tenth of a second
    seen.press("?")
    seen.wait_for("pause the display")
    seen.press("?")
    seen.wait_for("q quit")
    before = seen.text
    seen.press("l")
    wait_until_other(seen, before)
    before = seen.text
    seen.press("s")
    wait_until_other(seen, before)
    for key, words in zip(
        "2345",
        (("R@1, R@5, R@10", "batch accuracy"), ("machine",), ("gradient norm by",), ("captions",)),
        strict=True,
    ):
        seen.press(key)
        seen.wait_for(*words)
    seen.press("p")
    seen.wait_for("▀▀▀▀▀▀▀▀", "11 more ↓")
    seen.press("p")
    wait_until_gone(seen, "▀")
    seen.press("2")
    seen.wait_for("5 more ↓")  # what does not fit can be scrolled to
    for down, up in (("\x1b[B", "\x1b[A"), ("j", "k")):
        seen.press(down)
        seen.wait_for("learning rate", "2 more ↑, 3 ↓")
        seen.press(up)
        seen.wait_for("5 more ↓")
    seen.press("\x1b[D\x1b[D+")
    seen.wait_for("at 2", "last 150 steps")  # the values at a step of the newer half
    seen.press("++++++++")
    seen.wait_for("last 10 steps")
    seen.press("-----\x1b")
    wait_until_gone(seen, "last", " at 2")
    seen.press("c")
    seen.wait_for("A over  B zother")  # drawn over it, and named
    seen.press("1c")
    seen.wait_for("comparison off")
    seen.press(" ")
    seen.wait_for("paused")
    seen.press(" \t")
    seen.wait_for("zother ● stopped", "nothing yet")
    seen.press("q")
    assert seen.end() == 0


def test_pictures_come_and_go_with_a_key(finished, terminal):
    """On a large terminal with true colour they are there without being asked for."""
    seen = terminal(
        "monitor", "over", "--runs-dir", str(finished.path.parent), columns=200, rows=60, COLORTERM="truecolor"
    )
    seen.wait_for("over ● finished")
    seen.press("5")
    seen.wait_for("caption 11", "▀▀▀▀▀▀▀▀")
    seen.press("p")
    wait_until_gone(seen, "▀")
    seen.wait_for("caption 11", "similarity")
    seen.press("p")
    seen.wait_for("▀▀▀▀▀▀▀▀")


@pytest.mark.parametrize(
    "environment", [{"NO_COLOR": "1"}, {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}]
)
def test_a_terminal_without_colours_says_why_there_are_no_pictures(finished, terminal, environment):
    arguments = ("monitor", "over", "--page", "retrieval", "--pictures", "--runs-dir", str(finished.path.parent))
    seen = terminal(*arguments, columns=120, rows=36, **environment)
    seen.wait_for("caption 11", "pictures need 256 colours or more")
    assert "▀" not in seen.text and "????" not in seen.text


def wait_until_gone(seen, *words):
    deadline = time.monotonic() + 5
    while any(word in seen.text for word in words):
        assert time.monotonic() < deadline, seen.text
        time.sleep(0.02)


def test_it_follows_a_new_run_and_tab_goes_back(finished, terminal):
    """Without a name: the newest that is alive, one that is being planned, and the next as soon as it begins."""
    root = finished.path.parent
    seen = terminal("monitor", "--runs-dir", str(root), columns=120, rows=36)
    seen.wait_for("over ● finished", "clipctl report")
    with planning(root):
        seen.wait_for("a new run: planning for")
    run = RunDir.create(root, "tiny", "fresh")
    run.write_config("preset: tiny\n")
    Writer(run.metrics_file, "fresh").steps(1, 5)
    run.write_status("running", attempt=1, step=5, total_steps=300)
    seen.wait_for("fresh ● running", "now showing fresh, which has just started; tab: back")
    seen.press("\t")
    seen.wait_for("over ● finished")
    seen.press("q")
    assert seen.end() == 0 and not list(root.glob(".planning-*"))


def test_nothing_but_a_new_attempt_is_followed(finished, terminal):
    """Not another name, and no copy; but a run that goes on."""
    root = finished.path.parent
    live = RunDir.create(root, "tiny", "live")
    live.write_config("preset: tiny\n")
    Writer(live.metrics_file, "live").steps(1, 5)
    live.write_status("running", attempt=1, step=5, total_steps=300)
    seen = terminal("monitor", "--runs-dir", str(root), columns=120, rows=36)
    seen.wait_for("live ● running")
    shutil.copytree(finished.path, root / "copy")
    shutil.copytree(live.path, root / "zlive")
    finished.rename("boats")
    seen.wait_for("boats  finished", "copy  finished", "zlive  running")
    time.sleep(1)
    assert "live ● running" in seen.text and "now showing" not in seen.text
    finished = RunDir(root / "boats")
    finished.write_status("running", attempt=2, step=300, total_steps=600)
    seen.wait_for("boats ● running", "now showing boats, which has just resumed; tab: back")
    seen.press("q")
    assert seen.end() == 0


def test_it_waits_for_a_run_that_is_being_planned(tmp_path, terminal):
    root = tmp_path / "runs"
    seen = terminal("monitor", "--runs-dir", str(root), columns=120)
    seen.wait_for("waiting for a run in")
    with planning(root):
        seen.wait_for("planning for 2 s")
        assert "waiting for a run in" not in seen.text
    assert not root.exists()
    seen.wait_for("waiting for a run in")
    with planning(root):
        finished = RunDir.create(root, "tiny", "fresh")
        finished.write_config("preset: tiny\n")
    seen.wait_for("fresh ● waiting")
    assert [path.name for path in root.iterdir()] == ["fresh"]


def test_a_run_that_was_named_stays(finished, terminal):
    seen = terminal("monitor", "over", "--interval", "0.1", "--runs-dir", str(finished.path.parent))
    seen.wait_for("over ● finished")
    run = RunDir.create(finished.path.parent, "tiny", "fresh")
    run.write_config("preset: tiny\n")
    run.write_status("running", attempt=1, step=5, total_steps=300)
    seen.wait_for("fresh  running")  # among the others
    assert "over ● finished" in seen.text


@pytest.mark.parametrize(
    ("answer", "colour"), [("ffff/ffff/ffff", b"38;2;107;112;128"), ("0/0/0", b"38;2;138;147;166")]
)
def test_colours_follow_what_the_terminal_says_about_its_background(finished, terminal, answer, colour):
    seen = terminal("monitor", "--runs-dir", str(finished.path.parent), COLORTERM="truecolor")
    seen.wait_for("over ● finished")
    assert b"\x1b]11;?\x1b\\" in seen.output
    begins = len(seen.output)
    seen.press(f"\x1b]11;rgb:{answer}\x1b\\?")  # and a key right behind it
    seen.wait_for("pause the display")
    seen.press("?")
    seen.wait_for("q quit")
    assert colour in seen.output[begins:]


def test_the_dashboard_in_the_terminal_of_the_training(tmp_path, terminal):
    """Before the first report, through keys and sizes, until Ctrl-C; then the terminal is as it was."""
    seen = terminal(
        "train", "--live", "--runs-dir", str(tmp_path), *SETTINGS, "--set=train.epochs=40000", columns=120, rows=36
    )
    seen.wait_for("● waiting", "Ctrl-C saves and stops", seconds=60)
    seen.wait_for("● running", "R@1 unseen", "Ctrl-C saves and stops", seconds=60)
    seen.press("2")
    seen.wait_for("R@1, R@5, R@10", seconds=3)
    seen.resize(80, 24)
    time.sleep(1)
    seen.press("1q?")  # it is no monitor that could be left
    seen.wait_for("Ctrl-C saves and stops", "pause the display", seconds=3)
    seen.press("?")
    seen.wait_for("● running", "cpu    ", seconds=3)
    seen.process.send_signal(signal.SIGINT)
    assert seen.end(30) == 130
    assert "--resume" in seen.text and seen.output.rindex(b"\x1b[?1049l") > seen.output.rindex(b"\x1b[?1049h")
    assert termios.tcgetattr(seen._slave) == seen.settings and b"Traceback" not in seen.output


@pytest.mark.parametrize("live", [[], ["--live"]], ids=["rows", "live"])
def test_a_terminal_that_is_closed_ends_the_training_well(tmp_path, terminal, live):
    """Saved, and with the exit code of a hang-up, though nothing can be said any more."""
    settings = (*SETTINGS, "--set=train.epochs=40000", "--name", "run")
    seen = terminal("train", *live, "--runs-dir", str(tmp_path), *settings, columns=120, rows=36)
    seen.wait_for("left", seconds=60)
    master, slave, seen._master, seen._slave = seen._master, seen._slave, -1, -1
    os.close(slave)
    os.close(master)
    time.sleep(1)  # something is written to it
    seen.process.send_signal(signal.SIGHUP)
    assert seen.end(30) == 129
    status = RunDir(tmp_path / "run").status()
    assert status is not None and status.state == "stopped"


def test_without_keys_to_read_training_prints_rows(tmp_path):
    done = piped("train", "--live", "--runs-dir", str(tmp_path), *SETTINGS, TTY_COMPATIBLE="1")
    assert done.returncode == 0 and "images/s" in done.stderr and "1049h" not in done.stderr


def wait_until_other(seen, before):
    deadline = time.monotonic() + 5
    while seen.text == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("way", ["q", "ctrl-c", "SIGTERM", "SIGHUP", "SIGQUIT"])
def test_the_terminal_is_left_as_it_was_found(finished, terminal, way):
    seen = terminal("monitor", "--runs-dir", str(finished.path.parent))
    seen.wait_for("over ● finished")
    assert termios.tcgetattr(seen._slave)[3] != seen.settings[3]  # keys come one by one
    if way.startswith("SIG"):
        seen.process.send_signal(getattr(signal, way))
    elif way == "q":
        seen.press("q")
    else:
        seen.process.send_signal(signal.SIGINT)
    assert seen.end() == {"q": 0, "ctrl-c": 130, "SIGTERM": 143, "SIGHUP": 129, "SIGQUIT": 131}[way]
    assert termios.tcgetattr(seen._slave) == seen.settings
    assert seen.output.rindex(b"\x1b[?1049l") > seen.output.rindex(b"\x1b[?1049h")
    assert seen.output.rindex(b"\x1b[?25h") > seen.output.rindex(b"\x1b[?25l")
    assert b"Traceback" not in seen.output


def test_no_colour_and_no_unicode(finished, terminal):
    environment = {"NO_COLOR": "1", "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    seen = terminal("monitor", "--runs-dir", str(finished.path.parent), columns=120, rows=36, **environment)
    seen.wait_for("over * finished", "###")
    seen.press("q")
    assert seen.end() == 0
    assert all(byte < 128 for byte in seen.output)
    assert not re.search(rb"\x1b\[(\d+;)*(3[0-8]|4[0-8]|9[0-7])(;\d+)*m", seen.output)  # no colours


def test_a_dashboard_of_every_size(finished, terminal):
    """From one character up: it never refuses, and never writes past the edge."""
    seen = terminal("monitor", "--interval", "0.1", "--runs-dir", str(finished.path.parent))
    seen.wait_for("over ● finished")
    for columns, rows, words in (
        (1, 1, "f"),
        (10, 2, "finished"),
        (29, 6, "finished over 300/300"),
        (30, 6, "over ● finished"),
        (40, 8, "loss 0.17"),
        (40, 10, "R@1 unseen 50%"),
        (79, 23, "╭─ R@1 unseen"),
        (110, 24, "20 steps, chance 3.30"),
        (200, 60, "5 retrieval"),
        (80, 24, "q quit"),
    ):
        seen.resize(columns, rows)
        seen.wait_for(words, seconds=5)
        assert seen.process.poll() is None


def piped(*arguments, timeout=60, **environment):
    command = [sys.executable, "-m", "clipctl", *arguments]
    plain = {key: value for key, value in os.environ.items() if key != "TTY_COMPATIBLE"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={**plain, **environment})


def test_piped_it_is_a_line_an_interval_until_the_end(tmp_path):
    trainer = start(tmp_path, *SETTINGS, "--set=train.epochs=120", "--name", "run")
    wait_for_epochs(RunDir(tmp_path / "run"), 1)
    done = piped("monitor", "--interval", "0.5", "--runs-dir", str(tmp_path))
    assert finish(trainer)[0] == 0
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and "\x1b" not in done.stdout
    assert len(lines) >= 2 and all(line.startswith("running  run  step") for line in lines[:-1])
    assert lines[-1].startswith("finished  run  step 360/360")


def test_once_for_a_trainer_that_hangs(tmp_path):
    """Asked once, the monitor takes the time that a verdict takes."""
    trainer = start(tmp_path, *SETTINGS, "--set=train.epochs=4000", "--name", "run")
    wait_for_epochs(RunDir(tmp_path / "run"), 1)
    os.killpg(trainer.pid, signal.SIGSTOP)
    started = time.monotonic()
    assert json.loads(piped("monitor", "--json", "--runs-dir", str(tmp_path)).stdout)["state"] == "stalled"
    assert time.monotonic() - started < 12
    os.killpg(trainer.pid, signal.SIGKILL)
    trainer.communicate()
    assert json.loads(piped("monitor", "--json", "--runs-dir", str(tmp_path)).stdout)["state"] == "crashed"


@pytest.mark.parametrize("page", ["overview", "metrics", "machine", "model", "retrieval"])
def test_a_picture_without_any_font(finished, tmp_path, page):
    path = tmp_path / "run.png"
    arguments = ("--png", str(path), "--page", page, "--theme", "light", "--runs-dir", str(finished.path.parent))
    assert piped("monitor", *arguments).returncode == 0
    picture = Image.open(path).convert("RGB")
    colours = picture.getcolors(2**24)
    assert picture.size == (1464, 888) and max(colours)[1] == (250, 250, 252) and len(colours) > 20


def test_a_picture_of_another_kind_is_refused(finished, tmp_path):
    done = piped("monitor", "--svg", str(tmp_path / "x.png"), "--runs-dir", str(finished.path.parent))
    assert done.returncode == 2 and "did you mean --png" in done.stderr and not (tmp_path / "x.png").exists()


def test_a_picture(finished, tmp_path):
    done = piped("monitor", "--svg", str(tmp_path / "run.svg"), "--runs-dir", str(finished.path.parent))
    text = (tmp_path / "run.svg").read_text(encoding="utf-8")
    assert done.returncode == 0 and text.startswith("<svg") and "finished" in text and "loss" in text
    assert "url(" not in text.replace("url(#", "")  # it asks nobody for a font


def test_a_picture_does_not_depend_on_the_terminal_and_has_the_background_of_its_theme(finished, tmp_path):
    root = str(finished.path.parent)
    bare = {"TERM": "dumb", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "NO_COLOR": "1"}
    for name, environment in (("one.svg", {"COLORTERM": "truecolor", "COLORFGBG": "0;15"}), ("other.svg", bare)):
        assert piped("monitor", "--svg", str(tmp_path / name), "--runs-dir", root, **environment).returncode == 0
    dark = (tmp_path / "one.svg").read_text(encoding="utf-8")
    assert dark == (tmp_path / "other.svg").read_text(encoding="utf-8") and 'fill="#161822"' in dark
    light = tmp_path / "light.svg"
    assert piped("monitor", "--svg", str(light), "--theme", "light", "--runs-dir", root).returncode == 0
    assert 'fill="#fafafc"' in light.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--once"], "there are no runs in"),
        (["--json"], "start one: clipctl train"),
        (["nothing", "--once"], "there is no run 'nothing'"),
        (["--all"], "there are no runs in"),
    ],
)
def test_nothing_to_show(tmp_path, arguments, complaint):
    done = piped("monitor", *arguments, "--runs-dir", str(tmp_path))
    assert done.returncode == 2 and complaint in done.stderr and "Traceback" not in done.stderr


def test_several_matches_and_a_directory_that_is_no_run(finished, tmp_path):
    RunDir.create(tmp_path, "tiny", "overt").write_config("preset: tiny\n")
    done = piped("monitor", "ove", "--once", "--runs-dir", str(tmp_path))
    assert done.returncode == 2 and "matches several runs: over, overt" in done.stderr
    done = piped("monitor", str(tmp_path), "--once", "--runs-dir", str(tmp_path))
    assert done.returncode == 2 and "Traceback" not in done.stderr


# --- background -----------------------------------------------------------------------------------------------


def test_a_detached_run_outlives_its_terminal_and_stops_when_asked(tmp_path, terminal):
    seen = terminal(
        "train",
        "--detach",
        "--runs-dir",
        str(tmp_path),
        "--name",
        "run",
        *SETTINGS,
        "--set=train.epochs=9000",
        columns=200,
    )
    seen.wait_for("in the background", "clipctl monitor", "clipctl stop", "train.log")
    assert seen.end() == 0
    seen.close()
    run = RunDir(tmp_path / "run")
    wait_for_epochs(run, 1)
    status = run.status()
    assert status is not None and psutil.pid_exists(status.pid)
    listed = json.loads(piped("runs", "--json", "--runs-dir", str(tmp_path)).stdout)["runs"]
    assert [(row["run"], row["state"]) for row in listed] == [("run", "running")]
    done = piped("stop", "run", "--runs-dir", str(tmp_path))
    assert done.returncode == 0 and "stopped at step" in done.stdout and "--resume" in done.stdout
    assert probe(status) == "dead"
    assert "images/s" in run.log_file.read_text()
    again = piped("stop", "run", "--runs-dir", str(tmp_path))
    assert again.returncode == 2 and "is not running" in again.stderr
    done = piped("train", "--resume", "--detach", "--runs-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    done = piped("stop", "--runs-dir", str(tmp_path))  # the only one that is running
    assert done.returncode == 0 and "stopping run" in done.stderr and "run stopped at step" in done.stdout
    resumed = run.status()
    assert resumed is not None and resumed.attempt == 2 and len(RunDir.all(tmp_path)) == 1


def test_a_detached_run_that_cannot_start_says_why_and_leaves_nothing(tmp_path):
    done = piped("train", "--detach", "--runs-dir", str(tmp_path), "--epochs", "x")
    assert done.returncode == 2 and "--epochs must be" in done.stderr and not list(tmp_path.iterdir())


def test_a_detached_run_as_a_document(tmp_path):
    done = piped("train", "--detach", "--json", "--runs-dir", str(tmp_path), *SETTINGS)
    document = json.loads(done.stdout)
    assert psutil.pid_exists(document["pid"]) or RunDir(tmp_path / document["run"]).status() is not None
    psutil.wait_procs([psutil.Process(document["pid"])] if psutil.pid_exists(document["pid"]) else [], timeout=60)


SLOW_DISK = """
import time
from clipctl.monitor import reader

poll, looks = reader.MetricsTail.poll, []

def slow(tail):
    looks.append(0)
    if len(looks) > 1:
        time.sleep(60)
    return poll(tail)

reader.MetricsTail.poll = slow
"""


def test_keys_work_while_a_slow_disk_is_read(terminal, finished, tmp_path):
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow/sitecustomize.py").write_text(SLOW_DISK)
    path = os.pathsep.join([str(tmp_path / "slow"), os.environ.get("PYTHONPATH", os.getcwd())])
    shown = terminal("monitor", str(finished.path), columns=120, rows=36, PYTHONPATH=path)
    shown.wait_for("overview", "chance")
    time.sleep(1.5)  # the second look has begun, and hangs
    for key, words in (
        ("2", "gradient norm"),
        ("3", "nothing measured yet"),
        ("5", "similarity"),
        ("p", "▀▀▀"),
        ("1", "chance"),
    ):
        shown.press(key)
        shown.wait_for(words, seconds=2)
    shown.press("q")
    assert shown.end(5) == 0
