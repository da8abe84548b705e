"""Training from a pretrained model: what is locked stays, what is kept is not computed again, nothing gets worse."""

import json
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

import clipctl
from clipctl.cli.app import app
from clipctl.config.layers import Layer, resolve
from clipctl.config.sections import TuneConfig
from clipctl.errors import CheckpointError, ConfigError, Stopped
from clipctl.hardware.devices import open_device
from clipctl.hardware.profile import cache_dir
from clipctl.interop.card import Card
from clipctl.interop.export import export_libraries
from clipctl.model import cost
from clipctl.model.adapting import adapt, merged, resized_positions, trained_tensors
from clipctl.model.clip import Clip
from clipctl.model.encoder import Encoder
from clipctl.model.loss import LOSSES
from clipctl.model.towers import ImageTower, TextTower
from clipctl.model.weights import load_model
from clipctl.monitor.watch import RunWatcher
from clipctl.runs.checkpoint import MODEL, OPTIMIZER, read_checkpoint
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from clipctl.training.optim import LR_SHARE, make_optimizer
from clipctl.training.session import prepare, resume_run
from clipctl.training.stopping import StopSwitch
from tests.conftest import MICRO
from tests.test_training import rows

DEEP = {**MICRO, "model.image.depth": 3, "model.text.depth": 3, "model.text.vocab_size": 40}
RUN = {key: value for key, value in MICRO.items() if not key.startswith("model.")}
RUN |= {"train.epochs": 4, "save.every": "1e", "save.keep_last": 9, "data.augment_on": "device"}
TUNES = {
    "all": {},
    "image": {"tune.lock": "image"},
    "text": {"tune.lock": "text"},
    "both": {"tune.lock": "both"},
    "image:1": {"tune.lock": "image:1"},
    "lora": {"tune.lora": 2},
    "lora, image locked": {"tune.lora": 2, "tune.lock": "image"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A small model of CLIP's layout, trained for a moment."""
    root = tmp_path_factory.mktemp("base")
    clip = {"model.image.depth": 2, "model.text.depth": 2, "recipe": "plain", "train.epochs": 3}
    summary = prepare([Layer("test", {**MICRO, **clip})], root, name="base").train()
    return RunDir(root / "base"), summary


def tune(base, root, name="tuned", **values):
    asked = Layer("test", {**RUN, "tune.base": str(base[0].path), **values})
    session = prepare([asked], root, name=name)
    return RunDir(root / name), session


def last_weights(run):
    return load_model(CheckpointStore(run).named("last")).model.state_dict()


# --- what is trained --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", TUNES.values(), ids=TUNES)
def test_what_is_trained_is_counted_right_and_the_rest_stays(values):
    named = {**DEEP, **values, **({"tune.base": "x"} if values else {})}
    config = resolve([Layer("test", named)])
    torch.manual_seed(0)
    model = Clip(config.model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapt(model, config.tune)
    assert sum(tensor.numel() for tensor in trained_tensors(model).values()) == cost.trained_parameters(config)
    optimizer = make_optimizer(model, config.optim)
    images, tokens = torch.randn(6, 3, 16, 16), torch.randint(1, 39, (6, 9))
    embeddings = model(images, tokens)
    LOSSES["softmax"](embeddings, None).backward()
    optimizer.step()
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before.get(name, tensor))}
    assert moved == trained_tensors(model).keys() & before.keys()


def test_lora_starts_as_the_model_it_was_added_to_and_merges_back():
    config = resolve([Layer("test", {**DEEP, "tune.lora": 3, "tune.base": "x"})])
    torch.manual_seed(0)
    model = Clip(config.model).eval()
    images, tokens = torch.randn(4, 3, 16, 16), torch.randint(1, 40, (4, 9))
    with torch.no_grad():
        before = model(images, tokens)
        adapt(model, config.tune)
        started = model(images, tokens)
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
        changed = model(images, tokens)
        plain = merged(model)(images, tokens)
    assert torch.equal(before.image, started.image) and torch.equal(before.text, started.text)
    assert (changed.image - before.image).abs().max() > 1e-3
    assert (plain.image - changed.image).abs().max() < 1e-5 and (plain.text - changed.text).abs().max() < 1e-5
    assert not any("lora" in name for name in model.state_dict())


def test_lora_on_vit_b_32_trains_less_than_three_percent():
    image = {"model.image.size_px": 224, "model.image.patch_px": 32, "model.image.width": 768, "model.image.depth": 12}
    text = {"model.text.width": 512, "model.text.depth": 12, "model.text.heads": 8, "model.text.vocab_size": 49408}
    values = {**image, **text, "model.image.heads": 12, "model.embed_dim": 512, "tune.base": "x"}
    whole, lora = (resolve([Layer("test", {**values, "tune.lora": rank})]) for rank in (None, 8))
    assert cost.trained_parameters(whole) == cost.parameters(whole.model) > 150e6
    assert cost.trained_parameters(lora) < 0.03 * cost.trained_parameters(whole)
    memory = [cost.training_memory(cost.workload_of(config, 20)) for config in (whole, lora)]
    assert memory[1].optimizer_bytes < 0.03 * memory[0].optimizer_bytes


def test_lower_blocks_learn_more_slowly():
    config = resolve([Layer("test", DEEP)])
    model = Clip(config.model)
    optimizer = make_optimizer(model, config.optim, layer_decay=0.5)
    shares = {id(one): group[LR_SHARE] for group in optimizer.param_groups for one in group["params"]}
    by_name = {name: shares[id(parameter)] for name, parameter in model.named_parameters()}
    assert by_name["image.projection.weight"] == by_name["log_scale"] == 1
    assert by_name["image.blocks.2.mlp_in.weight"] == 0.5 and by_name["image.blocks.0.mlp_in.bias"] == 0.125
    assert by_name["image.patches.weight"] == by_name["text.tokens.weight"] == 0.0625


# --- a run ------------------------------------------------------------------------------------------------------


def test_a_run_starts_where_its_base_ended_and_is_never_worse(base, tmp_path):
    run, session = tune(base, tmp_path)
    summary = session.train()
    first = rows(run, "eval")[0]
    assert first["step"] == 0 and first["score"] == (summary.start_i2t_r1 + summary.start_t2i_r1) / 2
    store = CheckpointStore(run)
    assert summary.best_i2t_r1 + summary.best_t2i_r1 >= summary.start_i2t_r1 + summary.start_t2i_r1
    assert store.named("best").manifest.metrics["score"] >= first["score"]
    mine, theirs = load_model(store.named("base")), load_model(CheckpointStore(base[0]).named("best"))
    assert all(torch.equal(mine.model.state_dict()[name], one) for name, one in theirs.model.state_dict().items())


def test_a_rate_that_destroys_the_model_keeps_it_as_the_best_and_says_so(base, tmp_path):
    run, session = tune(base, tmp_path, **{"optim.lr": 1.0, "optim.grad_clip": 100.0})
    summary = session.train()
    scores = [row["score"] for row in rows(run, "eval")]
    assert max(scores[1:]) < scores[0], "this rate should have destroyed it"
    best = CheckpointStore(run).named("best")
    assert best.step == 0
    assert best.manifest.metrics["score"] == (summary.start_i2t_r1 + summary.start_t2i_r1) / 2
    assert "below_start" in {alert.name for alert in RunWatcher(run).look(0.0).alerts}


@pytest.mark.parametrize("name", ["image", "both", "text", "lora", "image:1"])
def test_checkpoints_hold_what_is_trained_and_load_as_a_whole(base, tmp_path, name):
    run, session = tune(base, tmp_path, **TUNES[name])
    session.train()
    last = CheckpointStore(run).named("last")
    saved = load_file(last.path / MODEL)
    whole = load_file(run.base_dir / MODEL)
    assert sum(one.numel() for one in saved.values()) == cost.trained_parameters(session.plan.config)
    found = last_weights(run)
    assert found.keys() == whole.keys()
    locked = [one for one in whole if one.startswith("image.blocks.0") and name in ("image", "both", "image:1")]
    assert all(torch.equal(found[one], whole[one]) for one in locked)
    assert not torch.equal(found["image.projection.weight"], whole["image.projection.weight"])
    vectors = clipctl.load(run.path).embed_texts(["a red cat"])
    assert vectors.shape == (1, 16) and np.isfinite(vectors).all()


@pytest.mark.parametrize("name", TUNES)
def test_killed_and_resumed_it_ends_with_the_same_bits(base, tmp_path, name):
    whole, session = tune(base, tmp_path, "whole", **TUNES[name])
    session.train()
    broken, session = tune(base, tmp_path, "broken", **TUNES[name])
    session.train()
    for checkpoint in CheckpointStore(broken).all()[2:]:  # as if it had been killed in the second epoch
        shutil.rmtree(checkpoint.path)
    shutil.rmtree(cache_dir("features"), ignore_errors=True)
    resumed = resume_run(broken)
    assert 0 < resumed.step < resumed.plan.schedule.total_steps
    resumed.train()
    last = [CheckpointStore(run).named("last") for run in (whole, broken)]
    for file in (MODEL, OPTIMIZER):
        assert (last[0].path / file).read_bytes() == (last[1].path / file).read_bytes(), file


# --- features ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lock", ["image", "text", "both"])
def test_kept_features_train_the_same_model(base, tmp_path, lock):
    runs = {}
    for kept in (True, False):
        values = {"tune.lock": lock, "tune.views": 2, "tune.keep_features": kept}
        runs[kept], session = tune(base, tmp_path, f"kept-{kept}", **values)
        session.train()
    losses = [[row["loss"] for row in rows(runs[kept], "step")] for kept in (True, False)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    with_features, without = last_weights(runs[True]), last_weights(runs[False])
    for name, tensor in without.items():
        assert torch.allclose(with_features[name], tensor, atol=1e-4), name
    scores = [[row["score"] for row in rows(runs[kept], "eval")] for kept in (True, False)]
    assert scores[0] == pytest.approx(scores[1])


def test_a_locked_tower_is_run_once_for_each_view_and_never_again(base, tmp_path, monkeypatch):
    seen = {"image": 0, "text": 0}
    for name, tower in (("image", ImageTower), ("text", TextTower)):
        features = tower.features

        def counted(self, inputs, name=name, features=features):
            seen[name] += len(inputs)
            return features(self, inputs)

        monkeypatch.setattr(tower, "features", counted)
    shutil.rmtree(cache_dir("features"), ignore_errors=True)
    _, session = tune(base, tmp_path, "first", **{"tune.lock": "both", "tune.views": 2})
    session.train()
    pictures, held_out = len(session.plan.data.train), len(session.plan.data.val)
    assert seen["image"] == 2 * pictures + held_out
    seen["image"] = 0
    _, session = tune(base, tmp_path, "second", **{"tune.lock": "both", "tune.views": 2})
    session.train()
    assert seen["image"] == held_out  # the training pictures' are on disk


@pytest.mark.parametrize("damage", ["cut", "flip", "manifest", "gone"])
def test_damaged_features_are_computed_again(base, tmp_path, damage):
    shutil.rmtree(cache_dir("features"), ignore_errors=True)
    first, session = tune(base, tmp_path, "first", **{"tune.lock": "both"})
    session.train()
    for entry in [one for one in cache_dir("features").iterdir() if one.is_dir()]:
        file = entry / ("manifest.json" if damage == "manifest" else "rows.npy")
        content = bytearray(file.read_bytes())
        if damage == "gone":
            file.unlink()
            continue
        content[-1] ^= 1
        file.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    second, session = tune(base, tmp_path, "second", **{"tune.lock": "both"})
    session.train()
    assert all(torch.equal(one, last_weights(second)[name]) for name, one in last_weights(first).items())


def test_a_picture_that_cannot_be_used_has_the_same_substitute(base, tmp_path):
    (tmp_path / "data").mkdir()
    rng = np.random.default_rng(0)
    table = ["filepath,caption"]
    for number in range(60):
        file = tmp_path / "data" / f"{number}.png"
        Image.fromarray(rng.integers(0, 255, (20, 20, 3), dtype=np.uint8)).save(file)
        if number in (7, 8):
            file.write_bytes(b"broken")
        table.append(f"{number}.png,{'red' if number % 2 else 'blue'} picture {number}")
    (tmp_path / "data" / "captions.csv").write_text("\n".join(table))
    losses = []
    for kept in (True, False):
        values = {"data.source": str(tmp_path / "data" / "captions.csv"), "tune.lock": "image", "tune.views": 2}
        run, session = tune(base, tmp_path, f"kept-{kept}", **values, **{"tune.keep_features": kept})
        summary = session.train()
        assert len(summary.bad_pictures) == 2
        losses.append([row["loss"] for row in rows(run, "step")])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


# --- another size, other names ----------------------------------------------------------------------------------


def test_positions_are_interpolated_for_larger_pictures(base, tmp_path):
    _, session = tune(base, tmp_path, **{"model.image.size_px": 32, "train.epochs": 1})
    assert session.plan.config.model.image.tokens == 17
    assert session.train().start_i2t_r1 is not None
    image = resolve([Layer("test", DEEP)]).model.image
    flat = torch.cat([torch.full((1, 4), 9.0), torch.arange(4.0).repeat(4, 1)])
    larger = resized_positions(flat, image, replace(image, size_px=64))
    assert larger.shape == (65, 4) and torch.equal(larger[0], flat[0])
    assert torch.allclose(larger[1:], torch.arange(4.0).repeat(64, 1), atol=1e-5)


def test_from_a_directory_of_transformers(base, tmp_path):
    found = load_model(CheckpointStore(base[0]).named("best"))
    export_libraries(found, tmp_path / "exported", ("transformers",), Card("exported", "here"))
    asked = Layer("test", {**RUN, "tune.base": str(tmp_path / "exported"), "train.epochs": 1})
    session = prepare([asked], tmp_path, name="tuned")
    summary = session.train()
    ours = base[1]
    assert summary.start_i2t_r1 == pytest.approx(ours.best_i2t_r1)


def test_a_resumed_run_needs_only_its_own_copy_of_the_base(base, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(base[0].path, elsewhere)
    run, session = tune((RunDir(elsewhere),), tmp_path, **{"tune.lock": "image"})
    session.train()
    shutil.rmtree(elsewhere)
    CheckpointStore(run).named("last").path.rename(tmp_path / "gone")
    assert resume_run(run).train().state == "finished"


def test_a_checkpoint_without_its_base_says_what_is_missing(base, tmp_path):
    run, session = tune(base, tmp_path, **{"tune.lock": "image"})
    session.train()
    shutil.rmtree(run.base_dir)
    with pytest.raises(CheckpointError, match="base"):
        load_model(CheckpointStore(run).named("last"))


def test_an_encoder_gives_the_features_that_the_projection_reads(base):
    found = load_model(CheckpointStore(base[0]).named("best"))
    encoder = Encoder(found.model, open_device("cpu"))
    pixels = torch.randint(0, 255, (3, 16, 16, 3), dtype=torch.uint8)
    assert torch.allclose(encoder.images(encoder.image_features(pixels)), encoder.images(pixels), atol=1e-6)


# --- what cannot be ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tune.lock": "image"}, "--from MODEL"),
        ({"tune.lora": 4}, "--from MODEL"),
        ({"tune.lock": "head"}, "image, text or both"),
        ({"tune.lock": "image:x"}, "image, text or both"),
        ({"tune.lora": 0}, "between 1"),
    ],
)
def test_settings_that_make_no_sense(values, words):
    with pytest.raises(ConfigError) as error:
        resolve([Layer("test", values)])
    assert words in f"{error.value} {error.value.hint}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "small"], "preset cannot be set with --from"),
        (["--set", "model.text.width=32"], "model.text.width cannot be set"),
        (["--tokenizer", "words"], "--tokenizer cannot be set"),
        (["--set", "model.image.size_px=20"], "multiple"),
    ],
)
def test_what_the_base_decides_cannot_be_asked_for(base, tmp_path, arguments, words):
    command = ["train", "synthetic:40", "--from", str(base[0].path), "--runs-dir", str(tmp_path), *arguments]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2 and words in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_plan_says_what_is_locked_and_what_it_takes(base, tmp_path):
    command = ["train", "synthetic:40", "--from", str(base[0].path), "--lock", "image", "--dry-run"]
    done = CliRunner().invoke(app, [*command, "--runs-dir", str(tmp_path)])
    assert done.exit_code == 0, done.stderr
    assert "features" in done.stdout and "computed once" in done.stdout and "of them trained" in done.stdout
    plan = json.loads(CliRunner().invoke(app, [*command, "--json", "--runs-dir", str(tmp_path)]).stdout)
    assert plan["trained_parameters"] < plan["parameters"]


