"""A real training process, and what it must come to."""

import hashlib
import json
import subprocess
import sys
import time

from clipctl.runs.checkpoint import MODEL, OPTIMIZER, STATE
from clipctl.runs.store import CheckpointStore
from tests.conftest import MICRO
from tests.launcher import PIPES, launch

SETTINGS = [f"--set={key}={value}" for key, value in {**MICRO, "train.epochs": 8, "save.every": "1e"}.items()]
TOTAL_STEPS = 24


def start(root, *arguments, workers=0):
    return launch(*words(root, *arguments, workers=workers))


def start_anew(root, *arguments, workers=0):
    """By a Python of its own, where it matters how a process starts or that it has nothing in common with others."""
    command = [sys.executable, "-m", *words(root, *arguments, workers=workers)]
    return subprocess.Popen(command, start_new_session=True, **PIPES)


def words(root, *arguments, workers):
    return ["clipctl", "train", "--runs-dir", str(root), f"--workers={workers}", *arguments]


def finish(process):
    stdout, stderr = process.communicate(timeout=120)
    return process.returncode, stdout, stderr


def digest(run, last_step=TOTAL_STEPS):
    """Of everything that going on depends on: weights, moments, random states, position."""
    last = CheckpointStore(run).last()
    assert last is not None and last.step == last_step
    contents = [(last.path / name).read_bytes() for name in (MODEL, OPTIMIZER)]
    state = json.loads((last.path / STATE).read_text())
    return hashlib.sha256(b"".join(contents)).hexdigest(), state["step"], state["evaluated_epochs"], state["evaluation"]


def wait_for_epochs(run, epochs):
    """Until metrics.jsonl shows that many epochs, those of earlier attempts included."""
    wait_until(
        lambda: run.metrics_file.exists() and run.metrics_file.read_text().count('"kind":"epoch"') >= epochs, 0.005
    )


def wait_until(condition, pause_s=0.0):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the run did not get there"
        time.sleep(pause_s)
