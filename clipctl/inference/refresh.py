"""Brings an index of embeddings up to date: embeds what is new or changed, forgets what is gone."""

import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from clipctl.data.bad import USABLE_HINT
from clipctl.data.formats.rows import Hints
from clipctl.errors import DataError, StoreError
from clipctl.inference import embedding_store as stores
from clipctl.inference.embedder import Embedder, Vectors
from clipctl.inference.embedding_store import DtypeName, EmbeddingStore, Known, ModelFacts
from clipctl.inference.gallery import NO_HINTS, BadFile, Gallery, PictureId
from clipctl.inference.stream import Decode, embed_stream, square_of
from clipctl.progress import Count
from clipctl.training.distributed import World, raised_in_all

# Reasons that lie in a file's content. Others, such as a disk that is not there, may pass.
_LASTING = ("empty", "damaged", "truncated", "not a picture", "more than")
PART_PICTURES, PART_S = 5_000, 20.0  # embedded work is saved after so many pictures, or so long


@dataclass(frozen=True)
class Refreshed:
    """What a refresh found and did."""

    pictures: int  # in the index now
    embedded: int  # new or changed
    forgotten: int  # no longer there
    bad: list[BadFile]


def facts_of(embedder: Embedder) -> ModelFacts:
    return ModelFacts(*embedder.identity, embedder.dimensions)


def refresh(
    path: Path,
    embedder: Embedder,
    gallery: Gallery,
    places: Sequence[str],
    dtype: DtypeName = "float16",
    progress: Count = lambda done, total: None,
    wait_s: float = 0.0,
    world: World | None = None,
    hints: Hints = NO_HINTS,
) -> Refreshed:
    """Make the index hold exactly the pictures of a gallery. If interrupted, it keeps what it has for the next time.
    `wait_s`: how long to wait for another process that refreshes it. `world`: processes that embed a part each; this is
    rank 0, the others call `help_refresh`."""
    with stores.locked(path, wait_s):
        model = facts_of(embedder)
        known = stores.unfinished_work(path, model, dtype)
        before, known_bad, is_current = list[PictureId](), dict[PictureId, BadFile](), False
        absolute = [os.path.abspath(place) for place in places]
        if stores.is_store(path):
            store = _opened_whole(path)
            store.check_model(model.name, model.fingerprint)
            before, manifest = store.all_pictures(), store.manifest
            if manifest.dtype == dtype:
                known |= {one: Known(store.vectors, row) for row, one in enumerate(before)}
            is_current = (manifest.dtype, manifest.places, manifest.hints) == (dtype, absolute, hints.of_pictures)
            known_bad = {one.picture: one for one in store.bad() if one.reason.startswith(_LASTING)}
        wanted = [n for n, one in enumerate(gallery.pictures) if one not in known and one not in known_bad]
        if world is not None:
            world.from_first(wanted)
        work = _Work(path, model, dtype, gallery, world)
        bad = [known_bad[one] for one in gallery.pictures if one in known_bad]
        with work.kept():
            bad += work.embed(embedder, wanted, progress)
            known |= work.found
            rows = [(one, known[one]) for one in gallery.pictures if one in known]
            if not rows:
                reasons = "; ".join(f"{one.picture.path}: {one.reason}" for one in bad[:3])
                raise DataError(f"none of the {len(gallery.pictures):,} pictures can be used: {reasons}", USABLE_HINT)
            if wanted or not is_current or [one for one, _ in rows] != before:
                stores.write_state(path, model, dtype, absolute, rows, bad, hints)
        forgotten = {one.path for one in before} - {one.path for one, _ in rows}
        return Refreshed(len(rows), len(work.found), len(forgotten), bad)


def _opened_whole(path: Path) -> EmbeddingStore:
    """The state before. Damage would be copied into the next one, which would then vouch for it."""
    if problems := stores.problems_of(path):
        raise StoreError(
            f"{path} is damaged: {problems[0]}",
            f"delete it, and embed the pictures again: rm -r {shlex.quote(str(path))}",
        )
    return EmbeddingStore.open(path)


def check_same(world: World, gallery: Gallery) -> None:
    """Raise in all processes if they do not see the same pictures, which may lie elsewhere on every machine."""
    names = sha256("\n".join(os.path.basename(one.path) for one in gallery.pictures).encode()).hexdigest()
    for rank, other in enumerate(found := world.all_of(names)):
        if other != found[0]:
            with raised_in_all():
                raise DataError(
                    f"rank {rank} finds different pictures from rank 0", "copy the same pictures to every machine"
                )


def help_refresh(world: World, embedder: Embedder, gallery: Gallery) -> None:
    """Embed this process's part of what rank 0 needs for its index."""
    for _ in embed_stream(embedder, _decoder(gallery, embedder), world.from_first(None), world=world):
        pass


def _decoder(gallery: Gallery, embedder: Embedder) -> Decode:
    return lambda number: square_of(gallery.content(number), embedder.size_px)


class _Work:
    """Embeds pictures and saves them in parts."""

    def __init__(self, path: Path, model: ModelFacts, dtype: str, gallery: Gallery, world: World | None) -> None:
        self._path, self._model, self._dtype, self._gallery, self._world = path, model, dtype, gallery, world
        self._number = stores.next_part(path)
        self._pictures, self._vectors = list[PictureId](), list[Vectors]()
        self._saved_s = time.monotonic()
        self.found: dict[PictureId, Known] = {}

    def embed(self, embedder: Embedder, wanted: Sequence[int], progress: Count) -> list[BadFile]:
        bad: list[BadFile] = []
        done, decode = 0, _decoder(self._gallery, embedder)
        for batch in embed_stream(embedder, decode, wanted, world=self._world):
            self._keep([self._gallery.pictures[number] for number in batch.numbers], batch.vectors)
            bad += [BadFile(self._gallery.pictures[one.picture], one.reason) for one in batch.bad]
            done += len(batch.numbers) + len(batch.bad)
            progress(done, len(wanted))
        return bad

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever ends the block early, Ctrl-C too, what was embedded is not lost."""
        try:
            yield
        except BaseException:
            self._save()
            raise

    def _keep(self, pictures: Sequence[PictureId], vectors: Vectors) -> None:
        vectors = vectors.astype(self._dtype)
        self.found |= {picture: Known(vectors, row) for row, picture in enumerate(pictures)}
        self._pictures += pictures
        self._vectors.append(vectors)
        if len(self._pictures) >= PART_PICTURES or time.monotonic() - self._saved_s >= PART_S:
            self._save()

    def _save(self) -> None:
        if self._pictures:
            vectors = np.concatenate(self._vectors)
            stores.save_part(self._path, self._model, self._dtype, self._number, self._pictures, vectors)
        self._number, self._pictures, self._vectors = self._number + 1, [], []
        self._saved_s = time.monotonic()
