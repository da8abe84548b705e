"""What a run's best model retrieves from its held-out pictures: the best and the worst captions, with thumbnails."""

import base64
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

from clipctl.data.bad import BadPictureError
from clipctl.data.catalog import read_data
from clipctl.data.decoding import to_square
from clipctl.data.source import Source
from clipctl.inference.embedder import Embedder
from clipctl.inference.evaluation import embed_data, rank
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore

EACH = 3  # best and worst captions
SHOWN = 3  # pictures of each
THUMBNAIL_PX = 92


@dataclass(frozen=True)
class FoundPicture:
    name: str
    source: str  # a data address
    is_right: bool


@dataclass(frozen=True)
class Find:
    """A caption and the pictures that are most similar to it."""

    caption: str
    rank: int  # of the best right picture, from 1
    of: int
    pictures: list[FoundPicture]


def best_and_worst(run: RunDir) -> list[Find]:
    """Raises DataError or CheckpointError if the model or its data no longer exist."""
    embedder = Embedder.of(CheckpointStore(run).named("best"))
    source = read_data(embedder.config.data).val
    data = embed_data(embedder, source)
    ranks = rank(data).t2i
    bad = {one.picture for one in data.bad}
    numbers = [number for number in range(len(source)) if number not in bad]
    similarity = data.text[: data.pictures] @ data.image.T  # (N, N)
    # Among equal ranks, the surest first, and at the other end the least sure last.
    order = np.lexsort((-similarity.diagonal(), ranks[: data.pictures]))
    different = list({data.captions[caption]: int(caption) for caption in order[::-1]}.values())[::-1]  # best of each
    finds = []
    for caption in dict.fromkeys([*different[:EACH], *different[-EACH:]]):
        nearest = (-similarity[caption]).argsort(kind="stable")[:SHOWN].tolist()
        pictures = [
            FoundPicture(
                source.label(numbers[picture]),
                _thumbnail(source, numbers[picture]),
                data.matches.is_right(picture, data.captions[caption]),
            )
            for picture in nearest
        ]
        finds.append(Find(data.captions[caption], int(ranks[caption]) + 1, data.pictures, pictures))
    return finds


def _thumbnail(source: Source, number: int) -> str:
    try:
        picture = to_square(source.picture(number, 2 * THUMBNAIL_PX), 2 * THUMBNAIL_PX)
    except BadPictureError:
        picture = Image.new("RGB", (THUMBNAIL_PX, THUMBNAIL_PX))
    drawn = io.BytesIO()
    picture.save(drawn, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(drawn.getvalue()).decode()}"
