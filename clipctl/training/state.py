"""Everything a run needs to go on exactly where it was, and how it is laid out in a checkpoint."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from clipctl.model.clip import Clip
from clipctl.runs import checkpoints


@dataclass
class TrainState:
    model: Clip
    optimizer: torch.optim.AdamW
    device: torch.device
    loss: str
    precision: str
    grad_clip: float | None
    step: int = 0  # updates made


def write_checkpoint(state: TrainState, directory: Path, facts: dict[str, Any]) -> None:
    """The files of a checkpoint: tensors as safetensors, the rest (`facts`) as JSON. Nothing is pickled."""
    model = {name: tensor.cpu().contiguous() for name, tensor in state.model.state_dict().items()}
    save_file(model, directory / checkpoints.MODEL, metadata={"format": "pt"})
    save_file(_optimizer_tensors(state), directory / checkpoints.OPTIMIZER, metadata={"format": "pt"})
    text = json.dumps({"step": state.step, **facts}, indent=2) + "\n"
    (directory / checkpoints.STATE).write_text(text, encoding="utf-8")


def read_checkpoint(state: TrainState, checkpoint: checkpoints.Checkpoint) -> dict[str, Any]:
    """Put a checkpoint, verified first, into `state`; returns the facts that were saved with it."""
    path = checkpoint.verified().path
    facts: dict[str, Any] = json.loads((path / checkpoints.STATE).read_text(encoding="utf-8"))
    state.model.load_state_dict(load_file(path / checkpoints.MODEL, device=str(state.device)))
    _restore_optimizer(state, load_file(path / checkpoints.OPTIMIZER))
    state.step = facts["step"]
    return facts


def _optimizer_tensors(state: TrainState) -> dict[str, Tensor]:
    """AdamW's tensors by parameter name (`text.positions.exp_avg`), and the state of the random generators."""
    tensors = {}
    for name, parameter in state.model.named_parameters():
        for key, value in state.optimizer.state[parameter].items():
            tensors[f"{name}.{key}"] = value.cpu().contiguous()
    tensors["rng.cpu"] = torch.get_rng_state()
    if state.device.type != "cpu":
        tensors["rng.device"] = torch.get_device_module(state.device).get_rng_state()
    return tensors


def _restore_optimizer(state: TrainState, tensors: dict[str, Tensor]) -> None:
    for name, parameter in state.model.named_parameters():
        keys = [key for key in tensors if key.rpartition(".")[0] == name]
        # Fused AdamW keeps its step counter where the parameter is.
        state.optimizer.state[parameter] = {key.rpartition(".")[2]: tensors[key].to(state.device) for key in keys}
    torch.set_rng_state(tensors["rng.cpu"])
    if "rng.device" in tensors and state.device.type != "cpu":
        torch.get_device_module(state.device).set_rng_state(tensors["rng.device"])
