"""`clipctl train --nproc N`: the same training in several processes, whatever happens to one of them."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file

from clipctl.runs.checkpoint import MODEL, OPTIMIZER
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from tests.conftest import MICRO
from tests.distributed.test_gradients import apart
from tests.test_training import rows

SETTINGS = {**MICRO, "recipe": "plain", "train.epochs": 12, "train.eval_every": 3, "save.every": "7steps"}
GONE_S = 60.0


def command(root, *words, settings=SETTINGS):
    values = [f"--set={key}={value}" for key, value in settings.items() if key != "data.source"]
    data = [settings["data.source"]] if "--resume" not in words else []
    return [sys.executable, "-m", "clipctl", "train", *data, "--runs-dir", str(root), *words, *values]


def run_to_end(root, *words, settings=SETTINGS):
    return subprocess.run(
        command(root, *words, settings=settings), capture_output=True, text=True, timeout=300, env=surroundings()
    )


def surroundings():
    return {**os.environ, "CLIPCTL_DEBUG": "1"}


def weights(run):
    return load_file(CheckpointStore(run).newest_valid()[0].file(MODEL))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def alone(root):
    done = run_to_end(root, "--name", "alone", "--json")
    assert done.returncode == 0, done.stderr
    return RunDir(root / "alone"), json.loads(done.stdout)


@pytest.fixture(scope="module")
def together(root):
    done = run_to_end(root, "--name", "together", "--nproc", "2", "--json")
    assert done.returncode == 0, done.stderr
    return RunDir(root / "together"), json.loads(done.stdout)


def test_two_processes_end_where_one_does(alone, together):
    (one, alone_says), (two, together_says) = alone, together
    assert together_says["steps"] == alone_says["steps"]
    assert together_says["loss"] == pytest.approx(alone_says["loss"], rel=1e-4)
    assert apart(weights(two), weights(one)) <= 1e-4


def test_each_step_is_written_once_with_the_whole_batch(alone, together):
    one, two = (rows(run, "step") for run, _ in (alone, together))
    assert [row["step"] for row in two] == [row["step"] for row in one]
    assert [row["batch_size"] for row in two] == [row["batch_size"] for row in one]
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-3)
    assert all("wait_s" in row and "communication_s" in row for row in two)


@pytest.mark.parametrize("batch_size", [12, 36])
def test_waiting_is_a_part_of_the_time(root, batch_size):
    """With a batch of 36, each epoch is one."""
    run = RunDir(root / f"waits-{batch_size}")
    settings = {**SETTINGS, "train.batch_size": batch_size, "train.epochs": 400, "train.eval_every": 40}
    done = run_to_end(root, "--name", run.name, "--nproc", "2", settings=settings)
    assert done.returncode == 0, done.stderr
    steps, ranks = rows(run, "step"), rows(run, "rank")
    assert all(row["data_s"] >= 0 and 0 < row["wait_s"] <= row["step_s"] for row in steps)
    assert {row["rank"] for row in ranks} == {0, 1} and all(0 < row["wait_share"] <= 1 for row in ranks)
    assert len(ranks) / 2 <= 1 + ranks[-1]["elapsed_s"], "at most one a second"


def test_evaluations_agree(alone, together):
    one, two = (rows(run, "eval") for run, _ in (alone, together))
    assert [row["step"] for row in two] == [row["step"] for row in one]
    assert [row["val_loss"] for row in two] == pytest.approx([row["val_loss"] for row in one], rel=1e-3)


def start(root, *words, settings=SETTINGS):
    return subprocess.Popen(
        command(root, *words, settings=settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=surroundings(),
    )


def ranks_of(process):
    """The processes that train, by rank."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            environment = child.environ()
        except psutil.Error:
            continue
        if "RANK" in environment and "clipctl" in " ".join(child.cmdline()):
            found[int(environment["RANK"])] = child
    return found


def wait_for_step(run, step, process):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        status = run.status()
        if status is not None and status.step >= step:
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate()[0])


LONG = {**SETTINGS, "train.epochs": 150, "train.eval_every": 30}
SHORTER = {**LONG, "train.epochs": 40}


@pytest.fixture(scope="module")
def unbroken(root):
    done = run_to_end(root, "--name", "unbroken", "--nproc", "2", settings=LONG)
    assert done.returncode == 0, done.stderr
    return RunDir(root / "unbroken")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_all_and_nothing_is_lost(root, unbroken, victim):
    run = RunDir(root / f"killed-{victim}")
    process = start(root, "--name", run.name, "--nproc", "2", settings=LONG)
    wait_for_step(run, random.Random(victim).randrange(20, 200), process)
    ranks = ranks_of(process)
    assert sorted(ranks) == [0, 1]
    ranks[victim].send_signal(signal.SIGKILL)
    killed_s = time.monotonic()
    output, _ = process.communicate(timeout=GONE_S)
    assert time.monotonic() - killed_s < GONE_S and process.returncode != 0
    assert not any(psutil.pid_exists(one.pid) and one.status() != psutil.STATUS_ZOMBIE for one in ranks.values())
    assert_resumed_to(unbroken, run, output)


def assert_resumed_to(unbroken, run, output):
    """Resumed, it ends with the same bits."""
    done = run_to_end(run.path.parent, "--resume", run.name, "--nproc", "2", settings={})
    assert done.returncode == 0, (output, done.stderr)
    found = weights(run)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(unbroken).items())


@pytest.fixture(scope="module")
def stopped(root):
    """A run of two, of which the second was told to stop: its exit code and what it said."""
    run = RunDir(root / "stopped")
    process = start(root, "--name", run.name, "--nproc", "2", settings=LONG)
    wait_for_step(run, 20, process)
    ranks_of(process)[1].send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=GONE_S)
    return run, process.returncode, output


