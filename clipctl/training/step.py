"""One optimizer update, in two parts: gradients of a batch, then the update. Training, trials and preflight use it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from clipctl.data.batch import Batch
from clipctl.hardware.devices import is_out_of_memory
from clipctl.model.clip import autocast, normalise
from clipctl.model.loss import LOSSES, Embeddings, Positives, batch_accuracy, picture_loss
from clipctl.training.optim import LR_SHARE
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
    """Leave the gradients of a batch in the parameters. Out of memory, halve the micro-batch and do it again: the
    gradients are the same, and no weight has moved yet."""
    if batch.positives is not None:
        batch = batch._replace(positives=batch.positives.to(state.device.image, non_blocking=True))
    pairs = len(batch.images)
    while True:
        try:
            state.optimizer.zero_grad(set_to_none=True)
            micro_batch = min(state.micro_batch or pairs, pairs)
            return _whole(state, batch, mark) if micro_batch == pairs else _cached(state, batch, micro_batch, mark)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or micro_batch == 1:
                raise
        # Not in the handler: while it runs, the traceback keeps the tensors of the failed attempt alive.
        state.micro_batch = micro_batch // 2
        state.device.release()


def _whole(state: TrainState, batch: Batch, mark: Mark) -> BatchResult:
    """All pairs at once: their activations are kept until the backward pass."""
    embeddings = _embed(state, batch, mark)
    loss = LOSSES[state.loss](embeddings, batch.positives)
    mark("forward")
    _backward(state, loss, embeddings, batch.positives)
    mark("backward")
    return _result(loss, embeddings, batch)


def _cached(state: TrainState, batch: Batch, micro_batch: int, mark: Mark) -> BatchResult:
    """The same gradients with the activations of one micro-batch at a time (GradCache).

    The loss couples all pairs, but only through their embeddings: dL/dw = Σᵢ dL/deᵢ · deᵢ/dw. So embed everything
    without keeping activations, take the gradient of the loss at the embeddings (and at the temperature), then embed
    each micro-batch again and pass its part of that gradient on. Random numbers are replayed: both passes agree.
    """
    parts = batch.split(micro_batch)
    replays = []
    with torch.no_grad():
        cached = []
        for part in parts:
            replays.append((torch.get_rng_state(), state.device.rng_state()))
            cached.append(_embed(state, part, mark))
            mark("forward")
    image, text = (torch.cat(side).requires_grad_() for side in zip(*(one[:2] for one in cached), strict=True))
    embeddings = Embeddings(image, text, state.model.log_scale.exp(), state.model.bias)
    loss = LOSSES[state.loss](embeddings, batch.positives)
    mark("forward")
    _backward(state, loss, embeddings, batch.positives)
    mark("backward")
    assert image.grad is not None and text.grad is not None
    after = torch.get_rng_state(), state.device.rng_state()
    for part, replay, *slopes in zip(
        parts, replays, torch.split(image.grad, micro_batch), torch.split(text.grad, micro_batch), strict=True
    ):
        _restore_rng(state, replay)
        embedded = _embed(state, part, mark)[:2]
        mark("forward")
        torch.autograd.backward(embedded, slopes)
        mark("backward")
    _restore_rng(state, after)
    return _result(loss, embeddings, batch)


def _embed(state: TrainState, batch: Batch, mark: Mark) -> Embeddings:
    batch = batch.to(state.device.image, state.device.text)
    images = batch.images if batch.has_features else normalise(batch.seen, batch.jitter, state.model.pixel_statistics)
    mark("transfer")
    with autocast(state.device.image, state.precision):
        return state.model(images, batch.tokens)  # type: ignore[no-any-return]


def _backward(state: TrainState, loss: Tensor, embeddings: Embeddings, positives: Positives) -> None:
    """The loss is reported without the picture term, so that it stays comparable with chance."""
    if state.picture_term and positives is not None:
        loss = loss + state.picture_term * picture_loss(embeddings.image, positives)
    scaled = loss if state.loss_scale is None else loss * state.loss_scale.value
    scaled.backward()  # type: ignore[no-untyped-call]


def _result(loss: Tensor, embeddings: Embeddings, batch: Batch) -> BatchResult:
    with torch.no_grad():
        accuracy = batch_accuracy(embeddings, batch.positives)
    return BatchResult(loss.detach(), accuracy, embeddings.scale.detach())


def _restore_rng(state: TrainState, replay: tuple[Tensor, Tensor | None]) -> None:
    on_cpu, on_device = replay
    torch.set_rng_state(on_cpu)
    if on_device is not None:
        state.device.set_rng_state(on_device)


def update(state: TrainState, loss: Tensor, *, lr: float) -> Tensor:
    """Clip the gradients, move the weights and count the step; returns the norm before clipping."""
    for group in state.optimizer.param_groups:
        group["lr"] = lr * group[LR_SHARE]
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
