"""How well held-out pictures and captions find each other. N pairs, E dimensions."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipctl.data.images import normalise
from clipctl.data.loader import HeldOut
from clipctl.model.loss import LOSSES, Embeddings
from clipctl.training.compiling import uncompiled
from clipctl.training.state import TrainState
from clipctl.training.step import autocast

BANDS = ("easy", "medium", "hard")


@dataclass(frozen=True)
class Evaluation:
    """Shares are 0–1. `_rK`: the right partner is among the K nearest, among all held-out ones."""

    val_loss: float
    i2t_r1: float
    i2t_r5: float
    i2t_r10: float
    t2i_r1: float
    t2i_r5: float
    t2i_r10: float
    accuracy_easy: float | None
    accuracy_medium: float | None
    accuracy_hard: float | None

    @property
    def score(self) -> float:
        """What `best` means: the mean of both recalls at 1."""
        return (self.i2t_r1 + self.t2i_r1) / 2

    def to_dict(self) -> dict[str, float | None]:
        return {"score": self.score, **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any] | None) -> "Evaluation | None":
        """What `to_dict` described, if anything."""
        return cls(**{field.name: values[field.name] for field in fields(cls)}) if values else None


class Evaluator:
    """Holds what does not change between evaluations: the held-out pairs and how alike their captions are."""

    def __init__(self, held_out: HeldOut) -> None:
        self.held_out = held_out
        self._right = torch.from_numpy(held_out.right)  # (N, C)
        self._bands = negative_bands(held_out.captions[: held_out.pictures], held_out.right[:, : held_out.pictures])

    def __call__(self, state: TrainState, between_batches: Callable[[], None] = lambda: None) -> Evaluation:
        """`between_batches` may end the evaluation by raising."""
        image, text, losses = self._embed(state, between_batches)
        similarity = image @ text.T  # (N, C): row = image, column = text
        i2t, t2i = _ranks(similarity, self._right), _ranks(similarity.T, self._right.T)
        easy, medium, hard = self._accuracy_by_band(similarity[:, : len(image)])
        return Evaluation(
            val_loss=sum(losses) / len(losses),
            i2t_r1=_recall(i2t, 1),
            i2t_r5=_recall(i2t, 5),
            i2t_r10=_recall(i2t, 10),
            t2i_r1=_recall(t2i, 1),
            t2i_r5=_recall(t2i, 5),
            t2i_r10=_recall(t2i, 10),
            accuracy_easy=easy,
            accuracy_medium=medium,
            accuracy_hard=hard,
        )

    @torch.no_grad()
    def _embed(self, state: TrainState, between_batches: Callable[[], None]) -> tuple[Tensor, Tensor, list[float]]:
        """Pictures (N, E), captions (C, E), and the loss of each batch of pictures with their first captions."""
        images, texts, losses = [], [], []
        state.model.eval()
        try:
            for batch in self.held_out.batches:
                between_batches()
                batch = batch.to(state.device.image, state.device.text)
                with autocast(state), uncompiled(state.compiled):
                    embeddings: Embeddings = state.model(normalise(batch.images), batch.tokens)
                losses.append(LOSSES[state.loss](embeddings, batch.positives))
                images.append(embeddings.image)
                texts.append(embeddings.text)
            for tokens in self.held_out.more_tokens:
                between_batches()
                with autocast(state):
                    texts.append(state.model.encode_text(tokens.to(state.device.text)).to(state.device.image))
        finally:
            state.model.train()
        return torch.cat(images).cpu(), torch.cat(texts).cpu(), torch.stack(losses).tolist()

    def _accuracy_by_band(self, similarity: Tensor) -> list[float | None]:
        """For each band the share of queries, both directions, whose partner beats every negative of that band."""
        result: list[float | None] = []
        for number in range(len(BANDS)):
            negatives = torch.from_numpy(self._bands == number)
            if not negatives.any():
                result.append(None)
                continue
            asked = negatives.any(dim=1)  # equal captions may leave a query without negatives of a band
            shares = [
                float((scores.diagonal() > scores.masked_fill(~negatives, -2.0).amax(dim=1))[asked].float().mean())
                for scores in (similarity, similarity.T)
            ]
            result.append(sum(shares) / 2)
        return result


def _ranks(similarity: Tensor, right: Tensor) -> Tensor:
    """How many wrong candidates each query (row) does not rank below its best right one. Ties and NaN count against
    it."""
    best = similarity.masked_fill(~right, -2.0).amax(dim=1, keepdim=True)
    return (~(similarity < best) & ~right).sum(dim=1)


def _recall(ranks: Tensor, k: int) -> float:
    return float((ranks < k).double().mean())


def negative_bands(captions: Sequence[str], right: NDArray[np.bool_]) -> NDArray[np.int8]:
    """(N, N): how hard caption j is as a negative for i: 0, 1, 2 by thirds of word overlap, -1 where it is `right`.

    The overlap is Jaccard's: shared words over all words of the two.
    """
    words = [set(caption.lower().replace(",", " ").replace(":", " ").split()) for caption in captions]
    column = {word: number for number, word in enumerate(sorted(set().union(*words)))}
    presence = np.zeros((len(words), len(column)), dtype=np.float32)
    for row, present in enumerate(words):
        presence[row, [column[word] for word in present]] = 1
    shared = presence @ presence.T
    sizes = presence.sum(axis=1)
    overlap = shared / np.maximum(1, sizes[:, None] + sizes[None, :] - shared)
    overlap[right] = -1  # sorts first, and is taken out below
    # The place of each negative among its row's, 0 the least alike, then which third that place lies in.
    rights = right.sum(axis=1, keepdims=True)
    order = overlap.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable") - rights
    negatives = len(captions) - rights
    return np.where(order < 0, -1, order * len(BANDS) // np.maximum(1, negatives)).astype(np.int8)
