"""The operations to time, and how much each of them computes and moves. `size` counts float32 elements."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

HEADS, HEAD_WIDTH, TOKENS = 12, 64, 197  # attention as in the image tower of ViT-B/16


@dataclass(frozen=True)
class Operation:
    """`operands(size)` are float32 on the CPU; `run` takes them on any device in any precision."""

    suite: str
    name: str
    operands: Callable[[int], tuple[Tensor, ...]]
    run: Callable[..., Tensor]
    flops: Callable[[int], float]
    elements_moved: Callable[[int], float]  # read and written, at least


def _side(size: int) -> int:
    return max(1, math.isqrt(size))


def _rows(size: int) -> tuple[int, int]:
    """Number of sequences and their length: full ones of 197 tokens, or a single shorter one."""
    width = HEADS * HEAD_WIDTH
    return (max(1, round(size / (TOKENS * width))), TOKENS) if size >= TOKENS * width else (1, max(1, size // width))


def _attention_operands(size: int) -> tuple[Tensor, ...]:
    rows, tokens = _rows(size)
    return tuple(_noise(rows, HEADS, tokens, HEAD_WIDTH, seed=seed) for seed in range(3))


def _attention_flops(size: int) -> float:
    rows, tokens = _rows(size)
    return 4.0 * rows * HEADS * tokens * tokens * HEAD_WIDTH


def _noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


OPERATIONS = (
    Operation(
        suite="elementwise",
        name="add",
        operands=lambda size: (_noise(size, seed=0), _noise(size, seed=1)),
        run=torch.add,
        flops=lambda size: 0.0,  # only bytes count: the peak of matrix products does not apply to sums
        elements_moved=lambda size: 3 * size,
    ),
    Operation(
        suite="elementwise",
        name="gelu",
        operands=lambda size: (_noise(size, seed=0),),
        run=F.gelu,
        flops=lambda size: 0.0,
        elements_moved=lambda size: 2 * size,
    ),
    Operation(
        suite="matmul",
        name="matmul",
        operands=lambda size: (_noise(_side(size), _side(size), seed=0), _noise(_side(size), _side(size), seed=1)),
        run=torch.mm,
        flops=lambda size: 2.0 * _side(size) ** 3,
        elements_moved=lambda size: 3 * _side(size) ** 2,
    ),
    Operation(
        suite="attention",
        name="attention",
        operands=_attention_operands,
        run=F.scaled_dot_product_attention,
        flops=_attention_flops,
        elements_moved=lambda size: 4 * math.prod(_rows(size)) * HEADS * HEAD_WIDTH,
    ),
)


def need_bytes(size: int) -> int:
    """Most memory an operation of this size can need: three operands in three precisions, copies while they are moved,
    a result and a reference."""
    return 4 * size * 11
