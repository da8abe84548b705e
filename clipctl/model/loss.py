"""Contrastive losses: pure functions of embeddings. B pairs, E dimensions."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Embeddings(NamedTuple):
    image: Tensor  # (B, E), unit length
    text: Tensor  # (B, E), unit length; row i belongs to image i
    scale: Tensor  # (), 1 / temperature
    bias: Tensor | None = None  # (), added to every logit; only the sigmoid loss uses it


# In all of these, `positives` (B, B) says which texts (columns) are right for an image (row): where a batch holds equal
# captions or equal pictures, more than its own. None: only its own.
Positives = Tensor | None


def softmax_loss(embeddings: Embeddings, positives: Positives = None) -> Tensor:
    """Symmetric cross-entropy: the i-th image and the i-th text are each other's label. Chance is ln B.

    With m right answers, each has the target probability 1/m, and the loss cannot go below ln m.
    """
    logits = embeddings.scale * embeddings.image @ embeddings.text.T  # (B, B)
    if positives is None:
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    return (F.cross_entropy(logits, _shares(positives)) + F.cross_entropy(logits.T, _shares(positives.T))) / 2


def _shares(right: Tensor) -> Tensor:
    """The same probability for all right answers of a row."""
    return right / right.sum(dim=1, keepdim=True)


def sigmoid_loss(embeddings: Embeddings, positives: Positives = None) -> Tensor:
    """Each of the B × B pairs is a yes-or-no question: +1 for what is right, -1 elsewhere. Summed, per image."""
    logits = embeddings.scale * embeddings.image @ embeddings.text.T  # (B, B)
    if embeddings.bias is not None:
        logits = logits + embeddings.bias
    if positives is None:
        signs = 2 * torch.eye(len(logits), device=logits.device, dtype=logits.dtype) - 1
    else:
        signs = 2 * positives.to(logits.dtype) - 1
    return -F.logsigmoid(signs * logits).sum() / len(logits)


PICTURE_SCALE = 10.0  # 1 / temperature between pictures; learnt, or shared with the captions, it found less


def picture_loss(image: Tensor, positives: Tensor, scale: float = PICTURE_SCALE) -> Tensor:
    """Cross-entropy between pictures (B, E): those with equal captions are each other's labels, a picture is never its
    own. Where captions repeat, it teaches what the captions cannot say: what those pictures have in common.

    A picture without a partner in the batch adds nothing, so the term weighs as much as the data support.
    """
    own = torch.eye(len(image), dtype=torch.bool, device=image.device)
    # Not minus infinity: zero times that, in a row without partners, would be NaN.
    log_shares = (scale * image @ image.T).masked_fill(own, -1e4).log_softmax(dim=1)  # (B, B)
    partners = positives & ~own
    targets = partners / partners.sum(dim=1, keepdim=True).clamp(min=1)
    return -(targets * log_shares).sum() / len(image)


LOSSES: dict[str, Callable[[Embeddings, Positives], Tensor]] = {"softmax": softmax_loss, "sigmoid": sigmoid_loss}


def batch_accuracy(embeddings: Embeddings, positives: Positives = None) -> Tensor:
    """Share of images and texts to which the most similar one of the batch is a right one."""
    similarity = embeddings.image @ embeddings.text.T  # (B, B)
    own = torch.arange(len(similarity), device=similarity.device)
    found = torch.stack([similarity.argmax(dim=1), similarity.argmax(dim=0)])  # (2, B)
    right = found == own if positives is None else torch.stack([positives[own, found[0]], positives[found[1], own]])
    return right.float().mean()


# --- several processes ----------------------------------------------------------------------------------------

# Each process asks for its own pairs (`rows`) only, among the embeddings of all. Summed over the processes, what these
# return is what the functions above return for the whole batch. `positives` (b, B) has the rows of those pairs: that
# captions or pictures are equal holds in both directions, so it serves both.


def positive_rows(keys: Tensor, rows: slice) -> Positives:
    """Which pairs have an equal caption or an equal picture, by their keys (B, 2); None if no two pairs have."""
    if all(len(column.unique()) == len(keys) for column in keys.T):
        return None
    caption, picture = keys.T
    return torch.logical_or(caption[rows, None] == caption, picture[rows, None] == picture)


def softmax_share(embeddings: Embeddings, rows: slice, positives: Positives = None) -> Tensor:
    image, text, scale, _ = embeddings
    targets = torch.arange(len(image), device=image.device)[rows] if positives is None else _shares(positives)
    directions = ((image[rows], text), (text[rows], image))
    losses = [F.cross_entropy(scale * asked @ among.T, targets, reduction="sum") for asked, among in directions]
    return (losses[0] + losses[1]) / (2 * len(image))


def sigmoid_share(embeddings: Embeddings, rows: slice, positives: Positives = None) -> Tensor:
    image, text, scale, bias = embeddings
    logits = scale * image[rows] @ text.T  # (b, B)
    if bias is not None:
        logits = logits + bias
    right = _own(rows, image) if positives is None else positives
    return -F.logsigmoid((2 * right.to(logits.dtype) - 1) * logits).sum() / len(image)


def picture_share(image: Tensor, rows: slice, positives: Tensor, scale: float = PICTURE_SCALE) -> Tensor:
    own = _own(rows, image)
    log_shares = (scale * image[rows] @ image.T).masked_fill(own, -1e4).log_softmax(dim=1)  # (b, B)
    partners = positives & ~own
    targets = partners / partners.sum(dim=1, keepdim=True).clamp(min=1)
    return -(targets * log_shares).sum() / len(image)


def accuracy_share(embeddings: Embeddings, rows: slice, positives: Positives = None) -> Tensor:
    image, text = embeddings[:2]
    right = _own(rows, image) if positives is None else positives
    found = torch.stack([(image[rows] @ text.T).argmax(dim=1), (text[rows] @ image.T).argmax(dim=1)], dim=1)  # (b, 2)
    return right.gather(1, found).sum() / (2 * len(image))


def _own(rows: slice, image: Tensor) -> Tensor:
    """(b, B): True where a pair meets itself."""
    everyone = torch.arange(len(image), device=image.device)
    return everyone[rows, None] == everyone


LOSS_SHARES: dict[str, Callable[[Embeddings, slice, Positives], Tensor]] = {
    "softmax": softmax_share,
    "sigmoid": sigmoid_share,
}
