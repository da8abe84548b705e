"""Measurements of this machine with this torch, stored in the user's application directory. Does not import torch.

One JSON file per machine and torch version. A file that cannot be read counts as absent and is replaced.
"""

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import psutil
from filelock import FileLock

from clipctl import files
from clipctl.hardware import cpu

SCHEMA = "clipctl.machine/2"
LIMIT_BYTES = 8_000_000
KEPT_STEPS = 500
LIFE_S = 30 * 86400.0  # of what was measured: then it is measured again, which takes a moment
LEAST_GAIN = 0.7  # of a rate with more threads over one with fewer
HYBRID = "hybrid"  # a device made of two: image tower on the accelerator, text tower on the CPU


def application_dir() -> Path:
    """Where clipctl stores what belongs to the user rather than to a run. `CLIPCTL_HOME` overrides it."""
    if asked := os.environ.get("CLIPCTL_HOME"):
        return Path(asked)
    if sys.platform == "darwin":
        return Path.home() / "Library/Application Support/clipctl"
    if sys.platform == "win32":
        return Path(os.environ.get("APPDATA", Path.home())) / "clipctl"
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "clipctl"


def cache_dir(name: str) -> Path:
    """A directory for what can be rebuilt; a temporary one if the application directory is not writable."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    for place in (application_dir(), Path(tempfile.gettempdir()) / f"clipctl-{user}"):
        directory = place / name
        with suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            if os.access(directory, os.W_OK):
                return directory
    return Path(tempfile.mkdtemp(prefix=f"clipctl-{name}-"))


@dataclass(frozen=True)
class Machine:
    """What must be the same for a measurement to apply."""

    cpu: str
    cores: int
    memory_gib: int
    system: str
    torch: str

    @classmethod
    def here(cls) -> "Machine":
        memory_gib = round(psutil.virtual_memory().total / 2**30)
        system = f"{platform.system()} {platform.machine()}"
        return cls(cpu.name(), cpu.usable_cores(), memory_gib, system, torch_version())

    @classmethod
    def parse(cls, values: Any) -> "Machine":
        """Raises ValueError if `values` does not describe a machine."""
        if not isinstance(values, dict) or not {item.name for item in fields(cls)} <= values.keys():
            raise ValueError("not a description of a machine")
        return cls(**{item.name: values[item.name] for item in fields(cls)})

    def differences(self, other: "Machine") -> list[str]:
        """What is different about `other`, in words."""
        pairs = zip(fields(self), astuple(self), astuple(other), strict=True)
        return [f"{item.name} {theirs} instead of {mine}" for item, mine, theirs in pairs if mine != theirs]

    @property
    def title(self) -> str:
        return f"{self.cpu}, {self.cores} cores, {self.memory_gib} GiB, {self.system}, torch {self.torch}"


def torch_version() -> str:
    """The installed torch's version, without `+cpu` and without importing torch, which takes a second."""
    try:
        return version("torch").split("+")[0]
    except PackageNotFoundError:
        return "none"


@dataclass(frozen=True)
class DeviceFacts:
    """A device that was seen here."""

    kind: str  # cpu, mps, cuda:0
    name: str
    memory_bytes: int  # total; for an accelerator, what a program may use


@dataclass(frozen=True)
class Rates:
    """The best rates a device reaches."""

    device: str
    precision: str
    threads: int
    gflops: float  # of a matrix product
    saved_s: float = 0.0  # since 1970


@dataclass(frozen=True)
class AttentionTimes:
    """Attention of one block, forward and backward, computed in both ways."""

    device: str
    precision: str
    threads: int
    shape: dict[str, Any]  # as plain values
    fused_s: float
    plain_s: float
    saved_s: float = 0.0  # since 1970

    @property
    def key(self) -> tuple[Any, ...]:
        return self.device, self.precision, self.threads, json.dumps(self.shape, sort_keys=True)


@dataclass(frozen=True)
class StepSample:
    """One measured training step."""

    device: str
    precision: str
    threads: int
    workload: dict[str, Any]  # what the step did, as plain values
    step_s: float
    iqr_s: float
    peak_bytes: int | None  # in a process that did nothing else
    saved_s: float

    @property
    def key(self) -> tuple[Any, ...]:
        return self.device, self.precision, self.threads, json.dumps(self.workload, sort_keys=True)


