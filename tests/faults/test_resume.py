"""Stopped or killed anywhere, a run goes on to the same weights. Real processes, real signals."""

import json
import os
import signal

import psutil
import pytest
import yaml

from clipctl.data.synthetic.scenes import SyntheticSource
from clipctl.errors import DataError
from clipctl.runs.checkpoint import MODEL
from clipctl.runs.metrics import read_rows
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from clipctl.training.session import resume_run
from tests.faults.trainer import SETTINGS, TOTAL_STEPS, digest, finish, start, wait_for_epochs
from tests.test_runs import rewrite_manifest


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stopped_run_saves_and_goes_on_to_the_same_weights(tmp_path, unbroken, number, code, workers):
    process = start(tmp_path, *SETTINGS, "--name", "run", workers=workers)
    run = RunDir(tmp_path / "run")
    wait_for_epochs(run, 2)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number)
    returncode, _, stderr = finish(process)
    assert returncode == code, stderr
    assert f", saved. To continue: clipctl train --resume {run.path}\n" in stderr
    assert "error" not in stderr and "Traceback" not in stderr
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    status = run.status()
    assert status is not None and status.state == "stopped" and status.step < TOTAL_STEPS
    last = CheckpointStore(run).last()
    assert last is not None and last.step == status.step
    returncode, _, stderr = finish(start(tmp_path, "--resume"))
    assert returncode == 0, stderr
    assert digest(run) == unbroken


def test_killed_runs_go_on_to_the_same_weights(tmp_path, unbroken):
    process = start(tmp_path, *SETTINGS, "--name", "run")
    run = RunDir(tmp_path / "run")
    for epochs in (1, 3, 5):
        wait_for_epochs(run, epochs)
        process.kill()
        process.communicate()
        process = start(tmp_path, "--resume", "run", workers=epochs % 2)
    returncode, _, stderr = finish(process)
    assert returncode == 0, stderr
    assert digest(run) == unbroken
    assert not list(run.checkpoints_dir.glob(".*"))
    status = run.status()
    assert status is not None and status.attempt == 4


def test_a_finished_run_has_nothing_left_to_do(finished, unbroken):
    code, stdout, stderr = finish(start(finished.path.parent, "--resume", "run", "--json"))
    assert code == 0 and "nothing left to do" in " ".join(stderr.split())
    assert json.loads(stdout)["steps"] == TOTAL_STEPS and digest(finished) == unbroken


def test_damage_is_passed_over_and_named(finished, unbroken):
    last = CheckpointStore(finished).last()
    assert last is not None
    model = last.path / MODEL
    content = bytearray(model.read_bytes())
    content[-5] ^= 1
    model.write_bytes(content)
    code, _, stderr = finish(start(finished.path.parent, "--resume", "run"))
    assert code == 0, stderr
    assert "skipped damaged checkpoint step-00000024" in stderr and "sha256" in stderr
    assert digest(finished) == unbroken


def test_changed_settings_are_named_and_refused(finished):
    code, _, stderr = finish(start(finished.path.parent, "--resume", "run", "--lr", "1e-5", "--seed", "3"))
    assert code == 2
    assert (
        "the checkpoint was made with optim.lr" in stderr
        and "train.seed 0, not 3" in stderr
        and "--allow-change" in stderr
    )


def test_a_config_that_was_edited_is_named_and_refused(finished):
    """F16: by hand, in the run's directory."""
    text = finished.config_file.read_text()
    finished.config_file.write_text(text.replace("weight_decay: 0.1", "weight_decay: 0.3"))
    code, _, stderr = finish(start(finished.path.parent, "--resume", "run"))
    assert code == 2 and "optim.weight_decay 0.1, not 0.3" in stderr
    code, _, stderr = finish(start(finished.path.parent, "--resume", "run", "--allow-change"))
    assert code == 0 and "optim.weight_decay changed from 0.1 to 0.3" in stderr


def test_data_that_has_changed_is_named_and_refused(finished, monkeypatch):
    """F16: the same name, other captions."""
    plain = SyntheticSource.captions
    monkeypatch.setattr(SyntheticSource, "captions", lambda self, index: [f"{text}!" for text in plain(self, index)])
    with pytest.raises(DataError, match="has changed since the run was stopped"):
        resume_run(finished)


def test_other_data_are_named_with_the_ways_out(finished):
    code, _, stderr = finish(start(finished.path.parent, "synthetic:100", "--resume", "run", "--epochs", "9"))
    assert code == 2 and "the run was trained on synthetic:" in stderr and "and was given synthetic:100" in stderr
    assert "pass --allow-change" in stderr and f"clipctl train synthetic:100 --from {finished.path} starts" in stderr


def test_another_machine_is_named(finished):
    environment = json.loads(finished.environment_file.read_text())
    environment["device"]["name"] = "Another CPU"
    environment["threads"]["value"] = 64
    finished.environment_file.write_text(json.dumps(environment))
    code, _, stderr = finish(start(finished.path.parent, "--resume", "run"))
    assert code == 0, stderr
    assert "changed from Another CPU to " in stderr
    assert "threads changed from 64 to 1: the last bits of the weights may differ" in stderr


