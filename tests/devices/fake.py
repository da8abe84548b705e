"""An accelerator for machines that have none: a real torch device, `fake`, whose work the CPU does.

Its tensors are torch's own, of the device type that torch leaves free for others; their memory is the CPU's. To carry
out an operation, a second set of tensors is laid over the same memory, this time as the CPU's. What sets it apart from
the CPU is in `settings`: memory that runs out, operations that take their time, and faults to be found.

    python -m tests.devices.fake train --device fake

is clipctl on a machine with this device; CLIPCTL_TEST_FAKE holds settings, as JSON.
"""

import ctypes
import json
import os
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.devices.faults import FAULTS, on_tensors, surround
from tests.devices.kernels import KERNELS

aten = torch.ops.aten
NAME, KEY = "fake", "PrivateUse1"
CPU_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


@dataclass
class Settings:
    """May be changed at any time."""

    available: bool = True
    memory_bytes: int = 2**32
    launch_s: float = 0.0  # added to every operation
    slowdown: float = 1.0  # how many times longer than on the CPU an operation takes
    faults: set[str] = field(default_factory=set)  # names from FAULTS
    garbage_length: int = 64  # for `garbage_past_length`

    def change(self, **values) -> None:
        for name, value in values.items():
            assert hasattr(self, name), name
            setattr(self, name, value)
        assert self.faults <= FAULTS.keys(), self.faults
        FAULTS["garbage_past_length"].forget()


@dataclass
class Counts:
    """What has been asked of the device so far."""

    operations: int = 0
    syncs: int = 0  # times that the host asked for a value, where a real device would have made it wait


class Memory:
    """The storages that are alive. One that dies tells nobody, so they are looked through when it may matter."""

    def __init__(self) -> None:
        self._storages: list[tuple[StorageWeakRef, int]] = []
        self._live_bytes = 0  # or fewer
        self.peak_bytes = 0
        self._lock = threading.Lock()  # a training asks from a second thread how much is used

    def live_bytes(self) -> int:
        with self._lock:
            self._storages = [(storage, size) for storage, size in self._storages if not storage.expired()]
            self._live_bytes = sum(size for _, size in self._storages)
            return self._live_bytes

    def check(self, size: int) -> None:
        limit = settings.memory_bytes
        if self._live_bytes + size > limit and self.live_bytes() + size > limit:
            free = limit - self._live_bytes
            raise torch.OutOfMemoryError(f"fake backend out of memory: {size} bytes wanted, {free} free")

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        with self._lock:
            self._storages.append((StorageWeakRef(storage), storage.nbytes()))
            self._live_bytes += storage.nbytes()
        if self._live_bytes > self.peak_bytes:
            self.peak_bytes = max(self.peak_bytes, self.live_bytes())


settings, counts, memory = Settings(), Counts(), Memory()


@contextmanager
def using(**values):
    """Other settings for the length of a block."""
    before = {name: getattr(settings, name) for name in values}
    settings.change(**values)
    try:
        yield
    finally:
        settings.change(**before)


# --- the same bytes, seen as the CPU's or as the device's -----------------------------------------------------

# DLPack is how libraries hand tensors to each other without a copy. What is handed over says on which device it lies;
# torch takes that at its word, and of number 12 makes a tensor of the free device type.
DLPACK_CPU, DLPACK_OTHER = 1, 12


