"""A model from a verified checkpoint: no optimizer, no run, no choice of device."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from clipctl.config.layers import from_dict
from clipctl.config.sections import TrainConfig
from clipctl.errors import CheckpointError, ConfigError
from clipctl.model.clip import Clip
from clipctl.runs.checkpoint import MODEL, Checkpoint
from clipctl.runs.tensors import read_header


class TrainedModel(NamedTuple):
    model: Clip  # on the CPU, in evaluation mode
    config: TrainConfig
    tokenizer: dict[str, Any]  # its description; `data.tokenizers` makes one from it


def load_model(checkpoint: Checkpoint) -> TrainedModel:
    """The model of a checkpoint. Every byte is checked before a tensor is loaded."""
    checkpoint = checkpoint.verified()
    facts = checkpoint.read_state()
    try:
        config = from_dict(facts["config"], str(checkpoint.path))
        tokenizer = facts["tokenizer"]
    except (KeyError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{checkpoint.path} does not say which model it holds: {error}") from None
    with torch.device("meta"):  # shapes only: the weights come from the file
        model = Clip(config.model, loss=config.train.loss)
    file = checkpoint.file(MODEL)
    check_shapes(file, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    model.load_state_dict(load_file(file), assign=True)
    return TrainedModel(model.eval(), config, tokenizer)


def check_shapes(file: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a file's header with the model it is meant for, before a byte of it is loaded."""
    found = {name: info.shape for name, info in read_header(file).items()}
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            shapes = f"{name} is {_shape(found.get(name))}, expected {_shape(wanted.get(name))}"
            raise CheckpointError(f"{file} does not fit the model: {shapes}")


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "×".join(str(side) for side in shape) or "a single number"
