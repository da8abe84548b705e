"""train --compile: the same training through torch.compile."""

import os
import signal
from dataclasses import replace

import pytest
import torch

from clipctl.errors import DeviceError
from clipctl.hardware.devices import open_device
from clipctl.model import compiling
from clipctl.runs.rundir import RunDir
from tests.faults.trainer import SETTINGS, digest, finish, start, start_anew, wait_for_epochs
from tests.test_training import changed, rows, run_training, weights


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """One place for what is compiled, made anew for these tests."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def _compiled_here(compiled, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    torch.compiler.reset()


@pytest.mark.parametrize("recompute", [False, True])
def test_one_block_is_compiled_for_all_and_computes_the_same(micro, tmp_path, monkeypatch, recompute):
    graphs = []
    compiled = compiling._inductor
    monkeypatch.setattr(compiling, "_inductor", lambda graph, inputs: graphs.append(graph) or compiled(graph, inputs))
    deep = replace(micro, model=replace(micro.model, image=replace(micro.model.image, depth=4)))
    deep = changed(deep, "runtime", precision="fp32")  # in bf16, compiled code rounds less often
    plain, _ = run_training(deep, tmp_path, "plain")
    assert not graphs
    asked = changed(deep, "runtime", compile=True, recompute=recompute)
    other, summary = run_training(asked, tmp_path, "compiled")
    assert len(graphs) == 2  # what `check_compiler` tries, and the block
    assert summary.steps == 6 and weights(other).keys() == weights(plain).keys()
    # Losses, not weights: where a gradient is all but zero, Adam makes a whole step of its rounding.
    losses, expected = ([row["loss"] for row in rows(run, "step")] for run in (other, plain))
    assert len(losses) == 6 and losses == pytest.approx(expected, rel=1e-4)


def test_a_stopped_compiled_run_goes_on_to_the_same_weights(tmp_path):
    settings = [*SETTINGS, "--set=model.image.depth=2", "--precision=fp32", "--compile"]
    assert finish(start(tmp_path, *settings, "--name", "whole"))[0] == 0
    process = start(tmp_path, *settings, "--name", "stopped")
    stopped = RunDir(tmp_path / "stopped")
    wait_for_epochs(stopped, 2)
    os.killpg(process.pid, signal.SIGINT)
    assert finish(process)[0] == 130
    assert finish(start(tmp_path, "--resume", "stopped"))[0] == 0
    assert digest(stopped) == digest(RunDir(tmp_path / "whole"))


def test_without_a_compiler_no_run_begins(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    code, _, stderr = finish(start_anew(tmp_path / "runs", *SETTINGS, "--compile"))
    assert code == 4 and "torch.compile does not work here: InvalidCxxCompiler" in stderr and "Traceback" not in stderr
    assert "leave --compile out" in stderr and not (tmp_path / "runs").exists()


def test_not_on_a_device_where_it_was_wrong():
    apple = replace(open_device("cpu"), label="mps", image=torch.device("mps"))
    with pytest.raises(DeviceError, match="--compile is for cpu and cuda, not mps"):
        compiling.check_compiler(apple)
