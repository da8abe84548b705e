"""Tests that need the fake device, in a process of their own. There is no way back from a registered device: torch
would offer it to all other tests, and its backward pass works only if it was there before torch's first one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MICRO

HERE = Path(__file__).parent


@pytest.mark.parametrize("cases", sorted(HERE.glob("cases_*.py")), ids=lambda path: path.stem)
def test_with_the_fake_device(cases):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(cases)]
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_training_in_a_process_of_its_own(tmp_path):
    settings = [f"--set={key}={value}" for key, value in {**MICRO, "train.epochs": 1}.items()]
    command = [sys.executable, "-m", "tests.devices.fake", "train", "--device", "fake", "--workers", "0", *settings]
    environment = {**os.environ, "CLIPCTL_TEST_FAKE": json.dumps({"launch_s": 1e-6, "faults": ["rounding"]})}
    where = ["--runs-dir", str(tmp_path), "--name", "run"]
    done = subprocess.run([*command, *where], cwd=HERE.parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/environment.json").read_text())["device"]["name"] == "Fake accelerator"
