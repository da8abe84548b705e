"""Loads pairs into batches, in this process or in workers."""

import itertools
import multiprocessing.connection
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from clipctl.data.bad import BadPicture, BadPictureError
from clipctl.data.batch import Batch, Views
from clipctl.data.cache import PictureCache
from clipctl.data.decoding import Pixels
from clipctl.data.images import Augmentation, augment
from clipctl.data.sampling import Key, chosen_captions, equal_pairs
from clipctl.data.source import Source
from clipctl.data.tokenizers import Tokenizer
from clipctl.data.views import draws, random_jitter, random_views
from clipctl.errors import DataError, TrainingError
from clipctl.hardware.processes import signals_held

PREFETCH_BATCHES = 2
KEPT_TEXTS = 50_000  # about a kilobyte each
TICK_S = 0.5
INSPECT_HINT = "clipctl data inspect DATA --deep says what is wrong with each"
WORKER_TIMEOUT_S = 120.0  # for a batch; longer than any working disk takes
KILL_S = 5.0  # for a killed worker to exit; one that waits for a dead network disk never does

_SIDES = re.compile(r"\b(left|right)\b", re.IGNORECASE)


class Pair(NamedTuple):
    pixels: Pixels | NDArray[np.float32]  # or features
    tokens: NDArray[np.int64] | NDArray[np.float32]  # ids, or features
    jitter: NDArray[np.float64] | None
    view: int  # which augmentation
    picture: int  # that was asked for
    may_flip: bool
    caption_key: int  # equal for equal captions
    picture_key: int  # and for equal pictures
    bad: tuple[BadPicture, ...]


class Text(NamedTuple):
    """A caption, tokenised."""

    tokens: NDArray[np.int64]
    names_side: bool  # it mentions left or right
    caption_key: int
    picture_key: int