class _Handed(ctypes.Structure):
    """How a DLTensor of dlpack.h begins."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_index", ctypes.c_int32))


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _handed_over(tensor: Tensor, device_type: int) -> Tensor:
    capsule = torch._C._to_dlpack(tensor)
    handed = _Handed.from_address(_pointer(capsule, b"dltensor"))
    handed.device_type, handed.device_index = device_type, 0
    return torch._C._from_dlpack(capsule)


def to_cpu(tensor: Tensor) -> Tensor:
    return _handed_over(tensor, DLPACK_CPU)


def to_fake(tensor: Tensor) -> Tensor:
    memory.check(tensor.untyped_storage().nbytes())
    fake = _handed_over(tensor, DLPACK_OTHER)
    memory.add(fake)
    return fake


# --- operations -----------------------------------------------------------------------------------------------


def carry_out(op, *args, **kwargs):
    """Any operation at all, by the CPU, over the same memory."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}  # what the CPU sees, by identity, and what it sees there

    def seen_by_cpu(tensor: Tensor) -> Tensor:
        if tensor.device.type == NAME:
            # Torch may pass an empty tensor, for the operation to make it as large as its result.
            view = to_cpu(tensor) if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype)
            seen[id(view)] = (view, tensor)
            return view
        if tensor.dim() > 0 and op is not aten._copy_from.default:
            raise RuntimeError(f"{op}: expected all tensors to be on the same device, found {NAME} and {tensor.device}")
        return tensor

    counts.operations += 1
    counts.syncs += _makes_the_host_wait(op, args)
    args, kwargs = on_tensors(seen_by_cpu, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    if _is_random(op) and kwargs.get("generator") is None:
        kwargs["generator"] = module.generator
    started = time.perf_counter()
    result = surround(_compute, settings)(op, args, kwargs)
    _pass_time((time.perf_counter() - started) * (settings.slowdown - 1) + settings.launch_s)
    for view, tensor in seen.values():
        if view.shape != tensor.shape:
            tensor.set_(to_fake(view))
    # What was written to is returned as it came; all else is new.
    return on_tensors(lambda out: seen[id(out)][1] if id(out) in seen else to_fake(out), result)


def _compute(op, args, kwargs):
    return KERNELS.get(op, op)(*args, **kwargs)


def _makes_the_host_wait(op, args) -> bool:
    copied_home = op is aten._copy_from.default and args[0].device.type == NAME and args[1].device.type == "cpu"
    return copied_home or op is aten._local_scalar_dense.default


@cache
def _is_random(op) -> bool:
    return any(argument.name == "generator" for argument in op._schema.arguments)


def _pass_time(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def attention(q, k, v, mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """Left in one piece, as real devices have it; torch would take it apart into products."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    whole = aten._scaled_dot_product_fused_attention_overrideable
    return whole(q, k, v, mask, dropout_p, is_causal, scale=scale)[0]


def autocast(op, *args, **kwargs):
    def lowered(tensor: Tensor) -> Tensor:
        is_ours = tensor.is_floating_point() and tensor.device.type == NAME
        return tensor.to(torch.get_autocast_dtype(NAME)) if is_ours else tensor

    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        args, kwargs = on_tensors(lowered, (args, kwargs))
        return op(*args, **kwargs)


# --- what torch is told ---------------------------------------------------------------------------------------


class Module:
    """torch.fake, which is to this device what torch.cuda is to CUDA's."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.get_rng_state = lambda device=None: self.generator.get_state()
        self.set_rng_state = lambda state, device=None: self.generator.set_state(state)
        self.manual_seed_all = self.generator.manual_seed
        self.is_available = lambda: settings.available
        self.device_count = lambda: int(settings.available)
        self.current_device = lambda: 0
        self.is_initialized = lambda: True
        self._is_in_bad_fork = lambda: False
        self.get_device_name = lambda device=None: "Fake accelerator"
        self.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
        self.memory_reserved = lambda device=None: memory.live_bytes()
        self.max_memory_reserved = lambda device=None: memory.peak_bytes

    def synchronize(self, device=None) -> None:
        counts.syncs += 1

    def mem_get_info(self, device=None) -> tuple[int, int]:
        return settings.memory_bytes - memory.live_bytes(), settings.memory_bytes

    def reset_peak_memory_stats(self, device=None) -> None:
        memory.peak_bytes = memory.live_bytes()


module = Module()
# What the CPU takes apart and real devices do not, or what torch would refuse.
WHOLE = (aten.convolution.default, aten.convolution_backward.default, aten.linear.default, *KERNELS)
# What autocast makes less precise, as on the CPU.
AUTOCAST = ("addmm", "bmm", "baddbmm", "conv2d", "linear", "matmul", "mm", "scaled_dot_product_attention")


def _cpu_operations():
    """All that the CPU has kernels of its own for."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            yield getattr(getattr(aten, packet), overload or "default")


def _is_view(op) -> bool:
    """Whether it is another look at the same memory. The CPU's kernels for that never look at the device."""
    aliases = [returned.alias_info for returned in op._schema.returns]
    return op._schema.name == "aten::set_" or any(alias is not None and not alias.is_write for alias in aliases)


@cache
def register() -> list[torch.library.Library]:
    """Make the device known to torch, for good. Before the first backward pass: torch counts the devices then."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    ops, rest = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    for op in [*_cpu_operations(), *WHOLE]:
        ops.impl(op.name(), partial(op.redispatch, CPU_KERNELS) if _is_view(op) else partial(carry_out, op), KEY)
    rest.fallback(carry_out, KEY)
    for name in AUTOCAST:
        ops.impl(name, partial(autocast, getattr(aten, name).default), f"Autocast{KEY}")
    rest.fallback(torch.library.fallthrough_kernel, f"Autocast{KEY}")
    for key in (KEY, f"Autograd{KEY}"):
        ops.impl("scaled_dot_product_attention", attention, key)
    # Torch asks a device of this kind for nothing but its type, and calls the rest not supported.
    torch._C._accelerator_synchronizeDevice = module.synchronize
    return [ops, rest]  # what is registered lasts as long as these


def main() -> None:
    values = json.loads(os.environ.get("CLIPCTL_TEST_FAKE", "{}"))
    settings.change(**values | {"faults": set(values.get("faults", ()))})
    register()
    from clipctl.__main__ import main as clipctl

    sys.argv[0] = "clipctl"
    clipctl()


if __name__ == "__main__":
    from tests.devices import fake  # this file under its own name, for whoever else imports it

    fake.main()
