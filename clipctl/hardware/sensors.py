"""What the machine is doing right now, as far as the system reports it without root. No torch.

A value that cannot be read is None, never a guess.
"""

import time
from pathlib import Path
from typing import Any

import psutil

from clipctl.hardware import disk
from clipctl.hardware.memory import available_bytes

POWERCAP_ENERGY = Path("/sys/class/powercap/intel-rapl:0/energy_uj")  # AMD processors use the same name
POWER_SUPPLY = Path("/sys/class/power_supply")
_TEMPERATURE_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")


class SystemSensors:
    """Reads loads since the previous reading; the first reading, made here, only starts the clock."""

    def __init__(self, *, with_children: bool, directory: Path = Path()) -> None:
        self._process = psutil.Process()
        self._directory = directory
        self._with_children = with_children
        self._energy_uj: int | None = None
        self._cpu_s: dict[int, float] = {}  # what each process had used at the previous reading
        self._read_s = time.monotonic()
        self._cores_used(self._children())
        psutil.cpu_percent(percpu=True)

    def read(self, interval_s: float) -> dict[str, Any]:
        """A system row: shares are 0–1 of one core."""
        memory = self._process.memory_info()
        children = self._children()
        return {
            "cpu_per_core": [round(percent / 100, 3) for percent in psutil.cpu_percent(percpu=True)],
            "process_cpu": round(self._cores_used(children), 3),
            "rss_bytes": memory.rss + sum(_rss(child) for child in children),
            "available_bytes": available_bytes(),
            "swap_used_bytes": psutil.swap_memory().used,
            "disk_free_bytes": _disk_free_bytes(self._directory),
            "temperature_c": temperature_c(),
            "power_w": self._power_w(interval_s),
        }

    def _children(self) -> list[psutil.Process]:
        """Finding them means reading the whole process table, so only do it if there are loader workers."""
        return self._process.children(recursive=True) if self._with_children else []

    def _cores_used(self, children: list[psutil.Process]) -> float:
        """Cores that the process and its children kept busy since the previous reading."""
        before, earlier_s, self._read_s = self._cpu_s, self._read_s, time.monotonic()
        self._cpu_s = {process.pid: _cpu_s(process) for process in (self._process, *children)}
        used_s = sum(max(0.0, cpu_s - before.get(pid, 0.0)) for pid, cpu_s in self._cpu_s.items())
        return used_s / max(1e-3, self._read_s - earlier_s)

    def _power_w(self, interval_s: float) -> float | None:
        """CPU package power from the energy counter if it is readable, otherwise the battery's discharge."""
        try:
            energy_uj = int(POWERCAP_ENERGY.read_text())
        except (OSError, ValueError):
            return battery_power_w(POWER_SUPPLY)
        previous, self._energy_uj = self._energy_uj, energy_uj
        if previous is None or energy_uj < previous or interval_s <= 0:  # the counter wraps around
            return None
        return round((energy_uj - previous) / 1e6 / interval_s, 2)


def _disk_free_bytes(directory: Path) -> int | None:
    try:
        return disk.free_bytes(directory)
    except OSError:
        return None


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it ended after it was listed
        return 0.0
    return float(times.user + times.system)


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it ended after it was listed
        return 0


def temperature_c() -> float | None:
    """The hottest CPU sensor."""
    read = getattr(psutil, "sensors_temperatures", None)  # absent on macOS and Windows
    sensors = read() if read else {}
    for chip in _TEMPERATURE_SENSORS:
        values = [sensor.current for sensor in sensors.get(chip, []) if sensor.current]
        if values:
            return float(round(max(values), 1))
    return None


def battery_power_w(root: Path) -> float | None:
    """Power drawn from a discharging battery, which on a laptop is what the whole machine uses."""
    for battery in sorted(root.glob("BAT*")):
        try:
            if (battery / "status").read_text().strip() != "Discharging":
                continue
            return round(int((battery / "power_now").read_text()) / 1e6, 2)
        except (OSError, ValueError):
            continue
    return None


LEAST_S = 0.2  # the system counts in hundredths of a second, so less tells nothing
BUSY_CORES = 0.25  # kept busy by other programs: above this, measurements suffer


class OtherLoad:
    """How busy other programs keep the machine, from the moment of creation."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._started = self._now()

    def cores(self) -> float:
        """Cores that others kept busy on average since then, excluding this process and its children."""
        seconds, busy, own = (now - then for now, then in zip(self._now(), self._started, strict=True))
        return max(0.0, (busy - own) / seconds) if seconds >= LEAST_S else 0.0

    def _now(self) -> tuple[float, float, float]:
        times, mine = psutil.cpu_times(), self._process.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "steal", 0.0)
        busy = sum(times[:8]) - idle if len(times) >= 8 else sum(times) - idle
        own = mine.user + mine.system + mine.children_user + mine.children_system
        return time.monotonic(), busy, own
