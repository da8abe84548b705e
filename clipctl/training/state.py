"""Everything a run needs to continue bit for bit, and how its tensors are laid out in a checkpoint."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from clipctl.config.sections import TrainConfig
from clipctl.data.batch import Batch
from clipctl.errors import CheckpointError
from clipctl.hardware.devices import Device
from clipctl.hardware.memory import keep_freed_memory
from clipctl.model.adapting import adapt, trained_tensors
from clipctl.model.clip import Clip
from clipctl.model.compiling import compile_blocks
from clipctl.model.weights import check_floats, check_shapes, is_finite
from clipctl.runs.checkpoint import MODEL, OPTIMIZER, Checkpoint
from clipctl.runs.tensors import TensorInfo, read_header
from clipctl.training.distributed import World
from clipctl.training.optim import make_optimizer, optimizer_state_shapes
from clipctl.training.sharding import part_like, shard, whole

LOSS_SCALE = "loss_scale"


class LossScale:
    """What the loss is multiplied by before the backward pass in fp16, whose smallest number is 6e-8.

    Halved after a step that overflowed, doubled after many that did not. Kept on the device, so that nothing waits.
    """

    START, GROWTH_STEPS = 1024.0, 500

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.tensor([self.START, 0.0], device=device)  # the factor, and good steps since it changed

    @property
    def value(self) -> Tensor:
        return self.tensor[0].clone()  # autograd keeps it; `adjust` must not change what it keeps

    def unscale(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self.tensor[0].to(parameter.device))

    def adjust(self, finite: Tensor) -> None:
        good = torch.where(finite, self.tensor[1] + 1, 0.0)
        grows = good >= self.GROWTH_STEPS
        factor = torch.where(finite, torch.where(grows, 2.0, 1.0), 0.5)
        self.tensor[0] *= factor
        self.tensor[1] = torch.where(grows, 0.0, good)


@dataclass
class TrainState:
    model: Clip
    optimizer: torch.optim.Optimizer
    device: Device
    loss: str
    precision: str
    grad_clip: float | None
    picture_term: float = 0.0  # weight of the loss between pictures
    label_smoothing: float = 0.0  # share of a target's probability that all pairs of the batch get
    loss_scale: LossScale | None = None  # only in fp16
    compiled: bool = False
    micro_batch: int | None = None  # pairs whose activations are kept at a time; None: the whole batch
    step: int = 0  # updates made
    world: World | None = None  # the processes that train together; None: this one alone
    is_sharded: bool = False  # each of them keeps a part of weights, gradients and moments


def fresh_state(
    config: TrainConfig,
    device: Device,
    precision: str,
    threads: int,
    base: Mapping[str, Tensor] | None = None,
    *,
    is_placed: bool = True,
) -> TrainState:
    """A new model and optimizer. Initialised on the CPU, so that a seed means the same on every device; with the
    weights of a `base`, if there is one. If not placed, the model stays there."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    torch.manual_seed(config.train.seed)
    model = Clip(config.model, loss=config.train.loss)
    if base is not None:
        model.load_state_dict(base)
    adapt(model, config.tune)
    if is_placed:
        model.place(device.image, device.text)
    model.image.recompute = model.text.recompute = config.runtime.recompute
    model.use_attention(config.runtime.attention)
    if config.runtime.compile:
        compile_blocks(model)
    return TrainState(
        model=model,
        optimizer=make_optimizer(model, config.optim, config.tune.layer_decay),
        device=device,
        loss=config.train.loss,
        precision=precision,
        grad_clip=config.optim.grad_clip,
        picture_term=config.train.picture_term,
        label_smoothing=config.train.label_smoothing,
        loss_scale=LossScale(device.image) if precision == "fp16" else None,
        compiled=config.runtime.compile,
        micro_batch=config.train.micro_batch,
    )


Tensors = dict[str, dict[str, Tensor]]  # by file of a checkpoint, then by name


def tensors_of(state: TrainState) -> Tensors:
    """What a checkpoint holds. If the model is sharded, all processes must call this: rank 0 gets the whole, on the
    CPU, and the others nothing."""
    files = {MODEL: _model_tensors(state), OPTIMIZER: _optimizer_tensors(state)}
    if not state.is_sharded or state.world is None:
        return files
    found: Tensors = {file: {} for file in files}
    for file, tensors in files.items():
        for name, tensor in tensors.items():
            gathered = whole(tensor)
            if state.world.is_first:  # the others keep none: a whole model may be more than they have room for
                found[file][name] = gathered.cpu()
    return found


def answer_requests(state: TrainState) -> None:
    """Send this process's parts to rank 0 as often as it asks, until it says that it is done."""
    while state.is_sharded and state.world is not None and state.world.from_first(None):
        tensors_of(state)


@contextmanager
def gathering(state: TrainState) -> Iterator[Callable[[], Tensors]]:
    """On rank 0, while the others answer its requests: yields a function that returns the tensors of a checkpoint."""
    world = state.world if state.is_sharded else None

    def ask() -> Tensors:
        if world is not None:
            world.from_first(True)
        return tensors_of(state)

    try:
        yield ask
    finally:
        if world is not None:
            world.from_first(False)


def nonfinite_tensors(files: Tensors) -> list[str]:
    """Names of weights and moments that hold NaN or an infinity; they must never become a checkpoint."""
    tensors = {name: tensor for found in files.values() for name, tensor in found.items()}
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    # Smallest and largest value, in one pass: NaN is passed on, an infinity is one of them.
    extremes = torch.stack([torch.stack(torch.aminmax(tensor.float())).cpu() for tensor in floats.values()])
    finite = torch.isfinite(extremes).all(dim=1).tolist()
    return [name for name, is_finite in zip(floats, finite, strict=True) if not is_finite]


