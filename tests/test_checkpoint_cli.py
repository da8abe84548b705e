"""clipctl checkpoint, on the checkpoints of a real run."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from clipctl.cli.app import app
from clipctl.config.layers import Layer, resolve
from clipctl.files import sha256_of
from clipctl.runs.checkpoint import MANIFEST, MODEL, OPTIMIZER, STATE
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from clipctl.training.plan import make_plan
from tests.conftest import MICRO, train
from tests.test_runs import rewrite_manifest


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    for name, rate in (("alpha", 1e-3), ("beta", 2e-3)):
        settings = {**MICRO, "optim.lr": rate, "save.every": "2s", "save.keep_last": 9}
        run = RunDir.create(root, "tiny", name)
        train(make_plan(resolve([Layer("test", settings)])), run)
        run.release()
    return root


@pytest.fixture
def root(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "runs")


@pytest.fixture
def invoke(root):
    def invoke(*arguments):
        return CliRunner().invoke(app, ["checkpoint", *arguments], env={"CLIPCTL_RUNS": str(root), "COLUMNS": "200"})

    return invoke


def newest(root, name="alpha"):
    last = CheckpointStore(RunDir(root / name)).last()
    assert last is not None
    return last


def flip(path, position=-5):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


# --- list -----------------------------------------------------------------------------------------------------


def test_list_shows_every_checkpoint_and_what_it_is(invoke):
    lines = invoke("list").stdout.splitlines()
    assert lines[0].split() == ["run", "step", "epoch", "score", "size", "age"]
    assert [line.split()[:2] for line in lines[1:5]] == [["alpha", step] for step in "2346"]
    assert "last" in lines[4] and sum("best" in line for line in lines) == 2


def test_list_as_json(invoke):
    document = json.loads(invoke("list", "alpha", "--json").stdout)
    assert document["schema"] == "clipctl.checkpoint-list/1"
    last = document["checkpoints"][-1]
    assert {"path", "run", "step", "valid", "problems", "best", "last", "size_bytes", "saved_s"} <= set(last)
    assert (last["run"], last["step"], last["valid"], last["last"]) == ("alpha", 6, True, True)


def test_list_shows_the_damaged_and_the_incomplete(invoke, root):
    (newest(root).path / MODEL).unlink()
    (root / "alpha" / "checkpoints" / "step-00000002" / MANIFEST).write_text("{")
    (root / "alpha" / "checkpoints" / ".step-00000007.partial").mkdir()
    output = invoke("list", "alpha").stdout
    assert "damaged: model.safetensors is missing" in output and "manifest.json cannot be read" in output
    assert "incomplete" in output.splitlines()[-1]
    documents = json.loads(invoke("list", "alpha", "--json").stdout)["checkpoints"]
    assert [one["valid"] for one in documents] == [False, True, True, False, False]


def test_order_is_by_step_and_never_by_time_of_the_file(invoke, root):
    for number, path in enumerate(sorted((root / "alpha" / "checkpoints").iterdir(), reverse=True)):
        os.utime(path, (number * 1000, number * 1000))
    steps = [one["step"] for one in json.loads(invoke("list", "alpha", "--json").stdout)["checkpoints"]]
    assert steps == [2, 3, 4, 6]


def test_two_hundred_are_listed(root, invoke):
    last = newest(root).path
    for copy in range(200):
        shutil.copytree(last, root / "alpha" / "checkpoints" / f"step-00000006.{copy + 1}")
    assert len(invoke("list", "alpha").stdout.splitlines()) == 1 + 4 + 200


# --- show -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["alpha", "alpha@last", "alpha@6", "lpha@6"])
def test_show_names_a_checkpoint_in_many_ways(invoke, name):
    result = invoke("show", name)
    assert result.exit_code == 0, result.stderr
    assert "step-00000006" in result.stdout and "optim.lr" in result.stdout and "0.001" in result.stdout
    assert "image.patches.weight" not in result.stdout and "optim.beta2" not in result.stdout


def test_show_lists_the_rest_if_asked(invoke):
    tensors, everything = invoke("show", "alpha", "--tensors").stdout, invoke("show", "alpha", "--all").stdout
    for text in ("image.patches.weight", "16×3×8×8", "F32"):
        assert text in tensors and text in everything
    assert "train.seed" in everything and "train.seed" not in tensors


def test_show_reads_headers_as_they_are(invoke, root):
    document = json.loads(invoke("show", str(newest(root).path), "--json").stdout)
    tensors = load_file(newest(root).path / MODEL)
    assert {name: info["shape"] for name, info in document["tensors"][MODEL].items()} == {
        name: list(tensor.shape) for name, tensor in tensors.items()
    }
    assert document["metrics"]["score"] == newest(root).manifest.metrics["score"]


# --- verify ---------------------------------------------------------------------------------------------------


def test_verify_passes_what_is_whole(invoke):
    result = invoke("verify", "--deep")
    assert result.exit_code == 0 and result.stdout.count("ok") == 8


@pytest.mark.parametrize("file", [MODEL, OPTIMIZER, STATE, MANIFEST])
def test_verify_finds_one_bit(invoke, root, file):
    flip(newest(root).path / file)
    result = invoke("verify", "alpha", "--json")
    assert result.exit_code == 3
    *others, last = json.loads(result.stdout)["checkpoints"]
    assert all(one["valid"] for one in others) and not last["valid"]
    assert file in last["problems"][0]


def test_verify_deep_finds_what_is_not_finite(invoke, root):
    checkpoint = newest(root)
    tensors = load_file(checkpoint.path / MODEL)
    tensors["text.positions"][3, 4] = float("nan")
    tensors["image.patches.weight"][0, 0, 0, :2] = float("-inf")
    save_file(tensors, checkpoint.path / MODEL)
    files = json.loads((checkpoint.path / MANIFEST).read_text())["files"]
    model = checkpoint.path / MODEL
    sums = {"size_bytes": model.stat().st_size, "sha256": sha256_of(model)}
    rewrite_manifest(checkpoint, files={**files, MODEL: sums})
    assert invoke("verify", "alpha").exit_code == 0
    result = invoke("verify", "alpha", "--deep")
    assert result.exit_code == 3
    assert "text.positions in model.safetensors has 1 non-finite numbers" in result.stdout
    assert "image.patches.weight in model.safetensors has 2 non-finite numbers" in result.stdout


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_float_type_is_looked_into(tmp_path, dtype):
    from clipctl.runs.values import nonfinite_counts

    values = torch.tensor([1.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny, -0.0], dtype=dtype)
    save_file({"fine": values, "not": torch.tensor([1, torch.nan, torch.inf], dtype=dtype)}, tmp_path / "file")
    assert nonfinite_counts(tmp_path / "file") == {"not": 2}


# --- prune ----------------------------------------------------------------------------------------------------


def steps(root, name="alpha"):
    return [checkpoint.step for checkpoint in CheckpointStore(RunDir(root / name)).all()]


def test_prune_only_tells_until_it_is_allowed(invoke, root):
    result = invoke("prune", "alpha")
    assert result.exit_code == 0 and "would delete" in result.stdout and "--yes" in result.stderr
    assert steps(root) == [2, 3, 4, 6]
    best = CheckpointStore(RunDir(root / "alpha")).best()
    assert best is not None
    assert invoke("prune", "alpha", "--yes").exit_code == 0
    assert steps(root) == sorted({best.step, 6})


def test_prune_keeps_the_newest_whole_one_if_the_last_is_damaged(invoke, root):
    rewrite_all_scores(root, 0.5)
    flip(newest(root).path / MODEL)
    invoke("prune", "alpha", "--yes")
    assert steps(root) == [4, 6]


def rewrite_all_scores(root, score):
    """So that the last is the best, too."""
    for checkpoint in CheckpointStore(RunDir(root / "alpha")).all():
        rewrite_manifest(checkpoint, metrics={"score": score})


def test_prune_takes_away_what_is_of_no_use(invoke, root):
    rewrite_all_scores(root, 0.5)
    partial = root / "alpha" / "checkpoints" / ".step-00000007.partial"
    partial.mkdir()
    (partial / "half").write_bytes(b"x" * 1000)
    (root / "alpha" / "checkpoints" / "step-00000002" / MANIFEST).write_text("{")
    document = json.loads(invoke("prune", "alpha", "--yes", "--json").stdout)
    assert document["deleted"] and document["freed_bytes"] > 1000 and len(document["checkpoints"]) == 4
    assert [path.name for path in (root / "alpha" / "checkpoints").iterdir()] == ["step-00000006"]


def test_prune_leaves_what_it_does_not_know(invoke, root):
    newer = CheckpointStore(RunDir(root / "alpha")).all()[0]
    rewrite_manifest(newer, schema=2)
    foreign = root / "alpha" / "checkpoints" / "step-00000005"
    shutil.copytree(newest(root, "beta").path, foreign)
    invoke("prune", "alpha", "--yes")
    assert newer.path.is_dir() and foreign.is_dir()


def test_prune_refuses_a_live_run(invoke, root):
    code = (
        "import sys; from pathlib import Path; from clipctl.runs.rundir import RunDir\n"
        "run = RunDir(Path(sys.argv[1])); run.acquire(); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(root / "alpha")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "held\n"
        refused = invoke("prune", "alpha", "--yes")
        assert refused.exit_code == 2 and "is in use" in refused.stderr
        assert "skipped" in invoke("prune", "--yes").stderr
        owner.kill()
    assert steps(root) == [2, 3, 4, 6]
    assert len(steps(root, "beta")) < 4


# --- diff -----------------------------------------------------------------------------------------------------


def test_diff_tells_settings_and_tensors(invoke, root):
    document = json.loads(invoke("diff", "alpha", "beta", "--json").stdout)
    assert document["config"] == {"optim.lr": [0.001, 0.002]}
    a, b = (load_file(newest(root, name).path / MODEL)["text.positions"] for name in ("alpha", "beta"))
    change = next(one for one in document["tensors"] if one["name"] == "text.positions")
    assert change["relative"] == pytest.approx(float((b - a).norm() / a.norm()), rel=1e-5)
    assert change["largest"] == pytest.approx(float((b - a).abs().max()), rel=1e-5)
    output = invoke("diff", "alpha", "beta").stdout
    assert "optim.lr" in output and "0.001" in output and "relative change" in output


def test_diff_of_one_with_itself(invoke):
    output = invoke("diff", "alpha", "alpha").stdout
    assert "config: no difference" in output and "0 of 38 differ" in output


def test_diff_reads_only_what_is_whole(invoke, root):
    flip(newest(root).path / MODEL)
    result = invoke("diff", "alpha", "beta")
    assert result.exit_code == 3 and "model.safetensors has changed: its sha256 does not match" in result.stderr


# --- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["show", "alpah"], 2, "did you mean alpha"),
        (["verify", "alpah@best"], 2, "did you mean alpha"),
        (["show", "alpha@99"], 3, "available steps: 2, 3, 4, 6"),
        (["show", "/"], 2, "neither a checkpoint nor a run"),
        (["show", "nowhere/step-00000001"], 3, "it has no manifest.json"),
        (["list", "--runs-dir", "nowhere"], 2, "there is no directory nowhere"),
        (["prune", "--keep-last", "0"], 2, "--keep-last"),
    ],
)
def test_mistakes_are_answered(invoke, arguments, code, complaint):
    result = invoke(*arguments)
    assert result.exit_code == code and complaint in result.stderr and "Traceback" not in result.stderr


def test_a_newer_schema_is_refused(invoke, root):
    rewrite_manifest(newest(root), schema=7)
    result = invoke("show", str(root / "alpha" / "checkpoints" / "step-00000006"))
    assert result.exit_code == 3 and "schema 7" in result.stderr and "upgrade clipctl" in result.stderr
    assert invoke("verify", "alpha").exit_code == 3


def test_a_run_without_checkpoints(invoke, root):
    RunDir.create(root, "tiny", "empty").write_config("preset: tiny\n")
    assert "no checkpoint yet" in invoke("show", "empty").stderr
    assert invoke("list", "empty").exit_code == 0


def test_all_but_diff_do_without_torch(root):
    code = (
        "import sys\nfrom clipctl.cli.app import app\n"
        "for words in (['list'], ['show', 'alpha'], ['verify', '--deep'], ['prune']):\n"
        "    try:\n        app(['checkpoint', *words])\n"
        "    except SystemExit as end:\n        assert not end.code, words\n"
        "sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "CLIPCTL_RUNS": str(root)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
