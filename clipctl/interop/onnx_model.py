"""A directory of ONNX files that clipctl exported: recognised, verified, and run by onnxruntime.

onnx/vision_model.onnx     pixel_values (B, 3, S, S) to image_embeds (B, E)
onnx/text_model.onnx       input_ids (B, N), N up to the context, to text_embeds (B, E)
onnx/…_quantized.onnx      the same, with weights of 8 bits
clipctl.json               settings, tokenizer, scale, and the sha256 of each of these files
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipctl.config.layers import from_dict
from clipctl.config.sections import ImageTowerConfig, TrainConfig
from clipctl.data import tokenizers
from clipctl.data.tokenizers import Tokenizer
from clipctl.errors import CheckpointError
from clipctl.files import sha256_of
from clipctl.interop.foreign import has_weights, read_object
from clipctl.interop.graphs import extra
from clipctl.model.clip import normalise
from clipctl.model.weights import Identity

DESCRIPTION = "clipctl.json"
SCHEMA = "clipctl.onnx/1"
VISION, TEXT = "vision_model", "text_model"  # as transformers.js names them


def graph_file(directory: Path, tower: str, *, int8: bool = False) -> Path:
    return directory / "onnx" / f"{tower}{'_quantized' if int8 else ''}.onnx"


def has_graphs(directory: Path) -> bool:
    return all(graph_file(directory, tower).is_file() for tower in (VISION, TEXT))


def has_only_graphs(directory: Path) -> bool:
    """Whether it is what `export --to onnx` wrote, without weights for torch."""
    return (directory / DESCRIPTION).is_file() and not has_weights(directory)


@dataclass(frozen=True)
class OnnxModel:
    """The model that a clipctl.json describes. No graph is opened yet."""

    path: Path
    config: TrainConfig
    tokenizer: Tokenizer
    scale: float
    bias: float  # of the logits; 0 unless trained with the sigmoid loss
    fingerprint: str  # of the weights that it was exported from
    files: dict[str, str]  # name and sha256

    @classmethod
    def read(cls, path: Path) -> "OnnxModel":
        document = read_object(path / DESCRIPTION)
        if document.get("schema") != SCHEMA:
            raise CheckpointError(f"{path / DESCRIPTION} has schema {document.get('schema')!r}, expected {SCHEMA}")
        try:
            config = from_dict(document["config"], str(path))
            scale, bias = float(document["scale"]), float(document["bias"])
            tokenizer, fingerprint = tokenizers.from_dict(document["tokenizer"]), str(document["fingerprint"])
            files = dict(document["files"])
            if not math.isfinite(scale + bias):
                raise ValueError("its scale is not a number")
        except Exception as error:  # the tokenizers package raises bare Exception
            hint = getattr(error, "hint", None)
            raise CheckpointError(f"{path / DESCRIPTION} does not say which model it is: {error}", hint) from None
        return cls(path, config, tokenizer, scale, bias, fingerprint, files)

    @property
    def is_int8(self) -> bool:
        """Whether it has only 8-bit weights: full ones are used if they exist."""
        return not graph_file(self.path, VISION).exists()

    @property
    def identity(self) -> Identity:
        """The same as that of the weights, so that an index made with them can be searched with these files."""
        suffix = " int8" if self.is_int8 else ""
        return Identity(self.path.absolute().name, str(self.path.absolute()), self.fingerprint + suffix)

    def open(self, *, int8: bool | None = None) -> "OnnxEncoder":
        """Both graphs, verified."""
        int8 = self.is_int8 if int8 is None else int8
        for tower in (VISION, TEXT):
            file = graph_file(self.path, tower, int8=int8)
            try:
                is_same = sha256_of(file) == self.files.get(file.relative_to(self.path).as_posix())
            except OSError as error:
                raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None
            if not is_same:
                raise CheckpointError(f"{file} has changed: its sha256 does not match", "export the model again")
        return OnnxEncoder(self.path, self.config.model.image, self.scale, int8=int8)


class OnnxEncoder:
    """Two graphs in onnxruntime, on the CPU. B rows, E dimensions."""

    def __init__(self, directory: Path, image: ImageTowerConfig, scale: float, *, int8: bool = False) -> None:
        self.scale = scale
        self._statistics = image.mean, image.std
        self._vision = _session(graph_file(directory, VISION, int8=int8), "pixel_values", "image_embeds")
        self._text = _session(graph_file(directory, TEXT, int8=int8), "input_ids", "text_embeds")
        self.dimensions = int(self._vision.get_outputs()[0].shape[1])

    def images(self, pixels: Tensor) -> Tensor:
        """Pixels (B, H, W, 3), uint8, to unit vectors (B, E)."""
        [found] = self._vision.run(None, {"pixel_values": normalise(pixels, None, self._statistics).numpy()})
        return F.normalize(torch.from_numpy(found), dim=-1)

    def texts(self, tokens: Tensor) -> Tensor:
        """Token ids (B, N) to unit vectors (B, E)."""
        [found] = self._text.run(None, {"input_ids": tokens.numpy()})
        return F.normalize(torch.from_numpy(found), dim=-1)


def _session(file: Path, *names: str) -> Any:
    """A graph with exactly this input and this output."""
    onnxruntime = extra("onnx", "onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # what is wrong is raised anyway
    # Its threads would wait by spinning, on cores that decode the next pictures meanwhile: a third slower.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no class in common
        raise CheckpointError(f"{file} cannot be read by onnxruntime: {str(error).splitlines()[0][:200]}") from None
    found = tuple(one.name for one in (*session.get_inputs(), *session.get_outputs()))
    if found != names:
        raise CheckpointError(f"{file} has inputs and outputs {', '.join(found)}; expected {', '.join(names)}")
    return session
