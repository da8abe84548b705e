import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from clipctl.errors import CheckpointError, RunError
from clipctl.files import replaced
from clipctl.runs import metrics, retention
from clipctl.runs.checkpoint import MANIFEST, MODEL, OPTIMIZER, STATE, read_checkpoint
from clipctl.runs.metrics import MetricsWriter, read_rows
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore, parse_reference

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
    RunDir.create(tmp_path, "tiny", "mine").write_config("preset: tiny\n")
    with pytest.raises(RunError, match="already exists"):
        RunDir.create(tmp_path, "tiny", "mine")


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "x" * 300, "a\nb"])
def test_names_that_are_no_single_directory(tmp_path, name):
    if not name:
        assert RunDir.create(tmp_path, "tiny", name).name.split("-")[2] == "tiny"
        return
    with pytest.raises(RunError, match="is not a valid run name"):
        RunDir.create(tmp_path, "tiny", name)


def test_a_directory_with_other_things_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(RunError, match="already exists"):
        RunDir.create(tmp_path, "tiny", "mine")


def test_a_run_killed_before_it_wrote_anything_is_in_nobodys_way(tmp_path):
    RunDir.create(tmp_path, "tiny", "mine").release()
    assert RunDir.create(tmp_path, "tiny", "mine").checkpoints_dir.is_dir()


def test_a_run_killed_before_its_first_heartbeat_can_go_on(tmp_path):
    RunDir.create(tmp_path, "tiny", "mine").write_config("preset: tiny\n")
    assert RunDir.newest_unfinished(tmp_path).name == "mine"


def test_a_run_is_called_by_its_last_digits_if_they_are_enough(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["20260101-120000-tiny-41a3", "20260101-120001-tiny-2026", "20260101-120002-tiny-77aa", "my 77aa"]
    for name in names:
        (tmp_path / "runs" / name).mkdir(parents=True)
        RunDir(Path("runs") / name).write_config("preset: tiny\n")
    handles = ["41a3", names[1], names[2], "'my 77aa'"]
    assert [RunDir(Path("runs") / name).handle for name in names] == handles
    assert RunDir.find(Path("runs"), "41a3").name == names[0]
    assert RunDir(tmp_path / "runs" / names[0]).handle == "41a3", "the same directory, typed in full"
    monkeypatch.setenv("CLIPCTL_RUNS", str(tmp_path / "elsewhere"))
    assert RunDir(Path("runs") / names[0]).handle == f"runs/{names[0]}"
    monkeypatch.setenv("CLIPCTL_RUNS", str(tmp_path / "runs"))
    assert RunDir(tmp_path / "runs" / names[0]).handle == "41a3"


def test_a_run_that_is_not_there_is_answered_with_those_that_are(tmp_path):
    with pytest.raises(RunError, match="there is no run 'x': no runs in"):
        RunDir.find(tmp_path, "x")
    for number in range(7):
        RunDir.create(tmp_path, "tiny", f"run-{number}").write_config("preset: tiny\n")
        os.utime(tmp_path / f"run-{number}", (number, number))
    with pytest.raises(RunError, match="there is no run 'rum-3'") as error:
        RunDir.find(tmp_path, "rum-3")
    hint = "did you mean run-3? runs there, newest first: run-6, run-5, run-4, run-3, run-2 and 2 more"
    assert error.value.hint == hint


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
    with pytest.raises(RunError, match="is in use"):
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


def test_a_full_disk_costs_rows_and_not_the_training(tmp_path, monkeypatch):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    monkeypatch.setattr(metrics, "open_to_append", lambda path: os.open("/dev/full", os.O_WRONLY))
    writer = MetricsWriter(tmp_path / "metrics.jsonl", "run-1")
    writer.write(metrics.STEP, {"step": 1})
    assert writer.lost_rows == 2  # the header too


# --- checkpoints ----------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path, "tiny", "run-1")


@pytest.fixture
def store(run):
    return CheckpointStore(run)


NO_TENSORS = (2).to_bytes(8, "little") + b"{}"  # as a safetensors file


def save(store, step, score=0.5, val_loss=1.0, content=b"{}", **beginnings):
    def write(directory):
        (directory / STATE).write_bytes(content)
        for name in (MODEL, OPTIMIZER):
            (directory / name).write_bytes(NO_TENSORS)

    return store.save(
        write,
        step=step,
        epoch=step,
        metrics={"score": score, "val_loss": val_loss},
        **beginnings,
    )


def steps(store):
    return [checkpoint.step for checkpoint in store.all()]


def test_a_saved_checkpoint_is_whole_and_verifies(run, store):
    checkpoint = save(store, 12)
    assert checkpoint.path.name == "step-00000012"
    assert read_checkpoint(checkpoint.path).verified().manifest == checkpoint.manifest
    assert [path.name for path in run.checkpoints_dir.iterdir()] == ["step-00000012"]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.write_bytes(b"{"), "has 1 bytes, expected 2"),
        (lambda file: file.write_bytes(b"[]"), "sha256 does not match"),
    ],
)
def test_damage_is_found(store, damage, complaint):
    checkpoint = save(store, 1)
    damage(checkpoint.path / STATE)
    with pytest.raises(CheckpointError, match=complaint):
        read_checkpoint(checkpoint.path).verified()


