"""`--recipe auto`, `--time` and what stands beside the result."""

import csv
import json
import math
import re
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from clipctl.cli.views.pages.overview import figures
from clipctl.cli.views.scene import Options, Scene
from clipctl.cli.views.training import improvement_lines, summary_text
from clipctl.config.layers import Layer, load_yaml, resolve, to_layer, to_yaml
from clipctl.config.quantities import parse_duration
from clipctl.data.catalog import open_data
from clipctl.data.traits import Traits, traits_of
from clipctl.errors import ConfigError
from clipctl.model.forecast import CostModel, Estimate
from clipctl.monitor.watch import RunWatcher
from clipctl.report import page
from clipctl.report.history import History
from clipctl.runs import metrics
from clipctl.runs.store import CheckpointStore
from clipctl.training import recipe
from clipctl.training.deadline import LEAVING_S, Deadline
from clipctl.training.pace import Pace, measure_pace
from clipctl.training.plan import make_plan
from clipctl.training.recipe import ENOUGH_PASSES, RUNGS, data_settings
from clipctl.training.session import prepare, resume_run
from tests.conftest import MICRO
from tests.test_training import rows, weights

THINGS = ("square", "circle", "cross", "bar", "corner", "triangle")


def draw(thing, rng, side=24):
    """A shape in ink on paper, a little elsewhere each time."""
    picture = Image.new("RGB", (side, side), "white")
    pen = ImageDraw.Draw(picture)
    x, y = rng.integers(3, 7, size=2)
    box = (int(x), int(y), int(x) + 12, int(y) + 12)
    match thing:
        case "square":
            pen.rectangle(box, outline="black", width=2)
        case "circle":
            pen.ellipse(box, outline="black", width=2)
        case "cross":
            pen.line(box, fill="black", width=2)
            pen.line((box[2], box[1], box[0], box[3]), fill="black", width=2)
        case "bar":
            pen.rectangle((box[0], box[1] + 5, box[2], box[1] + 8), fill="black")
        case "corner":
            pen.line((box[0], box[1], box[0], box[3], box[2], box[3]), fill="black", width=2)
        case "triangle":
            pen.polygon(((box[0] + box[2]) / 2, box[1], box[2], box[3], box[0], box[3]), outline="black")
    return picture


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """120 drawings of six things, 36 others of the same held out."""
    place, rng = tmp_path_factory.mktemp("shapes"), np.random.default_rng(0)
    for split, count in (("train", 120), ("val", 36)):
        with (place / f"{split}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["filepath", "caption"])
            for number in range(count):
                thing = THINGS[number % len(THINGS)]
                draw(thing, rng).save(place / f"{split}-{number}.png")
                table.writerow([f"{split}-{number}.png", f"a {thing}"])
    return {"data.source": str(place / "train.csv"), "data.val": str(place / "val.csv")}


def layer(**values):
    return [Layer("test", {"runtime.threads": 1, **values})]


# --- what the data are -----------------------------------------------------------------------------------------


def test_drawings_and_repeated_captions_are_recognised(shapes):
    found = traits_of(open_data(resolve(layer(**shapes)).data).train)
    assert (found.pictures, found.captions, found.repeated, found.side_px) == (120, 6, 1.0, 24)
    assert found.are_drawings


def test_photographs_are_not_drawings(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(8):
        smooth = np.cumsum(rng.normal(size=(60, 80, 3)), axis=0) * 9 + 128  # neighbours are alike, never equal
        Image.fromarray(smooth.clip(0, 255).astype(np.uint8)).save(tmp_path / f"{number}.jpg")
        (tmp_path / f"{number}.txt").write_text(f"a view number {number}")
    source = open_data(resolve(layer(**{"data.source": str(tmp_path), "data.val_fraction": 0.3})).data).train
    found = traits_of(source)
    assert not found.are_drawings and found.side_px == 60 and found.repeated == 0
    values, _ = data_settings(found)
    assert values["data.flip"] and values["data.min_crop"] < 1 and "train.picture_term" not in values


@pytest.mark.parametrize(("pictures", "batch_size"), [(20, 16), (216, 54), (7437, 512), (10**6, 512)])
def test_the_batch_grows_with_the_pictures(pictures, batch_size):
    values, _ = data_settings(Traits(pictures, pictures, 0.0, 64, 0.9))
    assert values["train.batch_size"] == batch_size
    assert recipe.LEAST_LR <= values["optim.lr"] <= recipe.PEAK_LR


# --- what is decided from it -----------------------------------------------------------------------------------


def test_what_was_asked_for_wins_over_the_recipe(shapes):
    asked = {**shapes, "train.epochs": 2, "train.batch_size": 30, "data.tokenizer": "characters", "data.jitter": 0.3}
    config = prepare(layer(**asked)).plan.config
    assert config.model.image.stem == "conv" and config.train.picture_term == 1.0 and not config.data.flip
    assert (config.train.batch_size, config.data.tokenizer, config.data.jitter) == (30, "characters", 0.3)
    assert config.train.epochs == 2 and config.train.steps is None


def test_a_preset_or_a_model_of_ones_own_is_kept(shapes):
    for own in ({"preset": "tiny"}, {key: value for key, value in MICRO.items() if key.startswith("model.")}):
        config = prepare(layer(**shapes, **own)).plan.config
        assert config.model.image.is_clip_layout and config.train.batch_size == 27 and config.optim.lr == 8e-4
        assert config.data.tokenizer == "words" and config.train.picture_term == 1.0
        assert config.save.every == resolve(layer()).save.every
        assert config.train.epochs == 50 and config.train.steps is None


def test_targets_are_smoothed_if_captions_have_few_pictures(shapes):
    def smoothing(**asked):
        return prepare(layer(**asked)).plan.config.train.label_smoothing

    assert smoothing() == smoothing(layout="clip") == recipe.LABEL_SMOOTHING
    assert smoothing(**shapes) == 0  # 120 pictures of six captions
    assert smoothing(**{"train.label_smoothing": 0.05}) == 0.05
    assert smoothing(**{"train.loss": "sigmoid"}) == smoothing(preset="tiny") == smoothing(recipe="plain") == 0


def test_layout_clip_trains_what_other_libraries_know(shapes, pace):
    plan = prepare(layer(**shapes, layout="clip")).plan
    assert plan.config.model.image.is_clip_layout and plan.config.train.picture_term == 1.0


def test_plain_is_what_0_1_did(shapes):
    plan = prepare(layer(**shapes, recipe="plain")).plan
    assert plan.config.model == resolve(layer()).model.__class__(
        text=plan.config.model.text, image=resolve(layer()).model.image
    )
    assert (plan.config.data.tokenizer, plan.config.data.augment_on, plan.recipe) == ("characters", "loader", ())


@pytest.fixture
def pace(monkeypatch):
    """A machine of a known speed: 10 ms for a step of the first rung that is tried."""
    measured = []

    def fake(plan, limit_s, longest_s):
        measured.append(plan)
        size_px, width = plan.config.model.image.size_px, plan.config.model.image.width
        return Pace(0.010 * (size_px / 32) ** 2 * (width / 128) ** 2, 1e-5)

    monkeypatch.setattr(recipe, "measure_pace", fake)
    return measured


def test_more_time_buys_a_larger_model(pace):
    found = []
    for asked in ("10s", "30s", "60s", "10m"):
        config = prepare(layer(**{"data.source": "synthetic:2000", "train.time": asked})).plan.config
        found.append((config.model.image.size_px, config.model.image.width))
    assert found == sorted(found) and len(set(found)) >= 3 and found[-1] == (RUNGS[-1].size_px, RUNGS[-1].width)


def test_steps_fill_the_time_and_evaluations_take_their_share(pace):
    plan = prepare(layer(**{"data.source": "synthetic:2000", "train.time": "2m"}), spent_s=5.0).plan
    assert plan.seconds is not None and 100 < plan.seconds.value < 121
    assert plan.schedule.total_steps == plan.config.train.steps
    assert plan.config.train.epochs == math.ceil(plan.schedule.total_steps / plan.schedule.steps_per_epoch)
    assert 2 <= plan.schedule.evaluations <= recipe.EVALUATIONS + 1
    assert any(re.search(r"epochs should give about \d+% of the R@1", words) for words in plan.recipe)
    assert sum(one.is_chosen for one in plan.alternatives) == 1 and len(plan.alternatives) >= 4


def test_without_a_time_real_data_get_a_budget_by_rule_and_nothing_is_measured(pace, shapes):
    first, second = (prepare(layer(**shapes)).plan for _ in range(2))
    assert first.config == second.config and not pace
    assert first.schedule.epochs <= ENOUGH_PASSES and any("epochs, the most by rule" in words for words in first.recipe)
    assert first.schedule.evaluations <= recipe.EVALUATIONS


def test_the_number_of_epochs_changes_the_length_and_nothing_else():
    usual, *others = [
        prepare(layer(**{"data.source": "synthetic:2000", **length})).plan.config
        for length in ({}, {"train.epochs": 5}, {"train.epochs": 200}, {"train.steps": 9})
    ]
    assert all(one.model == usual.model and one.optim == usual.optim for one in others)
    assert [one.train.epochs for one in others[:2]] == [5, 200] and others[2].train.steps == 9


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"model.embed_dim": 64}, None),
        ({"model.text.width": 64}, None),
        ({"model.image.size_px": 48}, 48),
        ({"model.image.width": 96}, None),
    ],
)
def test_a_setting_of_the_model_leaves_the_rest_to_the_recipe(shapes, own, expected):
    usual, config = (prepare(layer(**shapes, **values)).plan.config for values in ({}, own))
    image = config.model.image
    assert (image.stem, image.pool) == ("conv", "flat") and config.train.batch_size == usual.train.batch_size
    assert image.size_px == (expected or usual.model.image.size_px)
    assert {key: value for key, value in to_layer(config).values.items() if key in own} == own


