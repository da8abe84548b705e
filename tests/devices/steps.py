"""A few training steps of a very small model, on any device."""

from dataclasses import replace

import torch

from clipctl.config.layers import Layer, resolve
from clipctl.data.batch import Batch
from clipctl.hardware.devices import open_device
from clipctl.training.state import fresh_state
from clipctl.training.step import train_step
from tests.conftest import MICRO

PAIRS, END = 12, 39


def config(loss="softmax"):
    # Two blocks in each tower: the last one is computed in another way than the others.
    resolved = resolve([Layer("test", {**MICRO, "model.image.depth": 2, "model.text.depth": 2, "train.loss": loss})])
    return replace(
        resolved, model=replace(resolved.model, text=replace(resolved.model.text, vocab_size=END + 1, context=24))
    )


def batch(seed=0, tokens=10):
    generator = torch.Generator().manual_seed(seed)
    captions = torch.randint(1, END, (PAIRS, tokens), generator=generator)
    captions[torch.arange(PAIRS), torch.randint(2, tokens, (PAIRS,), generator=generator)] = END
    return Batch(torch.randint(0, 256, (PAIRS, 16, 16, 3), dtype=torch.uint8, generator=generator), captions)


def train(device, batches, *, loss="softmax", precision="fp32"):
    """The state after these batches, and what each step returned."""
    state = fresh_state(config(loss), open_device(device), precision, threads=1)
    with torch.no_grad():
        for name, parameter in state.model.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(0.1)  # a bias of zero would hide that it is forgotten
    results = [[value.item() for value in train_step(state, each, lr=1e-3)] for each in batches]
    return state, results


def tensors(state):
    """Weights, gradients and moments by name, on the CPU."""
    found = {}
    for name, parameter in state.model.named_parameters():
        moments = state.optimizer.state[parameter]
        for kind, tensor in {"weight": parameter.detach(), "grad": parameter.grad, **moments}.items():
            found[f"{name}.{kind}"] = tensor.cpu()
    return found
