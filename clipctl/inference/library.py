"""Search, classification and evaluation from Python, in a few lines."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from clipctl.config.layers import Layer, resolve
from clipctl.data.formats.rows import looks_like_picture
from clipctl.errors import CheckpointError, DataError
from clipctl.inference import labels as naming
from clipctl.inference.comparison import Comparison, compare, prepare
from clipctl.inference.embedder import Embedder, Picture, Vectors, load
from clipctl.inference.embedding_store import EmbeddingStore
from clipctl.inference.gallery import open_gallery
from clipctl.inference.labels import Named
from clipctl.inference.refresh import refresh
from clipctl.inference.search import nearest, without
from clipctl.interop import hub
from clipctl.model.weights import identify
from clipctl.runs.checkpoint import DIRECTORY_NAME, read_checkpoint


class Match(NamedTuple):
    path: str
    score: float  # cosine similarity


class PictureIndex:
    """Pictures that can be searched.

    >>> pictures = clipctl.index("a1f3", "photos", "photos.index")
    >>> pictures.search("a red boat", top=3)
    [Match(path='/home/me/photos/0012.jpg', score=0.41), …]
    """

    def __init__(self, store: EmbeddingStore, model: Embedder) -> None:
        store.check_model(model.identity.name, model.identity.fingerprint)
        self.store, self.model = store, model

    def __len__(self) -> int:
        return len(self.store)

    def search(
        self, query: Picture, *, top: int = 10, minus: Sequence[Picture] = (), threshold: float | None = None
    ) -> list[Match]:
        """The pictures nearest to words, to a picture file or to a picture; `minus`: what to steer away from."""
        wanted = embed_queries(self.model, [query])
        if minus:
            wanted = without(wanted, embed_queries(self.model, minus))
        found = nearest(self.store, wanted, top, threshold)
        rows = zip(found.rows[0], found.scores[0], strict=True)
        return [Match(self.store.picture(int(row)).path, float(score)) for row, score in rows]


def index(model: Embedder | str | Path, places: str | Path | Sequence[str | Path], path: str | Path) -> PictureIndex:
    """The index at `path`, made or brought up to date, of the pictures at these places."""
    embedder = model if isinstance(model, Embedder) else load(model)
    several = [places] if isinstance(places, str | Path) else list(places)
    names = [os.fspath(place) for place in several]
    refresh(Path(path), embedder, open_gallery(names), names)
    return PictureIndex(EmbeddingStore.open(Path(path)), embedder)


def open_index(path: str | Path, model: Embedder | str | Path | None = None) -> PictureIndex:
    """An index as it is, with the model it was made with."""
    store = EmbeddingStore.open(Path(path))
    embedder = model if isinstance(model, Embedder) else model_of(store, model)
    return PictureIndex(store, embedder)


def model_of(
    store: EmbeddingStore,
    name: str | Path | None = None,
    *,
    runs_dir: str | Path | None = None,
    device: str = "cpu",
) -> Embedder:
    """The model that an index was made with; `name`: what it is called now."""
    known = store.manifest.model.path
    if name is None:
        is_there = Path(known).exists() or hub.is_name(known)
        name = known if is_there else _renamed(Path(known), store.manifest.model.fingerprint)
    if name is None:
        raise DataError(
            f"the model of this index is gone: {known}",
            "if its run was moved, name it: --model RUN@STEP; else embed the pictures again",
        )
    embedder = load(name, runs_dir=runs_dir, device=device)
    store.check_model(embedder.identity.name, embedder.identity.fingerprint)
    return embedder


def _renamed(known: Path, fingerprint: str) -> Path | None:
    """The checkpoint with these weights, if its run has another name by now."""
    if not DIRECTORY_NAME.fullmatch(known.name):
        return None
    for path in sorted(known.parent.parent.parent.glob(f"*/checkpoints/{known.name}")):
        with suppress(CheckpointError):
            if identify(read_checkpoint(path)).fingerprint == fingerprint:
                return path
    return None


def classify(
    model: Embedder | str | Path,
    places: str | Path | Sequence[str | Path],
    labels: Sequence[str],
    *,
    templates: Sequence[str] = (naming.PLACE,),
    top: int = 1,
) -> list[Named]:
    """The best of these labels for every picture; pictures that cannot be used are left out."""
    if isinstance(labels, str):
        raise TypeError("classify takes several labels: pass a list")
    embedder = model if isinstance(model, Embedder) else load(model)
    several = [places] if isinstance(places, str | Path) else list(places)
    gallery = open_gallery([os.fspath(place) for place in several])
    return naming.classify(embedder, gallery, labels, templates, top)[0]


def evaluate(
    model: Embedder | str | Path,
    data: str | Path | None = None,
    *,
    against: Sequence[Embedder | str | Path] = (),
    classes: Sequence[str] | None = None,
    templates: Sequence[str] = (),
) -> Comparison:
    """A model on data, or on what its run held out: recall with intervals, chance and a baseline without training, and
    by how much it is better than others. `classes`: labels for zero-shot classification."""
    if isinstance(against, str | Path) or isinstance(classes, str):
        raise TypeError("against and classes take several: pass lists")
    embedders = [one if isinstance(one, Embedder) else load(one) for one in (model, *against)]
    config = None if data is None else resolve([Layer("data", {"data.source": os.fspath(data)})]).data
    found = compare(prepare(embedders, config, classes, templates))
    assert found is not None
    return found


def embed_queries(model: Embedder, queries: Sequence[Picture]) -> Vectors:
    """(Q, E). Text that names a file, or looks as if it did, is a picture; any other text is words."""
    if isinstance(queries, str):
        raise TypeError("several queries are needed: pass a list")

    vectors = []
    for query in queries:
        if isinstance(query, str) and not _names_picture(query):
            vectors.append(model.embed_texts([query]))
        else:
            vectors.append(model.embed_images([query]))
    return np.concatenate(vectors)


def _names_picture(query: str) -> bool:
    """Whatever an existing file is called; of others, what cannot be a description: its name was mistyped."""
    return os.path.isfile(query) or (looks_like_picture(query) and " " not in query.strip())
