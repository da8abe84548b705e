"""The optimizer, its learning rate as a function of the step, and gradient norms by block."""

import math
import re

import torch
from torch import Tensor, nn

from clipctl.config.sections import OptimConfig


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW. Norms, biases and the temperature are not decayed: pulling them to zero is no regularisation."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def optimizer_state_shapes(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, tuple[int, ...]]:
    """What AdamW keeps for a parameter once it has made a step, by name."""
    assert isinstance(optimizer, torch.optim.AdamW)
    shape = tuple(parameter.shape)
    return {"exp_avg": shape, "exp_avg_sq": shape, "step": ()}


def lr_at(step: int, total_steps: int, config: OptimConfig) -> float:
    """The rate of update `step` (the first is 1): linear to the peak, then half a cosine down to its final share."""
    warmup = config.warmup_of(total_steps)
    if step <= warmup:
        return config.lr * step / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return config.lr * (config.final_lr_share + (1 - config.final_lr_share) * cosine)


_BLOCK = re.compile(r"((?:image|text)\.blocks\.\d+)\.")


def block_of(name: str) -> str:
    """`image.blocks.3` for a parameter inside a block, else the parameter's own name without `.weight` or `.bias`."""
    match = _BLOCK.match(name)
    return match[1] if match else re.sub(r"\.(weight|bias)$", "", name)


@torch.no_grad()
def grad_norms_by_block(model: nn.Module) -> dict[str, float]:
    """Norm of the gradients that the last step left, by block. Waits for the device: once an epoch, not a step."""
    squares: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            block, square = block_of(name), parameter.grad.square().sum()
            squares[block] = squares[block] + square if block in squares else square
    if not squares:
        return {}
    device = next(iter(squares.values())).device  # the towers may be on two
    norms = torch.stack([square.to(device) for square in squares.values()]).sqrt().tolist()
    return dict(zip(squares, norms, strict=True))
