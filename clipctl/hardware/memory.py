"""How much memory there is and how much is in use. No torch."""

import ctypes
import sys
from pathlib import Path

import psutil

from clipctl.hardware.cpu import CGROUP_ROOT


def available_bytes() -> int:
    """Memory this process can still use: the system's free memory, or less in a container with a limit."""
    free = psutil.virtual_memory().available
    limit = cgroup_free_bytes(CGROUP_ROOT)
    return free if limit is None else min(free, limit)


def total_bytes() -> int:
    return int(psutil.virtual_memory().total)


def limited_bytes() -> int:
    """What this process could use at most if nothing else ran."""
    limit = cgroup_limit_bytes(CGROUP_ROOT)
    return total_bytes() if limit is None else min(total_bytes(), limit)


def cgroup_free_bytes(root: Path) -> int | None:
    """Memory left within a container's limit; None if there is no limit."""
    found = _cgroup_memory(root)
    return None if found is None else max(0, found[0] - found[1])


def cgroup_limit_bytes(root: Path) -> int | None:
    """A container's memory limit; None if there is none."""
    found = _cgroup_memory(root)
    return None if found is None else found[0]


def _cgroup_memory(root: Path) -> tuple[int, int] | None:
    """Limit and usage."""
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),  # version 2
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
    ):
        try:
            limit = (root / limit_file).read_text().strip()
            used = int((root / usage_file).read_text()) - _reclaimable_bytes(root / usage_file)
        except (OSError, ValueError):
            continue
        # Version 1 writes "no limit" as a number near 2^63.
        return None if limit == "max" or int(limit) > 1 << 60 else (int(limit), used)
    return None


def _reclaimable_bytes(usage_file: Path) -> int:
    """Cached file pages count as used, but are freed as soon as memory is needed."""
    try:
        lines = usage_file.with_name("memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next(
        (int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "total_inactive_file "))), 0
    )


# Parameters of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next step instead of returning it to the system; True if that worked.

    A step frees hundreds of megabytes of activations and gradients and allocates them again in the next one. Each
    round trip costs a page fault per 4 KiB: measured for the `small` preset, 30,000 to 230,000 faults and 0.3 to 3 s
    per step, and none with this setting. The peak stays the same. Huge pages as well (torch's THP_MEM_ALLOC_ENABLE)
    gained nothing: `small` at batch 12 took 4.5 to 4.8 s per step instead of 4.5, and 9% more memory.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1))


def rss_bytes() -> int:
    """Memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Peak memory of this process."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    try:  # on Linux, getrusage would include what the parent held when it started this process
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
