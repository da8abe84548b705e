"""A model as two Core ML packages, for programs on Apple's systems: one picture, or one caption, at a time.

ImageEncoder.mlpackage     image: S × S pixels, RGB                       to image_embeds (1, E)
TextEncoder.mlpackage      input_ids (1, N), padded with 0 to the context to text_embeds (1, E)

Both embeddings have length one, and pixels are normalised inside: a picture's dot product with a caption is their
similarity. Core ML runs on macOS only. Elsewhere a package is written and read back, and the user is told so.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from clipctl.config.sections import ImageTowerConfig
from clipctl.data import tokenizers
from clipctl.errors import CheckpointError
from clipctl.files import delete, replaced
from clipctl.interop.card import Card, write_card
from clipctl.interop.export import check_target, write_shared
from clipctl.interop.graphs import CaptionTower, extra, plain_attention, quiet
from clipctl.model.towers import ImageTower
from clipctl.model.weights import TrainedModel

IMAGE, TEXT = "ImageEncoder.mlpackage", "TextEncoder.mlpackage"


def export_coreml(trained: TrainedModel, target: Path, card: Card) -> None:
    """Write one directory, whole or not at all."""
    coremltools = extra("coreml", "coremltools")
    check_target(target)
    image, text = trained.config.model.image, trained.config.model.text
    end_id = tokenizers.from_dict(trained.tokenizer).end_id
    size, length = (1, 3, image.size_px, image.size_px), (1, text.context)
    with replaced(target.absolute()) as partial, plain_attention(trained.model):
        partial.mkdir()
        write_shared(trained, partial)
        pixels = coremltools.ImageType("image", size, color_layout=coremltools.colorlayout.RGB)
        _write(ImageEncoder(trained.model.image, image), torch.zeros(size), pixels, "image_embeds", partial / IMAGE)
        ids = coremltools.TensorType("input_ids", length, dtype=np.int32)
        captions = TextEncoder(CaptionTower(trained.model.text, end_id))
        _write(captions, torch.zeros(length, dtype=torch.int64), ids, "text_embeds", partial / TEXT)
        write_card(card, trained, partial)


class ImageEncoder(nn.Module):
    def __init__(self, tower: ImageTower, config: ImageTowerConfig) -> None:
        super().__init__()
        self.tower = tower
        self.mean, self.std = (nn.Buffer(255 * torch.tensor(one).view(3, 1, 1)) for one in (config.mean, config.std))

    def forward(self, image: Tensor) -> Tensor:
        """Pixels (1, 3, S, S), 0–255."""
        return F.normalize(self.tower((image - self.mean) / self.std), dim=-1)


class TextEncoder(nn.Module):
    def __init__(self, tower: CaptionTower) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.normalize(self.tower(input_ids), dim=-1)


def _write(module: nn.Module, example: Tensor, input: Any, output: str, path: Path) -> None:
    coremltools = extra("coreml", "coremltools")
    try:
        with quiet():
            program = torch.export.export(module.eval(), (example,)).run_decompositions({})
            package = coremltools.convert(
                program,
                inputs=[input],
                outputs=[coremltools.TensorType(output)],
                minimum_deployment_target=coremltools.target.macOS13,
                compute_precision=coremltools.precision.FLOAT32,  # the same numbers as here
                skip_model_load=True,
            )
            package.save(str(path))
    except Exception as error:  # whatever its many passes raise
        why = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise CheckpointError(
            f"coremltools {coremltools.__version__} cannot convert this model with torch {torch.__version__}: "
            f"{why[0][:200]}",
            "try the versions in constraints.txt, or export it with --to onnx, which other programs run on a Mac too",
        ) from None
    for left in path.glob("*debug*"):  # nothing that a reader needs
        delete(left)


def described(target: Path) -> str:
    """The inputs and outputs of the packages, read back from them."""
    found = []
    for name in (IMAGE, TEXT):
        spec = _open(target / name, run=False).get_spec().description
        [takes], [gives] = spec.input, spec.output
        picture, ids, embeds = takes.type.imageType, takes.type.multiArrayType, gives.type.multiArrayType
        shape = f"{picture.width}×{picture.height} px" if picture.width else _sides(ids)
        found.append(f"{takes.name} {shape} to {gives.name} {_sides(embeds)}")
    return "; ".join(found)


def _sides(array: Any) -> str:
    return "×".join(str(side) for side in array.shape)


def can_run() -> bool:
    return sys.platform == "darwin"


def run(target: Path, pixels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors (B, E) of pixels (B, S, S, 3) and of token ids (B, N), one after the other."""
    image, text = (_open(target / name, run=True) for name in (IMAGE, TEXT))
    with quiet():
        pictures = [image.predict({"image": Image.fromarray(one.numpy())})["image_embeds"] for one in pixels]
        captions = [text.predict({"input_ids": one.int().numpy()[None]})["text_embeds"] for one in tokens]
    return tuple(torch.cat([torch.as_tensor(one) for one in rows]) for rows in (pictures, captions))  # type: ignore[return-value]


def _open(path: Path, *, run: bool) -> Any:
    with quiet():
        return extra("coreml", "coremltools").models.MLModel(str(path), skip_model_load=not run)