def test_a_stop_of_any_process_saves_and_stops_all(stopped):
    run, code, output = stopped
    assert code == 143 and f"--resume {run.path}" in output, output
    status = run.status()
    assert status.state == "stopped" and CheckpointStore(run).newest_valid()[0].step == status.step


def test_the_launcher_gives_processes_time_to_save(root):
    """torch would kill them after 30 s, whatever step they are in."""
    process = start(root, "--name", "patient", "--nproc", "2", settings=LONG)
    wait_for_step(RunDir(root / "patient"), 3, process)
    variables = [one.environ() for one in ranks_of(process).values()]
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=GONE_S)
    assert process.returncode == 130 and "saved" in output and "death signal" not in output, output
    assert all(int(one["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) >= 600 for one in variables)


def test_a_loader_worker_killed_in_another_process_is_named(root):
    process = start(root, "--name", "worker", "--nproc", "2", "--workers", "1", settings=LONG)
    wait_for_step(RunDir(root / "worker"), 10, process)
    second = ranks_of(process)[1]
    victim = next(one for one in second.children() if "resource_tracker" not in " ".join(one.cmdline()))
    victim.kill()
    output, _ = process.communicate(timeout=GONE_S)
    assert process.returncode != 0
    assert f"error: process 1 on {socket.gethostname()}: loader worker 0 (process {victim.pid}) ended" in output, output
    assert output.count("\nerror:") + output.startswith("error:") == 2, "and rank 0 says that it is alone"


def test_resumed_with_another_number_it_goes_on_at_the_same_sample(root, stopped, unbroken):
    run, _, _ = stopped
    done = run_to_end(root, "--resume", run.name, settings={})
    assert done.returncode == 0, done.stderr
    assert apart(weights(run), weights(unbroken)) <= 1e-3


def test_a_batch_that_is_too_small_for_the_processes(root):
    done = run_to_end(root, "--nproc", "4", settings={**SETTINGS, "train.batch_size": 3})
    assert done.returncode == 2 and "--batch-size 3 is too small for 4 processes" in done.stderr


def test_a_plan_for_several_processes(root):
    done = run_to_end(root, "--nproc", "2", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "processes" in done.stdout and "micro-batches" not in done.stdout


def test_a_plan_under_torchrun(root):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [sys.executable, *launcher, *command(root, "--dry-run")[1:]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=surroundings())
    assert done.returncode == 0 and done.stdout.count("2 training together") == 1, done.stderr


def test_an_apple_gpu_is_for_one_process(root):
    done = run_to_end(root, "--nproc", "2", "--device", "mps", "--dry-run")
    assert done.returncode == 4 and "Apple's GPU cannot be shared by several processes" in done.stderr


# --- the model split among the processes ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(root):
    done = run_to_end(root, "--name", "sharded", "--nproc", "2", "--shard", "--json")
    assert done.returncode == 0, done.stderr
    return RunDir(root / "sharded"), json.loads(done.stdout)


def test_a_split_model_ends_where_a_whole_one_does(alone, sharded):
    (one, alone_says), (two, sharded_says) = alone, sharded
    assert sharded_says["steps"] == alone_says["steps"]
    assert apart(weights(two), weights(one)) <= 1e-4
    norms = [[row["grad_norm"] for row in rows(run, "step")] for run in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    blocks = [rows(run, "epoch")[-1]["grad_norm_by_block"] for run in (one, two)]
    assert blocks[1] == pytest.approx(blocks[0], rel=1e-2)


def test_checkpoints_are_the_same_files(together, sharded):
    files = [CheckpointStore(run).newest_valid()[0] for run, _ in (together, sharded)]
    for name in (MODEL, OPTIMIZER):
        plain, whole = (load_file(one.file(name)) for one in files)
        assert {key: tensor.shape for key, tensor in whole.items()} == {k: tensor.shape for k, tensor in plain.items()}


@pytest.fixture(scope="module")
def sharded_unbroken(root):
    done = run_to_end(root, "--name", "sharded-unbroken", "--nproc", "2", "--shard", settings=SHORTER)
    assert done.returncode == 0, done.stderr
    return RunDir(root / "sharded-unbroken")


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_and_resumed_a_split_model_ends_with_the_same_bits(root, sharded_unbroken, victim):
    run = RunDir(root / f"sharded-killed-{victim}")
    process = start(root, "--name", run.name, "--nproc", "2", "--shard", settings=SHORTER)
    wait_for_step(run, 40, process)
    ranks_of(process)[victim].send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=GONE_S)
    assert process.returncode != 0
    assert_resumed_to(sharded_unbroken, run, output)


def test_a_stop_saves_all_parts_and_one_process_goes_on(root):
    run = RunDir(root / "sharded-stopped")
    process = start(root, "--name", run.name, "--nproc", "2", "--shard", settings=LONG)
    wait_for_step(run, 20, process)
    ranks_of(process)[1].send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=GONE_S)
    assert process.returncode == 143, output
    assert CheckpointStore(run).newest_valid()[0].step == run.status().step
    done = run_to_end(root, "--resume", run.name, "--epochs", "60", settings={})
    assert done.returncode == 0 and "--shard has no effect in one process" in done.stderr, done.stderr


def test_what_does_not_go_with_shards(root):
    done = run_to_end(root, "--nproc", "2", "--shard", "--compile", "--dry-run")
    assert done.returncode == 2 and "--shard cannot be combined with --compile" in done.stderr
