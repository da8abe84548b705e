"""F05 and F12: disks that are full, directories that cannot be written, have odd names, or vanish."""

import dataclasses
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clipctl.config.quantities import Interval
from clipctl.errors import SaveError
from clipctl.runs.checkpoint import STATE
from clipctl.runs.metrics import STEP, MetricsWriter, read_rows
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from clipctl.training import attempt, saver
from clipctl.training.journal import Nobody
from clipctl.training.plan import make_plan
from clipctl.training.saver import SaveCadence
from clipctl.training.state import tensors_of, write_tensors
from tests.conftest import train
from tests.faults.trainer import SETTINGS, digest, finish, start, wait_for_epochs


@pytest.fixture
def filesystem(tmp_path):
    """Mounts a small real filesystem; skips where that is not allowed."""
    mounted = []

    def mount(size_bytes, *options):
        path = tmp_path / "filesystem"
        path.mkdir(exist_ok=True)
        words = ",".join([f"size={size_bytes}", *options])
        command = ["mount", "-t", "tmpfs", "-o", words, "tmpfs", str(path)]
        if sys.platform != "linux" or subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("mounting a filesystem is not allowed here; the injected failure covers it")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_disk_that_fills_up_costs_old_checkpoints_and_not_the_last(filesystem, unbroken):
    """A real filesystem with room for three of eight checkpoints, all of which are to be kept."""
    root = filesystem(700_000)
    code, _, stderr = finish(start(root, *SETTINGS, "--keep-last", "20", "--name", "run"))
    run = RunDir(root / "run")
    assert code == 0 and "Traceback" not in stderr, stderr
    warnings = [line for line in stderr.splitlines() if line.startswith("warning: the disk is full")]
    assert len(warnings) >= 3 and all("was deleted to save step" in line for line in warnings)
    kept = CheckpointStore(run).all()
    assert len(kept) >= 2 and not any(checkpoint.problems() for checkpoint in kept)
    assert not list(run.checkpoints_dir.glob(".*"))
    assert digest(run) == unbroken


def test_every_amount_of_room_leaves_what_was_there(filesystem, micro):
    """A real save into a real filesystem that is full after one page, two pages, and so on until it fits."""
    root = filesystem(2_000_000)
    run = RunDir.create(root, "tiny", "run")
    plan = make_plan(micro)
    train(plan, run)
    before = [(checkpoint.step, checkpoint.manifest) for checkpoint in CheckpointStore(run).all()]

    def write_all(directory):
        write_tensors(tensors_of(state), directory)
        (directory / STATE).write_text("{}")

    state, ballast = attempt.make_state(plan), root / "ballast"
    page = os.statvfs(root).f_frsize
    for pages in range(200):
        free = os.statvfs(root).f_bavail * page + (ballast.stat().st_size if ballast.exists() else 0)
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, free - pages * page))
        try:
            CheckpointStore(run, keep_last=9).save(write_all, step=99, epoch=9, metrics={})
        except OSError as error:
            assert error.errno == errno.ENOSPC
            left = CheckpointStore(run).all()
            assert [(checkpoint.step, checkpoint.manifest) for checkpoint in left] == before
            assert not any(checkpoint.problems() for checkpoint in left)
        else:
            assert pages > 10
            last = CheckpointStore(run).last()
            assert last is not None and last.step == 99 and not last.problems()
            return
    raise AssertionError("it never fitted")


def test_a_full_disk_without_a_full_disk(micro, tmp_path, monkeypatch):
    """The same where nothing can be mounted: the second and third save meet ENOSPC."""
    saves = iter([None, errno.ENOSPC, errno.ENOSPC] + [None] * 9)
    write = saver.write_tensors

    def failing(state, directory):
        write(state, directory)
        if number := next(saves):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(saver, "write_tensors", failing)
    said = []

    class Watcher(Nobody):
        def warn(self, message):
            said.append(message)

    run = RunDir.create(tmp_path, "tiny", "run")
    config = dataclasses.replace(micro, save=dataclasses.replace(micro.save, every=Interval(1, "steps"), keep_best=0))
    summary = train(make_plan(config), run, Watcher())
    assert summary.state == "finished" and len(said) == 2
    assert said[0].startswith("the checkpoint of step 2 could not be saved (No space left on device); the last one is")
    events = [row for row in read_rows(run.metrics_file) if row["kind"] == "event"]
    assert [(row["event"], row["step"]) for row in events] == [("save_failed", 2), ("save_failed", 3)]
    assert [checkpoint.step for checkpoint in CheckpointStore(run).all()] == [5, 6]


