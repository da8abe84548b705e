"""The fake device itself. Not collected with the other tests: see test_fake.py."""

import gc
import time

import pytest
import torch
from torch import nn

from clipctl.training.state import nonfinite_tensors, tensors_of
from tests.devices import fake
from tests.devices.faults import FAULTS
from tests.devices.steps import batch, tensors, train

fake.register()
# Captions of several lengths: a device must not care.
BATCHES = [batch(seed, tokens=8 + 3 * seed) for seed in range(4)]


def gap(a, b):
    """By how much two states differ, at most, relative to the largest value of each tensor."""
    a, b = tensors(a), tensors(b)
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max() / a[name].abs().max().clamp(min=1e-12)) for name in a)


def weights(state):
    return {name: parameter.detach().cpu() for name, parameter in state.model.named_parameters()}


def assert_same(a, b):
    a, b = tensors(a), tensors(b)
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


# --- the same as the CPU --------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_training_is_the_cpus_to_the_last_bit(loss, precision):
    on_cpu, expected = train("cpu", BATCHES, loss=loss, precision=precision)
    on_fake, found = train("fake", BATCHES, loss=loss, precision=precision)
    assert {parameter.device.type for parameter in on_fake.model.parameters()} == {"fake"}
    assert found == expected
    assert_same(on_cpu, on_fake)
    assert nonfinite_tensors(tensors_of(on_fake)) == []


def test_towers_on_two_devices_train_as_on_one():
    on_cpu, expected = train("cpu", BATCHES)
    on_both, found = train("hybrid", BATCHES)
    assert {parameter.device.type for parameter in on_both.model.image.parameters()} == {"fake"}
    assert {parameter.device.type for parameter in on_both.model.text.parameters()} == {"cpu"}
    # The norm of all gradients is summed in another order, by device.
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-6)
    assert gap(on_cpu, on_both) < 1e-5


def test_weights_come_and_go_through_a_state_dict():
    state, _ = train("fake", BATCHES[:1])
    other, _ = train("fake", BATCHES[1:2])
    other.model.load_state_dict({name: tensor.cpu() for name, tensor in state.model.state_dict().items()})
    expected, found = weights(state), weights(other)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_torch_knows_the_device():
    assert torch.accelerator.current_accelerator(check_available=True) == torch.device("fake")
    with fake.using(available=False):
        assert torch.accelerator.current_accelerator(check_available=True) is None
    torch.accelerator.synchronize()
    assert torch.get_device_module("fake").get_device_name() == "Fake accelerator"


def test_its_random_numbers_can_be_put_back():
    module = torch.get_device_module("fake")
    before, of_the_cpu = module.get_rng_state(), torch.get_rng_state()
    first = torch.randn(3, device="fake").tolist()
    module.set_rng_state(before)
    assert torch.randn(3, device="fake").tolist() == first
    assert torch.equal(torch.get_rng_state(), of_the_cpu)


def test_tensors_of_two_devices_do_not_mix():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="fake") + torch.ones(2)
    assert (torch.ones(2, device="fake") + torch.tensor(1.0)).tolist() == [2.0, 2.0]


# --- memory and time ------------------------------------------------------------------------------------------


def test_memory_is_counted_while_it_is_held():
    gc.collect()
    module = torch.get_device_module("fake")
    before = module.memory_reserved()
    held = torch.zeros(1000, device="fake")
    half = held[:500]  # the same memory
    assert module.memory_reserved() == before + 4000
    del held
    assert module.memory_reserved() == before + 4000
    del half
    assert module.memory_reserved() == before
    assert module.max_memory_reserved() >= before + 4000


def test_memory_runs_out():
    gc.collect()
    with fake.using(memory_bytes=fake.memory.live_bytes() + 3000):
        assert torch.get_device_module("fake").mem_get_info() == (3000, fake.settings.memory_bytes)
        torch.zeros(700, device="fake")  # forgotten at once
        kept = torch.zeros(700, device="fake")
        with pytest.raises(torch.OutOfMemoryError, match="fake backend out of memory"):
            kept + 1
        with pytest.raises(torch.OutOfMemoryError):
            train("fake", BATCHES[:1])


def test_memory_runs_out_in_a_backward_pass():
    x = torch.ones(1000, device="fake", requires_grad=True)
    loss = (x * x).sum()
    with fake.using(memory_bytes=fake.memory.live_bytes() + 5000), pytest.raises(torch.OutOfMemoryError):
        loss.backward()


def test_operations_take_as_long_as_they_are_told():
    x = torch.ones(2, device="fake")
    operations, started = fake.counts.operations, time.perf_counter()
    with fake.using(launch_s=0.01):
        for _ in range(5):
            x.add_(1)
    assert fake.counts.operations == operations + 5
    assert time.perf_counter() - started >= 0.05
    x = torch.ones(300, 300, device="fake")

    def product_s():
        started = time.perf_counter()
        x @ x
        return time.perf_counter() - started

    usual = min(product_s() for _ in range(5))
    with fake.using(slowdown=20):
        assert min(product_s() for _ in range(5)) > 5 * usual


