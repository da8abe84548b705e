"""Files, pictures, arrays and captions to embeddings, preprocessed as in an evaluation."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from clipctl.config.sections import TrainConfig
from clipctl.data import tokenizers
from clipctl.data.bad import USABLE_HINT, BadPictureError
from clipctl.data.decoding import FILE_LIMIT_BYTES, open_picture, to_rgb, to_square
from clipctl.data.index.columns import read_part
from clipctl.data.tokenizers import Tokenizer
from clipctl.errors import DataError, DeviceError, unreadable
from clipctl.hardware.devices import open_device
from clipctl.inference.engines import faster
from clipctl.interop.models import load_any
from clipctl.interop.onnx_model import OnnxModel, has_graphs, has_only_graphs
from clipctl.model.encoder import Encoder, Engine
from clipctl.model.weights import Identity, TrainedModel, identify, load_model
from clipctl.runs.checkpoint import Checkpoint
from clipctl.runs.rundir import runs_root

BATCH_SIZE = 64

Picture = str | Path | Image.Image | NDArray[np.uint8]  # a file, a Pillow picture, or (H, W, 3) pixels
Vectors = NDArray[np.float32]  # (N, E), each of length one: a dot product is a cosine similarity
T = TypeVar("T")


class Embedder:
    """A model that is ready to use. The dot product of two embeddings says how well they match."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, config: TrainConfig, identity: Identity) -> None:
        self._engine, self._tokenizer, self.config, self.identity = engine, tokenizer, config, identity
        self.size_px = config.model.image.size_px

    @classmethod
    def of(cls, checkpoint: Checkpoint, device: str = "cpu") -> "Embedder":
        """The model of a checkpoint, which is verified first."""
        return cls.ready(load_model(checkpoint), identify(checkpoint), device)

    @classmethod
    def ready(cls, trained: TrainedModel, identity: Identity, device: str = "cpu") -> "Embedder":
        """A model on its device."""
        model, config, tokenizer = trained
        place = open_device(device)
        encoder = Encoder(model.place(place.image, place.text), place)
        return cls(encoder, tokenizers.from_dict(tokenizer), config, identity)

    @classmethod
    def of_graphs(cls, model: OnnxModel, *, int8: bool | None = None) -> "Embedder":
        """An ONNX export, verified first, run by onnxruntime; by default with its full weights, if it has them."""
        return cls(model.open(int8=int8), model.tokenizer, model.config, model.identity)

    def or_faster(self, directory: Path) -> "Embedder":
        """This one, or the same model from the ONNX files in a directory, if they are faster here."""
        engine = faster(self._engine, directory, self.config)
        return self if engine is self._engine else Embedder(engine, self._tokenizer, self.config, self.identity)

    @property
    def dimensions(self) -> int:
        return self._engine.dimensions

    @property
    def scale(self) -> float:
        """1 / temperature: what the model multiplies similarities by before a softmax."""
        return self._engine.scale

    def embed_images(self, pictures: Iterable[Picture], *, batch_size: int = BATCH_SIZE) -> Vectors:
        """(N, E). Each picture is cut to its middle square. Raises DataError for one that cannot be used."""
        if isinstance(pictures, str | Path | Image.Image):
            raise TypeError("embed_images takes several pictures: pass a list")
        batches = _batches((self._pixels(picture) for picture in pictures), batch_size)
        return self._joined(self.embed_pixels(np.stack(batch)) for batch in batches)

    def embed_pixels(self, pixels: NDArray[np.uint8]) -> Vectors:
        """(N, E) of pictures that are squares of the model's size already: (N, S, S, 3)."""
        return self._engine.images(torch.from_numpy(pixels)).cpu().numpy()

    def embed_texts(self, captions: Iterable[str], *, batch_size: int = BATCH_SIZE) -> Vectors:
        """(N, E). Captions longer than the model's context are cut."""
        if isinstance(captions, str):
            raise TypeError("embed_texts takes several captions: pass a list")
        batches = _batches((self._tokenizer.encode(caption) for caption in captions), batch_size)
        return self._joined(self._engine.texts(torch.from_numpy(np.stack(batch))).cpu().numpy() for batch in batches)

    def _pixels(self, picture: Picture) -> NDArray[np.uint8]:
        return np.array(to_square(_opened(picture), self.size_px))

    def _joined(self, parts: Iterable[Vectors]) -> Vectors:
        found = list(parts)
        return np.concatenate(found) if found else np.zeros((0, self.dimensions), dtype=np.float32)


def load(model: str | Path, *, runs_dir: str | Path | None = None, device: str = "cpu") -> Embedder:
    """The model that RUN (its best checkpoint), RUN@last, RUN@STEP, the directory of a checkpoint or of a model by
    transformers or open_clip, or a name on the hub stands for, ready to embed. An ONNX export needs no torch weights;
    if a directory has both, whichever is faster here is used.

    >>> model = clipctl.load("a1f3@best")
    >>> model.embed_texts(["a red cat", "two towers"]) @ model.embed_images(["cat.jpg"]).T
    """
    if has_only_graphs(Path(model)):
        if device != "cpu":
            raise DeviceError(f"{model} has ONNX files, which run on the cpu, not on {device}")
        return Embedder.of_graphs(OnnxModel.read(Path(model)))
    found = load_any(runs_root(runs_dir), str(model))
    embedder, directory = Embedder.ready(found.model, found.identity, device), Path(found.identity.path)
    return embedder.or_faster(directory) if device == "cpu" and has_graphs(directory) else embedder


def _opened(picture: Picture) -> Image.Image:
    """A picture in RGB, from wherever it comes."""
    if isinstance(picture, Image.Image):
        return to_rgb(ImageOps.exif_transpose(picture))
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
            raise DataError(
                f"pixels must be uint8 of shape (height, width, 3), got {picture.dtype} {picture.shape}",
                "convert them first, for example with (255 * pixels).astype('uint8')",
            )
        return Image.fromarray(picture)
    try:
        return open_picture(read_part(str(picture), 0, FILE_LIMIT_BYTES + 1))
    except BadPictureError as error:
        raise DataError(f"{picture} cannot be used: {error}", USABLE_HINT) from None
    except OSError as error:
        raise unreadable(picture, error) from None


def _batches(items: Iterable[T], size: int) -> Iterator[Sequence[T]]:
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch
