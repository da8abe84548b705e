"""What a check found: a fact, a verdict, and what to do about it. No torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Problem:
    """What is wrong with a fact."""

    verdict: Literal["warn", "bad"]
    words: str
    way_out: str | None = None


@dataclass(frozen=True)
class Finding:
    name: str
    verdict: Verdict
    value: str  # one line
    way_out: str | None


Check = Callable[[], tuple[str, list[Problem]]]  # the fact in words, and what is wrong with it


def examine(name: str, check: Check) -> Finding:
    """Always returns a finding, whatever the check does: the worst verdict, with all words and all ways out."""
    try:
        value, problems = check()
    except Exception as error:  # one failing check must not hide the others
        value, problems = "–", [Problem("warn", f"could not be read: {error or type(error).__name__}")]
    verdict: Verdict = max((one.verdict for one in problems), key=("warn", "bad").index, default="ok")
    ways_out = [one.way_out for one in problems if one.way_out]
    return Finding(
        name,
        verdict,
        " ".join("; ".join([value, *(one.words for one in problems)]).split()),
        "; ".join(dict.fromkeys(ways_out)) or None,
    )