def test_waiting_for_a_value_is_counted():
    x = torch.ones(2, device="fake")
    before = fake.counts.syncs
    x.sum()
    assert fake.counts.syncs == before
    x.tolist(), x.sum().item(), x.cpu(), torch.accelerator.synchronize()
    assert fake.counts.syncs == before + 4


# --- faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - {"rounding", "garbage_past_length"}))
def test_a_fault_shows_in_the_first_step(fault):
    right, _ = train("fake", BATCHES[:1])
    with fake.using(faults={fault}):
        wrong, _ = train("fake", BATCHES[:1])
    assert gap(right, wrong) > 1e-3
    again, _ = train("fake", BATCHES[:1])
    assert_same(right, again)


def test_rounding_is_no_fault():
    exact, expected = train("fake", BATCHES[:3])
    with fake.using(faults={"rounding"}):
        rounded, found = train("fake", BATCHES[:3])
        again, _ = train("fake", BATCHES[:3])
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=0)
    assert found != expected
    a, b = tensors(exact), tensors(rounded)
    assert all(torch.allclose(a[name], b[name], rtol=0, atol=1e-5) for name in a)
    assert_same(rounded, again)


def layer_and_input(tokens=5):
    torch.manual_seed(0)
    return nn.Linear(8, 6).to("fake"), torch.randn(3, tokens, 8).to("fake")


def test_gradient_scaled():
    layer, x = layer_and_input()
    layer(x).sum().backward()
    weight, bias = layer.weight.grad.cpu(), layer.bias.grad.cpu()
    layer.zero_grad()
    with fake.using(faults={"gradient_scaled"}):
        layer(x).sum().backward()
    assert torch.equal(layer.weight.grad.cpu(), 1.5 * weight) and torch.equal(layer.bias.grad.cpu(), bias)


def test_bias_dropped():
    layer, x = layer_and_input()
    with fake.using(faults={"bias_dropped"}):
        assert torch.equal(layer(x[0]).cpu(), nn.functional.linear(x[0], layer.weight).cpu())
        dropped = layer(x)
    assert torch.equal(dropped.cpu(), layer(x).cpu())  # not where the input is 3-D


def test_frozen_parameter():
    with fake.using(faults={"frozen_parameter"}):
        frozen, _ = train("fake", BATCHES[:1])
        state, _ = train("fake", [])
    start, end = weights(state), weights(frozen)
    assert [name for name in start if torch.equal(start[name], end[name])] == ["image.positions"]


def test_garbage_past_length():
    """Only for long sums, and only once there was a step of another shape."""

    def grads(lengths, garbage_length):
        with fake.using(faults={"garbage_past_length"}, garbage_length=garbage_length):
            for tokens in lengths:
                layer, x = layer_and_input(tokens)
                layer(x).sum().backward()
        return layer.weight.grad.cpu()

    right = grads([6], 15)
    assert torch.equal(grads([6, 6, 6], 15), right)
    assert not torch.equal(grads([4, 6], 15), right)
    assert not torch.equal(grads([6, 4, 6], 15), right)
    assert torch.equal(grads([4, 6], 3 * 6 + 1), right)


def test_garbage_comes_in_the_second_step_of_a_training():
    _, right = train("fake", BATCHES[:2])
    with fake.using(faults={"garbage_past_length"}):
        _, wrong = train("fake", BATCHES[:2])
    assert wrong[0] == right[0] and abs(wrong[1][2] / right[1][2] - 1) > 1e-3  # the norm of the gradient
    with fake.using(faults={"garbage_past_length"}):
        _, fixed_shapes = train("fake", [BATCHES[0]] * 3)
    assert fixed_shapes == train("fake", [BATCHES[0]] * 3)[1]


def test_nondeterministic():
    layer, x = layer_and_input()
    right = layer(x).cpu()
    with fake.using(faults={"nondeterministic"}):
        once, twice = layer(x).cpu(), layer(x).cpu()
    assert not torch.equal(once, twice)
    assert torch.allclose(once, right, rtol=1.1e-2)


def test_noncontiguous_wrong():
    layer, x = layer_and_input()
    strided = x.transpose(0, 1)
    q = torch.randn(2, 4, 3, 8).to("fake").transpose(1, 2)
    right, attended = layer(strided).cpu(), nn.functional.scaled_dot_product_attention(q, q, q).cpu()
    with fake.using(faults={"noncontiguous_wrong"}):
        assert not torch.equal(layer(strided).cpu(), right)
        assert torch.allclose(layer(strided.contiguous()).cpu(), right)
        assert not torch.equal(nn.functional.scaled_dot_product_attention(q, q, q).cpu(), attended)
        q = q.contiguous()
        assert torch.allclose(nn.functional.scaled_dot_product_attention(q, q, q).cpu(), attended)