def test_a_failed_save_is_tried_again_when_the_next_is_due(micro, tmp_path, monkeypatch):
    """By minutes: not at every step after the first failure."""

    def fail(state, directory):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saver, "write_tensors", fail)
    cadence = SaveCadence(Interval.parse("10m"))
    cadence._tried_s -= 601
    monkeypatch.setattr(saver, "SaveCadence", lambda every: cadence)
    run = RunDir.create(tmp_path, "tiny", "run")
    config = dataclasses.replace(micro, save=dataclasses.replace(micro.save, every=Interval(10, "min"), keep_best=0))
    with pytest.raises(SaveError, match=r"step 6 could not be saved .*there is none yet"):
        train(make_plan(config), run)
    events = [row for row in read_rows(run.metrics_file) if row["kind"] == "event"]
    assert [row["step"] for row in events] == [1]


def test_a_reader_that_leaves_does_not_end_the_training(tmp_path, unbroken):
    """`clipctl train 2>&1 | head -3`, in effect."""
    process = start(tmp_path, *SETTINGS, "--set=train.epochs=100", "--name", "run")
    assert process.stderr is not None and process.stdout is not None
    while "images/s" not in process.stderr.readline():
        pass
    process.stderr.close()
    process.stdout.close()
    process.wait(timeout=120)
    status = RunDir(tmp_path / "run").status()
    assert status is not None and status.state == "finished"


def test_too_little_room_is_said_before_the_start(filesystem):
    root = filesystem(200_000)
    code, _, stderr = finish(start(root, *SETTINGS, "--name", "run"))
    assert code == 1 and "2 checkpoints need about" in stderr and "--runs-dir" in stderr
    assert not (root / "run").exists()


def test_metrics_survive_a_disk_that_was_full_for_a_while(filesystem):
    root = filesystem(400_000)
    path, ballast = root / "metrics.jsonl", root / "ballast"
    writer = MetricsWriter(path, "run")
    for step in range(3000):
        writer.write(STEP, {"step": step})
        if step == 100:
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, os.statvfs(root).f_bavail * os.statvfs(root).f_frsize)
        if step == 2000:
            ballast.unlink()
    writer.close()
    rows = [row for row in read_rows(path) if row["kind"] == "step"]
    assert 1000 < writer.lost_rows < 2000 and len(rows) + writer.lost_rows == 3000
    assert [row["step"] for row in rows[-999:]] == list(range(2001, 3000))  # all that came after there was room again


def test_lost_rows_are_said_at_the_end(micro, tmp_path, monkeypatch):
    write, said = os.write, []

    def full_for_a_while(descriptor, content):
        if b'"kind":"epoch"' in content:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content)

    class Watcher(Nobody):
        def warn(self, message):
            said.append(message)

    monkeypatch.setattr(os, "write", full_for_a_while)
    train(make_plan(micro), RunDir.create(tmp_path, "tiny", "run"), Watcher())
    assert said == ["2 rows of metrics could not be written: the curves have gaps; the model is not affected"]


def test_a_read_only_place_is_noticed_before_the_first_step(filesystem):
    root = filesystem(1_000_000, "ro")
    code, _, stderr = finish(start(root, *SETTINGS, "--name", "run"))
    assert code == 2 and "cannot create a run" in stderr and "CLIPCTL_RUNS" in stderr and "Traceback" not in stderr


def test_a_directory_that_vanishes_ends_the_run_cleanly(tmp_path):
    process = start(tmp_path, *SETTINGS, "--set=train.epochs=2000", "--name", "run")
    run = RunDir(tmp_path / "run")
    wait_for_epochs(run, 2)
    run.path.rename(tmp_path / "gone")
    code, _, stderr = finish(process)
    assert code == 2 and "is gone" in stderr and "Traceback" not in stderr
    assert not run.path.exists()


@pytest.mark.parametrize("name", ["with spaces", "ünïcödé 图片", "[red]markup[/red]", "x" * 200, 'quote\'d "name"'])
def test_odd_directories(tmp_path, unbroken, name):
    root = tmp_path / name
    code, _, stderr = finish(start(root, *SETTINGS, "--name", "run", "--set=train.epochs=1"))
    assert code == 0, stderr
    code, _, stderr = finish(start(root, "--resume", "run", "--epochs", "8"))
    assert code == 0, stderr
    assert len(RunDir.all(root)) == 1 and Path(root / "run").is_dir()
