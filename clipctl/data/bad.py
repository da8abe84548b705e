"""Pictures that cannot be used: which, why, how many are too many. No torch."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from clipctl.errors import DataError

MAX_BAD_SHARE = 0.05  # of the pictures; beyond that, something is wrong with the data as a whole
LISTED_BAD = 10


class BadPictureError(Exception):
    """A picture that cannot be used; the message is the reason, from a small fixed set."""


class BadPicture(NamedTuple):
    """A picture of a source that could not be used."""

    picture: int
    reason: str


def check_bad(reasons: Mapping[str, str], pictures: int) -> None:
    """Raise DataError if more than a few pictures are bad."""
    if len(reasons) <= MAX_BAD_SHARE * pictures:
        return
    is_lost = all(reason == "missing" for reason in reasons.values())
    raise DataError(
        f"{len(reasons):,} of {pictures:,} pictures cannot be used, more than {MAX_BAD_SHARE:.0%}: "
        f"{bad_counts(reasons.values())}: {'; '.join(bad_lines(reasons))}",
        "pass --image-root DIR if they are elsewhere" if is_lost else "clipctl data inspect DATA --deep lists them all",
    )


def bad_lines(reasons: Mapping[str, str], limit: int = LISTED_BAD) -> list[str]:
    """Pictures and why they cannot be used; at most `limit` of them."""
    lines = [f"{label} ({reason})" for label, reason in list(reasons.items())[:limit]]
    return lines + ([f"and {len(reasons) - limit:,} more"] if len(reasons) > limit else [])


def bad_counts(reasons: Iterable[str]) -> str:
    """3 missing, 1 truncated."""
    return ", ".join(f"{count:,} {reason}" for reason, count in Counter(reasons).most_common())
