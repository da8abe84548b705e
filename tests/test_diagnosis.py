"""Each alert fires on a run that has the fault, and is silent on a healthy one."""

import dataclasses
import math
import random

import pytest

from clipctl.monitor.diagnosis import CHECKS, RunFacts, diagnose
from clipctl.monitor.reader import MetricsTail
from clipctl.monitor.view import RunView
from clipctl.runs import metrics
from tests.test_monitor import Writer, step_row

STEPS = 400
FACTS = RunFacts(total_steps=STEPS, warmup_steps=40, loss="softmax", loss_floor=0.0, lr=8e-4)
GIB = 2**30
SYSTEM = {
    "cpu_per_core": [0.9, 0.9],
    "process_cpu": 1.7,
    "rss_bytes": GIB,
    "available_bytes": 6 * GIB,
    "swap_used_bytes": GIB,
    "disk_free_bytes": 50 * GIB,
}


class Story:
    """A run told step by step; what differs from a healthy one is said in the test."""

    def __init__(self, path):
        self.path = path
        self.writer = Writer(path, "run")
        self._chance = random.Random(0)

    def tell(self, steps=STEPS, *, row=lambda step: {}, val_loss=None, system=lambda step: {}, score=None):
        for step in range(1, steps + 1):
            noise = self._chance.gauss(0, 0.05)
            healthy = {
                "loss": max(0.05, 3.3 * math.exp(-step / 120) + 0.15 + noise),
                "temperature": 0.07 - 0.03 * step / STEPS,
                "grad_norm": 2.0 + self._chance.random(),
                "images_per_s": 210 + 5 * self._chance.random(),
            }
            self.writer.write(metrics.STEP, step_row(step, **{**healthy, **row(step)}), elapsed_s=step * 0.15)
            if step % 8 == 0:
                loss = 3.2 * math.exp(-step / 150) + 0.4 if val_loss is None else val_loss(step)
                values = {"step": step, "epoch": step // 8, "val_loss": loss}
                values["score"] = min(0.9, step / 400) if score is None else score(step)
                self.writer.write(metrics.EVAL, values)
                self.writer.write(metrics.CHECKPOINT, {"step": step, "size_bytes": 15 << 20, "save_s": 0.05})
            if step % 7 == 0:
                self.writer.write(metrics.SYSTEM, {**SYSTEM, **system(step)})
        return self

    def alerts(self, **facts):
        view = RunView()
        for rows in MetricsTail(self.path).poll()[1]:
            view.fold(rows)
        return {alert.name: alert for alert in diagnose(view, dataclasses.replace(FACTS, **facts))}


@pytest.fixture
def story(tmp_path):
    return Story(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("steps", [1, 5, 30, 60, 200, 400])
def test_a_healthy_run_is_left_in_peace(story, steps):
    assert not story.tell(steps).alerts()


def test_an_empty_run_is_left_in_peace(story):
    assert not story.alerts()


def test_every_alert_says_what_why_and_what_to_do(story):
    rows = {"loss": 3.3, "temperature": 0.9, "data_s": 0.08}
    story.tell(row=lambda step: rows, val_loss=lambda step: 2 + step / 100, score=lambda step: 1 / step)
    alerts = story.alerts()
    assert len(alerts) >= 4
    for alert in alerts.values():
        assert len(alert.what) > 15 and len(alert.why) > 15 and len(alert.todo) > 10
        assert "nan" not in alert.what and "inf" not in alert.what


def names(alerts):
    return set(alerts)


def test_loss_at_chance(story):
    alert = story.tell(row=lambda step: {"loss": 3.30}).alerts()["loss_at_chance"]
    assert "ln B = 3.30" in alert.what and "--lr" in alert.todo and alert.severity == "bad"


def test_loss_at_chance_waits_for_the_warm_up(story):
    assert "loss_at_chance" not in story.tell(60, row=lambda step: {"loss": 3.30}).alerts(warmup_steps=55)


def test_loss_at_chance_is_of_the_softmax_loss_only(story):
    assert "loss_at_chance" not in story.tell(row=lambda step: {"loss": 3.30}).alerts(loss="sigmoid")


def test_loss_at_the_floor_of_duplicates(story):
    story.tell(row=lambda step: {"loss": max(0.72, 3.3 * math.exp(-step / 60))})
    alert = story.alerts(loss_floor=0.69)["loss_at_floor"]
    assert "0.69" in alert.what and "caption" in alert.why
    assert "loss_at_floor" not in story.alerts(loss_floor=0.3)


def test_scale_pinned_and_collapsed(tmp_path):
    pinned = Story(tmp_path / "a").tell(row=lambda step: {"temperature": max(0.01, 0.07 - step / 4000)}).alerts()
    assert names(pinned) == {"scale_pinned"}
    collapsed = Story(tmp_path / "b").tell(row=lambda step: {"temperature": min(0.8, 0.07 + step / 400)}).alerts()
    assert names(collapsed) == {"scale_collapsed"}


def test_not_finite_and_forgotten_later(tmp_path):
    broken = {"loss": math.nan, "grad_norm": math.nan, "skipped": True}
    recent = Story(tmp_path / "a").tell(row=lambda step: broken if step in (350, 360) else {}).alerts()
    assert names(recent) == {"not_finite"} and "2 of the last 200 steps" in recent["not_finite"].what
    assert not Story(tmp_path / "b").tell(row=lambda step: broken if step == 100 else {}).alerts()


def test_spike_and_forgotten_later(tmp_path):
    recent = Story(tmp_path / "a").tell(row=lambda step: {"loss": 4.5} if step == 380 else {}).alerts()
    assert names(recent) == {"spike"} and "4.50" in recent["spike"].what
    assert not Story(tmp_path / "b").tell(row=lambda step: {"loss": 4.5} if step == 200 else {}).alerts()


@pytest.mark.parametrize(("level", "noise"), [(0.5, 0.15), (1.0, 0.2)])
def test_noise_on_a_long_run_is_no_spike(tmp_path, level, noise):
    """Past a thousand steps neighbours share a bucket; their means vary less than the steps do."""
    chance = random.Random(2)
    story = Story(tmp_path / "metrics.jsonl")
    story.tell(12_000, row=lambda step: {"loss": max(0.01, level + chance.gauss(0, noise))})
    assert "spike" not in story.alerts(total_steps=12_000)


def test_a_crash_and_a_failure_are_named(story):
    story.tell(100)
    assert names(story.alerts(state="crashed", handle="a1f3")) == {"crashed"}
    assert "clipctl train --resume a1f3" in story.alerts(state="crashed", handle="a1f3")["crashed"].todo
    assert names(story.alerts(state="failed")) == {"failed"}


def test_gradient_norm_jump(story):
    alerts = story.tell(row=lambda step: {"grad_norm": 60.0} if step > 370 else {}).alerts()
    assert names(alerts) == {"grad_norm_jump"}


def test_one_large_gradient_is_no_jump(story):
    assert not story.tell(row=lambda step: {"grad_norm": 60.0} if step == 390 else {}).alerts()


def test_validation_worse_than_at_the_start(story):
    alerts = story.tell(val_loss=lambda step: 2.0 + step / 200, score=lambda step: 0.2 - step / 4000).alerts()
    assert names(alerts) == {"validation_worse_than_start"}


def test_overfitting(story):
    story.tell(
        row=lambda step: {"accuracy": 0.8}, val_loss=rising_late, score=lambda step: 0.5 - abs(step - 200) / 1000
    )
    assert names(story.alerts()) == {"overfitting"}


def test_a_model_that_has_learnt_nothing_by_heart_does_not_overfit(story):
    story.tell(
        row=lambda step: {"accuracy": 0.1}, val_loss=rising_late, score=lambda step: 0.5 - abs(step - 200) / 1000
    )
    assert not story.alerts()


def rising_late(step):
    return 3.2 * math.exp(-step / 60) + 0.5 + max(0, step - 200) / 300


def test_a_model_that_finds_more_and_more_does_not_overfit_whatever_its_loss(story):
    assert not story.tell(val_loss=rising_late).alerts()


def test_by_heart_or_never_told(story):
    """The same figures mean something else if the held-out captions do not occur in training."""
    story.tell(row=lambda step: {"accuracy": 0.97}, score=lambda step: min(0.1, step / 1000))
    assert names(story.alerts(state="finished", seen_captions=0.8)) == {"overfitting"}
    assert names(story.alerts(state="finished", seen_captions=0.0)) == {"unseen_captions"}
    assert not story.alerts(state="running", seen_captions=0.0)


def test_the_verdict_at_the_end_stands_alone(story):
    """The validation loss of captions that were never seen rises, whatever the learning rate."""
    story.tell(
        row=lambda step: {"accuracy": 0.7}, val_loss=lambda step: 3 + step / 200, score=lambda step: max(0, 0.05 - step)
    )
    assert names(story.alerts(state="finished", seen_captions=0.0)) == {"unseen_captions"}


def test_still_rising_at_the_end_is_underfitting(story):
    story.tell(row=lambda step: {"accuracy": 0.4}, score=lambda step: step / 1000)
    alerts = story.alerts(state="finished")
    assert names(alerts) == {"underfitting"} and "--time" in alerts["underfitting"].todo


def test_a_validation_loss_that_levels_off_is_no_overfitting(story):
    """As the default run ends: the lowest was 0.37, the last is 0.39."""
    assert not story.tell(
        val_loss=lambda step: max(0.37, 3.2 * math.exp(-step / 110)) + max(0, step - 300) / 5000
    ).alerts()


def test_noise_in_the_validation_is_no_overfitting(story):
    chance = random.Random(1)
    assert not story.tell(val_loss=lambda step: 3.2 * math.exp(-step / 150) + 0.4 + chance.gauss(0, 0.02)).alerts()


def test_waiting_for_pictures(story):
    alerts = story.tell(row=lambda step: {"step_s": 0.1, "data_s": 0.05, "forward_s": 0.02}).alerts()
    assert names(alerts) == {"data_bound"} and "50%" in alerts["data_bound"].what


def test_a_late_start_of_workers_is_no_waiting_for_pictures(story):
    late = {"data_s": 30.0, "step_s": 30.05, "forward_s": 0.02}
    usual = {"data_s": 0.001, "forward_s": 0.02}
    assert "data_bound" not in story.tell(row=lambda step: late if step % 50 == 1 else usual).alerts()


@pytest.mark.parametrize(("own", "reason"), [(1.7, "hot"), (0.6, "another program")])
def test_slowdown_with_its_likely_reason(story, own, reason):
    alerts = story.tell(
        row=lambda step: {"images_per_s": 170.0} if step > 200 else {}, system=lambda step: {"process_cpu": own}
    ).alerts()
    assert names(alerts) == {"slowdown"} and reason in alerts["slowdown"].why


def test_a_run_far_slower_than_planned_says_so_from_its_first_steps(story):
    story.tell(30, row=lambda step: {"images_per_s": 27 / 2.0}, system=lambda step: {"process_cpu": 0.2})
    alert = story.alerts(planned_step_s=0.06)["slower_than_planned"]
    assert "33 times" in alert.what and "another program" in alert.why and alert.todo
    assert "slower_than_planned" not in story.alerts(planned_step_s=1.5)


def test_a_run_that_was_far_slower_than_planned_says_so_at_its_end(story):
    """Though its last steps were as fast as planned, and the other program has ended."""
    story.tell(
        row=lambda step: {"images_per_s": 27 / (2.0 if step < 300 else 0.05)},
        system=lambda step: {"process_cpu": 0.2 if step < 300 else 1.7},
    )
    alert = story.alerts(planned_step_s=0.06, state="finished")["slower_than_planned"]
    assert "took on average 1.5 s, 25 times" in alert.what and "another program" in alert.why
    assert "slower_than_planned" not in story.alerts(planned_step_s=0.06)
    assert "slower_than_planned" not in story.alerts(planned_step_s=1.0, state="finished")


def test_processes_that_train_together_are_not_taken_for_other_programs(story):
    story.tell(30, row=lambda step: {"images_per_s": 27 / 2.0}, system=lambda step: {"process_cpu": 0.2})
    for rank in range(2):
        story.writer.write(metrics.RANK, {"step": 30, "rank": rank, "host": "a", "images_per_s": 9.0, "wait_share": 0})
    assert "another program" not in story.alerts(planned_step_s=0.06)["slower_than_planned"].why


def test_memory_pressure_and_swap(tmp_path):
    pressed = Story(tmp_path / "a").tell(system=lambda step: {"available_bytes": GIB // 40}).alerts()
    assert names(pressed) == {"memory_pressure"} and pressed["memory_pressure"].todo == "close other programs"
    swapping = Story(tmp_path / "b").tell(system=lambda step: {"swap_used_bytes": GIB + step * 2**20}).alerts()
    assert names(swapping) == {"swap_growing"}
    in_parts = Story(tmp_path / "c").tell(system=lambda step: {"available_bytes": 50 << 20})
    assert "--resume a1f3 --micro-batch 6" in in_parts.alerts(micro_batch=12, handle="a1f3")["memory_pressure"].todo


def test_a_disk_with_room_for_less_than_two(story):
    alerts = story.tell(system=lambda step: {"disk_free_bytes": 20 << 20}).alerts()
    assert names(alerts) == {"disk_nearly_full"} and "prune" in alerts["disk_nearly_full"].todo


def test_a_save_that_failed_until_one_succeeds(story):
    story.tell(100)
    story.writer.write(metrics.EVENT, {"event": "save_failed", "step": 100, "message": "the disk is full"})
    assert names(story.alerts()) == {"save_failed"}
    story.writer.write(metrics.CHECKPOINT, {"step": 104, "size_bytes": 1, "save_s": 0.1})
    assert not story.alerts()


def test_bad_pictures_are_counted_and_hide_no_other_event(story):
    story.tell(100)
    story.writer.write(metrics.EVENT, {"event": "save_failed", "step": 100, "message": "the disk is full"})
    for count in range(1, 31):
        row = {"event": "bad_picture", "step": 100, "message": "a.jpg: truncated", "counts": {"truncated": count}}
        story.writer.write(metrics.EVENT, row)
    alerts = story.alerts()
    assert names(alerts) == {"save_failed", "bad_pictures"}
    assert alerts["bad_pictures"].what == "30 pictures cannot be used: 30 truncated"


def test_silence(story):
    assert names(story.tell(100).alerts(silence_s=20.0)) == {"silent"}


def test_a_warm_up_longer_than_the_run(story):
    assert "warmup_too_long" in story.tell(20).alerts(warmup_steps=500)


def test_rows_with_nothing_in_them(tmp_path):
    """Every check copes with rows that lack what it looks at."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"kind":"step","step":{step}}}\n' for step in range(1, 200)) + '{"kind":"system"}\n')
    view = RunView()
    for rows in MetricsTail(path).poll()[1]:
        view.fold(rows)
    assert view.step == 199 and len(CHECKS) == 19
    assert not diagnose(view, FACTS)
