"""What keeps processes from meeting, or from training together: each is said once, by rank 0."""

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from clipctl.runs.rundir import RunDir
from tests.conftest import MICRO
from tests.distributed.test_training import ranks_of, wait_for_step

SETTINGS = {**MICRO, "recipe": "plain", "train.epochs": 4}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def surroundings(rank, port, **more):
    """What torchrun tells a process."""
    facts = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    return {**os.environ, **{name: str(value) for name, value in {**facts, **more}.items()}, "MASTER_ADDR": "127.0.0.1"}


def start(rank, port, root, data="synthetic:40", *, cwd=None, code=None, values=None, **more):
    settings = {**SETTINGS, **(values or {})}
    values = [f"--set={key}={value}" for key, value in settings.items() if key != "data.source"]
    program = ["-c", code] if code else ["-m", "clipctl"]
    return subprocess.Popen(
        [sys.executable, *program, "train", data, "--runs-dir", str(root), "--name", "run", *values],
        cwd=cwd,
        env=surroundings(rank, port, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def both(processes):
    outputs = [process.communicate(timeout=120) for process in processes]
    return [process.returncode for process in processes], [stderr for _, stderr in outputs]


JOIN = "from clipctl.training import distributed; distributed.join(wait_s=2)"


def joined_alone(port, rank=0):
    done = subprocess.run(
        [sys.executable, "-c", JOIN], env=surroundings(rank, port), capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    return done.stderr


def test_one_that_never_arrives():
    port = free_port()
    assert f"rank 0 waited 2 s at 127.0.0.1:{port} for all 2 processes" in joined_alone(port)


def test_a_port_that_is_taken():
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        assert f"127.0.0.1:{port} is taken by another program" in joined_alone(port)


def test_an_address_that_means_the_machine_itself():
    """As a laptop's own name does: the other laptop would wait for itself."""
    port = free_port()
    done = subprocess.run(
        [sys.executable, "-c", JOIN],
        env=surroundings(0, port, LOCAL_WORLD_SIZE=1),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "127.0.0.1 means this machine itself (127.0.0.1)" in done.stderr and "waited" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_ends_what_waits_for_others(tmp_path, rank, number):
    process = start(rank, free_port(), tmp_path)
    wait_for_torch(process)
    process.send_signal(number)
    sent_s = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode == -number and time.monotonic() - sent_s < 10


def wait_for_torch(process):
    """Until it listens, or asks for the other one: it has threads of torch's store."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if psutil.Process(process.pid).net_connections(kind="tcp"):
            break
        time.sleep(0.1)
    time.sleep(2)


PATIENT = """
import time
from clipctl.training import distributed
world = distributed.join(wait_s=3)
if world.is_first:
    time.sleep(6)
assert world.from_first(7) == 7
world.wait_at_most(2)
if world.is_first:
    time.sleep(5)
try:
    world.wait()
except RuntimeError as error:
    assert distributed.is_lost_rank(error), error
else:
    assert world.is_first
"""


def test_while_one_plans_others_wait_longer_than_in_a_step():
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PATIENT], env=surroundings(rank, port), stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert not any("Traceback" in error for error in errors), errors


HURRIED = """
import time
from clipctl.training import evaluate, loop
from clipctl.__main__ import main
loop.WAIT_S = 2.0
judged = evaluate.Evaluator._judged
evaluate.Evaluator._judged = lambda *arguments: (time.sleep(5), judged(*arguments))[1]
main()
"""


def test_an_evaluation_may_take_longer_than_a_step(tmp_path):
    port = free_port()
    values = {"train.epochs": 2}
    codes, errors = both([start(rank, port, tmp_path, code=HURRIED, values=values) for rank in (0, 1)])
    assert codes == [0, 0], errors


def test_one_that_hangs_in_a_step_ends_the_run(tmp_path):
    port, run = free_port(), RunDir(tmp_path / "run")
    values = {"train.epochs": 5000}  # long ones: between them, one may wait longer
    processes = [start(rank, port, tmp_path, "synthetic:20000", code=HURRIED, values=values) for rank in (0, 1)]
    wait_for_step(run, 20, processes[0])
    processes[1].send_signal(signal.SIGSTOP)
    try:
        _, error = processes[0].communicate(timeout=30)
    finally:
        processes[1].kill()
        processes[1].communicate()
    assert "another process ended or is not responding; step " in error and "is saved" in error


def test_one_that_ends_before_the_first_step(tmp_path):
    port = free_port()
    leaves = "import os; from clipctl.training import distributed; distributed.join(); os._exit(1)"
    codes, errors = both([start(0, port, tmp_path), start(1, port, tmp_path, code=leaves)])
    assert codes[0] == 1 and "error: another process ended or is not responding" in errors[0], errors
    assert "bug" not in errors[0] and not (tmp_path / "run").exists()


def write_data(place, captions):
    from PIL import Image

    place.mkdir()
    lines = ["path,caption"]
    for number, caption in enumerate(captions):
        Image.new("RGB", (16, 16), (number * 12, 80, 120)).save(place / f"{number}.png")
        lines.append(f"{number}.png,{caption}")
    (place / "data.csv").write_text("\n".join(lines) + "\n")


def test_other_data_on_another_machine(tmp_path):
    places = [tmp_path / "first", tmp_path / "second"]
    for place, word in zip(places, ("square", "circle"), strict=True):
        write_data(place, [f"{word} {number}" for number in range(20)])
    port = free_port()
    codes, errors = both([start(rank, port, tmp_path / "runs", "data.csv", cwd=places[rank]) for rank in (0, 1)])
    assert codes == [2, 2]
    assert "error: rank 1 on " in errors[0] and "data.csv differs from that of rank 0" in errors[0]
    assert "error:" not in errors[1], "one speaks for all"
    assert not (tmp_path / "runs" / "run").exists()


def test_no_data_on_another_machine(tmp_path):
    write_data(tmp_path / "first", [f"square {number}" for number in range(20)])
    port = free_port()
    processes = [
        start(rank, port, tmp_path / "runs", "data.csv", cwd=place)
        for rank, place in enumerate(tmp_path / name for name in ("first", "."))
    ]
    codes, errors = both(processes)
    assert codes == [2, 2] and "error: rank 1 on " in errors[0] and "data.csv" in errors[0], errors


def test_another_version_on_another_machine(tmp_path):
    port = free_port()
    older = "import clipctl; clipctl.__version__ = '0.0.1'\nfrom clipctl.__main__ import main; main()"
    codes, errors = both([start(0, port, tmp_path), start(1, port, tmp_path, code=older)])
    assert codes == [2, 2] and "rank 1 on " in errors[0] and "it has clipctl 0.0.1 and torch" in errors[0]


def test_other_settings_on_another_machine(tmp_path):
    port = free_port()
    codes, errors = both([start(0, port, tmp_path), start(1, port, tmp_path, values={"train.batch_size": 10})])
    assert codes == [2, 2] and "rank 1 on " in errors[0]
    assert "train.batch_size is 10 there and 12 on rank 0" in errors[0] and "error:" not in errors[1]
    assert not (tmp_path / "run").exists()


def test_threads_and_places_may_differ(tmp_path):
    port = free_port()
    codes, errors = both(
        [start(0, port, tmp_path), start(1, port, tmp_path, values={"runtime.workers": 0, "runtime.cache": "none"})]
    )
    assert codes == [0, 0], errors


def test_a_mistake_is_said_once(tmp_path):
    port = free_port()
    codes, errors = both([start(rank, port, tmp_path, "nowhere.csv") for rank in (0, 1)])
    assert codes[0] == 2 and "nowhere.csv" in errors[0] and "error:" not in errors[1]


def test_torchrun_starts_again_and_the_run_goes_on(tmp_path):
    settings = {**SETTINGS, "train.epochs": 100, "save.every": "5steps"}
    values = [f"--set={key}={value}" for key, value in settings.items()]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", "clipctl", "train", "--runs-dir", str(tmp_path), "--name", "run", *values],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    run = RunDir(tmp_path / "run")
    wait_for_step(run, 30, process)
    ranks_of(process)[1].kill()
    killed_s = time.monotonic()
    while run.status().attempt == 1 and process.poll() is None:
        assert time.monotonic() - killed_s < 60
        time.sleep(0.05)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert run.status().state == "finished" and run.status().attempt == 2
    assert len(list(tmp_path.iterdir())) == 1, "no second run"


def test_in_the_background_and_stopped(tmp_path):
    values = [f"--set={key}={value}" for key, value in {**SETTINGS, "train.epochs": 5000}.items()]
    words = ["train", "--nproc", "2", "--detach", "--name", "run", "--runs-dir", str(tmp_path), *values]
    started = subprocess.run([sys.executable, "-m", "clipctl", *words], capture_output=True, text=True, timeout=120)
    assert started.returncode == 0, started.stderr
    stopped = subprocess.run(
        [sys.executable, "-m", "clipctl", "stop", "run", "--runs-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert stopped.returncode == 0 and "stopped at step" in stopped.stdout + stopped.stderr
    assert RunDir(tmp_path / "run").status().state == "stopped"
