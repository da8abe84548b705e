"""Ways in which a device may compute wrongly, and one in which it may not be blamed. Each stands around an operation:
`compute(op, args, kwargs)` does it right, over tensors of the CPU. B pairs, N tokens."""

import functools
import os

import torch
from torch import Tensor

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_fused_attention_overrideable.default._schema.name
MATMULS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "linear_backward")}
# The argument that is one side of a product, and its dimension that is summed over.
SUMMED = {"aten::mm": (0, 1), "aten::addmm": (1, 1), "aten::bmm": (0, 2), "aten::baddbmm": (1, 2)}
SUMMED |= {"aten::linear": (0, -1), "aten::linear_backward": (0, 0), ATTENTION: (2, 2)}


def on_tensors(change, value):
    """Apply to every tensor in arguments or results, however nested."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(on_tensors(change, item) for item in value)
    if isinstance(value, dict):
        return {key: on_tensors(change, item) for key, item in value.items()}
    return value


def gradient_scaled(compute, settings, op, args, kwargs):
    """The gradient of every linear layer's weight is half as large again."""
    result = compute(op, args, kwargs)
    if op is aten.linear_backward.default and result[1] is not None:
        result[1].mul_(1.5)
    return result


def bias_dropped(compute, settings, op, args, kwargs):
    """A linear layer forgets its bias where its input is 2-D."""
    if op is aten.linear.default and args[0].dim() == 2:
        args = args[:2]
    return compute(op, args, kwargs)


def frozen_parameter(compute, settings, op, args, kwargs):
    """The optimizer does all but move the first of its matrices."""
    if op is not aten._fused_adamw_.default or args[0][0].dim() < 2:
        return compute(op, args, kwargs)
    before = args[0][0].clone()
    result = compute(op, args, kwargs)
    args[0][0].copy_(before)
    return result


class GarbagePastLength:
    """A sum over more than `garbage_length` products takes in what lay in memory, once shapes have changed.

    As on Apple's GPUs, where a step is right until one of another shape has come before it. A step is told from the
    next by the first forward product after a backward one.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.always: set[tuple] | None = None  # shapes that every earlier step had
        self.now: set[tuple] = set()
        self.in_backward = False

    def __call__(self, compute, settings, op, args, kwargs):
        if op._schema.name not in SUMMED:
            return compute(op, args, kwargs)
        in_backward = torch._C._current_autograd_node() is not None
        if self.in_backward and not in_backward:
            self.always = self.now if self.always is None else self.always & self.now
            self.now = set()
        self.in_backward = in_backward
        shapes = (op._schema.name, *(tuple(arg.shape) for arg in args if isinstance(arg, Tensor)))
        self.now.add(shapes)
        if self.always is not None and shapes not in self.always:
            args = self.spoil(op, args, settings.garbage_length)
        return compute(op, args, kwargs)

    def spoil(self, op, args, length):
        place, dim = SUMMED[op._schema.name]
        side = args[place].clone(memory_format=torch.contiguous_format)
        summed = side.flatten(0, -2) if op is aten.linear_backward.default else side  # over all B × N rows
        if summed.shape[dim] >= length:
            summed.narrow(dim, length - 1, summed.shape[dim] - length + 1).fill_(1.0)
        return (*args[:place], side, *args[place + 1 :])


def nondeterministic(compute, settings, op, args, kwargs):
    """Products are off by a hundredth, each time by another."""
    return _noisy(compute, op, args, kwargs, amount=1e-2, seed=int.from_bytes(os.urandom(4)))


def rounding(compute, settings, op, args, kwargs):
    """No fault: products of another device, off by a few of the last bits, and always by the same ones."""
    return _noisy(compute, op, args, kwargs, amount=5e-7, seed=0)


def _noisy(compute, op, args, kwargs, *, amount, seed):
    result = compute(op, args, kwargs)
    if op._schema.name not in MATMULS:
        return result
    generator = torch.Generator().manual_seed(seed)
    # In place, for the result may be where the caller wanted it.
    return on_tensors(lambda out: out.mul_(1 + amount * (2 * torch.rand(out.shape, generator=generator) - 1)), result)


def noncontiguous_wrong(compute, settings, op, args, kwargs):
    """Attention, linear layers and convolutions take every operand for contiguous."""
    if op._schema.name not in {ATTENTION, "aten::linear", "aten::convolution"}:
        return compute(op, args, kwargs)
    garbled = on_tensors(lambda arg: arg if arg.is_contiguous() else arg.roll(1), args)
    return compute(op, garbled, kwargs)


FAULTS = {
    "gradient_scaled": gradient_scaled,
    "bias_dropped": bias_dropped,
    "frozen_parameter": frozen_parameter,
    "garbage_past_length": GarbagePastLength(),
    "nondeterministic": nondeterministic,
    "noncontiguous_wrong": noncontiguous_wrong,
    "rounding": rounding,
}


def surround(compute, settings):
    for name in sorted(settings.faults):
        compute = functools.partial(FAULTS[name], compute, settings)
    return compute