def test_stopped_while_features_are_computed(base, tmp_path, monkeypatch):
    """As Ctrl-C would: nothing is lost that was complete, and the run resumes."""
    real, calls = StopSwitch.check, []

    def interrupted(switch):
        calls.append(1)
        if len(calls) == 2:
            switch.signal = signal.SIGINT
        real(switch)

    monkeypatch.setattr(StopSwitch, "check", interrupted)
    shutil.rmtree(cache_dir("features"), ignore_errors=True)
    run, session = tune(base, tmp_path, **{"tune.lock": "image", "tune.views": 3})
    with pytest.raises(Stopped, match=r"^stopped before the first step$") as stop:
        session.train()
    assert stop.value.hint == f"To continue: clipctl train --resume {run.path}"
    monkeypatch.undo()
    assert resume_run(run).train().state == "finished"


def test_tune_config_words():
    assert TuneConfig(lock="both").locked == ("image", "text") and TuneConfig(lock="image:3").unlocked_blocks == 3
    assert TuneConfig(lock="image").has_features and not TuneConfig(lock="image:1").has_features
    assert not TuneConfig().has_features and not TuneConfig(lock="text", keep_features=False).has_features


# --- models between models --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    run, session = tune(base, tmp_path_factory.mktemp("tuned"), **{"optim.lr": 1e-3})
    session.train()
    return run