def test_a_damaged_step_that_was_asked_for_names_a_whole_one(finished):
    model = finished.checkpoints_dir / "step-00000024" / MODEL
    model.write_bytes(model.read_bytes()[:-1])
    code, _, stderr = finish(start(finished.path.parent, "--resume", "run@24"))
    assert code == 3 and "model.safetensors has" in stderr and "newest intact one is step 21" in stderr


def test_a_checkpoint_of_a_later_clipctl_is_not_passed_over(finished):
    last = CheckpointStore(finished).last()
    assert last is not None
    rewrite_manifest(last, schema=2)
    code, _, stderr = finish(start(finished.path.parent, "--resume", "run"))
    assert code == 3 and "schema 2" in stderr and "upgrade clipctl" in stderr


def test_going_back_leaves_the_later_checkpoints_behind(finished, unbroken):
    """The steps after the chosen one are made anew; what was there before does not count as newer."""
    steps = [checkpoint.step for checkpoint in CheckpointStore(finished).all()]
    code, _, stderr = finish(start(finished.path.parent, "--resume", f"run@{steps[0]}"))
    assert code == 0, stderr
    assert digest(finished) == unbroken
    last = CheckpointStore(finished).last()
    assert last is not None and last.manifest.attempt == 2


def test_more_steps_finish_the_epoch_that_was_cut_short(tmp_path):
    settings = [*(one for one in SETTINGS if "train.epochs" not in one), "--steps", "4", "--name", "run"]
    assert finish(start(tmp_path, *settings))[0] == 0
    code, stdout, stderr = finish(start(tmp_path, "--resume", "run", "--steps", "9", "--json"))
    assert code == 0, stderr
    assert json.loads(stdout)["steps"] == 9
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "step"]
    assert [row["step"] for row in rows] == list(range(1, 10))


def test_a_refused_change_leaves_the_run_as_it_was(finished, unbroken):
    arguments = ["--resume", "run", "--allow-change", "--set=model.embed_dim=8", "--epochs", "9"]
    code, _, stderr = finish(start(finished.path.parent, *arguments))
    assert code == 3 and "does not fit the model" in stderr
    code, _, stderr = finish(start(finished.path.parent, "--resume", "run"))
    assert code == 0, stderr
    assert digest(finished) == unbroken


def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path, unbroken):
    process = start(tmp_path, *SETTINGS, "--set=save.every=9e", "--keep-best", "0", "--name", "run")
    run = RunDir(tmp_path / "run")
    wait_for_epochs(run, 2)
    process.kill()
    process.communicate()
    code, _, stderr = finish(start(tmp_path, "--resume", "run"))
    assert code == 0 and "ended before its first checkpoint" in stderr
    assert [row["step"] for row in read_rows(run.metrics_file) if row["kind"] == "resume"] == [0]
    assert digest(run) == unbroken


def test_more_epochs_are_taken_and_their_effect_is_said(finished):
    code, stdout, stderr = finish(start(finished.path.parent, "--resume", "run", "--epochs", "9", "--json"))
    assert code == 0, stderr
    assert "27 steps instead of 24" in stderr and "learning rate continues at" in stderr
    assert json.loads(stdout)["steps"] == 27
    assert yaml.safe_load(finished.config_file.read_text())["train"]["epochs"] == 9


def test_a_name_that_is_taken_is_said_before_the_work_begins(finished):
    for name, words in (("run", "run already exists"), ("", "not a valid run name")):
        code, _, stderr = finish(start(finished.path.parent, f"--name={name}", "--dry-run"))
        assert code == 2 and words in stderr


def test_fewer_epochs_than_were_made_are_refused(finished):
    before = finished.config_file.read_text()
    code, _, stderr = finish(start(finished.path.parent, "--resume", "run", "--epochs", "2"))
    assert code == 2 and "has already made" in stderr
    assert finished.config_file.read_text() == before


def test_an_older_step_can_be_chosen(finished):
    steps = [checkpoint.step for checkpoint in CheckpointStore(finished).all()]
    code, _, stderr = finish(start(finished.path.parent, "--resume", f"run@{steps[0]}", "--dry-run"))
    assert code == 0, stderr
    code, _, stderr = finish(start(finished.path.parent, "--resume", "run@7777"))
    assert code == 3 and f"available steps: {steps[0]}" in stderr


def test_a_second_trainer_leaves_naming_the_first(tmp_path):
    run = RunDir.create(tmp_path, "tiny", "run")
    run.write_config("preset: tiny\n")
    run.write_status("running", attempt=1, step=0, total_steps=1)
    code, _, stderr = finish(start(tmp_path, "--resume", "run"))
    assert code == 2 and f"by process {os.getpid()}" in stderr


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("rnu-1", "did you mean run-1? runs there, newest first: run-2, run-1\n"),
        ("x", "hint: runs there, newest first: run-2, run-1\n"),
        ("run", "matches several runs: run-1, run-2"),
    ],
)
def test_names_that_are_not_clear(tmp_path, text, complaint):
    for age_s, name in enumerate(("run-2", "run-1")):
        run = RunDir.create(tmp_path, "tiny", name)
        run.write_config("preset: tiny\n")
        os.utime(run.path, (1e9 - age_s, 1e9 - age_s))
    code, _, stderr = finish(start(tmp_path, "--resume", text))
    assert code == 2 and complaint in stderr


def test_nothing_to_resume(tmp_path):
    code, _, stderr = finish(start(tmp_path, "--resume"))
    assert code == 2 and "no unfinished run" in stderr