@dataclass(frozen=True)
class Profile:
    machine: Machine
    devices: tuple[DeviceFacts, ...] = ()
    rates: tuple[Rates, ...] = ()
    steps: tuple[StepSample, ...] = ()
    attention: tuple[AttentionTimes, ...] = ()
    checked: dict[str, Any] = field(default_factory=dict)  # results of device checks, by what they apply to
    benched_s: float | None = None  # when `clipctl bench` last ran, since 1970

    def with_devices(self, devices: "list[DeviceFacts]") -> "Profile":
        return replace(self, devices=tuple(devices))

    def with_rates(self, new: "list[Rates]") -> "Profile":
        new = [one if one.saved_s else replace(one, saved_s=now_s()) for one in new]
        names = {(one.device, one.precision, one.threads) for one in new}
        kept = [one for one in self.rates if (one.device, one.precision, one.threads) not in names]
        return replace(self, rates=(*kept, *new))

    def with_steps(self, new: "list[StepSample]") -> "Profile":
        """Newer samples replace equal ones; one without a peak keeps the known peak."""
        steps = {one.key: one for one in self.steps}
        for one in new:
            known = steps.pop(one.key, None)
            peak_bytes = one.peak_bytes or (known.peak_bytes if known else None)
            steps[one.key] = replace(one, peak_bytes=peak_bytes)
        return replace(self, steps=tuple(steps.values())[-KEPT_STEPS:])

    def with_attention(self, new: "list[AttentionTimes]") -> "Profile":
        """Known times are kept: the same command gives the same weights only if it decides in the same way."""
        new = [one if one.saved_s else replace(one, saved_s=now_s()) for one in new]
        known = {one.key: one for one in (*new, *self.attention)}
        return replace(self, attention=tuple(known.values())[-KEPT_STEPS:])

    def exact_rate(self, device: str, precision: str, threads: int) -> Rates | None:
        """Measured with exactly that many threads."""
        wanted = (device, precision, threads)
        return next((one for one in self.rates if (one.device, one.precision, one.threads) == wanted), None)

    def is_plausible(self, rate: Rates) -> bool:
        """Not if fewer CPU threads reach far more: then another program was busy meanwhile."""
        place = ("cpu", rate.precision)
        fewer = (one for one in self.rates if (one.device, one.precision) == place and one.threads < rate.threads)
        return rate.device != "cpu" or all(rate.gflops >= LEAST_GAIN * one.gflops for one in fewer)

    def rate(self, device: str, precision: str, threads: int) -> Rates | None:
        """The rate measured with that many threads, or else with the most."""
        found = [one for one in self.rates if one.device == device and one.precision == precision]
        most = max(found, key=lambda one: one.threads, default=None)
        return self.exact_rate(device, precision, threads) or most

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def parse(cls, document: Any) -> "Profile":
        """Parse what `to_dict` wrote. Raises ValueError for anything else."""
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"not a document of schema {SCHEMA}")
        try:
            return cls(
                machine=Machine.parse(document["machine"]),
                devices=tuple(DeviceFacts(**_numbers(one, "memory_bytes")) for one in document["devices"]),
                rates=_recent(map(_rate, document["rates"])),
                steps=_recent(map(_sample, document["steps"])),
                attention=_recent(map(_times, document.get("attention", ()))),
                checked={key: dict(one) for key, one in document["checked"].items()},
                benched_s=document["benched_s"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"incomplete: {error}") from None


Measured = TypeVar("Measured", Rates, StepSample, AttentionTimes)


def _recent(measured: Iterable[Measured]) -> tuple[Measured, ...]:
    return tuple(one for one in measured if one.saved_s > now_s() - LIFE_S)


def _rate(values: dict[str, Any]) -> Rates:
    return Rates(**_numbers({"saved_s": 0.0, **values}, "threads", "gflops", "saved_s"))


def _sample(values: dict[str, Any]) -> StepSample:
    sample = StepSample(**_numbers(values, "threads", "step_s", "iqr_s", "saved_s"))
    if not sample.step_s or not isinstance(sample.workload, dict) or not isinstance(sample.peak_bytes, int | None):
        raise ValueError("a step that makes no sense")
    return sample


def _times(values: dict[str, Any]) -> AttentionTimes:
    times = AttentionTimes(**_numbers({"saved_s": 0.0, **values}, "threads", "fused_s", "plain_s", "saved_s"))
    if not isinstance(times.shape, dict):
        raise ValueError("attention without a shape")
    return times


def _numbers(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """The same values, if the named ones are finite and non-negative."""
    for name in names:
        value = values[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e300:
            raise ValueError(f"{name} is {value!r}")
    return values


# --- on disk --------------------------------------------------------------------------------------------------


def profile_file(machine: Machine) -> Path:
    digest = sha256(json.dumps(astuple(machine)).encode()).hexdigest()[:10]
    return application_dir() / "machines" / f"torch-{machine.torch}-{digest}.json"


def load_profile(machine: Machine | None = None) -> Profile:
    """What is known about this machine, without implausible values; nothing if it is new or the file is damaged."""
    machine = machine or Machine.here()
    try:
        profile = Profile.parse(files.read_sealed(profile_file(machine), LIMIT_BYTES))
    except (OSError, ValueError):
        return Profile(machine)
    if profile.machine != machine:
        return Profile(machine)
    return replace(profile, rates=tuple(filter(profile.is_plausible, profile.rates)))


def update_profile(change: Callable[[Profile], Profile], machine: Machine | None = None) -> bool:
    """Apply a change to the stored profile; False if it cannot be saved, which is not an error."""
    machine = machine or Machine.here()
    path = profile_file(machine)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock"), timeout=5):
            files.write_sealed(path, change(load_profile(machine)).to_dict())
    except (OSError, TimeoutError):
        return False
    return True


def keep_steps(samples: list[StepSample]) -> bool:
    return update_profile(lambda profile: profile.with_steps(samples))


def now_s() -> float:
    return round(time.time(), 1)
