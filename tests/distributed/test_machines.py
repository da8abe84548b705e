"""Two machines with a slow network between them: the training ends, and tells what it must and no more."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clipctl.config.layers import Layer, resolve
from clipctl.model.communication import traffic
from clipctl.model.cost import workload_of
from clipctl.monitor.watch import RunWatcher
from clipctl.runs.rundir import RunDir
from clipctl.training.distributed import interface_to
from tests.conftest import MICRO
from tests.distributed.link import ADDRESSES, can_be_made, inside, two_machines
from tests.distributed.test_training import wait_for_step
from tests.test_training import rows

WIDER = {"model.image.width": 256, "model.image.depth": 2, "model.text.width": 256, "model.text.depth": 2}
SETTINGS = {**MICRO, **WIDER, "recipe": "plain", "train.epochs": 12, "train.eval_every": 12, "save.every": "100epochs"}
DELAY_S, STEPS = 0.02, 36
EXAMPLE = Path(__file__).parents[2] / "examples" / "two-laptops.sh"

pytestmark = pytest.mark.skipif(not can_be_made(), reason="network namespaces and TUN devices need root")


def start(root, side):
    values = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    command = [str(EXAMPLE), str(side), ADDRESSES[0], "--name", "far", "--json", "--runs-dir", str(root), *values]
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    return subprocess.Popen(
        [*inside(side), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if side else None,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": path},
    )


@pytest.fixture(scope="module")
def far(tmp_path_factory):
    """A run of two machines, and how many bytes each of them sent per step."""
    root = tmp_path_factory.mktemp("far")
    run, counts = RunDir(root / "far"), {}
    with two_machines(DELAY_S) as link:
        processes = [start(root, side) for side in (0, 1)]
        for step in (6, 30):
            wait_for_step(run, step, processes[0])
            counts[run.status().step] = list(link.sent_bytes)
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    (first, before), (last, after) = sorted(counts.items())
    return run, json.loads(outputs[0]), [(b - a) / (last - first) for a, b in zip(before, after, strict=True)]


def test_it_ends(far):
    _, summary, _ = far
    assert summary["state"] == "finished" and summary["steps"] == STEPS


def test_gradients_and_embeddings_cross_the_network_once(far):
    config = resolve([Layer("test", {**SETTINGS, "model.text.vocab_size": 30})])
    sent = traffic(workload_of(config, 60), 12, 2)
    for found in far[2]:
        assert found == pytest.approx(sent.total_bytes, rel=0.1)


def test_the_monitor_shows_the_waiting(far):
    run, _, _ = far
    view = RunWatcher(run).look(time.monotonic()).view
    assert sorted(view.ranks) == [0, 1] and all(0.05 < one.wait_share < 1 for one in view.ranks.values())
    assert all(row["wait_s"] >= DELAY_S for row in rows(run, "step")[1:])


def test_the_interface_that_reaches_an_address():
    assert interface_to("127.0.0.1") == "lo" and interface_to("no such machine.") is None
