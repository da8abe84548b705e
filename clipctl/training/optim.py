"""The optimizer, its learning rate as a function of the step, and gradient norms by block."""

import math
import re

import torch
from torch import Tensor, nn

from clipctl.config.sections import OptimConfig
from clipctl.training.distributed import World
from clipctl.training.sharding import is_split, own_part


def make_optimizer(model: nn.Module, config: OptimConfig, layer_decay: float = 1.0) -> torch.optim.AdamW:
    """Fused AdamW for what is trained. Norms, biases and the temperature are not decayed: pulling them to zero is no
    regularisation. With a layer decay, blocks near the input get smaller rates: what they see changes least."""
    groups: dict[tuple[float, bool, bool], list[nn.Parameter]] = {}
    depths = depths_below_top(model) if layer_decay < 1 else {}
    for is_decayed in (True, False):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and (parameter.ndim >= 2) == is_decayed:
                key = layer_decay ** depths.get(name, 0), is_decayed, is_split(parameter)
                groups.setdefault(key, []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": members, "weight_decay": config.weight_decay if is_decayed else 0.0, LR_SHARE: share}
            for (share, is_decayed, _), members in groups.items()
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


LR_SHARE = "lr_share"  # of a group of parameters: its rate, as a share of the step's


def depths_below_top(model: nn.Module) -> dict[str, int]:
    """How many blocks lie between a parameter and the end of its tower; embeddings are below the first block. Whatever
    is in no tower or follows the blocks is at the top."""
    blocks: dict[str, int] = {}
    for name, _ in model.named_parameters():
        if match := _IN_BLOCK.match(name):
            blocks[match[1]] = max(blocks.get(match[1], 0), int(match[2]) + 1)
    found = {}
    for name, _ in model.named_parameters():
        if match := _IN_BLOCK.match(name):
            found[name] = blocks[match[1]] - int(match[2])
        elif (match := _EMBEDDING.match(name)) and match[1] in blocks:
            found[name] = blocks[match[1]] + 1
    return found


def optimizer_state_shapes(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, tuple[int, ...]]:
    """What AdamW keeps for a parameter after its first step, by name."""
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


_IN_BLOCK = re.compile(r"(image|text)\.blocks\.(\d+)\.")
_EMBEDDING = re.compile(r"(image|text)\.(?:patches|class_embedding|positions|norm_pre|tokens)\b")
_BLOCK = re.compile(r"((?:image|text)\.blocks\.\d+)\.")


def block_of(name: str) -> str:
    """`image.blocks.3` for a parameter inside a block, else the parameter's own name without `.weight` or `.bias`."""
    match = _BLOCK.match(name)
    return match[1] if match else re.sub(r"\.(weight|bias)$", "", name)


@torch.no_grad()
def grad_norms_by_block(model: nn.Module, world: World | None = None) -> dict[str, float]:
    """Norm of the gradients that the last step left, by block. Waits for the device: once an epoch, not a step.
    `world`: the processes that gradients are sharded across, if they are."""
    squares: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            block, square = block_of(name), own_part(parameter.grad).square().sum()
            if world is not None and not is_split(parameter.grad) and not world.is_first:
                square = torch.zeros_like(square)  # the same everywhere: counted once
            squares[block] = squares[block] + square if block in squares else square
    if not squares:
        return {}
    device = next(iter(squares.values())).device  # the towers may be on two
    sums = torch.stack([square.to(device) for square in squares.values()])
    norms = (sums if world is None else world.sum(sums)).sqrt().tolist()
    return dict(zip(squares, norms, strict=True))
