"""Python, torch and the other libraries: installed, recent enough, intact, and free of conflicts.

Nothing here imports torch until a child process has shown that it can be imported: two copies of OpenMP, or a CPU that
lacks an instruction, kill the process instead of raising an exception.
"""

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import psutil

from clipctl.doctor.finding import Problem
from clipctl.hardware import cpu

TESTED_TORCH = "2.13"
IMPORT_LIMIT_S = 120
NVIDIA_DRIVER = Path("/proc/driver/nvidia")
BUILDS = "https://pytorch.org/get-started/locally"
FRESH = "install clipctl into a fresh virtual environment"


# --- versions -------------------------------------------------------------------------------------------------


def release(text: str) -> tuple[int, ...]:
    """2.13.0+cpu becomes (2, 13), for comparing versions."""
    match = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def requirements() -> dict[str, str | None]:
    """What pyproject.toml requires, without extras, and the minimum versions. Empty if clipctl is not installed."""
    try:
        stated = metadata.requires("clipctl") or []
    except metadata.PackageNotFoundError:
        return {}
    needed = (one.split(";")[0] for one in stated if "extra ==" not in one)
    pairs = (re.match(r"([\w.-]+)(?:.*?>=\s*([\d.]+))?", one) for one in needed)
    return {pair[1].lower(): pair[2] for pair in pairs if pair}


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def shortfall(name: str) -> Problem | None:
    """The problem if a library is missing or older than required."""
    minimum, found = requirements().get(name), installed(name)
    way_out = f'pip install "{name}>={minimum}"' if minimum else f"pip install {name}"
    if found is None:
        return Problem("bad", f"{name} is not installed", way_out)
    if minimum and release(found) < release(minimum):
        return Problem("bad", f"{name} {found} is older than {minimum}", way_out)
    return None


# --- Python, torch, numpy and the rest ------------------------------------------------------------------------


def check_python() -> tuple[str, list[Problem]]:
    is_64_bit = sys.maxsize > 2**32
    problems = []
    if (minimum := _python_minimum()) and release(platform.python_version()) < release(minimum):
        problems.append(Problem("bad", f"older than {minimum}", f"install Python {minimum} or newer"))
    if not is_64_bit:
        problems.append(Problem("bad", "torch has no 32-bit build", "install a 64-bit Python"))
    if is_translated():
        way_out = "install a native (arm64) Python, and clipctl with it"
        problems.append(Problem("bad", "runs under Rosetta: slow, and without the GPU", way_out))
    bits = "64-bit" if is_64_bit else "32-bit"
    return f"{platform.python_version()}, {bits}, {platform.machine()}", problems


def _python_minimum() -> str | None:
    try:
        stated = metadata.metadata("clipctl")["Requires-Python"]
    except (metadata.PackageNotFoundError, KeyError):
        return None
    match = re.search(r">=\s*([\d.]+)", stated or "")
    return match[1] if match else None


def is_translated() -> bool:
    """Whether this is an Intel Python on an Apple chip (Rosetta)."""
    if sys.platform != "darwin" or platform.machine() != "x86_64":
        return False
    return "1" in (cpu.sysctl("sysctl.proc_translated"), cpu.sysctl("hw.optional.arm64"))


def check_torch() -> tuple[str, list[Problem]]:
    found, problem = installed("torch"), shortfall("torch")
    if found is None:
        return "–", [problem] if problem else []
    problems = []
    if problem:
        holes = "malicious files can run code in it (CVE-2025-32434, CVE-2026-24747)"
        problems.append(Problem("bad", f"{problem.words}: {holes}", problem.way_out))
    if failure := import_failure():
        problems.append(Problem("bad", f"cannot be imported: {failure}", FRESH))
        return found, problems
    import torch

    build = _build()
    if build == "CPU only" and has_nvidia_driver():
        way_out = f"choose a CUDA build at {BUILDS}"
        problems.append(Problem("warn", "an NVIDIA driver is installed, but this torch uses only the CPU", way_out))
    is_tested = release(torch.__version__)[:2] == release(TESTED_TORCH)
    words = "the version clipctl is tested with" if is_tested else f"clipctl is tested with {TESTED_TORCH}"
    return f"{found}, {build}, {words}", problems


def _build() -> str:
    import torch

    for word, number in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip), ("XPU", torch.version.xpu)):
        if number:
            return f"{word} {number}"
    return "Metal" if torch.backends.mps.is_built() else "CPU only"


