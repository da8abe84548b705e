"""Is this machine ready to train on, and if not, what helps? One function per check. Each imports torch itself if it
needs it, so that a missing or broken torch is a finding rather than a crash."""

import math
import os
import platform
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import psutil

from clipctl.doctor import libraries
from clipctl.doctor.finding import Check, Finding, Problem, examine
from clipctl.hardware import cpu, disk, memory, sensors
from clipctl.hardware.profile import application_dir, load_profile, torch_version

MEMORY_BYTES = 7e9  # a machine sold with 8 GB: firmware and graphics reserve some of it
FREE_MEMORY_BYTES = 2e9
SWAPPED_SHARE = 0.25  # of the memory
DISK_BYTES = 10e9
FULL_DISK_BYTES = 1e9
LOAD_S = 0.5
LEAST_MACOS = "14.0"  # required for Metal since torch 2.9


def checkup(runs_dir: Path) -> list[Finding]:
    """Runs every check, in the order a reader would expect."""
    checks: dict[str, Check] = {
        "Python": libraries.check_python,
        "torch": libraries.check_torch,
        "numpy": libraries.check_numpy,
        "libraries": libraries.check_libraries,
        "conflicts": libraries.check_conflicts,
        "processor": check_processor,
        "cores": check_cores,
        "memory": check_memory,
        "disk": lambda: check_disk(runs_dir),
        "app data": check_application_dir,
        "accelerator": check_accelerator,
        "preflight": check_preflight,
        "power": check_power,
        "load": check_load,
        "bench": check_bench,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whatever torch warns about on import is covered by the findings
        return [examine(name, check) for name, check in checks.items()]


def _gib(count_bytes: float) -> str:
    return f"{count_bytes / 2**30:.1f} GiB"


# --- processor ------------------------------------------------------------------------------------------------


def check_processor() -> tuple[str, list[Problem]]:
    sets, used = cpu.instruction_sets(), _torch_capability()
    problems = []
    if platform.machine().lower() in ("x86_64", "amd64"):
        has_avx2 = "avx2" in sets if sets is not None else used not in ("DEFAULT", "NO AVX")
        if not has_avx2:
            way_out = "in a virtual machine, pass the host's CPU type through; on an older CPU nothing helps"
            problems.append(Problem("warn", "no AVX2: torch is several times slower", way_out))
        elif used in ("DEFAULT", "NO AVX"):
            words = "torch does not use AVX2 although the CPU has it"
            problems.append(Problem("warn", words, "unset ATEN_CPU_CAPABILITY"))
    listed = "–" if sets is None else " ".join(sets) or "no instruction sets that torch uses"
    return f"{cpu.name()}: {listed}; torch uses {used or '–'}", problems


def _torch_capability() -> str | None:
    if libraries.import_failure():
        return None
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def check_cores() -> tuple[str, list[Problem]]:
    usable, logical, quota = cpu.usable_cores(), os.cpu_count() or 1, cpu.cgroup_quota_cores(cpu.CGROUP_ROOT)
    facts = [f"{psutil.cpu_count(logical=False) or '–'} physical", f"{logical} logical"]
    if hasattr(os, "sched_getaffinity"):
        facts.append(f"affinity allows {len(os.sched_getaffinity(0))}")
    if quota:
        facts.append(f"the container's quota is {quota:g}")
    problems = []
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        asked = os.environ.get(name, "").split(",")[0].strip()
        if asked.isdigit() and int(asked) < usable:
            words = f"{name}={asked} is lower; clipctl sets its own thread count, but numpy and other programs obey it"
            problems.append(Problem("warn", words, f"unset {name}, or if you want it, train with --threads {asked}"))
    return f"{usable} usable: {', '.join(facts)}", problems


# --- memory and disk ------------------------------------------------------------------------------------------


def check_memory() -> tuple[str, list[Problem]]:
    total, free, swapped = memory.total_bytes(), memory.available_bytes(), psutil.swap_memory().used
    limit = memory.cgroup_limit_bytes(cpu.CGROUP_ROOT)
    facts = [_gib(total), f"{_gib(free)} free", f"{_gib(swapped) if swapped else 'nothing'} swapped out"]
    if limit is not None and limit < total:
        total = limit
        facts.insert(1, f"of which the container may use {_gib(limit)}")
    problems = []
    if total < MEMORY_BYTES:
        raise_it = "give the container more memory, or " if total == limit else ""
        problems.append(Problem("warn", "less than 8 GB", f"{raise_it}use --preset tiny and small batches"))
    if free < FREE_MEMORY_BYTES:
        problems.append(Problem("warn", "less than 2 GB free", "close programs that use a lot of memory"))
    if swapped > SWAPPED_SHARE * total:
        words = "a lot is swapped out, and training slows to a crawl when it swaps"
        problems.append(Problem("warn", words, "close programs that use a lot of memory"))
    return ", ".join(facts), problems


def check_disk(runs_dir: Path) -> tuple[str, list[Problem]]:
    """Where runs go."""
    elsewhere = "choose another directory with --runs-dir or CLIPCTL_RUNS"
    free = disk.free_bytes(runs_dir)
    problems = _unwritable(runs_dir, elsewhere)
    way_out = f"free some space with clipctl checkpoint prune, or {elsewhere}"
    if free < FULL_DISK_BYTES:
        problems.append(Problem("bad", "less than 1 GB", way_out))
    elif free < DISK_BYTES:
        problems.append(Problem("warn", "less than 10 GB", way_out))
    return f"{_gib(free)} free for runs in {runs_dir.absolute()}", problems


def check_application_dir() -> tuple[str, list[Problem]]:
    """Where measurements are kept."""
    place = application_dir()
    problems = _unwritable(place, "choose another directory with CLIPCTL_HOME")
    return f"{_gib(disk.free_bytes(place))} free for measurements in {place.absolute()}", problems


def _unwritable(place: Path, way_out: str) -> list[Problem]:
    """Tests by writing an unnamed file: permissions alone do not reveal a read-only disk."""
    try:
        with tempfile.TemporaryFile(dir=disk.existing_part(place)):
            return []
    except OSError as error:
        return [Problem("bad", f"not writable: {error.strerror or error}", way_out)]


# --- accelerator ----------------------------------------------------------------------------------------------


def check_accelerator() -> tuple[str, list[Problem]]:
    libraries.require_torch()
    import torch

    from clipctl.hardware import devices

    found = [devices.open_device(label) for label in devices.labels() if label != "cpu"]
    problems = []
    if torch.version.cuda and not found and libraries.has_nvidia_driver():
        words = f"an NVIDIA driver is installed, but torch for CUDA {torch.version.cuda} finds no GPU"
        is_hidden = "CUDA_VISIBLE_DEVICES" in os.environ
        way_out = "unset CUDA_VISIBLE_DEVICES" if is_hidden else "update the driver; nvidia-smi shows its version"
        problems.append(Problem("warn", words, way_out))
    if torch.backends.mps.is_built():
        problems += _metal_problems(torch.backends.mps.is_available())
    names = (f"{one.label}: {one.name}, {_gib(one.memory_bytes)} free" for one in found)
    return "; ".join(names) or "none: the CPU will be used", problems


def _metal_problems(is_available: bool) -> list[Problem]:
    problems = []
    if not is_available:
        version = platform.mac_ver()[0]
        if libraries.release(version) < libraries.release(LEAST_MACOS):
            words, way_out = f"macOS {version} is too old for Metal in torch", f"install macOS {LEAST_MACOS} or newer"
        else:
            words, way_out = f"macOS {version} offers no Metal GPU", "a virtual machine may hide it; otherwise, restart"
        problems.append(Problem("warn", words, way_out))
    if os.environ.get("PYTORCH_ENABLE_MPS_FALLBACK", "0") not in ("", "0"):
        words = "PYTORCH_ENABLE_MPS_FALLBACK silently moves unsupported operations to the CPU, which is slow"
        problems.append(Problem("warn", words, "unset PYTORCH_ENABLE_MPS_FALLBACK"))
    return problems


def check_preflight() -> tuple[str, list[Problem]]:
    """Results of the comparison with the CPU that runs before training on an accelerator."""
    libraries.require_torch()
    from clipctl.hardware import devices

    if devices.labels() == ["cpu"]:
        return "not needed: there is no accelerator", []
    here = platform.platform()
    made: list[dict[str, Any]] = [one for one in load_profile().checked.values() if one.get("system", here) == here]
    if not made:
        return "not run yet; it runs automatically before the first training on an accelerator", []
    failed = [one for one in made if not one["passed"]]
    way_out = "train with --device cpu; the check runs again after an update of torch or the system"
    words = dict.fromkeys(
        f"{one['device']} does not give the same results as the CPU: {one['words']}" for one in failed
    )
    passed = sum(bool(one["passed"]) for one in made)
    return f"{passed} of {len(made)} passed", [Problem("bad", one, way_out) for one in words]


# --- what the machine is doing --------------------------------------------------------------------------------


def check_power() -> tuple[str, list[Problem]]:
    read = getattr(psutil, "sensors_battery", None)  # absent on some systems
    battery = read() if read else None
    governor, saves = cpu.governor()
    temperature = sensors.temperature_c()
    problems = []
    if battery is None:
        fact = "no battery" if read else "battery –"
    else:
        adapter = {True: "adapter connected", False: "adapter not connected", None: "adapter –"}[battery.power_plugged]
        fact = f"{adapter}, battery at {battery.percent:.0f}%"
        if battery.power_plugged is False:
            words = "training is slower on battery, and measurements are not representative"
            problems.append(Problem("warn", words, "connect the power adapter"))
    if saves:
        words = "this governor keeps the clock speed low"
        problems.append(
            Problem("warn", words, "powerprofilesctl set performance, or sudo cpupower frequency-set -g schedutil")
        )
    degrees = "–" if temperature is None else f"{temperature:.0f} °C"
    return f"{fact}; temperature {degrees}; CPU governor {governor or '–'}", problems


def check_load() -> tuple[str, list[Problem]]:
    processes = [one for one in psutil.process_iter() if one.pid != os.getpid()]
    for one in processes:
        _share(one)  # starts its clock
    others = sensors.OtherLoad()
    time.sleep(LOAD_S)
    cores = others.cores()
    problems = []
    if cores > sensors.BUSY_CORES:
        share, name = max(((_share(one), _name(one)) for one in processes), default=(0.0, "–"))
        words = f"most by {name} ({share:.0%} of a core)"
        problems.append(Problem("warn", words, "close it or wait: it slows down training and distorts measurements"))
    return f"other programs keep {cores:.2f} cores busy", problems


def _share(process: psutil.Process) -> float:
    """Share of one core used since the last call."""
    try:
        return process.cpu_percent() / 100
    except psutil.Error:  # it has ended, or we may not look at it
        return 0.0


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return "–"


def check_bench() -> tuple[str, list[Problem]]:
    profile = load_profile()
    basis = f"{len(profile.steps)} measured steps" if profile.steps else "rough estimates"
    if not profile.benched_s:
        return f"not run yet with torch {torch_version()}: forecasts are based on {basis}", []
    days = math.floor((time.time() - profile.benched_s) / 86400)
    age = "today" if days < 1 else "yesterday" if days == 1 else f"{days} days ago"
    return f"run {age} with torch {torch_version()}: forecasts are based on {basis}", []
