"""Classifies pictures: which of several labels fits best. Zero-shot classification, as CLIP does it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clipctl import files
from clipctl.data.bad import USABLE_HINT
from clipctl.data.decoding import Pixels
from clipctl.errors import ConfigError, DataError, unreadable
from clipctl.inference.embedder import Embedder, Vectors
from clipctl.inference.gallery import BadFile, Gallery
from clipctl.inference.stream import embed_stream, square_of
from clipctl.progress import Count

FILE_LIMIT_BYTES = 10_000_000
PLACE = "{}"  # where a template takes the label


def parse_labels(text: str | None, file: Path | None) -> list[str]:
    """Labels separated by commas, or one on each line of a file."""
    if (text is None) == (file is None):
        raise ConfigError("pass either --labels 'cat,dog' or --labels-file FILE, with one label per line")
    if file is not None:
        try:
            lines = files.read_bounded(file, FILE_LIMIT_BYTES).decode("utf-8-sig").splitlines()
        except OSError as error:
            raise unreadable(file, error) from None
        except UnicodeDecodeError:
            raise DataError(f"{file} is not UTF-8 text", "save it as UTF-8, with one label per line") from None
    else:
        assert text is not None
        lines = text.split(",")
    labels = list(dict.fromkeys(" ".join(line.split()) for line in lines if line.strip()))
    if len(labels) < 2:
        raise ConfigError(f"at least two labels are needed, got {len(labels)}")
    return labels


def check_templates(templates: Sequence[str]) -> None:
    for template in templates:
        if template.count(PLACE) != 1:
            raise ConfigError(f"the template {template!r} must contain {PLACE} once", "such as 'a photo of a {}'")


def embed_labels(embedder: Embedder, labels: Sequence[str], templates: Sequence[str] = (PLACE,)) -> Vectors:
    """(L, E): for each label the mean of its captions under all templates, of length one."""
    check_templates(templates)
    captions = [template.replace(PLACE, label) for label in labels for template in templates]
    vectors = embedder.embed_texts(captions).reshape(len(labels), len(templates), -1).mean(axis=1)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), dtype=np.float32)


class Named(NamedTuple):
    """A picture with its best labels, best first."""

    path: str
    labels: list[tuple[str, float]]  # and how sure the model is of each


def classify(
    embedder: Embedder,
    gallery: Gallery,
    labels: Sequence[str],
    templates: Sequence[str] = (PLACE,),
    top: int = 1,
    progress: Count = lambda done, total: None,
) -> tuple[list[Named], list[BadFile]]:
    """The best labels of every picture, and pictures that cannot be used."""
    label_vectors = embed_labels(embedder, labels, templates)
    named, bad, total = list[Named](), list[BadFile](), len(gallery.pictures)

    def decode(number: int) -> Pixels:
        return square_of(gallery.content(number), embedder.size_px)

    for batch in embed_stream(embedder, decode, range(total)):
        for number, shares in zip(batch.numbers, probabilities(embedder, batch.vectors, label_vectors), strict=True):
            best = (-shares).argsort(kind="stable")[:top]
            named.append(Named(gallery.pictures[number].path, [(labels[one], float(shares[one])) for one in best]))
        bad += [BadFile(gallery.pictures[one.picture], one.reason) for one in batch.bad]
        progress(len(named) + len(bad), total)
    if not named:
        raise DataError(
            f"none of the {total:,} pictures can be used: {bad[0].picture.path}: {bad[0].reason}", USABLE_HINT
        )
    return named, bad


def probabilities(embedder: Embedder, pictures: Vectors, labels: Vectors) -> NDArray[np.float64]:
    """(N, L): how sure the model is of each label, at its own temperature."""
    logits = embedder.scale * (pictures.astype(np.float64) @ labels.T.astype(np.float64))
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))
