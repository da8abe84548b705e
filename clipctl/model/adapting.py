"""Which parts of a pretrained model are trained: towers can be locked, and matrices trained through LoRA only."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipctl.config.sections import ImageTowerConfig, TuneConfig
from clipctl.model.clip import Clip
from clipctl.model.towers import Block, ImageTower, Linear, LoraLinear, TextTower


def adapt(model: Clip, tune: TuneConfig) -> Clip:
    """Freeze everything that is not to be trained. A new model is trained as a whole."""
    for name in tune.locked:
        _lock(getattr(model, name), tune.unlocked_blocks)
    if tune.lora is not None:
        _add_lora(model, tune)
    return model


def _lock(tower: ImageTower | TextTower, unlocked_blocks: int) -> None:
    """Freeze all but the projection; unlocked blocks (the last ones) and the norm after them are trained as well."""
    tower.requires_grad_(False)
    tower.projection.requires_grad_(True)
    if unlocked_blocks:
        for block in list(tower.blocks)[-unlocked_blocks:]:
            block.requires_grad_(True)
        (tower.norm_post if isinstance(tower, ImageTower) else tower.norm_final).requires_grad_(True)


def _add_lora(model: Clip, tune: TuneConfig) -> None:
    """Add low-rank matrices to every matrix in the blocks of unlocked towers. Projections and temperature are trained
    directly; everything else is frozen."""
    assert tune.lora is not None
    for name, tower in (("image", model.image), ("text", model.text)):
        tower.requires_grad_(False)
        tower.projection.requires_grad_(True)
        if name in tune.locked:
            continue
        for parent, child, linear in _matrices(tower):
            setattr(parent, child, LoraLinear(linear, tune.lora))


def merged(model: Clip) -> Clip:
    """The same model with its low-rank matrices merged into the others."""
    for parent, child, linear in _matrices(model):
        if isinstance(linear, LoraLinear):
            setattr(parent, child, linear.merged())
    return model


def _matrices(module: nn.Module) -> Iterator[tuple[nn.Module, str, Linear]]:
    """Every matrix inside a block: its parent, its name there, and itself."""
    for block in [one for one in module.modules() if isinstance(one, Block)]:
        for parent in (block, block.attention):
            for child, linear in list(parent.named_children()):
                if isinstance(linear, Linear):
                    yield parent, child, linear


def is_partial(model: Clip) -> bool:
    """Whether some of it is frozen."""
    return not all(parameter.requires_grad for parameter in model.parameters())


def trained_tensors(model: Clip) -> dict[str, Tensor]:
    """The tensors that training changes, by name."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name in trained}


def resized_positions(positions: Tensor, before: ImageTowerConfig, after: ImageTowerConfig) -> Tensor:
    """Position embeddings (N, D) for pictures of another size: the grid of patches is interpolated, the class token
    keeps its own."""
    first = int(before.pool == "class")
    sides = [image.size_px // image.patch_px for image in (before, after)]
    grid = positions[first:].T.reshape(1, -1, sides[0], sides[0])  # (1, D, S, S)
    scaled = F.interpolate(grid, size=(sides[1], sides[1]), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([positions[:first], scaled.flatten(2)[0].T])
