"""Devices: which there are, what they are called, how to wait for one and what it holds."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from clipctl.errors import ConfigError, DeviceError
from clipctl.hardware import cpu, memory
from clipctl.hardware.profile import DeviceFacts

HYBRID = "hybrid"  # image tower on the accelerator, text tower on the CPU


@dataclass(frozen=True)
class Device:
    """Where a model computes, what that place offers, and why it was chosen."""

    label: str  # cpu, mps, cuda:0, hybrid
    image: torch.device  # of the image tower and the loss
    text: torch.device  # of the text tower; another one only for hybrid
    name: str
    memory_bytes: int  # free for us
    reason: str = "as asked"

    @property
    def kind(self) -> str:
        """cpu, mps, cuda, hybrid."""
        return self.label.split(":")[0]

    @property
    def is_accelerator(self) -> bool:
        return self.image.type != "cpu"

    @property
    def wants_fixed_shapes(self) -> bool:
        """Apple's GPU leaks memory when shapes vary."""
        return "mps" in (self.image.type, self.text.type)

    def because(self, reason: str) -> "Device":
        return replace(self, reason=reason)

    def synchronize(self) -> None:
        """Wait for work that was only queued. The CPU queues nothing."""
        if self.is_accelerator:
            torch.get_device_module(self.image).synchronize()

    def allocated_bytes(self) -> int | None:
        """Memory that tensors and caches hold on an accelerator; None on the CPU, where RSS tells."""
        if self.image.type == "mps":
            return int(torch.mps.driver_allocated_memory())
        return self._ask("memory_reserved")

    def peak_bytes(self) -> int | None:
        """The most that it held, where the device remembers; Apple's does not."""
        return None if self.image.type == "mps" else self._ask("max_memory_reserved")

    def _ask(self, question: str) -> int | None:
        if not self.is_accelerator:
            return None
        answer: Callable[[], Any] | None = getattr(torch.get_device_module(self.image), question, None)
        return int(answer()) if answer else None


def labels() -> list[str]:
    """Every device of this machine, the CPU first."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    count = torch.accelerator.device_count()
    if accelerator.type == "cuda" or count > 1:
        return ["cpu", *(f"{accelerator.type}:{index}" for index in range(count))]
    return ["cpu", accelerator.type]


def open_device(asked: str) -> Device:
    """The device of that name; `cuda` is the first of its kind."""
    known = labels()
    if asked == HYBRID and len(known) > 1:
        accelerator = open_device(known[1])
        name = f"{accelerator.name} for pictures, {cpu.name()} for captions"
        return replace(accelerator, label=HYBRID, text=torch.device("cpu"), name=name)
    label = _match(asked, known)
    device = torch.device(label)
    return Device(label, device, device, _name(device), _free_bytes(device))


def facts() -> list[DeviceFacts]:
    """Every device, as a profile keeps it."""
    return [DeviceFacts(label, (device := open_device(label)).name, device.memory_bytes) for label in labels()]


def _match(asked: str, known: list[str]) -> str:
    for label in known:
        if asked in (label, label.split(":")[0]):
            return label
    available = f"available: {', '.join(['auto', *known])}"
    if re.fullmatch(r"cpu|mps|hybrid|(cuda|xpu)(:\d+)?", asked):
        raise DeviceError(f"device {asked} is not available on this machine", available)
    raise ConfigError(f"unknown device {asked!r}", available)


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return cpu.name()
    if device.type == "mps":
        return f"{cpu.name()} GPU"
    return str(torch.get_device_module(device).get_device_name(device.index or 0))


def _free_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return memory.available_bytes()
    if device.type == "mps":  # unified memory: what Metal recommends to take of it, not what the machine has
        return int(torch.mps.recommended_max_memory()) - int(torch.mps.driver_allocated_memory())
    return int(torch.get_device_module(device).mem_get_info(device.index or 0)[0])


_OUT_OF_MEMORY = (
    "backend out of memory",  # MPS
    "can't allocate memory",
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """True for every way in which CPU, MPS and CUDA say that a tensor did not fit."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
