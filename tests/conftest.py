import os
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest
import torch

from clipctl.config.layers import Layer, resolve
from clipctl.config.sections import TrainConfig
from clipctl.data import decoding
from clipctl.training.session import Session

# Plain text from Rich whatever the surroundings are.
os.environ.update(TTY_COMPATIBLE="0", COLUMNS="100")
for name in [name for name in os.environ if name.startswith("CLIPCTL_")] + ["FORCE_COLOR", "GITHUB_ACTIONS"]:
    os.environ.pop(name, None)
# Started by nohup or by a job runner, processes ignore SIGHUP, and so would every training that is started here.
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# What is measured while testing stays out of the user's application directory.
os.environ["CLIPCTL_HOME"] = tempfile.mkdtemp(prefix="clipctl-test-home-")

# The smallest model and data that still exercise every part.
MICRO = {
    "model.image.size_px": 16,
    "model.image.patch_px": 8,
    "model.image.width": 16,
    "model.image.depth": 1,
    "model.image.heads": 2,
    "model.text.width": 16,
    "model.text.depth": 1,
    "model.text.heads": 2,
    "model.embed_dim": 16,
    "data.source": "synthetic:40",
    "train.batch_size": 12,
    "train.epochs": 2,
    "runtime.threads": 1,
    "runtime.precision": "fp32",  # what is measured depends on what else runs
}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch) -> None:
    """Tests run beside each other; what they measure is kept all the same, unless a test is about that."""
    monkeypatch.setattr("clipctl.training.choice.OtherLoad.cores", lambda self: 0.0)


@pytest.fixture
def without_heif(monkeypatch) -> Iterator[None]:
    """As if pillow-heif were not installed."""
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    decoding.reads_heif.cache_clear()
    yield
    decoding.reads_heif.cache_clear()


@pytest.fixture
def micro() -> TrainConfig:
    return resolve([Layer("test", MICRO)])


def train(plan, run, watcher=None, *, resume_from=None):
    """Carry out a plan in a run directory, without looking at memory, disk and device again."""
    return Session(plan, run.path.parent, run=run, checkpoint=resume_from, is_checked=True).train(watcher)
