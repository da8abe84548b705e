"""Devices: which there are, which one to train on and why, in which precision and why."""

import re
from dataclasses import dataclass

import torch

from clipctl.errors import ConfigError, DeviceError
from clipctl.hardware import cpu, memory

# Where nothing has been measured: the GPU of a laptop tends to lose to its CPU below this size.
PRIOR_MIN_PARAMETERS = 100_000_000


@dataclass(frozen=True)
class Device:
    """A device, what it offers, and why it was chosen."""

    kind: str  # cpu, mps, cuda
    index: int | None
    name: str
    memory_bytes: int  # free for us
    reason: str

    @property
    def torch(self) -> torch.device:
        return torch.device(self.kind) if self.index is None else torch.device(self.kind, self.index)

    @property
    def is_accelerator(self) -> bool:
        return self.kind != "cpu"

    def synchronize(self) -> None:
        """Wait for work that was only queued. The CPU queues nothing."""
        if self.is_accelerator:
            torch.get_device_module(self.torch).synchronize()

    def allocated_bytes(self) -> int | None:
        """Memory that tensors and caches hold on an accelerator; None on the CPU, where RSS tells."""
        if self.kind == "mps":
            return int(torch.mps.driver_allocated_memory())
        if self.kind == "cuda":
            return int(torch.cuda.memory_reserved(self.torch))
        return None


def available_kinds() -> list[str]:
    kinds = ["cpu"]
    if torch.backends.mps.is_available():
        kinds.append("mps")
    kinds += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return kinds


def choose_device(asked: str, *, parameters: int) -> Device:
    """The device that was asked for, or for `auto` the one likely to be faster for a model of this size."""
    kinds = available_kinds()
    if asked != "auto":
        return _device(_match(asked, kinds), "as asked")
    accelerators = kinds[1:]
    if not accelerators:
        return _device("cpu", "no accelerator found")
    size = f"{parameters / 1e6:.1f}M parameters"
    if accelerators[0] == "mps" and parameters < PRIOR_MIN_PARAMETERS:
        return _device("cpu", f"{size}: below 100M the CPU of an Apple machine is usually faster than its GPU")
    return _device(accelerators[0], f"{size}: an accelerator is usually faster")


def choose_precision(asked: str, device: Device) -> tuple[str, str]:
    """The precision to compute in, and why."""
    if asked != "auto":
        return asked, "as asked"
    if device.kind == "cuda" and torch.cuda.get_device_capability(device.torch)[0] >= 8:
        return "bf16", "this GPU computes in bf16"
    return "fp32", f"the safe choice on {device.kind}"


def _match(asked: str, kinds: list[str]) -> str:
    for kind in kinds:
        if asked == kind or asked == kind.split(":")[0]:
            return kind
    available = f"available: {', '.join(['auto', *kinds])}"
    if re.fullmatch(r"cpu|mps|cuda(:\d+)?", asked):
        raise DeviceError(f"device {asked} is not available on this machine", available)
    raise ConfigError(f"unknown device {asked!r}", available)


def _device(kind: str, reason: str) -> Device:
    if kind == "cpu":
        return Device("cpu", None, cpu.name(), memory.available_bytes(), reason)
    if kind == "mps":
        limit = int(torch.mps.recommended_max_memory())
        return Device("mps", None, "Apple GPU", limit - int(torch.mps.driver_allocated_memory()), reason)
    index = int(kind.split(":")[1])
    free, _ = torch.cuda.mem_get_info(index)
    return Device("cuda", index, torch.cuda.get_device_name(index), free, reason)


_OUT_OF_MEMORY = (
    "MPS backend out of memory",
    "can't allocate memory",
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """True for every way in which CPU, MPS and CUDA say that a tensor did not fit."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