def test_layout_clip_refuses_what_it_is_not(shapes):
    with pytest.raises(ConfigError, match=r"layout clip needs model\.image\.pool class, not flat"):
        prepare(layer(**shapes, layout="clip", **{"model.image.pool": "flat"}))


def test_a_micro_batch_is_compared_with_the_batch_that_the_recipe_chooses():
    asked = {"data.source": "synthetic:400", "train.epochs": 1}
    config = prepare(layer(**asked, **{"train.micro_batch": 64})).plan.config
    assert (config.train.micro_batch, config.train.batch_size) == (64, 90)
    with pytest.raises(ConfigError, match=r"train\.micro_batch 91 is larger than train\.batch_size 90"):
        prepare(layer(**asked, **{"train.micro_batch": 91}))


@pytest.mark.parametrize("length", [{"train.epochs": 30}, {"train.steps": 90}, {"preset": "tiny"}])
def test_evaluations_take_no_more_than_their_share_however_the_length_was_set(length):
    asked = {"data.source": "synthetic:400", "data.val_fraction": 0.8, **length}
    plan = prepare(layer(**asked)).plan
    forward = recipe.FORWARD_SHARE * len(plan.data.val) / len(plan.data.train)  # in epochs
    assert len(plan.data.val) > 3 * len(plan.data.train)
    assert plan.schedule.evaluations * forward <= 1 + recipe.EVALUATION_SHARE * plan.schedule.epochs


