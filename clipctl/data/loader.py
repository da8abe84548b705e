"""Pairs to batches, in this process or in workers."""

import itertools
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from clipctl.config import DataConfig
from clipctl.data.images import Pixels, augment
from clipctl.data.sampling import EpochSampler, batch_count
from clipctl.data.tokenizers import CharacterTokenizer
from clipctl.errors import TrainingError

PREFETCH_BATCHES = 2
TICK_S = 0.5
WORKER_TIMEOUT_S = 120.0  # for a batch; longer than any disk takes that still works

_SIDES = re.compile(r"\b(left|right)\b", re.IGNORECASE)


class Source(Protocol):
    """Pictures with captions, by index. Workers get a copy, so it must pickle."""

    def __len__(self) -> int: ...
    def captions(self, index: int) -> Sequence[str]: ...
    def picture(self, index: int, size_px: int) -> Image.Image: ...


class Batch(NamedTuple):
    images: Tensor  # (B, H, W, 3) uint8
    tokens: Tensor  # (B, N) int64, N up to the context

    def to(self, image: torch.device, text: torch.device) -> "Batch":
        """Pictures and captions where their towers are."""
        return Batch(self.images.to(image, non_blocking=True), self.tokens.to(text, non_blocking=True))


class PictureCache:
    """Decoded pictures, kept until `limit_bytes` are used. Each process has its own."""

    def __init__(self, limit_bytes: int) -> None:
        self._room_bytes = limit_bytes
        self._pixels: dict[int, Pixels] = {}

    def get(self, source: Source, index: int, size_px: int) -> Pixels:
        pixels = self._pixels.get(index)
        if pixels is None:
            pixels = np.asarray(source.picture(index, size_px))
            if pixels.nbytes <= self._room_bytes:
                self._pixels[index] = pixels
                self._room_bytes -= pixels.nbytes
        return pixels


class PairDataset(Dataset[tuple[Pixels, NDArray[np.int64]]]):
    """One augmented pair for each key (epoch, index); what is random about it is f(seed, epoch, index)."""

    def __init__(
        self,
        source: Source,
        tokenizer: CharacterTokenizer,
        config: DataConfig,
        size_px: int,
        seed: int,
        cache_bytes: int,
    ) -> None:
        self._source, self._tokenizer, self._config = source, tokenizer, config
        self._size_px, self._seed = size_px, seed
        self._cache = PictureCache(cache_bytes)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Pixels, NDArray[np.int64]]:
        epoch, index = key
        rng = np.random.default_rng([self._seed, epoch, index])
        captions = self._source.captions(index)
        caption = captions[int(rng.integers(len(captions)))]
        pixels = self._cache.get(self._source, index, self._size_px)
        # A mirrored picture would make "on the left" a lie.
        flip = self._config.flip and not _SIDES.search(caption)
        pixels = augment(pixels, rng, max_shift=self._config.max_shift, max_zoom=self._config.max_zoom, flip=flip)
        return pixels, self._tokenizer.encode(caption)


class Collate:
    """Stacks pairs. Unless `fixed_length`, tokens are cut to the longest caption: padding has no effect."""

    def __init__(self, *, fixed_length: bool) -> None:
        self._fixed_length = fixed_length

    def __call__(self, pairs: list[tuple[Pixels, NDArray[np.int64]]]) -> Batch:
        images = np.stack([pixels for pixels, _ in pairs])
        tokens = np.stack([ids for _, ids in pairs])
        if not self._fixed_length:
            tokens = tokens[:, : int(tokens.argmax(axis=1).max()) + 1]
        return Batch(torch.from_numpy(images), torch.from_numpy(np.ascontiguousarray(tokens)))


class TrainLoader:
    """The batches of an epoch, from any batch on. Workers are started once and kept."""

    def __init__(
        self,
        dataset: PairDataset,
        sampler: EpochSampler,
        *,
        workers: int,
        fixed_length: bool,
        timeout_s: float = WORKER_TIMEOUT_S,
    ) -> None:
        self._sampler = sampler
        self._timeout_s = timeout_s if workers else None
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=Collate(fixed_length=fixed_length),
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=PREFETCH_BATCHES if workers else None,
            # Spawned workers inherit no threads and no locks, and behave the same on every system.
            multiprocessing_context="spawn" if workers else None,
            # Without a generator of its own, a loader draws from the global one and shifts everything after it.
            generator=torch.Generator(),
        )

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        self._sampler.start(epoch, first_batch)
        with _signals_held(), _alarm(self._timeout_s):  # workers are started here the first time, later asked to go on
            batches = iter(self._loader)
        while True:
            with _alarm(self._timeout_s):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def worker_error(self, error: RuntimeError) -> TrainingError | None:
        """If torch says that a worker failed: which one and how. Torch may say so anywhere, not only while it is asked
        for a batch, and names a process number at most."""
        batches: Any = self._loader._iterator
        if not (isinstance(error, WorkerSilentError) or str(error).startswith("DataLoader ")) or batches is None:
            return None
        hint = "go on with --resume; --workers 0 does without them"
        for number, worker in enumerate(batches._workers):
            if not worker.is_alive():
                how = f"signal {-worker.exitcode}" if worker.exitcode < 0 else f"exit code {worker.exitcode}"
                return TrainingError(f"loader worker {number} (process {worker.pid}) ended with {how}", hint)
        number = batches._task_info[batches._rcvd_idx][0]  # who owes the next batch
        pid = batches._workers[number].pid
        return TrainingError(f"loader worker {number} (process {pid}) has been silent for {self._timeout_s} s", hint)

    def close(self) -> None:
        """End the workers. They do not listen to signals, so nothing else would before the process is gone."""
        iterator: Any = self._loader._iterator  # where a loader keeps persistent workers
        if iterator is not None:
            iterator._shutdown_workers()
            for worker in iterator._workers:
                worker.kill()  # one that was stopped or hangs has not heard


class WorkerSilentError(RuntimeError):
    """No batch has come for too long."""


@contextmanager
def _alarm(seconds: float | None) -> Iterator[None]:
    """Raise WorkerSilentError if the block takes longer; None: it may take forever.

    Torch's own timeout covers waiting for a message but not reading it, and a worker may stop in the middle of one.
    The time is counted in ticks, of which none come while the trainer itself is put to sleep.
    """
    if seconds is None or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    ticks = itertools.count(1)

    def tick(number: int, frame: FrameType | None) -> None:
        if next(ticks) * TICK_S >= seconds:
            raise WorkerSilentError

    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back while workers start; the trainer gets them when the block ends.

    A child inherits the mask, so that a signal to the whole group (Ctrl-C in a terminal) never ends the workers of a
    trainer that is about to finish its step and save. They end when the trainer tells them to, or is gone.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # it releases both signals when it starts, so start it first
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def validation_batches(source: Source, tokenizer: CharacterTokenizer, size_px: int, batch_size: int) -> list[Batch]:
    """The whole held-out set, as it is, in order."""
    collate = Collate(fixed_length=True)
    indices = range(len(source))
    pairs = [(np.asarray(source.picture(i, size_px)), tokenizer.encode(source.captions(i)[0])) for i in indices]
    # Of almost equal size, for the reason given in `epoch_batches`.
    chunks = np.array_split(indices, batch_count(len(pairs), batch_size))
    return [collate([pairs[i] for i in chunk]) for chunk in chunks]
