import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clipctl.errors import CheckpointError, RunError
from clipctl.runs import checkpoints, metrics
from clipctl.runs.checkpoints import CheckpointStore, read_checkpoint
from clipctl.runs.files import replaced
from clipctl.runs.metrics import MetricsWriter, read_rows
from clipctl.runs.rundir import RunDir

# --- files ----------------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_the_old_file(tmp_path):
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(ValueError), replaced(target) as partial:
        partial.write_text("half")
        raise ValueError
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


# --- run directory --------------------------------------------------------------------------------------------


def test_a_name_can_be_used_once(tmp_path):
    RunDir.create(tmp_path, "tiny", "mine")
    with pytest.raises(RunError, match="already exists"):
        RunDir.create(tmp_path, "tiny", "mine")


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "x" * 300, "a\nb"])
def test_names_that_are_no_single_directory(tmp_path, name):
    if not name:
        assert RunDir.create(tmp_path, "tiny", name).name.split("-")[2] == "tiny"
        return
    with pytest.raises(RunError, match="cannot name a run"):
        RunDir.create(tmp_path, "tiny", name)


def test_a_root_that_is_a_file(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunError, match="is a file"):
        RunDir.create(tmp_path / "runs", "tiny")


def test_odd_directories_are_fine(tmp_path):
    run = RunDir.create(tmp_path / "mit Leerzeichen und ünïcode [red]", "tiny")
    assert run.checkpoints_dir.is_dir()


def test_the_status_names_the_process_that_wrote_it(tmp_path):
    run = RunDir.create(tmp_path, "tiny")
    assert run.status() is None
    run.write_status("running", attempt=1, step=3, total_steps=10)
    status = run.status()
    assert status is not None
    assert (status.pid, status.step, status.total_steps, status.state) == (os.getpid(), 3, 10, "running")


def test_the_lock_keeps_others_out_and_dies_with_its_owner(tmp_path):
    code = (
        "import sys; from pathlib import Path; from clipctl.runs.rundir import RunDir\n"
        "run = RunDir(Path(sys.argv[1])); run.acquire(); print('held', flush=True); sys.stdin.read()"
    )
    run = RunDir.create(tmp_path, "tiny", "mine")
    run.release()
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None and owner.stdout.readline() == "held\n"
    with pytest.raises(RunError, match="is being written"):
        run.acquire()
    owner.kill()
    owner.wait()
    run.acquire()


# --- metrics --------------------------------------------------------------------------------------------------


def test_rows_come_back_as_they_were_written(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl", "run-1")
    writer.write(metrics.STEP, {"step": 1, "loss": 2.5})
    writer.close()
    header, row = read_rows(tmp_path / "metrics.jsonl")
    assert header == {"kind": "header", "schema": 1, "run_id": "run-1"}
    assert (row["kind"], row["step"], row["loss"]) == ("step", 1, 2.5)


def test_what_is_not_finite_is_null_and_named(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl", "run-1")
    writer.write(metrics.STEP, {"loss": float("nan"), "grad_norm": float("inf"), "lr": 0.1})
    row = list(read_rows(tmp_path / "metrics.jsonl"))[1]
    assert (row["loss"], row["grad_norm"], row["lr"], row["nonfinite"]) == (None, None, 0.1, ["loss", "grad_norm"])


def test_what_is_not_finite_is_found_in_groups_too(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl", "run-1")
    writer.write(metrics.EPOCH, {"grad_norm_by_block": {"a": float("nan"), "b": 1.0}})
    row = list(read_rows(tmp_path / "metrics.jsonl"))[1]
    assert row["grad_norm_by_block"] == {"a": None, "b": 1.0} and row["nonfinite"] == ["grad_norm_by_block.a"]


def test_a_torn_line_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind":"header"}\n{"kind":"st')
    MetricsWriter(path, "run-1").write(metrics.STEP, {"step": 7})
    assert [row.get("step") for row in read_rows(path)] == [None, 7]


def test_readers_leave_a_torn_line_for_next_time(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind":"header"}\n{"kind":"st')
    assert list(read_rows(path)) == [{"kind": "header"}]


def test_a_full_disk_costs_rows_and_not_the_training(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    writer = MetricsWriter(Path("/dev/full"), "run-1")
    writer.write(metrics.STEP, {"step": 1})
    assert writer.lost_rows == 2  # the header too


# --- checkpoints ----------------------------------------------------------------------------------------------


def save(store, step, score=0.5, val_loss=1.0, content=b"weights"):
    return store.save(
        lambda directory: (directory / "model.safetensors").write_bytes(content) and None,
        step=step,
        epoch=step,
        metrics={"score": score, "val_loss": val_loss},
    )


def test_a_saved_checkpoint_is_whole_and_verifies(tmp_path):
    checkpoint = save(CheckpointStore(tmp_path, "run-1"), 12)
    assert checkpoint.path.name == "step-00000012"
    assert read_checkpoint(checkpoint.path).verified().manifest == checkpoint.manifest
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000012"]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.write_bytes(b"short"), "has 5 bytes, expected 7"),
        (lambda file: file.write_bytes(b"wEights"), "another sha256"),
    ],
)
def test_damage_is_found(tmp_path, damage, complaint):
    checkpoint = save(CheckpointStore(tmp_path, "run-1"), 1)
    damage(checkpoint.path / "model.safetensors")
    with pytest.raises(CheckpointError, match=complaint):
        read_checkpoint(checkpoint.path).verified()


def test_a_failed_save_leaves_the_older_ones(tmp_path):
    store = CheckpointStore(tmp_path, "run-1")
    save(store, 1)

    def fail(directory):
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.save(fail, step=2, epoch=2, metrics={})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_the_last_two_and_the_best_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, "run-1", keep_last=2, keep_best=1)
    for step, score in enumerate([0.1, 0.9, 0.3, 0.9, 0.2, 0.4], start=1):
        save(store, step, score=score, val_loss=2.0 if step == 4 else 1.0)
    assert [checkpoint.step for checkpoint in store.all()] == [2, 5, 6]
    best, last = store.best(), store.last()
    assert best is not None and last is not None
    assert (best.step, last.step) == (2, 6)


def test_a_newer_schema_is_refused_by_name(tmp_path):
    checkpoint = save(CheckpointStore(tmp_path, "run-1"), 1)
    manifest = checkpoint.path / checkpoints.MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "schema": 99}))
    with pytest.raises(CheckpointError, match="schema 99"):
        read_checkpoint(checkpoint.path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1, "files": {"../x": {"size_bytes": 1, "sha256": ""}}}'])
def test_manifests_that_are_none(tmp_path, text):
    (tmp_path / checkpoints.MANIFEST).write_text(text)
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path)
