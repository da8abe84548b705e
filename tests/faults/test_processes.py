"""F08, F09, F10: signals at every stage, workers that die or hang, time that stands still or jumps."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from clipctl.data.cache import RamCache
from clipctl.data.loader import Collate, PairDataset, TrainLoader
from clipctl.data.sampling import EpochSampler
from clipctl.errors import TrainingError
from clipctl.runs.metrics import read_rows
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from clipctl.training.journal import Nobody
from clipctl.training.plan import make_plan
from tests.conftest import train
from tests.faults.trainer import SETTINGS, digest, finish, start, start_anew, wait_for_epochs, wait_until

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.mark.parametrize("delay_s", [0.1, 0.2, 0.5, 1.5])
@pytest.mark.parametrize("number", CODES)
def test_a_signal_while_it_starts(tmp_path, number, delay_s):
    process = start_anew(tmp_path, *SETTINGS, "--name", "run", "--set=train.epochs=500")
    time.sleep(delay_s)
    os.killpg(process.pid, number)
    code, _, stderr = finish(process)
    assert "Traceback" not in stderr
    # Before Python itself is up there is nobody to answer, and the signal's own way to end a process stands.
    assert code in (CODES[number], -number), stderr


@pytest.mark.parametrize("number", CODES)
def test_a_signal_inside_a_save(tmp_path, unbroken, number):
    run = RunDir(tmp_path / "run")
    process = start(tmp_path, *SETTINGS, "--save-every", "1s", "--name", "run")
    wait_until(lambda: any(path.name.endswith(".partial") for path in names(run.checkpoints_dir)))
    os.killpg(process.pid, number)
    code, _, stderr = finish(process)
    assert code == CODES[number], stderr
    last = CheckpointStore(run).last()
    assert last is not None and not last.problems() and not list(run.checkpoints_dir.glob(".*"))
    assert finish(start(tmp_path, "--resume", "run"))[0] == 0
    assert digest(run) == unbroken


def names(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def test_a_signal_inside_an_evaluation_ends_it_at_the_next_batch(tmp_path):
    """Nine tenths are held out, so that most of the time is evaluation; it is repeated when the run goes on."""
    settings = [
        *SETTINGS,
        "--set=data.source=synthetic:2000",
        "--set=data.val_fraction=0.9",
        "--set=data.val_limit=2000",
        "--set=train.epochs=2",
        "--set=train.eval_every=1",
    ]
    run = RunDir(tmp_path / "run")
    process = start(tmp_path, *settings, "--name", "run")
    wait_for_epochs(run, 1)
    os.killpg(process.pid, signal.SIGTERM)
    code, _, stderr = finish(process)
    assert code == 143, stderr
    assert not [row for row in read_rows(run.metrics_file) if row["kind"] == "eval"]
    last = CheckpointStore(run).last()
    assert last is not None and (last.step, last.manifest.epoch, last.manifest.metrics) == (17, 0, {})
    assert finish(start(tmp_path, "--resume", "run"))[0] == 0
    rows = list(read_rows(run.metrics_file))
    assert [row["epoch"] for row in rows if row["kind"] == "eval"] == [1, 2]


def workers_of(process):
    """The loader's workers; multiprocessing has another child to look after shared memory."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


def test_a_second_interrupt_leaves_at_once(tmp_path):
    # Long steps, and one signal after the other: the second comes while it is busy with what the first asked for.
    long_steps = ("--set=model.image.depth=12", "--set=train.epochs=2000")
    process = start(tmp_path, *SETTINGS, *long_steps, "--name", "run", workers=1)
    wait_for_epochs(RunDir(tmp_path / "run"), 1)
    workers = workers_of(process)
    while process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.005)
    code, _, stderr = finish(process)
    assert code == 130 and "Traceback" not in stderr and ", saved" not in stderr
    assert workers and not psutil.wait_procs(workers, timeout=10)[1]