class PairDataset(Dataset[Pair]):
    """One augmented pair per key; all randomness is a function of (seed, epoch, index).

    A picture that cannot be used is replaced, along with its caption, by the next usable one. With `views`, a picture
    is augmented in only that many ways, which take turns from epoch to epoch.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        augmentation: Augmentation,
        size_px: int,
        seed: int,
        cache: PictureCache,
        views: int | None = None,
    ) -> None:
        self._source, self._tokenizer, self._augmentation = source, tokenizer, augmentation
        self._size_px, self._seed, self._cache, self._views = size_px, seed, cache, views
        self._bad: dict[int, str] = {}  # reasons by index
        self._texts: dict[tuple[int, int], Text] = {}  # by index and which

    def __getitem__(self, key: Key) -> Pair:
        epoch, index, which = key
        asked = index
        pixels, index, bad = self._usable(index)
        if bad:
            which = self._substitute_caption(index, epoch)
        text, how, view = self._text(index, which), self._augmentation, self.view_of(epoch)
        may_flip = how.flip and not self._names_side(index, text)  # a mirrored picture would make "on the left" a lie
        jitter = None
        if not how.on_device:
            rng = np.random.default_rng([self._seed, view, asked])
            pixels = augment(pixels, rng, self._size_px, how, flip=may_flip)
            jitter = rng.uniform(1 - how.jitter, 1 + how.jitter, size=3) if how.jitter else None
        return Pair(pixels, text.tokens, jitter, view, asked, may_flip, text.caption_key, text.picture_key, bad)

    def view_of(self, epoch: int) -> int:
        """What the randomness of pictures depends on: the epoch, or, with a few fixed views, whose turn it is."""
        return epoch if self._views is None else 1 + (epoch - 1) % self._views

    def _names_side(self, index: int, text: Text) -> bool:
        """A view serves all captions of a picture, so none of them may mention a side."""
        if self._views is None:
            return text.names_side
        return any(self._text(index, which).names_side for which in range(self._source.caption_count(index)))

    def _substitute_caption(self, index: int, epoch: int) -> int:
        count = np.array([self._source.caption_count(index)])
        return int(chosen_captions(np.array([index]), count, self._seed, epoch)[0])

    def pixels(self, index: int) -> Pixels | None:
        """A picture as it is cached; None if it cannot be used."""
        if index not in self._bad:
            try:
                return self._cache.get(index)
            except BadPictureError as error:
                self._bad[index] = str(error)
        return None

    def _text(self, index: int, which: int) -> Text:
        text = self._texts.get((index, which))
        if text is None:
            source, caption = self._source, self._source.caption(index, which)
            keys = source.caption_key(index, which), source.picture_key(index)
            text = Text(self._tokenizer.encode(caption), bool(_SIDES.search(caption)), *keys)
            if len(self._texts) < KEPT_TEXTS:
                self._texts[index, which] = text
        return text

    def _usable(self, index: int) -> tuple[Pixels, int, tuple[BadPicture, ...]]:
        """The picture, or the next usable one after it; and the bad ones that were skipped."""
        bad: list[BadPicture] = []
        for _ in range(len(self._source)):
            if (pixels := self.pixels(index)) is not None:
                return pixels, index, tuple(bad)
            bad.append(BadPicture(index, self._bad[index]))
            index = (index + 1) % len(self._source)
        raise DataError(
            f"none of the pictures in {self._source.name} can be used; the last one is {bad[-1].reason}", INSPECT_HINT
        )


class Collate:
    """Stacks pairs. Unless `fixed_length`, tokens are trimmed to the longest caption: padding has no effect."""

    def __init__(self, *, fixed_length: bool) -> None:
        self._fixed_length = fixed_length

    @property
    def plain(self) -> "Collate":
        """The same for pictures that need no views, such as features."""
        return Collate(fixed_length=self._fixed_length)

    def __call__(self, pairs: list[Pair]) -> Batch:
        jitter = np.array([pair.jitter for pair in pairs if pair.jitter is not None], dtype=np.float32)
        return self._batch(pairs, np.stack([pair.pixels for pair in pairs]), jitter if len(jitter) else None)

    def _batch(
        self, pairs: list[Pair], images: Pixels, jitter: NDArray[np.float32] | None, views: Views | None = None
    ) -> Batch:
        tokens = np.stack([pair.tokens for pair in pairs])
        if not self._fixed_length and tokens.dtype == np.int64:  # not features
            tokens = tokens[:, : int(tokens.argmax(axis=1).max()) + 1]
        caption_keys, picture_keys = (
            np.array(keys, dtype=np.uint64)
            for keys in zip(*((one.caption_key, one.picture_key) for one in pairs), strict=True)
        )
        positives = equal_pairs(caption_keys, picture_keys)
        return Batch(
            torch.from_numpy(images),
            torch.from_numpy(np.ascontiguousarray(tokens)),
            None if jitter is None else torch.from_numpy(jitter),
            torch.from_numpy(positives) if positives.sum() > len(pairs) else None,
            tuple(bad for pair in pairs for bad in pair.bad),
            views,
            torch.from_numpy(np.stack([caption_keys, picture_keys], axis=1).view(np.int64)),
        )


class CollateWithViews(Collate):
    """Stacks pictures as they are, each in the upper left corner of its place, and says where to look at them."""

    def __init__(self, augmentation: Augmentation, size_px: int, seed: int, *, fixed_length: bool) -> None:
        super().__init__(fixed_length=fixed_length)
        self._augmentation, self._size_px, self._seed = augmentation, size_px, seed

    def __call__(self, pairs: list[Pair]) -> Batch:
        heights, widths = (max(pair.pixels.shape[axis] for pair in pairs) for axis in (0, 1))
        canvas = np.zeros((len(pairs), heights, widths, 3), dtype=np.uint8)
        for place, pair in zip(canvas, pairs, strict=True):
            height, width, _ = pair.pixels.shape
            place[:height, :width] = pair.pixels
        sizes = np.array([pair.pixels.shape[1::-1] for pair in pairs], dtype=np.int64)
        drawn = draws(np.array([pair.picture for pair in pairs], dtype=np.uint64), self._seed, pairs[0].view)
        may_flip = np.array([pair.may_flip for pair in pairs])
        maps = random_views(drawn, sizes, self._augmentation, may_flip)
        jitter = random_jitter(drawn, self._augmentation)
        views = Views(torch.from_numpy(maps.astype(np.float32)), torch.from_numpy(sizes), self._size_px)
        return self._batch(pairs, canvas, None if jitter is None else jitter.astype(np.float32), views)


class Sampler(Protocol):
    """Batches of keys, from wherever `start` was told to begin."""

    def start(self, epoch: int, first_batch: int = 0) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence[Key]]: ...


class TrainLoader:
    """The batches of an epoch, starting at any batch. Workers are started once and kept."""

    def __init__(
        self,
        dataset: PairDataset,
        sampler: Sampler,
        collate: Collate,
        *,
        workers: int,
        timeout_s: float = WORKER_TIMEOUT_S,
    ) -> None:
        self.dataset, self.collate, self.workers, self._sampler = dataset, collate, workers, sampler
        self._timeout_s = timeout_s
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=cast(Any, sampler),
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=PREFETCH_BATCHES if workers else None,
            # Spawned workers inherit no threads and no locks, and behave the same on every system.
            multiprocessing_context="spawn" if workers else None,
            # Without its own generator, a loader draws from the global one and changes everything after it.
            generator=torch.Generator(),
        )

    def of(
        self, dataset: PairDataset, collate: Collate, *, workers: int, sampler: Sampler | None = None
    ) -> "TrainLoader":
        """The same loader, or one with other batches, over another dataset."""
        return TrainLoader(dataset, sampler or self._sampler, collate, workers=workers)

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        self._sampler.start(epoch, first_batch)
        # Starts the workers the first time, and reuses them after that. They do not receive Ctrl-C, because the trainer
        # still has to finish its step and save: they exit when it tells them to, or when it is gone.
        with signals_held(), _sigchld_kept(), self._watch():
            batches = iter(self._loader)
        while True:
            try:
                with self._watch():
                    batch = next(batches, None)
            except DataError as error:  # from a worker it includes the traceback; the last line is the message
                raise DataError(
                    str(error).strip().splitlines()[-1].removeprefix("clipctl.errors.DataError: "), INSPECT_HINT
                ) from None
            if batch is None:
                return
            yield batch

    def _watch(self) -> AbstractContextManager[None]:
        """Limits how long the block may wait for workers, if there are any."""
        return _alarm(self._timeout_s, self._workers_live) if self.workers else nullcontext()

    def _workers_live(self) -> bool:
        iterator: Any = self._loader._iterator  # None until all have started
        return iterator is None or all(worker.is_alive() for worker in iterator._workers)

    def worker_error(self, error: RuntimeError | OSError) -> TrainingError | None:
        """If a batch could not be loaded because of a worker: which one, and how it failed."""
        batches: Any = self._loader._iterator
        # torch looks after its workers, too, and gives a process id at most; or a pipe breaks in the middle of a batch
        is_of_worker = isinstance(error, WorkerError | ConnectionError) or str(error).startswith("DataLoader ")
        if batches is None or not is_of_worker:
            return None
        # A worker that is killed closes its pipes first, and is gone a moment later.
        patience_s = KILL_S if isinstance(error, ConnectionError) else 0.0
        ending = multiprocessing.connection.wait([worker.sentinel for worker in batches._workers], patience_s)
        for worker in batches._workers:
            if worker.sentinel in ending:
                worker.join(KILL_S)
        hint = "continue with --resume; --workers 0 loads pictures without worker processes"
        for number, worker in enumerate(batches._workers):
            if not worker.is_alive():
                how = f"signal {-worker.exitcode}" if worker.exitcode < 0 else f"exit code {worker.exitcode}"
                return TrainingError(f"loader worker {number} (process {worker.pid}) ended with {how}", hint)
        number = batches._task_info[batches._rcvd_idx][0]  # the worker that owes the next batch
        pid = batches._workers[number].pid
        return TrainingError(f"loader worker {number} (process {pid}) has not responded for {self._timeout_s} s", hint)

    def close(self) -> None:
        """Kill the workers. They ignore signals, so otherwise they would run until this process exits.

        Torch's own shutdown asks them to exit, using a lock that a suspended or killed worker may hold forever. They
        have nothing to finish, so they are killed, after telling torch not to treat that as a failure.
        """
        iterator: Any = self._loader._iterator  # holds the persistent workers
        if iterator is None or iterator._shutdown:
            return
        iterator._shutdown = True
        torch._C._remove_worker_pids(id(iterator))
        for worker in iterator._workers:
            worker.kill()
        for worker in iterator._workers:
            worker.join(KILL_S)
        for queue in iterator._index_queues:
            queue.cancel_join_thread()
            queue.close()


class WorkerError(RuntimeError):
    """A worker has ended, or no batch has arrived for too long."""


@contextmanager
def _sigchld_kept() -> Iterator[None]:
    """Take back the handler of SIGCHLD that torch sets as it starts workers. It raises wherever the program happens to
    be: in the middle of a step, or in a destructor, where the error is printed and lost."""
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


@contextmanager
def _alarm(seconds: float, workers_live: Callable[[], bool]) -> Iterator[None]:
    """Raise WorkerError if a worker ends or the block takes longer.

    Torch's own timeout covers waiting for a message but not reading it, and a worker may stop in the middle of one.
    Time is counted in ticks, which pause while the trainer itself is suspended.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    ticks = itertools.count(1)

    def tick(number: int, frame: FrameType | None) -> None:
        if next(ticks) * TICK_S >= seconds or not workers_live():
            raise WorkerError

    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
