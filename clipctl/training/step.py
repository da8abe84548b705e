"""One optimizer update, in two parts: gradients of a batch, then the update. Training, trials and preflight use it."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_, get_total_norm

from clipctl.data.batch import Batch
from clipctl.hardware.devices import is_out_of_memory
from clipctl.model.clip import Clip, autocast, normalise
from clipctl.model.loss import (
    LOSS_SHARES,
    LOSSES,
    Embeddings,
    Positives,
    accuracy_share,
    batch_accuracy,
    picture_loss,
    picture_share,
    positive_rows,
)
from clipctl.training.distributed import GradientSum
from clipctl.training.optim import LR_SHARE
from clipctl.training.sharding import clip_gradients, is_split
from clipctl.training.state import TrainState, in_passes

Mark = Callable[[str], None]
T = TypeVar("T")


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
    """Leave the gradients of a batch in the parameters.

    The loss couples all pairs, but only through their embeddings: dL/dw = Σᵢ dL/deᵢ · deᵢ/dw. So embed the pairs, take
    the gradient of the loss at the embeddings, and pass it on through the towers. Out of memory, halve the micro-batch
    and do it again: the gradients are the same, and no weight has moved yet. Only processes among which the model is
    split cannot: they must all make the same passes.
    """
    contrast, pairs = _Contrast(state, batch), _most_pairs(state, batch)
    total = GradientSum(_parameters_to_sum(state.model)) if state.world is not None else None
    while True:
        try:
            state.optimizer.zero_grad(set_to_none=True)
            micro_batch = min(state.micro_batch or pairs, pairs)
            result = (
                _whole(state, batch, contrast, total, mark)
                if micro_batch == pairs
                else _cached(state, in_passes(state, batch, micro_batch, pairs), contrast, total, mark)
            )
            break
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or micro_batch == 1 or state.is_sharded:
                raise
        # Not in the handler: while it runs, the traceback keeps the tensors of the failed attempt alive.
        state.micro_batch = micro_batch // 2
        state.device.release()
    if total is not None:
        total.finish()
        mark("communication")
    return result


def _parameters_to_sum(model: Clip) -> list[list[Parameter]]:
    """Tower by tower, in the order of the backward pass; the temperature comes last. The gradients of a sharded model
    are summed in the backward pass itself."""
    towers = list(model.image.parameters()), list(model.text.parameters()), _scaling(model)
    return [[one for one in tower if not is_split(one)] for tower in towers]


def _most_pairs(state: TrainState, batch: Batch) -> int:
    """That any process has to pass through the model, if all must make the same passes."""
    pairs = len(batch.images)
    if state.is_sharded and state.world is not None and state.micro_batch is not None:
        return max(count for (count,) in state.world.ask(pairs))
    return pairs


def _whole(
    state: TrainState, batch: Batch, contrast: "_Contrast", total: GradientSum | None, mark: Mark
) -> BatchResult:
    """All pairs at once: their activations are kept until the backward pass."""
    image, text = _embed(state, batch, mark)[:2]
    mark("forward")
    slopes = contrast.slopes(image, text, mark)
    sides = [(side, slope) for side, slope in zip((image, text), slopes, strict=True) if side.requires_grad]
    with nullcontext() if total is None else total.during_backward():
        # Alone, both towers at once: they may be on two devices. With other processes, one after the other: the
        # gradients of the first are sent during the backward pass of the second.
        for group in [sides] if total is None else [[one] for one in sides]:
            torch.autograd.backward([side for side, _ in group], [slope for _, slope in group])
    mark("backward")
    return contrast.result()


def _cached(
    state: TrainState, parts: list[Batch], contrast: "_Contrast", total: GradientSum | None, mark: Mark
) -> BatchResult:
    """The same gradients with the activations of one micro-batch at a time (GradCache): embed everything without
    keeping activations, then each micro-batch again, to pass its part of the slopes on. Random numbers are replayed:
    both passes agree."""
    replays = []
    with torch.no_grad():
        cached = []
        for part in parts:
            replays.append((torch.get_rng_state(), state.device.rng_state()))
            cached.append(_embed(state, part, mark))
            mark("forward")
    image, text = (torch.cat([one[side] for one in cached]) for side in (0, 1))  # type: ignore[misc]
    slopes = contrast.slopes(image, text, mark)
    after = torch.get_rng_state(), state.device.rng_state()
    sizes = [len(part.images) for part in parts]
    of_parts = zip(*(torch.split(slope, sizes) for slope in slopes), strict=True)
    for part, replay, (image_slope, text_slope) in zip(parts, replays, of_parts, strict=True):
        _restore_rng(state, replay)
        images, tokens = _inputs(state, part, mark)
        is_last = part is parts[-1]  # only now are gradients complete
        with total.during_backward() if total is not None and is_last else nullcontext():
            # One tower after the other: only one has activations at a time.
            _pass_on(state, state.model.encode_image, images, image_slope, mark)
            _pass_on(state, state.model.encode_text, tokens, text_slope, mark)
    _restore_rng(state, after)
    return contrast.result()


def _pass_on(state: TrainState, encode: Callable[[Tensor], Tensor], inputs: Tensor, slope: Tensor, mark: Mark) -> None:
    """Add one tower's gradients, given the slope of the loss at its embeddings."""
    with autocast(state.device.image, state.precision):
        embedded = encode(inputs)
    mark("forward")
    embedded.backward(slope.to(embedded.device))  # type: ignore[no-untyped-call]
    mark("backward")


