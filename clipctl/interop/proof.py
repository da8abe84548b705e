"""Proof that an export computes what the model here computes: the other library loads it and is given the same picture
files and captions, through its own processor."""

import importlib.metadata
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from clipctl.config.sections import ImageTowerConfig
from clipctl.data import tokenizers
from clipctl.data.decoding import open_picture, to_square
from clipctl.data.synthetic.scenes import SyntheticSource
from clipctl.interop import configs, coreml
from clipctl.interop.foreign import OPEN_CLIP_CONFIG, read_object
from clipctl.interop.onnx_model import OnnxModel
from clipctl.model.clip import Clip, normalise
from clipctl.model.weights import TrainedModel

PAIRS = 8


@dataclass(frozen=True)
class Proof:
    """The largest differences between the library's results and ours, or why there are none."""

    library: str
    version: str
    image: float | None = None  # of unit vectors
    text: float | None = None
    logits: float | None = None  # similarities times the scale
    missing: str | None = None  # why the library could not be asked


class NotHere(Exception):
    """Why a library cannot compute here, and what was checked instead."""


class Inputs:
    """Real picture files, and captions."""

    def __init__(self, directory: Path, size_px: int) -> None:
        scenes = SyntheticSource(PAIRS, seed=7, validation=True)
        self.captions = [scenes.caption(number, 0) for number in range(PAIRS)]
        self.files = [directory / f"{number}.png" for number in range(PAIRS)]
        for number, file in enumerate(self.files):  # tall and wide ones, so that cutting and scaling is compared too
            step_px = number * size_px // PAIRS
            scenes.square(number, 2 * size_px).resize((size_px + step_px, 2 * size_px - step_px)).save(file)

    def pixels(self, size_px: int) -> Tensor:
        """(B, S, S, 3)"""
        squares = [np.array(to_square(open_picture(file.read_bytes()), size_px)) for file in self.files]
        return torch.from_numpy(np.stack(squares))

    def images(self, image: ImageTowerConfig) -> Tensor:
        """As the model takes them: (B, 3, S, S)."""
        return normalise(self.pixels(image.size_px), None, (image.mean, image.std))

    def tokens(self, target: Path, context: int) -> Tensor:
        """As an export's tokenizer.json makes them: (B, N)."""
        tokenizer = tokenizers.package().Tokenizer.from_file(str(target / "tokenizer.json"))
        tokenizer.enable_padding(length=context)
        return torch.tensor([one.ids for one in tokenizer.encode_batch(self.captions)])


@torch.no_grad()
def our_result(trained: TrainedModel, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Image embeddings, text embeddings and logits (pictures × captions)."""
    model, tokenizer = trained.model, tokenizers.from_dict(trained.tokenizer)
    images = inputs.images(trained.config.model.image)
    tokens = torch.from_numpy(np.stack([tokenizer.encode(caption) for caption in inputs.captions]))
    image, text = model.encode_image(images), model.encode_text(tokens)
    return image, text, logits_of(model, image, text)


def logits_of(model: Clip, image: Tensor, text: Tensor) -> Tensor:
    return model.log_scale.exp() * image @ text.T + (0.0 if model.bias is None else model.bias)


def prove(trained: TrainedModel, target: Path, libraries: Sequence[str]) -> list[Proof]:
    """One for each library that the export is for."""
    ask: dict[str, Callable[[Path, Inputs], tuple[Tensor, Tensor, Tensor]]] = {
        "transformers": _ask_transformers,
        "open_clip": _ask_open_clip,
        "onnxruntime": _ask_onnxruntime,
        "onnxruntime int8": partial(_ask_onnxruntime, int8=True),
        "coremltools": partial(_ask_core_ml, trained),
    }
    with tempfile.TemporaryDirectory() as directory:
        inputs = Inputs(Path(directory), trained.config.model.image.size_px)
        ours = our_result(trained, inputs)
        return [_compared(library, partial(ask[library], target, inputs), ours) for library in libraries]


def _compared(library: str, ask: Callable[[], Any], ours: Sequence[Tensor]) -> Proof:
    package = {"open_clip": "open_clip_torch"}.get(library, library.partition(" ")[0])
    if not _is_installed(package):
        return Proof(library, "", missing=f"pip install {package} to compare with it")
    try:
        with torch.no_grad():
            theirs = ask()
    except ImportError as error:
        return Proof(library, "", missing=f"it cannot be imported: {error}")
    except NotHere as error:
        return Proof(library, importlib.metadata.version(package), missing=str(error))
    image, text, logits = (
        float((mine - other.detach().cpu().float()).abs().max()) for mine, other in zip(ours, theirs, strict=True)
    )
    return Proof(library, importlib.metadata.version(package), image, text, logits)


def _is_installed(package: str) -> bool:
    return bool(list(importlib.metadata.distributions(name=package)))


def _ask_transformers(target: Path, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    from transformers import AutoProcessor, CLIPModel

    model: Any = CLIPModel.from_pretrained(target)
    processor: Any = AutoProcessor.from_pretrained(target)  # type: ignore[no-untyped-call]
    pictures = [Image.open(file) for file in inputs.files]
    asked = processor(text=inputs.captions, images=pictures, return_tensors="pt", padding=True, truncation=True)
    asked.pop("token_type_ids", None)
    found = model.eval()(**asked)
    return found.image_embeds, found.text_embeds, found.logits_per_image


def _ask_open_clip(target: Path, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    import open_clip

    name = f"local-dir:{target.absolute()}"
    if _is_installed("torchvision"):
        model, preprocess = open_clip.create_model_from_pretrained(name)
        images = torch.stack([preprocess(Image.open(file)) for file in inputs.files])
    else:  # its preprocessing needs torchvision; its statistics do not
        model = open_clip.create_model(name)
        images = inputs.images(configs.from_open_clip(read_object(target / OPEN_CLIP_CONFIG)).image)
    tokens = open_clip.get_tokenizer(name)(inputs.captions)
    image, text, scale, *bias = model.eval()(images, tokens)
    return image, text, scale * image @ text.T + (bias[0] if bias else 0.0)


def _ask_onnxruntime(target: Path, inputs: Inputs, *, int8: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    found = OnnxModel.read(target)
    encoder, shape = found.open(int8=int8), found.config.model
    image = encoder.images(inputs.pixels(shape.image.size_px))
    text = encoder.texts(inputs.tokens(target, shape.text.context))
    return image, text, found.scale * image @ text.T + found.bias


def _ask_core_ml(trained: TrainedModel, target: Path, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    if not coreml.can_run():
        raise NotHere(f"Core ML runs on macOS only; converted and read back: {coreml.described(target)}")
    shape = trained.config.model
    tokens = inputs.tokens(target, shape.text.context)
    image, text = coreml.run(target, inputs.pixels(shape.image.size_px), tokens)
    return image, text, logits_of(trained.model, image, text)