def test_how_often_is_evaluated_can_be_asked_for(pace):
    for length in ({"train.time": "1m"}, {"train.epochs": 30}, {}):
        asked = {"data.source": "synthetic:400", "train.eval_every": 7, **length}
        assert prepare(layer(**asked)).plan.schedule.eval_every == 7


def test_the_plan_agrees_with_what_was_considered(monkeypatch):
    """Towers are slower here than their operations let expect: the one that is chosen was timed itself."""
    monkeypatch.setattr(
        recipe, "measure_pace", lambda plan, *_: Pace(0.010 * (plan.config.model.image.size_px / 32) ** 3, 1e-5)
    )
    plan = prepare(layer(**{"data.source": "synthetic:2000", "train.time": "2m"})).plan
    (chosen,) = [one for one in plan.alternatives if one.is_chosen]
    epochs = plan.schedule.total_steps / plan.schedule.steps_per_epoch
    assert epochs <= chosen.epochs < 1.3 * epochs


def test_a_saved_config_is_a_config(shapes, pace, tmp_path):
    """`time: null` says nothing; and of a run with a time limit, the number of steps is kept."""
    plan = prepare(layer(**shapes, **{"train.time": "30s"})).plan
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(plan.config))
    again = prepare([load_yaml(file)]).plan
    assert again.config == plan.config and again.schedule == plan.schedule


def test_a_time_given_later_replaces_epochs(shapes, pace):
    asked = [*layer(**shapes, **{"train.epochs": 3}), Layer("--time", {"train.time": "30s"})]
    assert prepare(asked).plan.deadline_s is not None
    turned = [*layer(**shapes, **{"train.time": "30s"}), Layer("--epochs", {"train.epochs": 3})]
    plan = prepare(turned).plan
    assert plan.deadline_s is None and plan.schedule.epochs == 3


@pytest.mark.parametrize("text", ["10", "m", "-3m", "0s", "ten minutes", "1e3m", "500h500h"])
def test_a_time_that_is_no_time(text):
    with pytest.raises(ValueError, match="a duration such as 90s, 10m or 2h"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("1h30m", 5400), (" 2m ", 120)]
)
def test_times_as_people_write_them(text, seconds):
    assert parse_duration(text) == seconds


def test_a_time_too_short_for_anything_says_the_least(shapes):
    with pytest.raises(ConfigError, match="--time 1s is too short") as caught:
        prepare(layer(**shapes, **{"train.time": "1s"}))
    least = re.search(r"use --time (\d+)s or more", caught.value.hint or "")
    assert least is not None
    prepare(layer(**shapes, **{"train.time": f"{int(least[1]) + 2}s"}))


def test_a_forecast_made_beside_busy_programs_does_not_refuse_a_time(shapes, monkeypatch):
    monkeypatch.setattr(CostModel, "step_s", lambda *_: Estimate.around(15.0, 0.5, "prior"))
    plan = prepare(layer(**shapes, **{"train.time": "30s"})).plan
    assert plan.forecast.step_s is not None and plan.forecast.step_s.value < 1.5
    monkeypatch.setattr(CostModel, "step_s", lambda *_: Estimate.around(1500.0, 0.5, "prior"))
    with pytest.raises(ConfigError, match="too short"):
        prepare(layer(**shapes, **{"train.time": "30s"}))


def test_a_step_longer_than_allowed_is_timed_once(shapes, monkeypatch):
    plan = prepare(layer(**shapes, **{"train.epochs": 1})).plan
    taken = []
    monkeypatch.setattr("clipctl.training.pace.train_step", lambda *_, **__: taken.append(time.sleep(0.2)))
    pace = measure_pace(plan, 0.01, 0.1)
    assert len(taken) == 1 and 0.2 <= pace.step_s < 1


def test_a_time_and_a_number_of_steps_contradict_each_other(shapes):
    with pytest.raises(ConfigError, match=r"train\.time and train\.steps both say"):
        prepare(layer(**shapes, **{"train.time": "1m", "train.steps": 5}))


# --- a run -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(shapes, tmp_path_factory):
    session = prepare(
        layer(**shapes, **{"train.epochs": 12, "train.eval_every": 5, "save.every": "1e"}),
        tmp_path_factory.mktemp("runs"),
    )
    session = session.checked().opened()
    return session.run, session.train()


def test_a_few_pictures_are_learnt(trained):
    _, summary = trained
    assert summary.best_i2t_r1 > 0.6


def test_chance_counts_equal_captions(trained):
    """Six things, as often as each other: whoever guesses is right once in six times."""
    _, summary = trained
    assert summary.chance_r1 == pytest.approx(1 / 6)
    assert "chance 17%" in summary_text(summary)


def test_the_baseline_stands_beside_the_result(trained):
    run, summary = trained
    assert summary.baseline_r1 is not None and 0.3 < summary.baseline_r1 <= 1
    last = CheckpointStore(run).last()
    assert last is not None and last.read_state()["baseline"] == summary.baseline_r1
    assert json.loads(json.dumps(summary.to_dict()))["baseline_r1"] == summary.baseline_r1
    assert {row["baseline_r1"] for row in rows(run, "eval")} == {summary.baseline_r1}
    snapshot = RunWatcher(run).look(time.monotonic())
    assert snapshot.to_dict()["baseline_r1"] == summary.baseline_r1
    told = f"{summary.baseline_r1:.0%}"
    assert any(f"pixels {told}" in beneath for _, _, beneath in figures(Scene(snapshot, Options())))
    report = page.report([History.read(run, time.monotonic())])
    assert f"<th>R@1, nearest pixels</th><td>{told} picture to caption</td>" in report


def test_evaluations_are_made_when_due_and_at_the_end(trained):
    run, _ = trained
    assert [row["epoch"] for row in rows(run, "eval")] == [5, 10, 12]
    assert [row["epoch"] for row in rows(run, "epoch")] == list(range(1, 13))


def test_only_evaluated_checkpoints_have_a_score(trained):
    run, _ = trained
    for checkpoint in CheckpointStore(run).all():
        assert bool(checkpoint.manifest.metrics) == (checkpoint.manifest.epoch in (5, 10, 12))


def test_it_resumes_to_the_same_bits(shapes, trained, tmp_path):
    """Words, views, convolutions and the picture term, killed in the middle of an epoch."""
    run, _ = trained
    asked = layer(**shapes, **{"train.epochs": 12, "train.eval_every": 5, "save.every": "1s", "save.keep_last": 99})
    session = prepare(asked, tmp_path).checked().opened()
    session.train()
    assert session.run is not None
    for checkpoint in CheckpointStore(session.run).all():
        if checkpoint.step > 18:
            shutil.rmtree(checkpoint.path)
    again = resume_run(session.run)
    assert again.step == 18
    again.train()
    assert all(torch.equal(tensor, weights(session.run)[name]) for name, tensor in weights(run).items())


class Clock:
    """A second for each time that somebody looks."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        self.now_s += 1.0
        return self.now_s


def test_the_number_of_steps_follows_the_pace():
    clock = Clock()
    deadline = Deadline(ends_s=101.0 + 50.0 + LEAVING_S, clock=clock)  # 50 s from now on
    assert deadline.corrected_steps(9, 100) is None  # too early
    clock.now_s = 110.0
    assert deadline.corrected_steps(13, 100) == 65  # 13 steps took 10 s
    assert deadline.corrected_steps(14, 65) is None  # not again before a quarter
    clock.now_s = 126.0 - 1
    assert deadline.corrected_steps(33, 65) is None  # within 2%
    clock.now_s = 149.0
    assert deadline.corrected_steps(60, 65) == 61  # late: one more step, to end with an evaluation
    assert deadline.corrected_steps(64, 65) is None


def test_a_run_with_a_time_limit_is_corrected_and_resumes_to_the_same_bits(shapes, tmp_path, monkeypatch):
    """As if steps took twice as long as they did when they were timed."""
    monkeypatch.setattr(recipe, "measure_pace", lambda *_: Pace(0.01, 1e-5))
    asked = layer(**shapes, **{"train.time": "8s", "save.every": "1e", "save.keep_last": 99})
    session = prepare(asked, tmp_path)
    planned = session.plan.schedule.total_steps
    looks = iter([None, None, planned // 2])
    monkeypatch.setattr(Deadline, "corrected_steps", lambda *_: next(looks, None))
    session = session.checked().opened()
    assert session.run is not None
    summary = session.train()
    assert summary.steps == planned // 2
    (event,) = rows(session.run, "event")
    assert event["message"] == f"{planned // 2} steps instead of {planned}, to end on time"
    expected = weights(session.run)
    for checkpoint in CheckpointStore(session.run).all():
        if checkpoint.step > event["step"]:
            shutil.rmtree(checkpoint.path)
    again = resume_run(session.run)
    assert again.step == event["step"] and again.plan.schedule.total_steps == planned // 2
    again.train()
    assert all(torch.equal(tensor, weights(session.run)[name]) for name, tensor in expected.items())


def test_a_run_shorter_than_an_epoch_is_corrected_too(shapes, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "measure_pace", lambda *_: Pace(0.01, 1e-5))
    asked = {
        "train.time": "8s",
        "train.batch_size": 2,
        "data.source": shapes["data.source"],
        "data.val": shapes["data.val"],
    }
    session = prepare(layer(**asked), tmp_path)
    session = replace(session, plan=session.plan.with_steps(50))  # of 60 in an epoch
    monkeypatch.setattr("clipctl.training.meter.READ_INTERVAL_S", 0.0)
    monkeypatch.setattr(Deadline, "corrected_steps", lambda _, step, total: 30 if step >= 12 and total == 50 else None)
    summary = session.checked().opened().train()
    assert summary.steps == 30


def test_a_run_that_was_begun_takes_no_other_time(trained):
    run, _ = trained
    with pytest.raises(ConfigError, match="keeps its number of steps"):
        resume_run(run, layer(**{"train.time": "1m"}))


def test_patience_ends_a_run_that_no_longer_improves(shapes, tmp_path):
    asked = {"train.epochs": 200, "train.patience": 3, "optim.lr": 1e-9}
    session = prepare(layer(**shapes, **asked), tmp_path).checked().opened()
    summary = session.train()
    assert session.run is not None
    evaluated = rows(session.run, "eval")
    assert summary.state == "finished" and 4 <= len(evaluated) < 60 and summary.is_stopped_early
    (event,) = rows(session.run, "event")
    assert event["message"].startswith("stopped early") and "3 evaluations without a new best" in event["message"]
    assert "--patience" not in "".join(improvement_lines(summary))
    assert metrics.read_rows(session.run.metrics_file)
    last = CheckpointStore(session.run).last()
    assert last is not None and last.step == evaluated[-1]["step"]


@pytest.mark.parametrize(("lr", "is_noted"), [(1.0, True), (5e-3, False)])
def test_a_rate_far_above_the_usual_one_is_noted_before_the_run_starts(lr, is_noted):
    plan = make_plan(resolve([Layer("test", {**MICRO, "optim.lr": lr})]))
    assert any("times the usual" in note for note in plan.notes) == is_noted