def has_nvidia_driver() -> bool:
    return NVIDIA_DRIVER.exists() or shutil.which("nvidia-smi") is not None


@cache
def import_failure() -> str | None:
    """Why torch cannot be imported, found out in a child process that may crash."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", "import torch"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"not finished after {IMPORT_LIMIT_S} s"
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode > 0:
        return lines[-1] if lines else f"exit code {done.returncode}"
    name = signal.Signals(-done.returncode).name
    return f"{name}: {lines[0]}" if lines else name


def require_torch() -> None:
    if import_failure():
        raise ImportError("torch cannot be imported")


def check_numpy() -> tuple[str, list[Problem]]:
    problem = shortfall("numpy")
    problems = [problem] if problem else []
    found = installed("numpy")
    if found:
        try:
            import numpy  # noqa: F401
        except Exception as error:
            problems.append(Problem("bad", f"cannot be imported: {str(error).strip().splitlines()[0]}", FRESH))
    return found or "–", problems


def check_libraries() -> tuple[str, list[Problem]]:
    """Everything else that pyproject.toml requires."""
    names = [name for name in requirements() if name not in ("torch", "numpy")]
    if not names:
        words = "clipctl is not installed, so its requirements are unknown"
        return "–", [Problem("warn", words, "run pip install . in its directory")]
    value = ", ".join(f"{name} {installed(name) or '–'}" for name in names)
    return value, [problem for name in names if (problem := shortfall(name))]


# --- conflicts ------------------------------------------------------------------------------------------------


def check_conflicts() -> tuple[str, list[Problem]]:
    problems = [*_set_by_hand(), *_unmatched()]
    if import_failure():
        return "OpenMP runtime: –", problems
    problems += _strangers_to_numpy()
    runtimes = openmp_runtimes()
    if runtimes is not None and at_odds(runtimes):
        files = ", ".join(sorted(path.name for path in runtimes))
        words = f"two OpenMP runtimes are loaded ({files}); they compete for cores or crash the program"
        problems.append(Problem("warn", words, f"{FRESH}, with either pip or conda but not both"))
    names = "–" if runtimes is None else ", ".join(sorted({path.name.split(".")[0] for path in runtimes})) or "none"
    return f"OpenMP runtime: {names}", problems


def _set_by_hand() -> Iterator[Problem]:
    if os.environ.get("KMP_DUPLICATE_LIB_OK"):
        words = "KMP_DUPLICATE_LIB_OK allows two OpenMP runtimes side by side, which can give wrong results"
        yield Problem("warn", words, "unset KMP_DUPLICATE_LIB_OK")


def _unmatched() -> Iterator[Problem]:
    """Libraries built for exactly one torch version, according to their own metadata."""
    mine = installed("torch")
    for name in ("torchvision", "torchaudio"):
        if mine is None or (found := installed(name)) is None:
            continue
        for stated in metadata.requires(name) or []:
            built_for = re.match(r"torch\s*\(?==\s*([\d.]+)", stated)
            if built_for and release(built_for[1]) != release(mine):
                words = f"{name} {found} was built for torch {built_for[1]}"
                yield Problem("warn", words, f"pip install --upgrade {name}, or pip uninstall {name} (not needed)")


def _strangers_to_numpy() -> Iterator[Problem]:
    import torch

    try:
        torch.zeros(1).numpy()
    except Exception as error:
        words = f"torch was built for a different numpy: {error}"
        yield Problem("bad", words, "pip install --upgrade torch numpy")


def openmp_runtimes() -> list[Path] | None:
    """OpenMP runtimes loaded into this process along with what training imports; None if the system does not say."""
    import numpy  # noqa: F401
    import PIL.Image  # noqa: F401
    import torch  # noqa: F401

    maps = getattr(psutil.Process(), "memory_maps", None)  # absent on macOS
    if maps is None:
        return None
    paths = {Path(one.path) for one in maps()}
    return sorted(path for path in paths if re.match(r"lib(gomp|i?omp)\d*(md)?[.-]", path.name))


def at_odds(runtimes: list[Path]) -> bool:
    """Two copies of GNU's runtime can coexist. Intel's and LLVM's, which are the same, tolerate neither a second copy
    nor GNU's. Those shipped with torch have been tested together."""
    import torch

    home = Path(torch.__file__).resolve().parent
    others = [path for path in runtimes if not {home, home.with_name("torch.libs")} & set(path.parents)]
    is_all_gnu = all(path.name.startswith("libgomp") for path in runtimes)
    return len(runtimes) > 1 and bool(others) and not is_all_gnu
