"""A device's overhead besides computing, each part measured separately."""

import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool

import torch

from clipctl.bench.results import Overhead
from clipctl.hardware.devices import Device
from clipctl.hardware.processes import Helpers
from clipctl.hardware.timing import Stopwatch, time_in_turns

COPY_BYTES = 64 * 2**20
ALLOC_BYTES = 16 * 2**20
_LIMIT_S = 0.1


def measure_overhead(device: Device) -> Overhead:
    odd = torch.randn(509, 509).to(device.image)  # a shape used nowhere else
    first_call_s = _once(lambda: torch.logit(odd), device)
    one, square = torch.ones(1, device=device.image), torch.randn(512, 512).to(device.image)

    def timed(run: Callable[[], object]) -> float:
        return time_in_turns({"": Stopwatch(run, device.synchronize)}, limit_s=_LIMIT_S)[""].median_s

    return Overhead(
        device=device.label,
        init_s=_init_s(device),
        first_call_s=first_call_s,
        warm_call_s=timed(lambda: torch.logit(odd)),
        fresh_alloc_s=_fresh_alloc_s(device),
        cached_alloc_s=timed(lambda: torch.empty(ALLOC_BYTES, dtype=torch.uint8, device=device.image)),
        launch_s=timed(lambda: one + one),
        enqueue_s=_enqueue_s(device) if device.is_accelerator else None,
        synchronize_s=timed(device.synchronize) if device.is_accelerator else None,
        copy_in_gbytes_per_s=_copy_rate(device, torch.device("cpu"), device.image, timed),
        copy_out_gbytes_per_s=_copy_rate(device, device.image, torch.device("cpu"), timed),
        compute_s=timed(lambda: square @ square),
    )


def _init_s(device: Device) -> float | None:
    """Measured in a new process, because in this one the device is already initialised."""
    if not device.is_accelerator:
        return None
    with Helpers() as process:
        try:
            return process.submit(_first_tensor_s, device.label).result()
        except (BrokenProcessPool, RuntimeError):
            return None


def _first_tensor_s(label: str) -> float:
    started = time.perf_counter()
    torch.zeros(1, device=label).cpu()
    return time.perf_counter() - started


def _once(run: Callable[[], object], device: Device) -> float:
    started = time.perf_counter()
    run()
    device.synchronize()
    return time.perf_counter() - started


def _fresh_alloc_s(device: Device) -> float:
    """With nothing suitable in the cache; every byte is touched, because only then is it really allocated."""
    if device.is_accelerator and hasattr(torch.get_device_module(device.image), "empty_cache"):
        torch.get_device_module(device.image).empty_cache()
    seconds = []
    kept = []
    for number in range(3):
        size = 4 * ALLOC_BYTES + number * 4096  # larger than anything freed before
        started = time.perf_counter()
        kept.append(torch.zeros(size, dtype=torch.uint8, device=device.image).fill_(1))
        device.synchronize()
        seconds.append((time.perf_counter() - started) * ALLOC_BYTES / size)
    return min(seconds)


def _enqueue_s(device: Device) -> float:
    """Time until the call for a product returns, regardless of when the device finishes."""
    square = torch.randn(512, 512).to(device.image)
    seconds = []
    for _ in range(20):
        device.synchronize()
        started = time.perf_counter()
        square @ square
        seconds.append(time.perf_counter() - started)
    device.synchronize()
    return sorted(seconds)[10]


def _copy_rate(
    device: Device, source: torch.device, target: torch.device, timed: Callable[[Callable[[], object]], float]
) -> float | None:
    if not device.is_accelerator:
        return None
    numbers = torch.ones(COPY_BYTES // 4).to(source)
    return COPY_BYTES / timed(lambda: numbers.to(target)) / 1e9
