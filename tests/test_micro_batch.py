"""Exact large batches in small memory: gradients through cached embeddings, and what happens when memory runs out."""

import re
from dataclasses import replace

import pytest
import torch

from clipctl.config.layers import Layer, resolve
from clipctl.data.batch import Batch
from clipctl.errors import ConfigError, DeviceError
from clipctl.hardware.devices import open_device
from clipctl.model.cost import workload_of
from clipctl.model.towers import ImageTower
from clipctl.model.workload import Setting
from clipctl.runs import metrics
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from clipctl.training.plan import make_plan
from clipctl.training.session import resume_run
from clipctl.training.state import fresh_state
from clipctl.training.step import gradients, train_step
from clipctl.training.trial import time_steps
from tests.conftest import MICRO, train
from tests.test_training import rows, weights

PAIRS = 23


def config(**values):
    return resolve([Layer("test", {**MICRO, "model.text.vocab_size": 40, **values})])


def a_batch(pairs=PAIRS):
    rng = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (pairs, 16, 16, 3), dtype=torch.uint8, generator=rng)
    tokens = torch.randint(1, 39, (pairs, 9), generator=rng)
    tokens[:, -1] = 39
    captions = torch.randint(0, pairs // 2, (pairs,), generator=rng)  # some are equal
    jitter = 0.9 + 0.2 * torch.rand(pairs, 3, generator=rng)
    return Batch(images, tokens, jitter, captions[:, None] == captions)


def gradients_of(micro_batch, *, loss="softmax", precision="fp32"):
    state = fresh_state(config(**{"train.loss": loss}), open_device("cpu"), precision, 1)
    state.micro_batch = micro_batch
    result = gradients(state, a_batch())
    if state.loss_scale:
        state.loss_scale.unscale(list(state.model.parameters()))
    return result, {name: parameter.grad for name, parameter in state.model.named_parameters()}


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("micro_batch", [1, 4, 12, 22])
def test_micro_batches_give_the_gradients_of_the_whole_batch(loss, micro_batch):
    whole, expected = gradients_of(None, loss=loss)
    parts, found = gradients_of(micro_batch, loss=loss)
    assert parts.loss == pytest.approx(float(whole.loss), rel=1e-6) and parts.accuracy == whole.accuracy
    for name, gradient in expected.items():
        assert torch.norm(found[name] - gradient) <= 1e-5 * torch.norm(gradient), name


def test_averaging_the_losses_of_parts_would_not():
    """What other trainers call accumulation: each part contrasted only with itself."""
    _, expected = gradients_of(None)
    state = fresh_state(config(), open_device("cpu"), "fp32", 1)
    batch, total = a_batch(), {}
    for part in batch.split(6):
        gradients(state, part)
        for name, parameter in state.model.named_parameters():
            total[name] = total.get(name, 0) + parameter.grad * len(part.images) / PAIRS
    worst = max(float(torch.norm(total[name] - expected[name]) / torch.norm(expected[name])) for name in expected)
    assert worst > 0.1


def test_fp16_scales_the_loss_in_parts_too():
    _, expected = gradients_of(None, precision="fp16")
    _, found = gradients_of(6, precision="fp16")
    for name, gradient in expected.items():
        assert torch.norm(found[name] - gradient) <= 0.02 * torch.norm(gradient) + 1e-6, name


def test_random_numbers_are_replayed(monkeypatch):
    """With dropout in a tower, both passes over a micro-batch must draw the same mask."""
    masks = []
    plain = ImageTower.forward

    def with_dropout(tower, images):
        mask = torch.rand(len(images), 1) < 0.5
        masks.append(mask)
        return plain(tower, images) * mask

    monkeypatch.setattr(ImageTower, "forward", with_dropout)
    state = fresh_state(config(), open_device("cpu"), "fp32", 1)
    state.micro_batch = 8
    gradients(state, a_batch())
    assert len(masks) == 6 and len({tuple(mask.flatten().tolist()) for mask in masks}) == 3
    assert all(torch.equal(first, again) for first, again in zip(masks[:3], masks[3:], strict=True))
    drawn = torch.rand(1)
    torch.manual_seed(0)
    masks.clear()
    state = fresh_state(config(), open_device("cpu"), "fp32", 1)
    state.micro_batch = 8
    gradients(state, a_batch())
    assert torch.equal(torch.rand(1), drawn)  # as if only the first pass had drawn


class OutOfMemory:
    """The image tower fails at given calls, in the way a device does."""

    def __init__(self, monkeypatch, *calls, error=None):
        self.count, plain = 0, ImageTower.forward

        def forward(tower, images):
            self.count += 1
            if self.count in calls:
                raise error or RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
            return plain(tower, images)

        monkeypatch.setattr(ImageTower, "forward", forward)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB"),
        MemoryError(),
    ],
)
def test_out_of_memory_halves_the_micro_batch_and_redoes_the_step(monkeypatch, error):
    plain = fresh_state(config(), open_device("cpu"), "fp32", 1)
    train_step(plain, a_batch(), lr=1e-3)
    OutOfMemory(monkeypatch, 1, 3, error=error)
    state = fresh_state(config(), open_device("cpu"), "fp32", 1)
    train_step(state, a_batch(), lr=1e-3)
    assert state.micro_batch == PAIRS // 2 // 2 and state.step == 1
    for name, tensor in plain.model.state_dict().items():
        assert torch.allclose(tensor, state.model.state_dict()[name], atol=1e-6), name