def _embed(state: TrainState, batch: Batch, mark: Mark) -> Embeddings:
    images, tokens = _inputs(state, batch, mark)
    with autocast(state.device.image, state.precision):
        return state.model(images, tokens)  # type: ignore[no-any-return]


def _inputs(state: TrainState, batch: Batch, mark: Mark) -> tuple[Tensor, Tensor]:
    """What each tower takes, on its device."""
    batch = batch.to(state.device.image, state.device.text)
    images = batch.images if batch.has_features else normalise(batch.seen, batch.jitter, state.model.pixel_statistics)
    mark("transfer")
    return images, batch.tokens


class _Contrast:
    """The loss of a batch and its slopes at the embeddings of this process. Found once, however often the step is begun
    again: other processes would not answer twice."""

    def __init__(self, state: TrainState, batch: Batch) -> None:
        self._state, self._batch = state, batch
        self._found: tuple[Tensor, ...] | None = None  # slopes at pictures, captions, then at what scales the logits
        self._exchanged: dict[str, Any] = {}
        self._result: BatchResult

    def slopes(self, image: Tensor, text: Tensor, mark: Mark) -> tuple[Tensor, Tensor]:
        """(b, E) each."""
        if self._found is None:
            self._found = self._alone(image, text) if self._state.world is None else self._together(image, text, mark)
            mark("backward")
        return self._found[0], self._found[1]

    def result(self) -> BatchResult:
        """What the batch came to; leaves the gradients of what scales the logits, which no tower has."""
        assert self._found is not None
        for parameter, slope in zip(_scaling(self._state.model), self._found[2:], strict=True):
            parameter.grad = slope
        return self._result

    def _alone(self, image: Tensor, text: Tensor) -> tuple[Tensor, ...]:
        state, positives = self._state, self._batch.positives
        if positives is not None:
            positives = positives.to(state.device.image, non_blocking=True)
        embeddings = self._leaves(image, text)
        loss, whole = self._losses(embeddings, positives)
        with torch.no_grad():
            accuracy = batch_accuracy(embeddings, positives)
        self._result = BatchResult(loss.detach(), accuracy, embeddings.scale.detach())
        return self._grad(whole, embeddings)

    def _together(self, image: Tensor, text: Tensor, mark: Mark) -> tuple[Tensor, ...]:
        """Every process has some pairs (rows). It asks for those only, but among the embeddings of all; the sum of
        what all processes find is the loss of the whole batch, and the sum of their slopes its slope."""
        world = self._state.world
        assert world is not None and self._batch.keys is not None
        keys = self._batch.keys
        rows, counts = self._once("place", lambda: world.place_of(len(image)))
        mark("wait")
        own = torch.cat([image.detach(), text.detach()], dim=1)
        everything = self._once("embeddings", lambda: world.gather(own, counts))  # (B, 2E)
        all_keys = self._once("keys", lambda: world.gather(keys.to(image.device), counts))
        positives = positive_rows(all_keys, rows)
        mark("communication")
        embeddings = self._leaves(*everything.tensor_split(2, dim=1))
        loss, whole = self._losses(embeddings, positives, rows)
        with torch.no_grad():
            accuracy = accuracy_share(embeddings, rows, positives)
        slopes = self._grad(whole, embeddings)
        mark("backward")
        summed = self._once("slopes", lambda: world.sum(torch.cat(slopes[:2], dim=1)))[rows]
        loss_and_accuracy = self._once("loss", lambda: world.sum(torch.stack([loss.detach(), accuracy])))
        mark("communication")
        self._exchanged.clear()
        self._result = BatchResult(loss_and_accuracy[0], loss_and_accuracy[1], embeddings.scale.detach())
        return (*summed.tensor_split(2, dim=1), *slopes[2:])

    def _losses(self, embeddings: Embeddings, positives: Positives, rows: slice | None = None) -> tuple[Tensor, Tensor]:
        """The loss of some rows of the batch, or of all, and what is minimised: the same with smoothed targets, plus
        the loss between pictures. The loss alone is reported: it stays comparable with chance."""
        state, image = self._state, embeddings.image
        if rows is None:
            loss_of, between_pictures = partial(LOSSES[state.loss], embeddings), partial(picture_loss, image)
        else:
            loss_of = partial(LOSS_SHARES[state.loss], embeddings, rows)
            between_pictures = partial(picture_share, image, rows)
        loss = whole = loss_of(positives)
        if state.label_smoothing:
            # Cross-entropy is linear in its targets: those that are right, and all pairs evenly.
            evenly = torch.ones(len(image[rows or slice(None)]), len(image), dtype=torch.bool, device=image.device)
            whole = torch.lerp(loss, loss_of(evenly), state.label_smoothing)
        if state.picture_term and positives is not None:
            whole = whole + state.picture_term * between_pictures(positives)
        return loss, whole

    def _once(self, what: str, exchange: Callable[[], T]) -> T:
        """What an exchange found: if memory runs out after it, the others have gone on to the next."""
        if what not in self._exchanged:
            self._exchanged[what] = exchange()
        return self._exchanged[what]  # type: ignore[no-any-return]

    def _leaves(self, image: Tensor, text: Tensor) -> Embeddings:
        """Embeddings at which the gradient can be taken: nothing before them is known."""
        image, text = (side.detach().requires_grad_() for side in (image, text))
        return Embeddings(image, text, self._state.model.log_scale.exp(), self._state.model.bias)

    def _grad(self, loss: Tensor, embeddings: Embeddings) -> tuple[Tensor, ...]:
        scale = self._state.loss_scale
        scaled = loss if scale is None else loss * scale.value
        return torch.autograd.grad(scaled, [embeddings.image, embeddings.text, *_scaling(self._state.model)])


def _scaling(model: Clip) -> list[Parameter]:
    """The temperature and bias of the logits, if they are trained."""
    return [one for one in (model.log_scale, model.bias) if one is not None and one.requires_grad]


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
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if state.is_sharded and state.world is not None:
        grad_norm = clip_gradients(found, state.grad_clip, state.world)
    elif state.grad_clip is None:
        grad_norm = get_total_norm(found)
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
    if state.device.image.type == "cuda" and not state.is_sharded:
        state.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        state.optimizer.step()
    elif finite:
        state.optimizer.step()
