"""One optimizer update, in two parts: gradients of a batch, then the update. Training, trials and preflight use it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from clipctl.data.batch import Batch
from clipctl.model.clip import autocast, normalise
from clipctl.model.loss import LOSSES, batch_accuracy
from clipctl.training.state import TrainState

Mark = Callable[[str], None]


class BatchResult(NamedTuple):
    """What a batch came to. Scalars still on the device: reading one would make the host wait."""

    loss: Tensor
    accuracy: Tensor
    scale: Tensor


class StepResult(NamedTuple):
    """Scalars still on the device, in the order in which the meter reads them."""

    loss: Tensor
    accuracy: Tensor
    grad_norm: Tensor
    scale: Tensor


def train_step(state: TrainState, batch: Batch, *, lr: float, mark: Mark = lambda phase: None) -> StepResult:
    """Advance `state` by one batch: one update, or none if the loss or the gradient is not finite.

    Touches no file, clock or console; `mark` is told when a phase has ended.
    """
    result = gradients(state, batch, mark)
    grad_norm = update(state, result.loss, lr=lr)
    mark("optimizer")
    return StepResult(result.loss, result.accuracy, grad_norm, result.scale)


def gradients(state: TrainState, batch: Batch, mark: Mark = lambda phase: None) -> BatchResult:
    """Leave the gradients of a batch in the parameters. The only caller of `.backward()`."""
    state.optimizer.zero_grad(set_to_none=True)
    batch = batch.to(state.device.image, state.device.text)
    images = normalise(batch.images, batch.jitter)
    mark("transfer")
    with autocast(state.device.image, state.precision):
        embeddings = state.model(images, batch.tokens)
    loss = LOSSES[state.loss](embeddings, batch.positives)
    mark("forward")
    scaled = loss if state.loss_scale is None else loss * state.loss_scale.value
    scaled.backward()  # type: ignore[no-untyped-call]
    mark("backward")
    with torch.no_grad():
        accuracy = batch_accuracy(embeddings, batch.positives)
    return BatchResult(loss.detach(), accuracy, embeddings.scale.detach())


def update(state: TrainState, loss: Tensor, *, lr: float) -> Tensor:
    """Clip the gradients, move the weights and count the step; returns the norm before clipping."""
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    parameters = list(state.model.parameters())
    if state.loss_scale is not None:
        state.loss_scale.unscale(parameters)
    if state.grad_clip is None:
        grad_norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    else:
        grad_norm = clip_grad_norm_(parameters, state.grad_clip)
    grad_norm = grad_norm.to(loss.device)  # with two towers on two devices it may be on either
    finite = torch.isfinite(loss) & torch.isfinite(grad_norm)
    _move_weights(state, finite)
    if state.loss_scale is not None:
        state.loss_scale.adjust(finite)
    # Clamp after the update: Adam can push the scale past its cap, where the softmax saturates.
    state.model.clamp_scale()
    state.step += 1
    return grad_norm.detach()


def _move_weights(state: TrainState, finite: Tensor) -> None:
    """One update, unless the step is not finite: a single NaN would be in every weight for good.

    CUDA's kernel is told through a flag on the device; elsewhere the host looks, which costs nothing on the CPU.
    """
    if state.device.image.type == "cuda":
        state.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        state.optimizer.step()
    elif finite:
        state.optimizer.step()
