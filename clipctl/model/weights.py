"""Loads a model from a verified checkpoint, and saves one: no optimizer, no run, no choice of device."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from clipctl.config.layers import from_dict, to_dict
from clipctl.config.sections import TrainConfig
from clipctl.errors import CheckpointError, ConfigError
from clipctl.model.adapting import adapt, merged
from clipctl.model.clip import Clip
from clipctl.runs.checkpoint import MODEL, STATE, Checkpoint, read_checkpoint
from clipctl.runs.rundir import BASE, RunDir
from clipctl.runs.store import write_checkpoint
from clipctl.runs.tensors import read_header

Shapes = Mapping[str, tuple[int, ...]]
NAMED = 10  # tensors in an error message
FLOATS = ("F32", "F16", "BF16", "F64")


class TrainedModel(NamedTuple):
    model: Clip  # on the CPU, in evaluation mode
    config: TrainConfig
    tokenizer: dict[str, Any]  # its description; `data.tokenizers` makes one from it


class Identity(NamedTuple):
    """Which model it is."""

    name: str  # for people: run and step
    path: str  # where it was loaded from
    fingerprint: str  # sha256 of its weights

    @property
    def is_of_run(self) -> bool:
        """Whether it is a checkpoint of a run, which has data of its own."""
        return RunDir.is_run(Path(self.path).parent.parent)


def identify(checkpoint: Checkpoint) -> Identity:
    path = checkpoint.path.absolute()
    found = Identity(path.name, str(path), checkpoint.manifest.files[MODEL].sha256)
    return found._replace(name=f"{path.parent.parent.name}@{checkpoint.step}") if found.is_of_run else found


def load_model(checkpoint: Checkpoint) -> TrainedModel:
    """The model of a checkpoint. Every byte is checked before a tensor is loaded."""
    checkpoint = checkpoint.verified()
    facts = checkpoint.read_state()
    try:
        config = from_dict(facts["config"], str(checkpoint.path))
        tokenizer = facts["tokenizer"]
    except (KeyError, AttributeError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{checkpoint.path} does not say which model it holds: {error}") from None
    if config.model.text.vocab_size is None:
        raise CheckpointError(f"{checkpoint.path} does not say how many tokens its model knows")
    with torch.device("meta"):  # shapes only: the weights come from the file
        model = Clip(config.model, loss=config.train.loss)
        adapt(model, config.tune)
    files = weight_files(checkpoint, facts)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    check_tensors(str(files[-1]), {name: shape for file in files for name, shape in file_shapes(file).items()}, wanted)
    for file in files:
        check_floats(file)
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if odd := [name for name, tensor in tensors.items() if not is_finite(tensor)]:
        raise CheckpointError(f"{odd[0]} in {checkpoint.path} is not finite: the model cannot be used")
    model.load_state_dict(tensors, assign=True)
    return TrainedModel(merged(model).requires_grad_(True).eval(), config, tokenizer)


def save_model(
    trained: TrainedModel,
    target: Path,
    *,
    name: str,
    facts: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
) -> Checkpoint:
    """A directory with a model for use only, which `load_model` reads; it appears whole or not at all."""

    def write(directory: Path) -> None:
        tensors = {key: tensor.cpu().contiguous() for key, tensor in trained.model.state_dict().items()}
        save_file(tensors, directory / MODEL, metadata={"format": "pt"})
        document = {"step": 0, "config": to_dict(trained.config), "tokenizer": trained.tokenizer, **facts}
        (directory / STATE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    return write_checkpoint(target, write, run_id=name, metrics=metrics)


def weight_files(checkpoint: Checkpoint, facts: Mapping[str, Any]) -> list[Path]:
    """Where the weights of a verified checkpoint are. If only some are trained, it holds those, and the others are in
    the model that its run started from, which is verified here."""
    files = [checkpoint.file(MODEL)]
    if wanted := facts.get("base"):
        base = read_checkpoint(checkpoint.path.absolute().parents[1] / BASE).verified()
        if base.manifest.files[MODEL].sha256 != wanted:
            raise CheckpointError(f"{base.path} is not the model that {checkpoint.path} was trained from")
        files.insert(0, base.file(MODEL))
    return files


def is_finite(tensor: torch.Tensor) -> bool:
    """Smallest and largest value, in one pass: NaN propagates, and an infinity is one of the two."""
    return not tensor.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(tensor.float()))).all())


def file_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    return {name: info.shape for name, info in read_header(file).items()}


def check_floats(file: Path) -> None:
    """Weights must be floating-point numbers; torch would silently convert others."""
    for name, info in read_header(file).items():
        if info.dtype not in FLOATS:
            raise CheckpointError(f"{name[:80]} in {file} has type {info.dtype}, expected one of {', '.join(FLOATS)}")


def check_shapes(file: Path, wanted: Shapes) -> None:
    """Compare a file's header with the model it is meant for, before a byte of it is loaded."""
    check_tensors(str(file), file_shapes(file), wanted)


def check_tensors(what: str, found: Shapes, wanted: Shapes) -> None:
    """Raises CheckpointError naming tensors that are missing, left over, or of another shape."""
    differ = [name for name in sorted(found.keys() | wanted.keys()) if found.get(name) != wanted.get(name)]
    if not differ:
        return
    several = [f"{name} is {_shape(found.get(name))}, expected {_shape(wanted.get(name))}" for name in differ]
    more = f"; and {len(several) - NAMED:,} more" if len(several) > NAMED else ""
    raise CheckpointError(f"{what} does not fit the model: {'; '.join(several[:NAMED])}{more}")


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "×".join(str(side) for side in shape) or "a single number"