def test_a_killed_trainer_leaves_no_orphans(tmp_path):
    process = start(tmp_path, *SETTINGS, "--set=train.epochs=2000", "--name", "run", workers=2)
    wait_for_epochs(RunDir(tmp_path / "run"), 1)
    workers = workers_of(process)
    process.kill()
    process.communicate()
    assert len(workers) == 2 and not psutil.wait_procs(workers, timeout=10)[1]


def test_a_killed_worker_is_named_and_the_run_goes_on_later(tmp_path, unbroken):
    process = start(tmp_path, *SETTINGS, "--set=train.epochs=2000", "--name", "run", workers=2)
    run = RunDir(tmp_path / "run")
    wait_for_epochs(run, 1)
    victim = workers_of(process)[0]
    victim.kill()
    code, _, stderr = finish(process)
    assert code == 1 and "Traceback" not in stderr
    assert (
        f"(process {victim.pid}) ended with signal 9" in stderr and "loader worker" in stderr and "--resume" in stderr
    )
    status = run.status()
    assert status is not None and status.state == "failed"


@pytest.fixture
def loader(micro):
    """One worker, pairs in batches of two."""
    plan = make_plan(micro)
    source = plan.data.train
    dataset = PairDataset(source, plan.data.tokenizer, plan.data.augmentation, 16, 0, RamCache(source, 16, 0))
    return TrainLoader(dataset, EpochSampler(source, 2, 0), Collate(fixed_length=True), workers=1)


def test_a_hung_worker_is_named(loader):
    batches = loader.epoch(1)
    next(batches)
    loader._timeout_s = 1  # past the start, which takes seconds
    worker = loader._loader._iterator._workers[0]
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        with pytest.raises(RuntimeError) as caught:
            list(batches)
        problem = loader.worker_error(caught.value)
        assert isinstance(problem, TrainingError)
        assert str(problem) == f"loader worker 0 (process {worker.pid}) has not responded for 1 s"
    finally:
        loader.close()
    assert not worker.is_alive()


def test_a_killed_worker_interrupts_nothing_but_loading(loader):
    """Torch raises from a handler of SIGCHLD, wherever the program happens to be."""
    batches = loader.epoch(1)
    next(batches)
    worker = loader._loader._iterator._workers[0]
    worker.kill()
    worker.join()
    assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    with pytest.raises(RuntimeError) as caught:
        while True:
            list(batches)  # what was prefetched comes first
            batches = loader.epoch(2)
    assert str(loader.worker_error(caught.value)) == f"loader worker 0 (process {worker.pid}) ended with signal 9"
    loader.close()


def test_a_worker_that_stopped_with_a_lock_in_its_hand_holds_nobody_up(loader):
    """Each batch, a worker asks under a lock whether it is to end. Stopped or killed there, it keeps the lock."""
    next(loader.epoch(1))
    iterator = loader._loader._iterator
    with iterator._workers_done_event._cond:
        loader.close()
    assert not any(worker.is_alive() for worker in iterator._workers)


def test_a_trainer_that_was_put_to_sleep_goes_on(tmp_path, unbroken):
    process = start(tmp_path, *SETTINGS, "--name", "run", workers=1)
    run = RunDir(tmp_path / "run")
    wait_for_epochs(run, 2)
    os.killpg(process.pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.killpg(process.pid, signal.SIGCONT)
    code, _, stderr = finish(process)
    assert code == 0, stderr
    assert digest(run) == unbroken


def test_a_clock_that_jumps_moves_no_duration(micro, tmp_path, monkeypatch):
    now, calls = time.time(), iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: now + (-1) ** next(calls) * 86_400)
    seen = []

    class Watcher(Nobody):
        def progress(self, progress):
            seen.append(progress.eta_s)

    run = RunDir.create(tmp_path, "tiny", "run")
    summary = train(make_plan(micro), run, Watcher())
    assert 0 < summary.seconds < 60 and all(eta_s >= 0 for eta_s in seen)
    rows = [row for row in read_rows(run.metrics_file) if row["kind"] == "step"]
    assert all(0 < row["step_s"] < 60 for row in rows)
    assert [row["elapsed_s"] for row in rows] == sorted(row["elapsed_s"] for row in rows)
    last = CheckpointStore(run).last()
    assert last is not None and last.step == 6
