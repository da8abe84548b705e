import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clipctl.hardware.devices import open_device
from clipctl.training.state import fresh_state
from clipctl.training.step import train_step
from tests.devices.steps import batch, config
from tests.devices.strict_mps import StrictMps


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_a_step_keeps_the_rules_of_apples_gpu(loss, monkeypatch):
    monkeypatch.setattr("clipctl.model.towers.needs_contiguous", lambda device: True)
    state = fresh_state(config(loss), open_device("cpu"), "fp32", threads=1)
    train_step(state, batch(0), lr=1e-3)  # the optimizer makes its moments in the first one
    steps = []
    for seed in (1, 2):
        with StrictMps() as rules:
            train_step(state, batch(seed), lr=1e-3)
        steps.append(rules)
    assert steps[0].shapes == steps[1].shapes  # new shapes are compiled anew, and the memory of the old ones is kept
    assert all(len(step.syncs) <= 1 for step in steps)


def test_strided_attention_is_found_in_a_step(monkeypatch):
    monkeypatch.setattr("clipctl.model.towers.needs_contiguous", lambda device: False)
    state = fresh_state(config(), open_device("cpu"), "fp32", threads=1)
    with pytest.raises(AssertionError, match="scaled_dot_product_attention of strides"), StrictMps():
        train_step(state, batch(), lr=1e-3)


def strided(*shape):
    return torch.ones(*shape[:-1], 2 * shape[-1])[..., ::2]


def attention(mask=None, dropout_p=0.0):
    q = torch.ones(2, 2, 4, 8)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=dropout_p)


BREACHES = {
    "float64": lambda: torch.ones(2).double(),
    "linear of strides": lambda: nn.Linear(4, 4)(strided(2, 3, 4)),
    "single token": lambda: nn.Linear(4, 4)(torch.ones(2, 1, 4)),
    "half precision": lambda: F.linear(torch.ones(2, 3, 4).bfloat16(), torch.ones(4, 4).bfloat16()),
    "conv2d of strides": lambda: nn.Conv2d(3, 4, 2)(torch.ones(2, 8, 8, 3).permute(0, 3, 1, 2)),
    "with a mask and dropout": lambda: attention(torch.ones(4, 4, dtype=torch.bool), 0.1),
    "aten.mm.default of matrices": lambda: torch.ones(4, 4) @ strided(4, 4),
    "addcmul_": lambda: strided(4, 4).addcmul_(torch.ones(4, 4), torch.ones(4, 4)),
}


@pytest.mark.parametrize("words", BREACHES)
def test_a_breach_names_the_operation(words):
    with pytest.raises(AssertionError, match=words), StrictMps():
        BREACHES[words]()


def test_what_is_allowed_passes():
    x = torch.ones(2, 4, requires_grad=True)
    with StrictMps() as rules:
        nn.Linear(4, 4)(x).square().sum().backward()
        nn.Linear(4, 4, bias=False)(torch.ones(2, 1, 4))
        attention(torch.ones(4, 4, dtype=torch.bool))
    assert rules.syncs == []


def test_every_wait_is_counted():
    x = torch.ones(3)
    with StrictMps() as rules:
        x.sum().item(), x.tolist(), x.cpu(), bool(x.sum() > 0)
    assert rules.syncs == ["aten::_local_scalar_dense", "tolist", "cpu", "aten::_local_scalar_dense"]