def write_tensors(files: Tensors, directory: Path) -> None:
    """The tensor files of a checkpoint, as safetensors. Nothing is pickled."""
    for name, tensors in files.items():
        on_cpu = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
        try:
            save_file(on_cpu, directory / name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise _os_error(error) from error


def _os_error(error: SafetensorError) -> OSError:
    """The system error that safetensors wraps in text: `… No space left on device (os error 28)`."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))


def read_tensors(state: TrainState, checkpoint: Checkpoint) -> None:
    """Put the tensors of a checkpoint into `state`. Every byte is checked first, then every name, type and shape, then
    every number: matching checksums prove who wrote a file, not what is in it."""
    checkpoint = checkpoint.verified()
    model, optimizer = checkpoint.file(MODEL), checkpoint.file(OPTIMIZER)
    check_shapes(model, {name: tuple(tensor.shape) for name, tensor in _model_tensors(state).items()})
    check_floats(model)
    header = read_header(optimizer)
    check_shapes(optimizer, _optimizer_shapes(state, header))
    if any(info.dtype != ("U8" if name.startswith("rng.") else "F32") for name, info in header.items()):
        raise CheckpointError(f"{optimizer} has tensors of a type that no optimizer keeps")
    weights, moments = load_file(model), load_file(optimizer)
    for name, tensor in (*weights.items(), *moments.items()):
        if not is_finite(tensor):
            raise CheckpointError(f"{name} in {checkpoint.path} is not finite", "resume from another: RUN@STEP")
    state.model.load_state_dict(weights, strict=False)  # what is not trained is there already
    try:
        _restore_optimizer(state, moments)
    except RuntimeError as error:  # a random state that is none
        raise CheckpointError(f"{optimizer} cannot be used: {str(error).splitlines()[0][:200]}") from None
    state.step = checkpoint.step


def in_passes(state: TrainState, batch: Batch, micro_batch: int, most_pairs: int) -> list[Batch]:
    """The parts of a batch that go through the model one after the other. If it is sharded, all processes must make the
    same number of passes, which follows from the largest batch of any: `most_pairs`."""
    if not state.is_sharded:
        return batch.split(micro_batch)
    return batch.split_evenly(-(-most_pairs // micro_batch))


def share_state(state: TrainState, world: World) -> None:
    """Give every process the state of rank 0, whether new or read from a checkpoint."""
    state.world = world
    world.copy_from_first(state.model.state_dict().values())
    state.step, state.micro_batch = world.from_first((state.step, state.micro_batch))
    tensors = _optimizer_tensors(state)
    kinds = world.from_first({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()})
    if not world.is_first:
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds.items()}
    on_cpu = {name: tensor.cpu() for name, tensor in tensors.items()}
    world.copy_from_first(on_cpu.values())
    if not world.is_first:
        _restore_optimizer(state, on_cpu)


def shard_state(state: TrainState, config: TrainConfig) -> None:
    """Keep only this process's part of a state that all have in full."""
    assert state.world is not None
    moments = _optimizer_tensors(state)
    shard(state.model, state.device.image, state.world)
    state.optimizer = make_optimizer(state.model, config.optim, config.tune.layer_decay)
    state.is_sharded = True
    _restore_optimizer(state, moments)


def _optimizer_shapes(state: TrainState, header: dict[str, TensorInfo]) -> dict[str, tuple[int, ...]]:
    """What the optimizer keeps for every parameter after its first step, and the random states as they are."""
    shapes = {"rng.cpu": tuple(torch.get_rng_state().shape)}
    if "rng.device" in header:
        shapes["rng.device"] = header["rng.device"].shape
    if LOSS_SCALE in header:  # a change of precision takes or leaves it
        shapes[LOSS_SCALE] = (2,)
    if header.keys() - shapes.keys():  # before its first step it keeps nothing
        for name, parameter in _trained(state):
            kept = optimizer_state_shapes(state.optimizer, parameter)
            shapes |= {f"{name}.{key}": shape for key, shape in kept.items()}
    return shapes


def _model_tensors(state: TrainState) -> dict[str, Tensor]:
    """What training changes; the rest is in the model that the run started from."""
    return trained_tensors(state.model)


def _trained(state: TrainState) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in state.model.named_parameters() if parameter.requires_grad]


def _optimizer_tensors(state: TrainState) -> dict[str, Tensor]:
    """The optimizer's tensors by parameter name (`text.positions.exp_avg`), and the state of the random generators."""
    tensors = {}
    for name, parameter in _trained(state):
        for key, value in state.optimizer.state[parameter].items():
            tensors[f"{name}.{key}"] = value
    tensors["rng.cpu"] = torch.get_rng_state()
    if (on_device := state.device.rng_state()) is not None:
        tensors["rng.device"] = on_device
    if state.loss_scale is not None:
        tensors[LOSS_SCALE] = state.loss_scale.tensor
    return tensors


def _restore_optimizer(state: TrainState, tensors: dict[str, Tensor]) -> None:
    for name, parameter in _trained(state):
        keys = [key for key in tensors if key.rpartition(".")[0] == name]
        # A fused optimizer keeps its step counter where the parameter is.
        state.optimizer.state[parameter] = {
            key.rpartition(".")[2]: part_like(tensors[key].to(parameter.device), parameter) for key in keys
        }
    torch.set_rng_state(tensors["rng.cpu"])
    if "rng.device" in tensors:
        state.device.set_rng_state(tensors["rng.device"])
    if LOSS_SCALE in tensors and state.loss_scale is not None:
        state.loss_scale.tensor.copy_(tensors[LOSS_SCALE])