def test_a_failed_save_leaves_the_older_ones(run, store):
    save(store, 1)

    def fail(directory):
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.save(fail, step=2, epoch=2, metrics={})
    assert [path.name for path in run.checkpoints_dir.iterdir()] == ["step-00000001"]


def test_the_last_two_and_the_best_are_kept(run):
    store = CheckpointStore(run, keep_last=2, keep_best=1)
    for step, score in enumerate([0.1, 0.9, 0.3, 0.9, 0.2, 0.4], start=1):
        save(store, step, score=score, val_loss=2.0 if step == 4 else 1.0)
    assert steps(store) == [2, 5, 6]
    best, last = store.best(), store.last()
    assert best is not None and last is not None
    assert (best.step, last.step) == (2, 6)


def test_a_step_saved_again_replaces_the_older_one_only_when_it_is_there(run, store):
    save(store, 3, content=b"{}")
    again = save(store, 3, content=b"[]", beginnings=((1, 0), (2, 3)))
    assert store.all() == [again] and again.path.name == "step-00000003.1"
    third = save(store, 3, beginnings=((1, 0), (2, 3)))
    assert store.all() == [third] and third.path.name == "step-00000003.2" and third.path.is_dir()


def test_a_course_that_was_left_does_not_count_as_last(run):
    """Going back to step 2 must not make the steps 5 and 6 of before look newer than what follows."""
    store = CheckpointStore(run, keep_last=2, keep_best=1)
    for step in (2, 5, 6):
        save(CheckpointStore(run, keep_last=9), step, score=0.9 if step == 5 else 0.1)
    save(store, 3, score=0.2, beginnings=((1, 0), (2, 2)))
    last, best = store.last(), store.best()
    assert last is not None and last.step == 3
    assert best is not None and best.step == 5
    assert steps(store) == [2, 3, 5]  # the last two of the new course, and the best of all


def test_a_course_stays_left_when_what_left_it_is_gone(run):
    """Attempt 2 went back to 20, attempt 3 went on from its 60; 40 is not on it, even if none of attempt 2 is kept."""
    save(CheckpointStore(run, keep_last=9), 40, score=0.9)
    store = CheckpointStore(run, keep_last=2)
    save(store, 60, score=0.1, beginnings=((1, 0), (2, 20)))
    for step in (80, 100):
        save(store, step, score=0.1, beginnings=((1, 0), (2, 20), (3, 60)))
    assert steps(store) == [40, 80, 100]
    assert [checkpoint.step for checkpoint in retention.course(store.all())] == [80, 100]


def test_a_manifest_that_the_system_refuses_is_not_taken_for_damage(run, store, monkeypatch):
    save(store, 1, score=None)
    save(store, 2, score=None)

    def refuse(path, limit_bytes):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("clipctl.runs.checkpoint.read_bounded", refuse)
    assert [entry.kind for entry in store.inventory()] == ["strange", "strange"] and not store.prunable()


def test_readers_of_a_live_run_see_no_damage(run):
    """While checkpoints come and go, what is listed is whole or not listed."""
    seen, store = [], CheckpointStore(run, keep_last=1, keep_best=0)
    writer = threading.Thread(target=lambda: [save(store, step) for step in range(1, 150)])
    writer.start()
    while writer.is_alive():
        for entry in CheckpointStore(run).inventory():
            problems = entry.checkpoint.problems() if entry.checkpoint else []
            seen += [problem for problem in problems if entry.path.exists() and entry.size_bytes]
    assert not seen and steps(store) == [149]


