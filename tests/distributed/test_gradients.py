"""Several processes give the gradients of one with the whole batch."""

import os
import subprocess
import sys

import pytest
import torch

from tests.distributed.gradients import CASES, DIFFERENT, a_batch, everything, found_in, state_of

WORLDS = (2, 4)


def distance(found, expected):
    return float(torch.norm(found.double() - expected.double()) / torch.norm(expected.double()).clamp(min=1e-12))


def apart(found, expected):
    """The largest difference, number by number: where the gradient is zero but for rounding, as at the bias of keys,
    Adam makes whole steps of that."""
    return max(float((found[name] - weights).abs().max()) for name, weights in expected.items())


@pytest.fixture(scope="module")
def alone():
    return everything(None)


@pytest.fixture(scope="module", params=WORLDS)
def together(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("gradients") / "found.pt"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(request.param)]
    done = subprocess.run(
        [sys.executable, *command, "-m", "tests.distributed.gradients", str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize("case", [*CASES, DIFFERENT[0]])
def test_every_gradient_is_that_of_the_whole_batch(alone, together, case):
    expected, found = alone[case], together["found"][case]
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert distance(found[name], gradient) <= 1e-5, (name, distance(found[name], gradient))


def test_the_scale_has_the_gradient_of_the_whole_batch(alone, together):
    found, expected = together["found"]["softmax"]["log_scale"], alone["softmax"]["log_scale"]
    assert found == pytest.approx(float(expected), rel=1e-5)


def test_every_process_has_the_same_bits(together):
    assert together["equal"]


def test_gradients_are_sent_during_the_backward_pass(together):
    for _, sent_before in together["reactions"]:
        assert sent_before[0] > 1


def test_a_process_out_of_memory_repeats_its_pass_and_the_others_do_not(alone, together):
    """Some of its gradients had been sent already: they are not sent again."""
    *others, (last, _) = together["reactions"]
    assert last is not None and all(micro_batch is None for micro_batch, _ in others)
    for name, gradient in alone["softmax"].items():
        assert distance(together["found"]["out of memory"][name], gradient) <= 1e-5, name


def test_only_the_first_gathers_a_split_model_to_save_it(together):
    first, *others = together["saved"]
    assert all(first.values()) and not any(count for one in others for count in one.values())


def test_a_process_out_of_memory_in_the_loss_asks_nothing_twice(alone, together):
    for name, gradient in alone["softmax"].items():
        assert distance(together["found"]["out of memory in the loss"][name], gradient) <= 1e-5, name


@pytest.mark.parametrize("case", ["after 50 steps", "after 50 steps, split"])
def test_fifty_steps_end_with_the_same_weights(alone, together, case):
    before, expected = state_of({}, None).model.state_dict(), alone["after 50 steps"]
    found = together["found"][case]
    assert apart(found, expected) <= 1e-4
    everything = [torch.cat([one[name].flatten() for name in expected]) for one in (found, expected, before)]
    assert distance(everything[0], everything[1]) <= 1e-4 < 0.01 < distance(everything[2], everything[1])


def test_the_usual_gather_would_fail_this_test(together):
    """Embeddings of others without gradients, then a mean: too small, and in another direction."""
    expected = found_in({}, a_batch(repeats=False), None)
    found = together["found"]["the usual way"]
    assert max(distance(found[name], gradient) for name, gradient in expected.items() if name in found) > 0.1
