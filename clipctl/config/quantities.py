"""Quantities as people write them: counts, memory sizes, intervals. Every parser raises ValueError saying what it
expects."""

import math
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
    """Seconds of a duration: 90s, 10m, 1.5h, 1h30m."""
    match = re.fullmatch(r"\s*(?:(\d+(?:\.\d+)?)h)?\s*(?:(\d+(?:\.\d+)?)m)?\s*(?:(\d+(?:\.\d+)?)s)?\s*", text)
    parts = [float(part or 0) for part in match.groups()] if match else [0.0]
    seconds = sum(part * factor for part, factor in zip(parts, (3600, 60, 1), strict=False))
    if not 0 < seconds <= 366 * 86400:
        raise ValueError("a duration such as 90s, 10m or 2h")
    return seconds


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


@dataclass(frozen=True)
class Interval:
    """How often something happens. Written 5e (epochs), 500s (steps) or 10m (minutes)."""

    count: float
    unit: Literal["e", "s", "m"]

    @classmethod
    def parse(cls, text: str) -> "Interval":
        match = re.fullmatch(r"(\d+)([es])|(\d+(?:\.\d+)?)(m)", text.strip())
        count = float(match[1] or match[3]) if match else 0.0
        if not match or not 0 < count < 1e12:
            raise ValueError("a number of epochs, steps or minutes such as 5e, 500s or 10m")
        return cls(count, typing.cast(Any, match[2] or match[4]))

    def __str__(self) -> str:
        return f"{self.count:.12f}".rstrip("0").rstrip(".") + self.unit
