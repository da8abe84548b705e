"""The command line as a person uses it: real processes for what depends on the process, a runner for the rest."""

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from clipctl.cli.app import app
from clipctl.cli.output import aligned
from clipctl.cli.talk import TerminalWatcher
from clipctl.cli.views import units
from clipctl.cli.views.training import RowRhythm
from clipctl.hardware import devices
from clipctl.monitor.watch import RunWatcher
from clipctl.runs.rundir import RunDir
from clipctl.training.journal import Progress
from tests.conftest import MICRO
from tests.launcher import launch
from tests.test_monitor import Writer

SETTINGS = [argument for key, value in MICRO.items() for argument in ("--set", f"{key}={value}")]


def clipctl(*arguments, cwd="."):
    """Run the real program."""
    process = launch("clipctl", *arguments, cwd=cwd)
    stdout, stderr = process.communicate(timeout=120)
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def invoke(*arguments, **environment):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)


# --- training -------------------------------------------------------------------------------------------------


def test_train_writes_a_run_and_prints_its_score(tmp_path):
    command = [sys.executable, "-m", "clipctl", "train", *SETTINGS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["batch_size"] == 12
    assert "unseen pictures matched" in done.stdout and run.name in done.stdout
    assert "images/s" in done.stderr and "\x1b" not in done.stderr + done.stdout
    assert [line for line in done.stderr.splitlines() if line != line.rstrip()] == []


@pytest.mark.parametrize(("pictures", "commands"), [("synthetic:40", 4), ("synthetic:2000", 3)])
def test_what_was_just_done_is_not_suggested_next(tmp_path, pictures, commands):
    settings = [f"--set={key}={value}" for key, value in MICRO.items() if key not in ("data.source", "train.epochs")]
    done = clipctl("train", pictures, *settings, "--steps", "1", cwd=tmp_path)
    assert "1: 1 epoch of " in done.stderr and ": 1 step, " in done.stdout
    assert done.stdout.count("\n  clipctl ") == commands, done.stderr


def test_json_is_one_document_on_stdout(tmp_path):
    done = clipctl("train", *SETTINGS, "--json", "--runs-dir", "elsewhere", "--name", "mine", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert document["schema"] == "clipctl.train/1"
    keys = "run state device parameters steps epochs seconds images_per_s loss i2t_r1 t2i_r1 best_i2t_r1 best_t2i_r1"
    assert set(keys.split()) | {"peak_memory_bytes"} <= set(document)
    assert document["run"] == os.path.join("elsewhere", "mine") and document["state"] == "finished"


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path):
    done = clipctl("train", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0
    for text in ("parameters", "216 pictures", "24 held out", "device", "chance loss", "activations"):
        assert text in done.stdout
    if devices.labels() == ["cpu"]:
        assert "no accelerator found" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_flags_beat_the_environment_which_beats_the_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("optim: {lr: 1e-4}\ntrain: {epochs: 7, batch_size: 9}\n")
    arguments = ["train", "--dry-run", "--json", "--config", file]
    document = json.loads(invoke(*arguments, "--lr", "3e-4", CLIPCTL_LR="2e-4", CLIPCTL_EPOCHS="5").stdout)
    assert document["config"]["optim"]["lr"] == 3e-4
    assert document["config"]["train"]["epochs"] == 5
    assert document["config"]["train"]["batch_size"] == 9


@pytest.mark.parametrize(
    ("in_file", "flags", "steps", "note"),
    [
        ("steps: 9", ["--epochs", "3"], 81, "note: --epochs 3 replaces train.steps 9 from length.yaml"),
        ("epochs: 3", ["--steps", "9"], 9, "note: --steps 9 replaces train.epochs 3 from length.yaml"),
        ("steps: 9\n  epochs: 3", [], 9, None),
        ("steps: 9\n  epochs: 3", ["--set", "train.epochs=2"], 54, "replaces train.steps 9"),
    ],
)
def test_a_flag_beats_the_other_length_of_a_file(tmp_path, monkeypatch, in_file, flags, steps, note):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "length.yaml").write_text(f"train:\n  batch_size: 8\n  {in_file}\n")
    done = invoke("train", "--dry-run", "--json", "--config", "length.yaml", *flags)
    assert json.loads(done.stdout)["steps"] == steps
    assert note in done.stderr if note else "note:" not in done.stderr


def test_a_flag_beats_the_other_length_of_the_environment():
    done = invoke("train", "--dry-run", "--json", "--epochs", "2", "--batch-size", "8", CLIPCTL_STEPS="9")
    assert json.loads(done.stdout)["steps"] == 54
    assert "note: --epochs 2 replaces train.steps 9 from CLIPCTL_STEPS" in done.stderr


def test_a_large_batch_shrinks_and_says_so():
    done = invoke("train", "--dry-run", "--batch-size", "1e4")
    assert done.exit_code == 0 and "larger than the 216 training pairs: using 216" in done.stdout


# --- mistakes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "texts"),
    [
        (["--preset", "tinny"], 2, ["unknown preset 'tinny'", "did you mean tiny?"]),
        (["--set", "optim.lrr=1"], 2, ["unknown key optim.lrr", "did you mean optim.lr?"]),
        (["--set", "optim.lr"], 2, ["is not KEY=VALUE"]),
        (["--device", "gpu"], 2, ["unknown device 'gpu'", "available: auto, cpu"]),
        (["--precision", "fp8"], 2, ["one of auto, fp32, bf16"]),
        (["--epochs", "-3"], 2, ["--epochs must be between 1 and 1,000,000, got '-3'\n"]),
        (["--batch-size", "1"], 2, ["--batch-size must be between 2"]),
        (["--lr", "fast", "--seed", "x"], 2, ["--lr must be a number", "--seed must be a whole number"]),
        (["--set", "train.epochs=0"], 2, ["train.epochs must be between 1 and 1,000,000, got '0' (--set)"]),
        (["--micro-batch", "9", "--batch-size", "4"], 2, ["--micro-batch 9 is larger than --batch-size 4"]),
        (["--steps", "9", "--epochs", "3"], 2, ["--epochs 3 and --steps 9 both say how long to train", "choose one"]),
        (["--steps=9", "--set=train.epochs=3"], 2, ["--set train.epochs=3 and --steps 9 both say"]),
        (["--config", "missing.yaml"], 2, ["no such config file: missing.yaml"]),
        (["--name", "a/b"], 2, ["is not a valid run name"]),
        (["no-such-folder"], 2, ["no such file or directory", "no-such-folder"]),
        (["--no-such-flag"], 2, ["--no-such-flag"]),
        (["--preset", "huge", "--batch-size", "200", "--micro-batch", "200"], 4, ["training needs about", "hint:"]),
    ],
)
def test_mistakes_are_explained(tmp_path, monkeypatch, arguments, code, texts):
    monkeypatch.chdir(tmp_path)
    done = invoke("train", *arguments)
    assert done.exit_code == code
    for text in texts:
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_device_ends_with_4():
    import torch

    if torch.backends.mps.is_available():
        pytest.skip("this machine has an Apple GPU")
    command = [sys.executable, "-m", "clipctl", "train", "--device", "mps"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 4
    assert "error: device mps is not available on this machine" in done.stderr and "available: auto, cpu" in done.stderr


def test_a_run_that_exists_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("preset: tiny\n")
    done = invoke("train", *SETTINGS, "--runs-dir", tmp_path, "--name", "mine")
    assert done.exit_code == 2 and "run already exists" in done.stderr
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["config.yaml"]


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = invoke("train", *SETTINGS, "--runs-dir", tmp_path / "file" / "runs")
    assert done.exit_code == 2 and "cannot create a run" in done.stderr and "--runs-dir" in done.stderr


def test_a_read_only_disk_is_called_that_and_not_full(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    monkeypatch.setattr("clipctl.hardware.disk.free_bytes", lambda path: 0)
    done = invoke("train", *SETTINGS, "--runs-dir", tmp_path)
    assert done.exit_code == 2 and f"cannot create a run in {tmp_path}: Read-only file system" in done.stderr
    assert "free" not in done.stderr and "--runs-dir DIRECTORY" in done.stderr


def test_an_unexpected_failure_is_no_traceback_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("clipctl.training.session.plan_by_recipe", lambda *_, **__: 1 / 0)
    done = invoke("train")
    assert done.exit_code == 1 and "ZeroDivisionError" in done.stderr and "Traceback" not in done.stderr
    assert "Traceback" in invoke("train", CLIPCTL_DEBUG="1").stderr


def test_ctrl_c_ends_with_130(tmp_path):
    import signal

    process = launch("clipctl", "train", *SETTINGS, "--set", "train.epochs=100000", "--name", "mine", cwd=tmp_path)
    assert process.stderr is not None
    for line in process.stderr:
        if "/100000" in line:
            break
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in stderr and "error" not in stderr
    stopped = r"^stopped at step [\d,]+ of [\d,]+, saved. To continue: clipctl train --resume mine$"
    assert re.search(stopped, stderr, re.M)
    assert json.loads((tmp_path / "runs/mine/run.json").read_text())["state"] == "stopped"


def test_the_bar_shows_the_time_left(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with TerminalWatcher(console, RunDir(tmp_path)) as watcher:
        watcher.progress(Progress(100, 400, 1, 4, 2.5, 0.5, 80.0, eta_s=200.0, evaluation=None))
        watcher._bar.refresh()
    assert "3:20 left" in console.file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "epochs", "most", "least"),
    [(60, 12, 14, 8), (60, 400, 14, 8), (250, 12, 40, 24), (36000, 90, 900, 600)],
)
def test_rows_are_as_many_as_a_person_reads(seconds, epochs, most, least):
    """A report every two seconds, and an evaluation at the end of every epoch."""
    rhythm, shown, evaluations = RowRhythm(), 0, [object() for _ in range(epochs + 1)]
    for now_s in range(0, seconds + 1, 2):
        step = 1000 * now_s // seconds
        evaluation = evaluations[epochs * now_s // seconds]
        shown += rhythm.is_due(Progress(step, 1000, 1, epochs, 2.5, 0.5, 80.0, 9.0, evaluation), now_s)
    assert least <= shown <= most


def test_a_run_far_slower_than_planned_says_so_once_while_it_runs(tmp_path):
    run = RunDir.create(tmp_path, "tiny", "run")
    run.write_config("preset: tiny\n")
    run.write_environment({"planned_step_s": {"value": 0.01, "low": 0.01, "high": 0.02}})
    Writer(run.metrics_file, "run").steps(1, 30)
    run.write_status("running", attempt=1, step=30, total_steps=400)
    console = Console(file=io.StringIO(), width=200)
    with TerminalWatcher(console, run) as watcher:
        for step in (30, 400):
            watcher.progress(Progress(step, 400, 1, 4, 2.5, 0.5, 80.0, eta_s=200.0, evaluation=None))
    (warning,) = [line for line in console.file.getvalue().splitlines() if line.startswith("warning")]
    (alert,) = [one for one in RunWatcher(run).look(0.0).alerts if one.name == "slower_than_planned"]
    assert warning == f"warning: {alert.what}: {alert.why}; {alert.todo}" and "0.1 s, 5 times" in warning


# --- start-up -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_does_not_import_torch(arguments):
    code = (
        "import sys, runpy; sys.argv = ['clipctl', *sys.argv[1:]]\n"
        "try: runpy.run_module('clipctl', run_name='__main__')\n"
        "except SystemExit as end: code = end.code\n"
        "sys.exit(code or int('torch' in sys.modules) * 7)"
    )
    assert subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True).returncode == 0


def test_no_command_shows_the_commands():
    assert "train" in invoke().output


@pytest.mark.parametrize("words", [["--help"], ["runs"], ["checkpoint", "list"], ["monitor", "--once"]])
def test_commands_start_without_what_they_do_not_need(words, tmp_path):
    code = (
        "import sys\nfrom clipctl.cli.app import app\n"
        "try:\n    app(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "sys.exit(bool({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (None, "–"),
        (0, "0%"),
        (1 / 20_000, "0.005%"),
        (1 / 200, "0.5%"),
        (0.01, "1%"),
        (1 / 24, "4%"),
        (1, "100%"),
    ],
)
def test_a_share_below_one_per_cent_is_not_called_nothing(share, words):
    assert units.percent(share) == words


# --- narrow terminals -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_run(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    invoke("train", *SETTINGS, "--runs-dir", root, "--name", "a-run-with-a-rather-long-name")
    return root


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ("runs", ["a-run-with-a-rather-long-name\n    state finished, steps 6 of 6,\n"]),
        ("checkpoint list", ["\n    step 6, epoch 2", "best, last"]),
        ("recommend-device --params 150M", ["what would change it\nTiny\n    parameters below 10M,"]),
        ("bench --sizes 1e4 --suites elementwise --dtypes fp32 --threads 1", ["add\n    size 1e4, on cpu fp32"]),
        ("data inspect synthetic:50", ["pictures    50: 45 to train on"]),
        ("eval a-run", ["\n    direction picture to caption,", "guessing"]),
    ],
)
def test_tables_fit_40_columns(words, texts, one_run):
    done = invoke(*words.split(), COLUMNS="40", CLIPCTL_RUNS=str(one_run))
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 40
    for text in texts:
        assert text in done.stdout


def test_a_table_in_a_pipe_has_one_line_per_row(monkeypatch):
    monkeypatch.delenv("COLUMNS")
    rows = [("run", "state"), ("a" * 100, "finished")]
    assert len(aligned(rows).plain.splitlines()) == 2


# --- completion -----------------------------------------------------------------------------------------------

COMPLETIONS = {
    "bash": "source {script}; COMP_WORDS=(clipctl {words}); COMP_CWORD={last}; _clipctl; "
    'printf "%s\\n" "${{COMPREPLY[@]}}"',
    "fish": 'source {script}; complete -C "clipctl {words}"',
    # zsh completes only at a prompt; there the words that would be offered are caught.
    "zsh": "compdef() {{ :; }}; compadd() {{ shift; print -l -- $@; }}; _files() {{ :; }}; source {script}; "
    "words=(clipctl {words}); CURRENT=$#words; _clipctl",
}


@pytest.mark.parametrize("shell", COMPLETIONS)
@pytest.mark.parametrize(
    ("words", "offered"),
    [("checkpoint v", "verify"), ("train --batch", "--batch-size"), ("recommend-device --par", "--params")],
)
def test_shells_complete_commands_and_options(shell, words, offered, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(invoke("completion", shell).stdout)
    code = COMPLETIONS[shell].format(script=script, words=words, last=len(words.split()))
    done = subprocess.run([shell, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert offered in [line.split("\t")[0] for line in done.stdout.splitlines()], done.stderr


def test_an_unknown_shell_is_refused():
    done = invoke("completion", "tcsh")
    assert done.exit_code == 2 and "shells: bash, zsh, fish" in done.stderr


def test_a_detached_run_is_named_after_the_preset_in_the_config_file(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("clipctl.cli.background.start", lambda root, preset, *_, **__: asked.append(preset))
    file = tmp_path / "config.yaml"
    file.write_text("preset: small\n")
    invoke("train", "--detach", "--config", file)
    invoke("train", "--detach", "--config", file, "--preset", "base")
    assert asked == ["small", "base"]
