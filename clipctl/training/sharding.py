"""Each process keeps only its part of weights, gradients and moments (FSDP), for models beyond one device's memory.

A block's weights are gathered when it is computed, and freed afterwards; its gradients are summed over the processes,
and each keeps its part of the sum. So all processes must make the same passes through the model. The temperature, a
single number, is whole everywhere.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from clipctl.model.clip import Clip
from clipctl.training.distributed import World

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor  # takes most of a second to import: only where it is needed


def shard(model: Clip, device: torch.device, world: World) -> None:
    """Shard the towers: from here on, this process keeps only its part, on its device. Parameters are replaced."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (world.size,))
    for tower in (model.image, model.text):
        for block in tower.blocks:
            fully_shard(block, mesh=mesh)
            register_fsdp_forward_method(block, "at")
        fully_shard(tower, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is a sum over the pairs of all processes, so its gradient is one too, and no mean.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.to(device)


def is_split(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether other processes keep parts of the tensor."""
    return hasattr(tensor, "to_local")


def own_part(tensor: Tensor) -> Tensor:
    """The part that this process keeps."""
    return tensor.to_local() if is_split(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All parts together; every process must call this at the same time."""
    return tensor.full_tensor() if is_split(tensor) else tensor


def part_like(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """This process's part of a whole tensor, sharded as a parameter is. Nothing is sent: all have the whole."""
    if not is_split(parameter) or tensor.shape != parameter.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


def sum_of_squares(gradients: Iterable[Tensor], world: World) -> Tensor:
    """The sum over all their numbers, in whichever process they are."""
    split, kept_whole = list[Tensor](), list[Tensor]()
    for gradient in gradients:
        (split if is_split(gradient) else kept_whole).append(own_part(gradient).square().sum())
    zero = torch.zeros((), device=(split + kept_whole)[0].device)
    return world.sum(sum(split, zero)) + sum(kept_whole, zero)


def clip_gradients(gradients: list[Tensor], most: float | None, world: World) -> Tensor:
    """Scale all gradients down to the norm `most`, if theirs is larger; returns their norm."""
    norm = sum_of_squares(gradients, world).sqrt()
    if most is not None:
        factor = (most / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            own_part(gradient).mul_(factor)
    return norm
