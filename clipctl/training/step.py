"""One optimizer update: the only caller of `.backward()`, used by training and by the benchmark."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from clipctl.data.images import normalise
from clipctl.data.loader import Batch
from clipctl.model.loss import LOSSES, batch_accuracy
from clipctl.training.optim import set_lr
from clipctl.training.state import TrainState

Mark = Callable[[str], None]


class StepResult(NamedTuple):
    """Scalars still on the device: reading one would make the device wait."""

    loss: Tensor
    accuracy: Tensor
    grad_norm: Tensor
    scale: Tensor


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(state: TrainState) -> AbstractContextManager[None]:
    """The precision in which the towers compute; weights and their updates stay fp32."""
    if state.precision == "fp32":
        return nullcontext()
    return torch.autocast(state.device.image.type, dtype=DTYPES[state.precision])


def _update(state: TrainState, finite: Tensor) -> None:
    """One update, unless the step is not finite: a single NaN would be in every weight for good.

    CUDA's kernel is told through a flag on the device; elsewhere the host looks, which costs nothing on the CPU.
    """
    if state.device.image.type == "cuda":
        state.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        state.optimizer.step()
    elif finite:
        state.optimizer.step()


def train_step(state: TrainState, batch: Batch, *, lr: float, mark: Mark = lambda phase: None) -> StepResult:
    """Advance `state` by one batch: one update, or none where loss or gradient is not finite.

    Touches no file, clock or console; `mark` is told when a phase has ended.
    """
    set_lr(state.optimizer, lr)
    state.optimizer.zero_grad(set_to_none=True)
    batch = batch.to(state.device.image, state.device.text)
    images = normalise(batch.images, batch.jitter)
    mark("transfer")
    with autocast(state):
        embeddings = state.model(images, batch.tokens)
    loss = LOSSES[state.loss](embeddings, batch.positives)
    mark("forward")
    scaled = loss if state.loss_scale is None else loss * state.loss_scale.value
    scaled.backward()  # type: ignore[no-untyped-call]
    mark("backward")
    parameters = list(state.model.parameters())
    if state.loss_scale is not None:
        state.loss_scale.unscale(parameters)
    if state.grad_clip is None:
        grad_norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    else:
        grad_norm = clip_grad_norm_(parameters, state.grad_clip)
    grad_norm = grad_norm.to(loss.device)  # of two towers on two devices it may be on either
    finite = torch.isfinite(loss.detach()) & torch.isfinite(grad_norm)
    _update(state, finite)
    if state.loss_scale is not None:
        state.loss_scale.adjust(finite)
    # Clamp after the update: Adam can push the scale past 100, where the softmax saturates.
    state.model.clamp_scale()
    state.step += 1
    with torch.no_grad():
        accuracy = batch_accuracy(embeddings, batch.positives)
    mark("optimizer")
    return StepResult(loss.detach(), accuracy, grad_norm.detach(), embeddings.scale.detach())
