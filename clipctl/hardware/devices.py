"""Devices: which exist, their names, how to wait for one, and how much memory it uses."""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from clipctl.errors import ConfigError, DeviceError
from clipctl.hardware import cpu, faults, memory
from clipctl.hardware.profile import HYBRID, DeviceFacts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Device:
    """Where a model is computed, what that device offers, and why it was chosen."""

    label: str  # cpu, mps, cuda:0, hybrid
    image: torch.device  # of the image tower and the loss
    text: torch.device  # of the text tower; differs from `image` only for hybrid
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

    @property
    def product_limit(self) -> int | None:
        """Matrix products at least this long come out wrong; None if no such limit is known."""
        return faults.product_limit(self.image.type, self.name)

    def synchronize(self) -> None:
        """Wait until all queued work is done. The CPU queues nothing."""
        self._ask("synchronize")

    def allocated_bytes(self) -> int | None:
        """Memory held by tensors and caches on an accelerator; None on the CPU, where RSS is the measure."""
        held = self._ask("driver_allocated_memory" if self.image.type == "mps" else "memory_reserved")
        return None if held is None else int(held)

    def peak_bytes(self) -> int | None:
        """Peak memory, if the device keeps track of it; Apple's does not."""
        peak = self._ask("max_memory_reserved")
        return None if peak is None else int(peak)

    def forget_peak(self) -> None:
        self._ask("reset_peak_memory_stats")

    def release(self) -> None:
        """Return cached free memory to the system, which otherwise counts it as in use."""
        if self.is_accelerator and hasattr(self._module, "empty_cache"):
            self._module.empty_cache()

    def rng_state(self) -> torch.Tensor | None:
        state: torch.Tensor | None = self._ask("get_rng_state")
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        if self.is_accelerator:
            self._module.set_rng_state(state, *self._which)

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.image)

    @property
    def _which(self) -> tuple[torch.device, ...]:
        """Arguments that select the device. There is only one Apple GPU, so its functions take none."""
        return () if self.image.type == "mps" else (self.image,)

    def _ask(self, question: str) -> Any:
        """Call a function of the accelerator's module; None on the CPU, or if the module does not have it."""
        answer = getattr(self._module, question, None) if self.is_accelerator else None
        return answer(*self._which) if answer else None


def labels() -> list[str]:
    """Every device of this machine, CPU first."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    count = torch.accelerator.device_count()
    if accelerator.type == "cuda" or count > 1:
        return ["cpu", *(f"{accelerator.type}:{index}" for index in range(count))]
    return ["cpu", accelerator.type]


def open_device(asked: str) -> Device:
    """The device with that name; `cuda` means the first one."""
    known = labels()
    if asked == HYBRID and len(known) > 1:
        accelerator = open_device(known[1])
        name = f"{accelerator.name} for pictures, {cpu.name()} for captions"
        return replace(accelerator, label=HYBRID, text=torch.device("cpu"), name=name)
    label = _match(asked, known)
    device = torch.device(label)
    return Device(label, device, device, _name(device), _free_bytes(device))


def facts() -> list[DeviceFacts]:
    """Every device, as a profile stores it."""
    return [DeviceFacts(label, _name(torch.device(label)), _total_bytes(torch.device(label))) for label in labels()]


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
    if device.type == "mps":  # unified memory: what Metal recommends using, not all that the machine has
        return int(torch.mps.recommended_max_memory()) - int(torch.mps.driver_allocated_memory())
    return int(torch.get_device_module(device).mem_get_info(device.index or 0)[0])


def _total_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return memory.total_bytes()
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    return int(torch.get_device_module(device).mem_get_info(device.index or 0)[1])


_OUT_OF_MEMORY = (
    "backend out of memory",  # MPS
    "can't allocate memory",
    "DefaultCPUAllocator: not enough memory",  # Windows
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """True for every way in which CPU, MPS and CUDA report that a tensor did not fit."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
