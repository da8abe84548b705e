"""clipctl runs rm, rename and compare."""

import json

import pytest
from typer.testing import CliRunner

from clipctl.cli.app import app
from clipctl.errors import RunError
from clipctl.runs.metrics import MetricsWriter
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from tests.test_runs import save


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Two runs that have ended, with a checkpoint each."""
    root = tmp_path / "runs"
    monkeypatch.setenv("CLIPCTL_RUNS", str(root))
    for name, lr, loss in (("boats", "1e-3", 2.5), ("cars", "2e-3", 1.25)):
        run = RunDir.create(root, "tiny", name)
        run.write_config(f"preset: tiny\noptim: {{lr: {lr}}}\n")
        writer = MetricsWriter(run.metrics_file, run.run_id)
        writer.write("step", {"step": 1, "loss": loss, "step_s": 0.5, "batch_size": 10, "images_per_s": 20})
        writer.close()
        run.write_status("finished", attempt=1, step=1, total_steps=1)
        save(CheckpointStore(run), 1)
        run.release()
    return root


def invoke(*arguments):
    return CliRunner().invoke(app, ["runs", *map(str, arguments)])


def names(root):
    return sorted(path.name for path in root.iterdir())


# --- rm -------------------------------------------------------------------------------------------------------


def test_rm_is_a_dry_run_unless_told_otherwise(root):
    done = invoke("rm", "boats")
    assert done.exit_code == 0 and "would delete  boats" in done.stdout and "would be freed; pass --yes" in done.stderr
    assert names(root) == ["boats", "cars"]


def test_rm_deletes_and_says_what_was_freed(root):
    document = json.loads(invoke("rm", "boats", root / "boats", "--yes", "--json").stdout)
    assert document["deleted"] and [one["run"] for one in document["runs"]] == ["boats"]
    assert document["freed_bytes"] == document["runs"][0]["size_bytes"] > 9
    assert names(root) == ["cars"]


def test_rm_deletes_none_if_one_is_live(root):
    with RunDir(root / "cars").locked():
        done = invoke("rm", "boats", "cars", "--yes")
    assert done.exit_code == 2 and "is in use" in done.stderr
    assert names(root) == ["boats", "cars"]


def test_rm_follows_no_links(root, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "picture.jpg").write_text("mine")
    (root / "boats" / "link").symlink_to(kept)
    (root / "other").symlink_to(root / "cars")
    assert invoke("rm", "boats", "--yes").exit_code == 0
    done = invoke("rm", "other", "--yes")
    assert done.exit_code == 2 and "is a symbolic link" in done.stderr
    assert (kept / "picture.jpg").exists() and names(root) == ["cars", "other"]


def test_what_an_interrupted_rm_leaves_is_no_run(root):
    (root / "boats").rename(root / ".boats.deleted")
    assert [run.name for run in RunDir.all(root)] == ["cars"]


# --- rename ---------------------------------------------------------------------------------------------------


def test_a_renamed_run_keeps_its_checkpoints(root):
    done = invoke("rename", "boats", "ships")
    assert done.exit_code == 0 and done.stdout == "boats is now ships\n"
    assert names(root) == ["cars", "ships"]
    renamed = RunDir.find(root, "ships")
    assert renamed.run_id == "boats" and CheckpointStore(renamed).last().step == 1


@pytest.mark.parametrize(
    ("new", "complaint"), [("cars", "run already exists"), ("a/b", "not a valid run name"), ("..", "not a valid")]
)
def test_names_that_cannot_be_taken(root, new, complaint):
    done = invoke("rename", "boats", new)
    assert done.exit_code == 2 and complaint in done.stderr
    assert names(root) == ["boats", "cars"]


def test_a_live_run_is_not_renamed(root):
    with RunDir(root / "boats").locked(), pytest.raises(RunError, match="is in use"):
        RunDir(root / "boats").rename("ships")


def test_a_run_that_only_its_name_identifies_is_not_renamed(root):
    run = RunDir(root / "boats")
    run.metrics_file.unlink()
    with pytest.raises(RunError, match="it would lose its checkpoints"):
        run.rename("ships")


# --- compare --------------------------------------------------------------------------------------------------


def test_runs_side_by_side(root):
    document = json.loads(invoke("compare", "boats", "cars", "--json").stdout)
    assert document["settings"] == {"optim.lr": [1e-3, 2e-3]}
    assert [(one["loss"], one["images_per_s"]) for one in document["runs"]] == [(2.5, 20), (1.25, 20)]
    lines = invoke("compare", "boats", "cars").stdout.splitlines()
    assert lines[0].split() == ["boats", "cars"] and lines[1].split() == ["optim.lr", "0.001", "0.002"]
    assert ["loss", "2.500", "1.250"] in [line.split() for line in lines]


def test_one_run_alone_is_not_compared(root):
    done = invoke("compare", "boats", "boats")
    assert done.exit_code == 2 and "name two runs or more" in done.stderr
