"""The CPU: how many cores this process can actually use, and how many threads and workers suit them. No torch."""

import math
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")
CPUFREQ = Path("/sys/devices/system/cpu/cpu0/cpufreq")

# Instruction sets that make torch faster, as Linux names them.
_INSTRUCTION_SETS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8"),
    *("neon", "asimd", "bf16", "i8mm", "sve", "sve2"),
)
_MACOS_INSTRUCTION_SETS = {
    "avx2": "hw.optional.avx2_0",
    "avx512f": "hw.optional.avx512f",
    "neon": "hw.optional.neon",
    "bf16": "hw.optional.arm.FEAT_BF16",
    "i8mm": "hw.optional.arm.FEAT_I8MM",
}


@cache
def name() -> str:
    """The CPU's own name."""
    if sys.platform == "darwin":
        return sysctl("machdep.cpu.brand_string") or platform.machine()
    try:
        for line in CPUINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "cpu"


def sysctl(key: str) -> str | None:
    """A value from macOS's sysctl; None if there is none."""
    try:
        done = subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def instruction_sets() -> list[str] | None:
    """The CPU's instruction sets that matter to torch; None if the system does not report them."""
    if sys.platform == "darwin":
        return [name for name, key in _MACOS_INSTRUCTION_SETS.items() if sysctl(key) == "1"]
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(("flags", "Features")):  # Intel and AMD, Arm
            flags = line.split(":", 1)[1].split()
            return [name for name in _INSTRUCTION_SETS if name in flags]
    return None


def governor() -> tuple[str | None, bool]:
    """The CPU frequency governor on Linux, and whether it keeps the clock low; None if the system reports none."""

    def read(name: str) -> str | None:
        try:
            return (CPUFREQ / name).read_text().strip()
        except OSError:
            return None

    name, preference = read("scaling_governor"), read("energy_performance_preference")
    if preference:  # drivers that have one call their normal governor powersave, but it follows the load all the same
        return f"{name or '–'} ({preference})", preference == "power"
    return name, name == "powersave" and read("scaling_driver") != "intel_pstate"


def usable_cores() -> int:
    """Cores this process can use at once: physical ones, within its affinity and its container's quota."""
    logical = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    physical = psutil.cpu_count(logical=False) or logical
    quota = cgroup_quota_cores(CGROUP_ROOT)
    limits = [logical, physical] + ([max(1, math.floor(quota))] if quota else [])
    return max(1, min(limits))


def cgroup_quota_cores(root: Path) -> float | None:
    """CPU time a container may use per unit of time, as set by Docker's --cpus; None if there is no limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()  # version 2
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()  # version 1
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if quota in ("max", "-1"):
        return None
    return int(quota) / int(period)


def thread_candidates() -> list[int]:
    """Thread counts worth trying, the usual one first: one per core, one per fast core, half the cores."""
    cores = usable_cores()
    fast = int(sysctl("hw.perflevel0.physicalcpu") or cores) if sys.platform == "darwin" else cores
    return [count for count in dict.fromkeys((cores, fast, cores // 2)) if 1 <= count <= cores]


def choose_workers(asked: int | None, *, on_accelerator: bool, cached: bool) -> tuple[int, str]:
    """The number of worker processes that load batches, and why."""
    if asked is not None:
        return asked, "as asked"
    if cached:
        return 0, "all pictures fit in memory, so no worker processes are needed"
    spare = usable_cores() - 1
    if on_accelerator:
        return min(4, max(1, spare)), "they decode while the accelerator computes"
    return min(4, max(1, spare // 2)), "only a few, because they take CPU cores away from training"
