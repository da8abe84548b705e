"""How well held-out pictures and captions find each other. N pictures, C captions, E dimensions.

Similarities are computed for some pictures and captions at a time, so that memory does not grow with N × C.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipctl.data.held_out import HeldOut, Matches
from clipctl.model.encoder import Encoder
from clipctl.model.loss import LOSSES, Embeddings
from clipctl.runs.retrieval import CAPTIONS, NEAREST, Near, Query, Retrieval
from clipctl.training.state import TrainState, in_passes

BANDS = ("easy", "medium", "hard")
BAND_QUERIES = 1000  # pictures and captions that the difficulty of negatives is measured on
BLOCK_ELEMENTS = 2**23  # of similarities held at the same time
TILE_CAPTIONS = 2**15  # that many at a time: a few pictures against very many captions would wait for memory


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
        """What `to_dict` described, if anything. Raises KeyError, TypeError or ValueError for anything else."""
        if values is None:
            return None
        numbers = {field.name: values[field.name] for field in fields(cls)}
        for name, value in numbers.items():
            may_be_absent = name.startswith("accuracy_")
            if not (may_be_absent and value is None) and type(value) not in (int, float):
                raise ValueError(f"{name} is {str(value)[:40]!r}")
        return cls(**numbers)


class Evaluator:
    """Holds what does not change between evaluations: the held-out pairs and how alike their captions are."""

    def __init__(self, held_out: HeldOut) -> None:
        self.held_out = held_out
        pictures = held_out.pictures
        count = min(pictures, BAND_QUERIES)
        self._queries = np.arange(count) * pictures // count
        right = held_out.matches.rows(self._queries)[:, :pictures]
        self._bands = negative_bands(held_out.captions[:pictures], self._queries, right)
        different = held_out.matches.different
        shown = min(len(different), CAPTIONS)
        self._shown = torch.from_numpy(different[np.arange(shown) * len(different) // shown])  # captions, spread evenly

    def of(self, held_out: HeldOut) -> "Evaluator":
        """The same evaluator, with the same pairs in another form, such as features."""
        other = copy(self)
        other.held_out = held_out
        return other

    def __call__(
        self, state: TrainState, between_batches: Callable[[], object] = lambda: None
    ) -> tuple[Evaluation, Retrieval]:
        """How good the model is, and what it finds for a few captions. `between_batches` may raise to stop it."""
        image, text, losses = self._embed(state, between_batches)
        if state.world is None:
            return self._judged(state.step, image, text, losses)
        # One decides for all: on other machines the last bit, and so what is best, might be another.
        return state.world.from_first(  # type: ignore[no-any-return]
            self._judged(state.step, image, text, losses) if state.world.is_first else None
        )

    def _judged(self, step: int, image: Tensor, text: Tensor, losses: Sequence[float]) -> tuple[Evaluation, Retrieval]:
        i2t, t2i = find_ranks(image, text, self.held_out.matches)
        easy, medium, hard = accuracy_by_band(image, text[: len(image)], self._queries, self._bands)
        evaluation = Evaluation(
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
        return evaluation, self._retrieval(step, image, text, t2i)

    def _retrieval(self, step: int, image: Tensor, text: Tensor, ranks: Tensor) -> Retrieval:
        """The nearest pictures of each caption that is shown."""
        similarity = (text[self._shown] @ image.T).nan_to_num(nan=-1.0)  # (S, N)
        scores, pictures = similarity.topk(min(NEAREST, len(image)), dim=1)
        queries = []
        for caption, row, numbers in zip(self._shown.tolist(), scores.tolist(), pictures.tolist(), strict=True):
            words = self.held_out.captions[caption]
            nearest = (
                Near(picture, round(score, 4), self.held_out.matches.is_right(picture, words))
                for picture, score in zip(numbers, row, strict=True)
            )
            queries.append(Query(words, int(ranks[caption]) + 1, None, tuple(nearest)))
        return Retrieval(step, len(image), tuple(queries))

    @torch.no_grad()
    def _embed(self, state: TrainState, between_batches: Callable[[], object]) -> tuple[Tensor, Tensor, list[float]]:
        """Pictures (N, E), captions (C, E), and the loss of each batch of pictures with their first captions."""
        encoder = Encoder(state.model, state.device, precision=state.precision, compiled=state.compiled)
        scale, bias = state.model.log_scale.exp(), state.model.bias
        batches, more = self.held_out.batches, self.held_out.more_tokens
        largest = max(len(batch.images) for batch in batches)
        images, texts, losses = dict[int, Tensor](), dict[int, Tensor](), dict[int, Tensor]()
        state.model.eval()
        try:
            for number, is_own in _turns(len(batches), state):
                between_batches()
                batch = batches[number]
                # In parts, as in training; but the loss is of the whole batch, as in training too.
                parts = in_passes(state, batch, state.micro_batch or largest, largest)
                image = torch.cat([encoder.images(part.images) for part in parts])
                text = encoder.texts(batch.tokens)
                if is_own:
                    positives = None if batch.positives is None else batch.positives.to(state.device.image)
                    images[number], texts[number] = image, text
                    losses[number] = LOSSES[state.loss](Embeddings(image, text, scale, bias), positives)
            for number, is_own in _turns(len(more), state):
                between_batches()
                text = encoder.texts(more[number])
                if is_own:
                    texts[len(batches) + number] = text
        finally:
            state.model.train()
        rows = [len(batch.images) for batch in batches]
        return (
            self._joined(state, images, rows),
            self._joined(state, texts, [*rows, *map(len, more)]),
            self._joined(state, {number: loss[None] for number, loss in losses.items()}, [1] * len(batches)).tolist(),
        )

    def _joined(self, state: TrainState, parts: dict[int, Tensor], rows: Sequence[int]) -> Tensor:
        """All parts concatenated; those of other processes are zeros here, filled in by summing over processes."""
        if state.world is None:
            return torch.cat(list(parts.values())).cpu()
        width = state.world.from_first(parts[0].shape[1:] if state.world.is_first else None)  # it has the first part
        blank = torch.zeros(sum(rows), *width)
        for block, (number, count) in zip(torch.split(blank, list(rows)), enumerate(rows), strict=True):
            if number in parts:
                assert count == len(parts[number])
                block.copy_(parts[number])
        return state.world.sum(blank)


def _turns(count: int, state: TrainState) -> Iterator[tuple[int, bool]]:
    """The numbers that this process computes of `count`, and whether they are its own; processes take turns. In the
    last turn some may repeat what another does, and drop it: a sharded model needs all of them in every pass."""
    rank, ranks = (state.world.rank, state.world.size) if state.world else (0, 1)
    for first in range(0, count, ranks):
        yield min(first + rank, count - 1), first + rank < count


def find_ranks(image: Tensor, text: Tensor, matches: Matches) -> tuple[Tensor, Tensor]:
    """For each picture (N,), and for each caption (C,), how many wrong candidates come before its best right one.
    Ties and NaN count against it. Equal captions are one candidate: a wrong one stands in the way once, however many
    pictures have it."""
    different, text_of = torch.from_numpy(matches.different), torch.from_numpy(matches.text_of)
    pictures, texts = (torch.from_numpy(side) for side in matches.pairs)  # of each pair that is right
    at_right = image.new_empty(len(pictures))
    for rows, columns, similarity in _tiles(image, text, different):
        inside = (pictures >= rows.start) & (pictures < rows.stop) & (texts >= columns.start) & (texts < columns.stop)
        at_right[inside] = similarity[pictures[inside] - rows.start, texts[inside] - columns.start]
    best_text = image.new_full((len(image),), -2.0).scatter_reduce(0, pictures, at_right, "amax")
    best_picture = image.new_full((len(different),), -2.0).scatter_reduce(0, texts, at_right, "amax")
    # All candidates are counted, so the right ones among them are taken off first.
    i2t = -torch.bincount(pictures[~(at_right < best_text[pictures])], minlength=len(image))
    t2i = -torch.bincount(texts[~(at_right < best_picture[texts])], minlength=len(different))
    for rows, columns, similarity in _tiles(image, text, different):
        # 32 bits: summing them as 64, as torch does by itself, takes longer than all the rest.
        i2t[rows] += (~(similarity < best_text[rows, None])).sum(dim=1, dtype=torch.int32)
        t2i[columns] += (~(similarity < best_picture[columns])).sum(dim=0, dtype=torch.int32)
    return i2t, t2i[text_of]


def _tiles(image: Tensor, text: Tensor, different: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Similarities of some pictures to some of the distinct captions, and which ones; tile by tile, of all to all."""
    for left in range(0, len(different), TILE_CAPTIONS):
        columns = slice(left, min(left + TILE_CAPTIONS, len(different)))
        part = text[different[columns]].T
        height = max(1, BLOCK_ELEMENTS // part.shape[1])
        for top in range(0, len(image), height):
            rows = slice(top, min(top + height, len(image)))
            yield rows, columns, image[rows] @ part


def accuracy_by_band(
    image: Tensor, text: Tensor, queries: NDArray[np.int64], bands: NDArray[np.int8]
) -> list[float | None]:
    """For each band the share of queries, both directions, whose partner beats every negative of that band. `text`
    holds the first caption of each picture."""
    chosen = torch.from_numpy(queries)
    directions = (image[chosen] @ text.T, text[chosen] @ image.T)  # each (Q, N)
    result: list[float | None] = []
    for number in range(len(BANDS)):
        negatives = torch.from_numpy(bands == number)
        if not negatives.any():
            result.append(None)
            continue
        asked = negatives.any(dim=1)  # equal captions may leave a query without negatives of a band
        shares = []
        for scores in directions:
            own = scores.gather(1, chosen[:, None]).squeeze(1)
            beaten = own > scores.masked_fill(~negatives, -2.0).amax(dim=1)
            shares.append(float(beaten[asked].float().mean()))
        result.append(sum(shares) / 2)
    return result


def _recall(ranks: Tensor, k: int) -> float:
    return float((ranks < k).double().mean())


def negative_bands(captions: Sequence[str], queries: NDArray[np.int64], right: NDArray[np.bool_]) -> NDArray[np.int8]:
    """(Q, N): how hard caption j is as a negative for query i: 0, 1, 2 by thirds of word overlap, -1 if it is `right`.

    The overlap is Jaccard's: shared words over all words of the two.
    """
    words = [set(caption.lower().replace(",", " ").replace(":", " ").split()) for caption in captions]
    holders: dict[str, list[int]] = {}  # captions that hold a word
    for number, present in enumerate(words):
        for word in present:
            holders.setdefault(word, []).append(number)
    sizes = np.array([len(present) for present in words], dtype=np.float32)
    bands = np.empty((len(queries), len(captions)), dtype=np.int8)
    for row, query in enumerate(queries):
        shared = np.zeros(len(captions), dtype=np.float32)
        for word in words[query]:
            shared[holders[word]] += 1
        overlap = shared / np.maximum(1, sizes[query] + sizes - shared)
        overlap[right[row]] = -1  # sorts first, and is taken out below
        # The place of each negative, 0 the least alike, then which third that place lies in.
        rights = int(right[row].sum())
        place = overlap.argsort(kind="stable").argsort(kind="stable") - rights
        bands[row] = np.where(place < 0, -1, place * len(BANDS) // max(1, len(captions) - rights))
    return bands