def merge(*arguments):
    return CliRunner().invoke(app, ["checkpoint", "merge", *map(str, arguments)])


def test_alpha_is_the_share_of_the_second_model(tuned, tmp_path):
    names = f"{tuned.path}@base", f"{tuned.path}@last"
    states = [load_model(CheckpointStore(tuned).named(which)).model.state_dict() for which in ("base", "last")]
    for alpha, wanted in (("0", states[0]), ("1", states[1]), ("0.25", None)):
        done = merge(*names, "--alpha", alpha, "-o", tmp_path / alpha)
        assert done.exit_code == 0, done.stderr
        found = load_model(read_checkpoint(tmp_path / alpha)).model.state_dict()
        for name, tensor in found.items():
            between = 0.75 * states[0][name] + 0.25 * states[1][name]
            assert torch.equal(tensor, wanted[name]) if wanted else torch.allclose(tensor, between, atol=1e-6), name


def test_several_alphas_are_judged_and_the_best_is_kept(tuned, tmp_path):
    names = f"{tuned.path}@base", f"{tuned.path}@last"
    done = merge(*names, "--alpha", 0, 0.5, 1, "-o", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    scores = {row["alpha"]: row["score"] for row in document["results"]}
    assert list(scores) == [0, 0.5, 1] and scores[document["alpha"]] == max(scores.values())
    assert scores[0] == pytest.approx(rows(tuned, "eval")[0]["score"])
    shown = merge(*names, "--alpha", 0, 1, "--data", "synthetic:60")
    assert shown.exit_code == 0 and "best" in shown.stdout and "evaluate it on others" in shown.stdout


def test_one_run_alone_is_averaged_over_its_steps(tuned, tmp_path):
    assert merge(tuned.path, "-o", tmp_path / "mean").exit_code == 0
    states = [load_model(one).model.state_dict() for one in CheckpointStore(tuned).all()]
    found = load_model(read_checkpoint(tmp_path / "mean")).model.state_dict()
    for name, tensor in found.items():
        assert torch.allclose(tensor, sum(state[name] for state in states) / len(states), atol=1e-6), name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--alpha", "2", "-o", "x"], "between 0 and 1"),
        (["--alpha", "half", "-o", "x"], "between 0 and 1"),
        ([], "nothing to do"),
        (["-o", "."], "already exists"),
    ],
)
def test_what_cannot_be_merged(tuned, arguments, words):
    done = merge(f"{tuned.path}@base", f"{tuned.path}@last", *arguments)
    assert done.exit_code == 2 and words in done.stderr


def test_models_of_different_shapes_cannot_be_merged(tuned, tmp_path):
    other = prepare([Layer("test", {**MICRO, "recipe": "plain", "train.epochs": 1})], tmp_path, name="other")
    other.train()
    done = merge(tuned.path, tmp_path / "other", "-o", tmp_path / "out")
    assert done.exit_code == 3 and "does not fit" in done.stderr and not (tmp_path / "out").exists()
