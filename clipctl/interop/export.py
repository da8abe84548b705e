"""Exports a model as a directory that other libraries load, with its tokenizer, its preprocessing and a card.

config.json, model.safetensors, preprocessor_config.json, tokenizer.json …     transformers
open_clip_config.json, open_clip_model.safetensors                             open_clip, as local-dir:PATH
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from clipctl.data import tokenizers
from clipctl.errors import CheckpointError, ConfigError
from clipctl.files import replaced
from clipctl.interop import configs, naming
from clipctl.interop.card import Card, write_card
from clipctl.interop.foreign import OPEN_CLIP_CONFIG, OPEN_CLIP_WEIGHTS, PREPROCESSOR, TRANSFORMERS_CONFIG
from clipctl.interop.naming import Library
from clipctl.interop.tokenizer_files import token_ids, write_tokenizer
from clipctl.model.weights import TrainedModel, save_model

LIBRARIES: dict[str, tuple[Library, ...]] = {
    "transformers": ("transformers",),
    "open_clip": ("open_clip",),
    "both": ("transformers", "open_clip"),
}


def check_target(target: Path) -> None:
    """Raise if something is there already: an export overwrites nothing."""
    if target.exists():
        raise ConfigError(f"{target} already exists", "choose another directory with -o, or delete it")
    target.absolute().parent.mkdir(parents=True, exist_ok=True)


def export_libraries(trained: TrainedModel, target: Path, libraries: Sequence[Library], card: Card) -> None:
    """Write one directory for all these libraries, whole or not at all."""
    check_target(target)
    check_layout(trained)
    with replaced(target.absolute()) as partial:
        partial.mkdir()
        write_shared(trained, partial)
        if "transformers" in libraries:
            _write_transformers(trained, partial)
        if "open_clip" in libraries:
            _write_open_clip(trained, partial)
        write_card(card, trained, partial)


def export_native(trained: TrainedModel, target: Path, card: Card) -> None:
    """A model directory of clipctl's own: safetensors, with nothing that only training needs."""
    check_target(target)
    save_model(trained, target.absolute(), name=card.name, facts={"source": card.source}, metrics=card.metrics)


def check_layout(trained: TrainedModel) -> None:
    """Raise if the model has a layout that transformers and open_clip do not know."""
    image = trained.config.model.image
    if not image.is_clip_layout:
        raise CheckpointError(
            f"transformers and open_clip have no image tower like this one ({image.words}, pooled by {image.pool})",
            "export it with --to onnx or --to safetensors, or train one that they know with --layout clip",
        )


def write_shared(trained: TrainedModel, directory: Path) -> None:
    """Tokenizer and preprocessing, which all libraries read from the same files."""
    write_tokenizer(tokenizers.from_dict(trained.tokenizer), directory)
    write_document(directory / PREPROCESSOR, configs.to_preprocessor(trained.config.model.image))


def transformers_config(trained: TrainedModel) -> dict[str, Any]:
    ids = token_ids(tokenizers.from_dict(trained.tokenizer))
    return configs.to_transformers(trained.config.model, ids)


def _write_transformers(trained: TrainedModel, directory: Path) -> None:
    tensors = naming.to_transformers(trained.model.state_dict())
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_document(directory / TRANSFORMERS_CONFIG, transformers_config(trained))


def _write_open_clip(trained: TrainedModel, directory: Path) -> None:
    tensors = naming.to_open_clip(trained.model.state_dict())
    save_file(tensors, directory / OPEN_CLIP_WEIGHTS[0], metadata={"format": "pt"})
    document = configs.to_open_clip(trained.config.model, has_bias="logit_bias" in tensors)
    write_document(directory / OPEN_CLIP_CONFIG, document)


def write_document(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
