"""Merged models: weights interpolated (WiSE-FT) or averaged. Works if one was trained from the other, or both from the
same model: then the loss stays low all the way between them, and the middle often generalises best."""

from collections.abc import Sequence

import torch
from torch import Tensor

from clipctl.errors import CheckpointError
from clipctl.model.clip import Clip
from clipctl.model.weights import TrainedModel, check_tensors


def merge(models: Sequence[TrainedModel], shares: Sequence[float]) -> TrainedModel:
    """Every weight is the mean of the models' weights, weighted by these shares, which add up to 1."""
    first, last = models[0], models[-1]
    states = [one.model.state_dict() for one in models]
    shapes = [{name: tuple(tensor.shape) for name, tensor in state.items()} for state in states]
    for number, (other, found) in enumerate(zip(models[1:], shapes[1:], strict=True), start=2):
        check_tensors(f"model {number} of {len(models)}", found, shapes[0])
        if other.tokenizer != first.tokenizer or other.config.model != first.config.model:
            raise CheckpointError("the models differ in tokenizer or model settings, so they cannot be merged")
    tensors = {name: _mixed([state[name] for state in states], shares) for name in states[0]}
    with torch.device("meta"):
        model = Clip(last.config.model, loss=last.config.train.loss)
    model.load_state_dict(tensors, assign=True)
    return last._replace(model=model.requires_grad_(True).eval())


def _mixed(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Summed in double precision, so that equal weights stay exactly what they are."""
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor, share in zip(tensors, shares, strict=True):
        total += share * tensor.detach().double()
    return total.to(tensors[0].dtype)
