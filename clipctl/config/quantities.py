"""Quantities as people write them: counts, memory sizes, intervals. Every parser raises ValueError saying what it
expects."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_SUFFIXES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def parse_count(text: str | float) -> int:
    """A whole number: 1_000_000, 1e6, 10M, 1.2B, 8G."""
    match = re.fullmatch(r"\s*([-+]?[\d_,.]+(?:[eE][-+]?\d+)?)\s*([kKmMgGbBtT]?)\s*", str(text))
    if not match:
        raise ValueError("a whole number such as 12, 1e6 or 10M")
    try:
        value = float(match[1].replace("_", "").replace(",", "")) * _SUFFIXES[match[2].upper()]
    except ValueError:
        raise ValueError("a whole number such as 12, 1e6 or 10M") from None
    if not math.isfinite(value) or value != int(value):
        raise ValueError("a whole number")
    return int(value)


def counted(count: int, noun: str) -> str:
    """1 epoch, 1,200 epochs."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def parse_bytes(text: str) -> int:
    """A memory size: 8G, 8GB, 8GiB, 512M, in powers of 1024."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT])(?:i?[bB])?\s*|\s*(\d+)\s*", text)
    if not match:
        raise ValueError("a memory size such as 8G or 512M")
    value = int(match[3]) if match[3] else round(float(match[1]) * 1024 ** (1 + "KMGT".index(match[2].upper())))
    if value < 1:
        raise ValueError("a memory size above zero")
    return value


def parse_duration(text: str) -> float:
    """Seconds of a duration: 90s, 10m or 10min, 1.5h, 1h30m."""
    match = re.fullmatch(r"\s*(?:(\d+(?:\.\d+)?)h)?\s*(?:(\d+(?:\.\d+)?)m(?:in)?)?\s*(?:(\d+(?:\.\d+)?)s)?\s*", text)
    parts = [float(part or 0) for part in match.groups()] if match else [0.0]
    seconds = sum(part * factor for part, factor in zip(parts, (3600, 60, 1), strict=False))
    if not 0 < seconds <= 366 * 86400:
        raise ValueError("a duration such as 90s, 10m or 2h")
    return seconds


def parse_bandwidth(text: str) -> float:
    """Bytes per second of a network: 1Gbps, 100Mbit/s, 10Gb, or 1.2GB/s, in powers of 1000."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT])(b|bps|bit|bit/s|B|B/s|Bps)\s*", text)
    value = float(match[1]) * 1000 ** (1 + "KMGT".index(match[2].upper())) if match else 0.0
    if match is None or value <= 0:
        raise ValueError("a bandwidth such as 1Gbps, 100Mbps or 1GB/s")
    return value if match[3].startswith("B") else value / 8


def parse_counts(texts: Sequence[str], *, limit: int = 1000) -> list[int]:
    """Several counts above zero: `1e6 1e7`, `1e6,1e7`, and `1e5:1e8:7` for seven from 1e5 to 1e8 at equal ratios.
    Sorted, each once."""
    found: set[int] = set()
    for part in (part for text in texts for part in text.split(",") if part.strip()):
        first, *rest = part.split(":")
        if not rest:
            found.add(parse_count(first))
            continue
        if len(rest) != 2:
            raise ValueError("written FROM:TO:HOW_MANY, such as 1e5:1e8:7")
        low, high, number = parse_count(first), parse_count(rest[0]), parse_count(rest[1])
        if not (0 < low < high and 2 <= number <= limit):
            raise ValueError("a range from a smaller to a larger number in two or more steps")
        found |= {round(low * (high / low) ** (step / (number - 1))) for step in range(number)}
    if not found or min(found) < 1:
        raise ValueError("above zero")
    return sorted(found)


_INTERVAL = re.compile(r"(\d+(?:\.\d+)?)\s*(epochs?|e|steps?|s|minutes?|min|m|hours?|h)")


@dataclass(frozen=True)
class Interval:
    """How often something happens. Written 5epochs, 500steps, 10min or 2h; 5e, 500s and 10m are older forms."""

    count: float
    unit: Literal["epochs", "steps", "min"]

    @classmethod
    def parse(cls, text: str) -> "Interval":
        found = _INTERVAL.fullmatch(text.strip())
        count, letter = (float(found[1]), found[2][0]) if found else (0.0, "")
        if not 0 < count < 1e12 or (letter in "es" and not count.is_integer()):
            raise ValueError("a number of epochs, steps, minutes or hours such as 5epochs, 500steps, 10min or 2h")
        match letter:
            case "e":
                return cls(count, "epochs")
            case "s":
                return cls(count, "steps")
            case _:
                return cls(60 * count if letter == "h" else count, "min")

    @staticmethod
    def is_ambiguous(text: str) -> bool:
        """True for 30s, which means steps but reads as seconds."""
        return re.fullmatch(r"\s*\d+\s*s\s*", text) is not None

    def __str__(self) -> str:
        number = f"{self.count:.12f}".rstrip("0").rstrip(".")
        return number + (self.unit.removesuffix("s") if self.count == 1 else self.unit)