def test_one_that_lost_a_file_does_not_count_among_the_last(run, store):
    save(store, 1, score=None)
    (save(store, 2, score=None).path / STATE).unlink()
    save(store, 3, score=None)
    assert steps(store) == [1, 3]


def test_checkpoints_of_another_run_are_never_touched(run, store):
    save(store, 1)
    foreign, renamed = run.checkpoints_dir / "step-00000900", run.checkpoints_dir / "step-00000800"
    save(store, 700).path.rename(renamed)
    save(CheckpointStore(RunDir.create(run.path.parent, "tiny", "other")), 900).path.rename(foreign)
    for step in (2, 3, 4):
        save(store, step, score=None)
    assert foreign.is_dir() and renamed.is_dir() and steps(store) == [1, 3, 4]
    last = store.last()
    assert last is not None and last.step == 4
    problems = [entry.problems[0] for entry in store.inventory()[-2:]]
    assert "says step 700" in problems[0] and "another run, other" in problems[1]


def test_the_best_of_a_course_that_was_left_survives_the_same_step(run):
    store = CheckpointStore(run, keep_last=1, keep_best=1)
    best = save(store, 12, score=0.9)
    save(store, 12, score=0.1, beginnings=((1, 0), (2, 6)))
    assert store.best() == best and best.path.is_dir()


@pytest.mark.parametrize("name", ["metrics_file", "status_file", "environment_file"])
def test_pipes_are_not_waited_for(run, name):
    os.mkfifo(getattr(run, name))
    assert (run.run_id, run.status(), run.read_environment()) == ("run-1", None, {})


@pytest.mark.parametrize("text", ["[" * 100_000, '{"attempt": 1.5}', "x"])
def test_a_status_that_is_none(run, text):
    run.write_status("running", attempt=1, step=3, total_steps=10)
    document = json.loads(run.status_file.read_text())
    run.status_file.write_text(json.dumps({**document, **json.loads(text)}) if text.startswith("{") else text)
    assert run.status() is None


def test_a_name_with_an_at_sign_is_a_name(tmp_path):
    for name in ("a", "a@12"):
        RunDir.create(tmp_path, "tiny", name).write_config("preset: tiny\n")
    assert parse_reference(tmp_path, "a@12") == ("a@12", None)
    assert parse_reference(tmp_path, "a@13") == ("a", "13")
    assert parse_reference(tmp_path, "a@best") == ("a", "best")


def test_a_renamed_run_still_owns_its_checkpoints(run):
    MetricsWriter(run.metrics_file, run.run_id).close()
    save(CheckpointStore(run), 7)
    moved = RunDir(run.path.rename(run.path.with_name("renamed")))
    assert moved.run_id == "run-1" and steps(CheckpointStore(moved)) == [7]


def rewrite_manifest(checkpoint, **changes):
    """As a program that knows the format would: the manifest's own sum is right."""
    path = checkpoint.path / MANIFEST
    values = {key: value for key, value in {**json.loads(path.read_text()), **changes}.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    path.write_text(json.dumps({**values, "sha256": digest}, indent=2) + "\n")


def test_a_newer_schema_is_refused_by_name(store):
    checkpoint = save(store, 1)
    rewrite_manifest(checkpoint, schema=99)
    with pytest.raises(CheckpointError, match="schema 99; this clipctl reads up to 1"):
        read_checkpoint(checkpoint.path)


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"../x": {"size_bytes": 1, "sha256": ""}}},
        {"files": {"..": {"size_bytes": 1, "sha256": ""}}},
        {"files": []},
        {"files": {"x": {"size_bytes": -1, "sha256": ""}}},
        {"step": "7"},
        {"step": True},
        {"metrics": [1]},
        {"metrics": {"score": "x"}},
        {"beginnings": []},
        {"beginnings": [[1]]},
        {"beginnings": [[1, "0"]]},
        {"surprise": 1},
        {"saved_s": 10**401},
        {"metrics": {"score": 10**401}},
        {"metrics": {"\ud800": 1.0}},
        {"files": {"\ud800": {"size_bytes": 1, "sha256": ""}}},
    ],
)
def test_manifests_that_lie(store, changes):
    checkpoint = save(store, 1)
    rewrite_manifest(checkpoint, **changes)
    with pytest.raises(CheckpointError):
        read_checkpoint(checkpoint.path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, "\xff", "1" * 2_000_000])
def test_manifests_that_are_none(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path)
