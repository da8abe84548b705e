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


def softmax_loss(embeddings: Embeddings) -> Tensor:
    """Symmetric cross-entropy: the i-th image and the i-th text are each other's label. Chance is ln B."""
    logits = embeddings.scale * embeddings.image @ embeddings.text.T  # (B, B)
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def sigmoid_loss(embeddings: Embeddings) -> Tensor:
    """Each of the B × B pairs is a yes-or-no question: +1 on the diagonal, -1 elsewhere. Summed, per image."""
    logits = embeddings.scale * embeddings.image @ embeddings.text.T  # (B, B)
    if embeddings.bias is not None:
        logits = logits + embeddings.bias
    signs = 2 * torch.eye(len(logits), device=logits.device, dtype=logits.dtype) - 1
    return -F.logsigmoid(signs * logits).sum() / len(logits)


LOSSES: dict[str, Callable[[Embeddings], Tensor]] = {"softmax": softmax_loss, "sigmoid": sigmoid_loss}


def batch_accuracy(embeddings: Embeddings) -> Tensor:
    """Share of images and texts whose own partner is the most similar one of the batch."""
    similarity = embeddings.image @ embeddings.text.T  # (B, B)
    labels = torch.arange(len(similarity), device=similarity.device)
    right = (similarity.argmax(dim=1) == labels).float() + (similarity.argmax(dim=0) == labels).float()
    return right.mean() / 2
