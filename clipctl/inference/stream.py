"""Pictures to embeddings, batch by batch: threads decode the next batches while the model works on this one."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clipctl.data.bad import BadPicture, BadPictureError
from clipctl.data.decoding import Pixels, open_picture, to_square
from clipctl.hardware.cpu import usable_cores
from clipctl.inference.embedder import BATCH_SIZE, Embedder, Vectors
from clipctl.training.distributed import World

BATCHES_AHEAD = 3  # decoded, or being decoded: bounds the memory

Decode = Callable[[int], Pixels]  # a picture's number to pixels (S, S, 3); raises BadPictureError


class Embedded(NamedTuple):
    """A batch: the pictures that could be used, and those that could not."""

    numbers: NDArray[np.int64]
    vectors: Vectors
    bad: list[BadPicture]


def square_of(content: bytes, size_px: int) -> Pixels:
    """What a model sees of a picture file. Raises BadPictureError."""
    return np.array(to_square(open_picture(content), size_px))


def embed_stream(
    embedder: Embedder,
    decode: Decode,
    numbers: Sequence[int],
    batch_size: int = BATCH_SIZE,
    world: World | None = None,
) -> Iterator[Embedded]:
    """The pictures with these numbers, in order. Several processes take turns with the batches; each gets the
    embeddings of all."""
    batches = [numbers[start : start + batch_size] for start in range(0, len(numbers), batch_size)]
    if world is None:
        yield from _embed_batches(embedder, decode, batches)
        return
    own = _embed_batches(embedder, decode, batches[world.rank :: world.size])
    for first in range(0, len(batches), world.size):
        mine = next(own) if first + world.rank < len(batches) else None
        yield from (batch for batch in world.all_of(mine) if batch is not None)


def _embed_batches(embedder: Embedder, decode: Decode, batches: Sequence[Sequence[int]]) -> Iterator[Embedded]:
    def decoded(batch: Sequence[int]) -> tuple[list[int], list[Pixels], list[BadPicture]]:
        good, pixels, bad = list[int](), list[Pixels](), list[BadPicture]()
        for number in batch:
            try:
                pixels.append(decode(number))
                good.append(number)
            except BadPictureError as error:
                bad.append(BadPicture(number, str(error)))
        return good, pixels, bad

    threads = ThreadPoolExecutor(usable_cores(), thread_name_prefix="decode")
    waiting: deque[Future[tuple[list[int], list[Pixels], list[BadPicture]]]] = deque()
    try:
        for batch in batches:
            waiting.append(threads.submit(decoded, batch))
            if len(waiting) >= max(BATCHES_AHEAD, usable_cores()):
                yield _embedded(embedder, *waiting.popleft().result())
        while waiting:
            yield _embedded(embedder, *waiting.popleft().result())
    finally:  # whoever leaves early does not wait for what nobody wants any more
        threads.shutdown(wait=False, cancel_futures=True)


def _embedded(embedder: Embedder, good: list[int], pixels: list[Pixels], bad: list[BadPicture]) -> Embedded:
    vectors = embedder.embed_pixels(np.stack(pixels)) if pixels else np.zeros((0, embedder.dimensions), np.float32)
    return Embedded(np.array(good, dtype=np.int64), vectors, bad)
