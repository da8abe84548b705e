"""Several processes embed and judge as one does."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from clipctl.config.layers import Layer, resolve
from clipctl.inference.embedding_store import EmbeddingStore
from clipctl.runs.rundir import RunDir
from clipctl.training.plan import make_plan
from tests.conftest import MICRO, train
from tests.test_use import COLOURS, draw


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Pictures, one of them broken, and a model."""
    root = tmp_path_factory.mktemp("use")
    for colour in COLOURS:
        for number in range(60):
            draw(root / "photos" / colour / f"{number:02d}.png", colour, number)
    (root / "photos" / "red" / "99.png").write_bytes(b"no picture")
    run = RunDir.create(root / "runs", "tiny", "colours")
    train(make_plan(resolve([Layer("test", {**MICRO, "train.epochs": 2})])), run)
    run.release()
    return root


def clipctl(place, *words):
    command = [sys.executable, "-m", "clipctl", *words, "--runs-dir", "runs", "--json"]
    return subprocess.run(
        command, cwd=place, env={**os.environ, "CLIPCTL_DEBUG": "1"}, capture_output=True, text=True, timeout=300
    )


def test_an_index_of_several_processes_is_that_of_one(place):
    alone, together = (
        clipctl(place, "embed", "colours", "photos", "-o", name, "--dtype", "float32", *more)
        for name, more in (("one", []), ("two", ["--nproc", "2"]))
    )
    assert alone.returncode == together.returncode == 0, together.stderr
    said = [json.loads(done.stdout) for done in (alone, together)]
    assert said[1]["pictures"] == said[0]["pictures"] == 180 and said[1]["bad"] == said[0]["bad"] != []
    one, two = (EmbeddingStore.open(place / name) for name in ("one", "two"))
    assert two.all_pictures() == one.all_pictures()
    np.testing.assert_allclose(two.vectors, one.vectors, atol=1e-5)
    again = clipctl(place, "embed", "colours", "photos", "-o", "two", "--dtype", "float32", "--nproc", "3")
    assert again.returncode == 0 and json.loads(again.stdout)["embedded"] == 0, again.stderr


def test_several_processes_judge_as_one_does(place):
    alone, together = (clipctl(place, "eval", "colours", *more) for more in ([], ["--nproc", "2"]))
    assert alone.returncode == together.returncode == 0, together.stderr
    one, two = (json.loads(done.stdout) for done in (alone, together))
    assert {key: two[key] for key in two if "_r" in key} == {key: one[key] for key in one if "_r" in key}
    assert two["pictures"] == one["pictures"] and two["calibration"] == pytest.approx(one["calibration"], abs=1e-4)


def test_what_is_wrong_is_said_once(place):
    done = clipctl(place, "embed", "colours", "nowhere", "-o", "three", "--nproc", "2")
    assert done.returncode == 2 and done.stderr.count("\nerror:") == 1 and "nowhere" in done.stderr, done.stderr
    assert not (place / "three").exists()
