"""F13: NaN and infinities in losses and gradients."""

import dataclasses

import pytest
import torch

from clipctl.config.quantities import Interval
from clipctl.errors import TrainingError
from clipctl.runs.metrics import read_rows
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from clipctl.training import attempt, loop
from clipctl.training.divergence import LIMIT_IN_A_ROW
from clipctl.training.plan import make_plan
from clipctl.training.state import nonfinite_tensors, tensors_of
from clipctl.training.step import train_step
from tests.conftest import train


@pytest.fixture
def state(micro):
    return attempt.make_state(make_plan(micro))


def batches(plan):
    return attempt.make_loader(plan).epoch(1)


def snapshot(state):
    return [parameter.detach().clone() for parameter in state.model.parameters()]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_without_finite_gradients_changes_nothing(micro, state, value):
    first, second, third = batches(make_plan(micro))
    train_step(state, first, lr=1e-3)
    before, moments = snapshot(state), state.optimizer.state[state.model.text.positions]["exp_avg"].clone()
    handle = state.model.text.positions.register_hook(lambda gradient: gradient * value)
    result = train_step(state, second, lr=1e-3)
    handle.remove()
    assert not torch.isfinite(result.grad_norm) and torch.isfinite(result.loss)
    assert all(torch.equal(old, new) for old, new in zip(before, snapshot(state), strict=True))
    assert torch.equal(moments, state.optimizer.state[state.model.text.positions]["exp_avg"])
    assert state.step == 2  # the batch is used up all the same
    train_step(state, third, lr=1e-3)
    assert not nonfinite_tensors(tensors_of(state))
    assert not all(torch.equal(old, new) for old, new in zip(before, snapshot(state), strict=True))


def train_with_broken_steps(config, root, monkeypatch, broken):
    """A real run in which the gradients of some steps come out as NaN."""
    run = RunDir.create(root, "tiny", "run")

    def step(state, batch, **options):
        hook = state.model.text.positions.register_hook(
            lambda gradient: gradient * float("nan") if state.step + 1 in broken else gradient
        )
        try:
            return train_step(state, batch, **options)
        finally:
            hook.remove()

    monkeypatch.setattr(loop, "train_step", step)
    try:
        return run, train(make_plan(config), run)
    except TrainingError as error:
        return run, error


def test_single_steps_are_skipped_recorded_and_survived(micro, tmp_path, monkeypatch):
    run, summary = train_with_broken_steps(micro, tmp_path, monkeypatch, {1, 4})
    rows = [row for row in read_rows(run.metrics_file) if row["kind"] == "step"]
    assert [row["step"] for row in rows if row.get("skipped")] == [1, 4]
    assert rows[0]["grad_norm"] is None and "grad_norm" in rows[0]["nonfinite"]
    assert summary.state == "finished" and summary.loss == pytest.approx((rows[4]["loss"] + rows[5]["loss"]) / 2)
    last = CheckpointStore(run).last()
    assert last is not None and not last.problems()


def test_several_in_a_row_end_the_run_with_a_diagnosis(micro, tmp_path, monkeypatch):
    save = dataclasses.replace(micro.save, every=Interval(2, "epochs"), keep_best=0)
    config = dataclasses.replace(micro, train=dataclasses.replace(micro.train, epochs=6), save=save)
    run, error = train_with_broken_steps(config, tmp_path, monkeypatch, set(range(8, 19)))
    assert isinstance(error, TrainingError)
    for word in (
        "diverged",
        f"{LIMIT_IN_A_ROW} steps in a row",
        "step 12",
        "gradient norm nan (still",
        "scale",
    ):
        assert word in str(error)
    assert "learning rate" in str(error) and "batch size 12" in str(error)
    assert error.hint is not None and "checkpoint is from step 6" in error.hint and "--lr 0.0004" in error.hint
    status = run.status()
    assert status is not None and status.state == "failed"


def test_weights_that_are_not_finite_never_become_a_checkpoint(micro, tmp_path, monkeypatch):
    run = RunDir.create(tmp_path, "tiny", "run")

    def step(state, batch, **options):
        result = train_step(state, batch, **options)
        if state.step == 4:
            with torch.no_grad():
                state.model.text.positions[0, 0] = float("inf")
        return result

    monkeypatch.setattr(loop, "train_step", step)
    with pytest.raises(TrainingError, match=r"text\.positions is not finite at step 4"):
        train(
            make_plan(dataclasses.replace(micro, save=dataclasses.replace(micro.save, every=Interval(2, "steps")))), run
        )
    assert [checkpoint.step for checkpoint in CheckpointStore(run).all()] == [2, 3]


def test_a_rate_that_is_far_too_high_ends_the_same_way(micro, tmp_path):
    """Nothing injected: a rate of 10 without clipping overflows by itself."""
    optim = dataclasses.replace(micro.optim, lr=10.0, grad_clip=None, beta2=0.0, eps=1e-12)
    config = dataclasses.replace(micro, optim=optim, train=dataclasses.replace(micro.train, epochs=30))
    run = RunDir.create(tmp_path, "tiny", "run")
    with pytest.raises(TrainingError, match="diverged"):
        train(make_plan(config), run)
    assert all(not checkpoint.problems() for checkpoint in CheckpointStore(run).all())
