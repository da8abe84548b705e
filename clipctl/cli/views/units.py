"""Numbers formatted for people. Bytes and seconds become MiB and minutes here and nowhere else."""

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clipctl.config.quantities import Interval


def size(count_bytes: float) -> str:
    """12 B, 3.4 MiB, 1.2 GiB."""
    value, units = float(count_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" or value >= 100 else f"{value:.1f} {units[0]}"


def duration(seconds: float) -> str:
    """0:48, 12:05, 3:02:11."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def seconds(value: float) -> str:
    """12 µs, 3.4 ms, 1.25 s, 140 s: three digits."""
    for limit, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= limit or unit == "µs":
            scaled = value / limit
            return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f} {unit}"
    raise AssertionError


def count(number: int) -> str:
    """950, 1.3M, 77.0M, 1.0B."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return str(number)


def percent(share: float | None) -> str:
    """Whole per cent; one digit below 1%, which is the range of guessing and early recall among many pictures."""
    if share is None or not math.isfinite(share):
        return "–"
    return f"{share * 100:.1g}%" if 1e-6 <= share < 0.01 else f"{share * 100:.0f}%"


def value(setting: Any) -> str:
    """A setting or a metric: none, 12, 0.0008, softmax."""
    return "none" if setting is None else f"{setting:.4g}" if isinstance(setting, float) else str(setting)


def shape(sides: "Sequence[int]") -> str:
    return "×".join(str(side) for side in sides) or "1"


def age(saved_s: float | None) -> str:
    """Time since a moment: 40 s, 5 min, 3 h, 12 d."""
    if saved_s is None:
        return "–"
    seconds = max(0.0, time.time() - saved_s)
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def save_interval(interval: "Interval") -> str:
    """5 epochs, 1 step, 10 minutes."""
    noun = {"epochs": "epoch", "steps": "step", "min": "minute"}[interval.unit]
    return noun if interval.count == 1 else f"{interval.count:g} {noun}s"


def basis(name: str) -> str:
    """What an estimate rests on."""
    return "rough estimate" if name == "prior" else name