def in_parts(pairs, micro_batch):
    return workload_of(config(**{"train.batch_size": pairs, "train.micro_batch": micro_batch}), 9)


def test_a_trial_makes_its_steps_in_the_micro_batches_of_its_workload(monkeypatch):
    seen, plain = [], ImageTower.forward
    monkeypatch.setattr(ImageTower, "forward", lambda tower, images: seen.append(len(images)) or plain(tower, images))
    time_steps(config(), in_parts(7, 3), [Setting("cpu", "fp32", 1)], limit_s=0.0, min_samples=1)
    assert seen[:6] == [3, 3, 1] * 2 and set(seen) == {3, 1}


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_trial_that_runs_out_of_memory_is_not_timed_in_smaller_micro_batches(monkeypatch, micro_batch):
    OutOfMemory(monkeypatch, 2)
    with pytest.raises(torch.OutOfMemoryError):
        time_steps(config(), in_parts(6, micro_batch), [Setting("cpu", "fp32", 1)], limit_s=0.0)


def test_other_errors_are_not_taken_for_it(monkeypatch):
    OutOfMemory(monkeypatch, 1, error=RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    state = fresh_state(config(), open_device("cpu"), "fp32", 1)
    with pytest.raises(RuntimeError, match="mat1"):
        train_step(state, a_batch(), lr=1e-3)


def test_a_run_that_runs_out_of_memory_ends_with_the_same_weights(micro, tmp_path, monkeypatch):
    run = RunDir.create(tmp_path, "tiny", "plain")
    train(make_plan(micro), run)
    short = RunDir.create(tmp_path, "tiny", "short")
    OutOfMemory(monkeypatch, 3)  # the third of six steps; an epoch of three is evaluated in one part
    train(make_plan(micro), short)
    for name, tensor in weights(run).items():
        assert torch.allclose(tensor, weights(short)[name], atol=1e-5), name
    (event,) = [row for row in rows(short, "event") if row["event"] == "out_of_memory"]
    assert event["step"] == 3 and "micro-batches of 6" in event["message"]
    last = CheckpointStore(short).last()
    assert last is not None and last.read_state()["micro_batch"] == 6


def test_a_resumed_run_keeps_the_smaller_micro_batch(micro, tmp_path, monkeypatch):
    """Bit-identical: what is summed in which order stays the same."""
    saved = replace(micro, save=replace(micro.save, every=type(micro.save.every)(1, "e"), keep_last=9))
    unbroken, broken = (RunDir.create(tmp_path, "tiny", name) for name in ("unbroken", "broken"))
    with monkeypatch.context() as patch:
        OutOfMemory(patch, 2)
        train(make_plan(saved), unbroken)
    with monkeypatch.context() as patch:
        OutOfMemory(patch, 2)
        train(make_plan(saved), broken)
    CheckpointStore(broken).named("last").path.rename(tmp_path / "gone")  # as if it had been killed in epoch 2
    session = resume_run(broken)
    assert session.step == 3
    session.train()
    assert all(torch.equal(tensor, weights(broken)[name]) for name, tensor in weights(unbroken).items())
    assert metrics.read_rows(broken.metrics_file)


# --- how it is chosen -------------------------------------------------------------------------------------------


def with_memory(monkeypatch, gib):
    monkeypatch.setattr("clipctl.hardware.memory.available_bytes", lambda: int(gib * 2**30))


def test_the_whole_batch_at_once_if_it_fits(micro):
    assert make_plan(micro).config.train.micro_batch == 12


def test_in_parts_if_it_does_not(monkeypatch):
    with_memory(monkeypatch, 1.0)
    plan = make_plan(resolve([Layer("test", {"data.source": "synthetic:3000", "train.batch_size": 1024})]))
    micro_batch = plan.config.train.micro_batch
    assert micro_batch is not None and 1 <= micro_batch < 1024 and plan.memory_problem() is None
    assert any(f"micro-batches of {micro_batch}" in note for note in plan.notes)
    assert plan.forecast.workload.micro_batch == micro_batch


def test_a_micro_batch_that_was_asked_for_stays(micro):
    plan = make_plan(replace(micro, train=replace(micro.train, micro_batch=5)))
    assert plan.config.train.micro_batch == 5 and plan.forecast.workload.kept_pairs == 5


def test_one_larger_than_the_batch_is_refused():
    with pytest.raises(ConfigError, match=re.escape("train.micro_batch 13 is larger than train.batch_size 12")):
        config(**{"train.micro_batch": 13})


def test_too_little_memory_for_a_single_pair_names_a_preset_that_fits(monkeypatch):
    with_memory(monkeypatch, 1.5)
    plan = make_plan(resolve([Layer("test", {"preset": "large", "data.source": "synthetic:40"})]))
    problem = plan.memory_problem()
    assert isinstance(problem, DeviceError) and problem.hint is not None
    assert re.search(r"not even a single pair fits; --preset (tiny|small) would", problem.hint)
