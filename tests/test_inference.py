"""A trained model in Python: loaded from a checkpoint, asked for embeddings."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import clipctl
from clipctl.config.layers import Layer, resolve
from clipctl.data.synthetic.scenes import SyntheticSource
from clipctl.errors import CheckpointError, ConfigError, DataError
from clipctl.model.weights import load_model
from clipctl.runs.checkpoint import MODEL
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from clipctl.training import attempt
from clipctl.training.plan import make_plan
from clipctl.training.session import resume
from clipctl.training.state import read_tensors
from tests.conftest import MICRO, train

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = RunDir.create(tmp_path_factory.mktemp("runs"), "tiny", "run")
    train(make_plan(resolve([Layer("test", MICRO)])), run)
    run.release()
    return run


@pytest.fixture(scope="module")
def model(run):
    return clipctl.load("run@last", runs_dir=run.path.parent)


@pytest.fixture
def picture():
    return SyntheticSource(4, seed=0, validation=True).square(0, 16)


def test_embeddings_are_those_of_the_evaluation(run, model):
    plan = make_plan(resolve([Layer("test", MICRO)]))
    state, evaluator = attempt.make_state(plan), attempt.make_evaluator(plan)
    read_tensors(state, CheckpointStore(run).last())
    image, text, _ = evaluator._embed(state, lambda: None)
    source = plan.data.val
    pictures = [source.square(index, 16) for index in range(len(source))]
    assert np.allclose(model.embed_images(pictures), image.numpy(), atol=1e-6)
    assert np.allclose(model.embed_texts(evaluator.held_out.captions), text.numpy(), atol=1e-6)


def test_files_pictures_and_arrays_give_the_same(model, picture, tmp_path):
    picture.save(tmp_path / "one.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "one.png")
    forms = [str(tmp_path / "one.png"), tmp_path / "link.png", picture, np.array(picture)]
    vectors = model.embed_images(forms, batch_size=3)
    assert vectors.shape == (4, model.dimensions) and vectors.dtype == np.float32
    assert np.array_equal(vectors[0], vectors[1]) and np.allclose(vectors, vectors[0], atol=1e-6)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def test_odd_pictures_are_made_fit(model):
    wide, clear = Image.new("L", (90, 7), 200), Image.new("RGBA", (5, 5))
    assert model.embed_images([wide, clear]).shape == (2, model.dimensions)


def test_nothing_gives_nothing(model):
    assert model.embed_images([]).shape == model.embed_texts([]).shape == (0, model.dimensions)


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "empty"), (b"no picture", "not a picture"), (None, "No such file")]
)
def test_a_picture_that_cannot_be_used_is_named(model, tmp_path, content, words):
    path = tmp_path / "bad.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=rf"bad\.png cannot be (used|read): {words}"):
        model.embed_images([path])


@pytest.mark.parametrize("pixels", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)])
def test_arrays_of_another_shape_or_type_are_refused(model, pixels):
    with pytest.raises(DataError, match="pixels must be uint8"):
        model.embed_images([pixels])


def test_a_single_text_or_picture_is_not_taken_for_several(model):
    with pytest.raises(TypeError, match="pass a list"):
        model.embed_texts("a red cat")
    with pytest.raises(TypeError, match="pass a list"):
        model.embed_images("cat.jpg")


def test_runs_are_found_where_the_environment_says(run, monkeypatch):
    monkeypatch.setenv("CLIPCTL_RUNS", str(run.path.parent))
    assert clipctl.load("run@last").size_px == 16


def test_a_refused_resume_lets_go_of_the_run(run):
    changed = [Layer("test", {"optim.weight_decay": 0.5})]
    with pytest.raises(ConfigError, match=r"made with optim\.weight_decay"):
        resume(run.path.parent, "run", changed)
    resume(run.path.parent, "run", changed, allow_change=True).run.release()


def test_a_model_needs_no_optimizer_and_is_verified_first(run, tmp_path):
    last = CheckpointStore(run).last()
    before = torch.get_rng_state()
    trained = load_model(last)
    assert not trained.model.training and torch.equal(torch.get_rng_state(), before)
    assert trained.config.train.batch_size == 12 and trained.tokenizer["kind"] == "characters"
    content = bytearray((last.path / MODEL).read_bytes())
    content[-1] ^= 1
    (last.path / MODEL).write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        load_model(last)
    content[-1] ^= 1
    (last.path / MODEL).write_bytes(content)


def test_the_program_in_the_readme_trains_evaluates_and_embeds(tmp_path, picture, monkeypatch, capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) <= 5
    (tmp_path / "docs").mkdir()
    picture.save(tmp_path / "docs/pictures.png")
    small = block.replace("{", "{" + ", ".join(f"{key!r}: {value!r}" for key, value in MICRO.items()) + ", ", 1)
    assert small != block
    monkeypatch.chdir(tmp_path)
    exec(small, {})
    assert (tmp_path / "runs").is_dir() and re.search(r"R@1 \d\.\d\d \[\[", capsys.readouterr().out)


def test_a_python_program_gets_the_checks_of_the_command_line(tmp_path, monkeypatch):
    from clipctl.errors import DeviceError, SaveError
    from clipctl.hardware import disk

    with pytest.raises(ConfigError, match=r"unknown key optim\.lrr"):
        clipctl.train("synthetic", {"optim.lrr": 1}, runs_dir=tmp_path)
    with pytest.raises(DeviceError, match="training needs about"):
        clipctl.train(
            "synthetic", {"preset": "huge", "train.batch_size": 200, "train.micro_batch": 200}, runs_dir=tmp_path
        )
    monkeypatch.setattr(disk, "free_bytes", lambda path: 1000)
    with pytest.raises(SaveError, match="2 checkpoints need"):
        clipctl.train("synthetic:40", {key: value for key, value in MICRO.items() if key != "data.source"})
    assert list(tmp_path.iterdir()) == []


def test_a_training_lets_go_of_its_run(tmp_path):
    summary = clipctl.train("synthetic:40", {**MICRO, "train.epochs": 1}, runs_dir=tmp_path)
    with RunDir(Path(summary.run)).locked():
        assert clipctl.load(summary.run).embed_texts(["a red cat"]).shape == (1, 16)
