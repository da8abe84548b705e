"""Pictures that cannot be used: which, why, how many are too many. No torch."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from clipctl.errors import DataError

LISTED_BAD = 10


class BadPictureError(Exception):
    """A picture that cannot be used; the message is the reason, from a small fixed set."""


class BadPicture(NamedTuple):
    """A picture of a source that could not be used."""

    picture: int
    reason: str


def check_bad(reasons: Mapping[str, str], pictures: int, max_share: float) -> None:
    """Raise DataError if more pictures are bad than a user expects: something is wrong with the data as a whole."""
    if len(reasons) <= max_share * pictures:
        return
    is_lost = all(reason == "missing" for reason in reasons.values())
    where = "--image-root DIR if they are elsewhere" if is_lost else "clipctl data inspect DATA --deep lists them all"
    allowed = math.ceil(100 * len(reasons) / pictures)
    raise DataError(
        f"{len(reasons):,} of {pictures:,} pictures cannot be used, more than {max_share:.0%}: "
        f"{bad_counts(reasons.values())}: {'; '.join(bad_lines(reasons))}",
        f"{where}; to train without them: --max-bad {allowed}%",
    )


def bad_lines(reasons: Mapping[str, str], limit: int = LISTED_BAD) -> list[str]:
    """Pictures and why they cannot be used; at most `limit` of them."""
    lines = [f"{label} ({reason})" for label, reason in list(reasons.items())[:limit]]
    return lines + ([f"and {len(reasons) - limit:,} more"] if len(reasons) > limit else [])


def bad_counts(reasons: Iterable[str]) -> str:
    """3 missing, 1 truncated."""
    return ", ".join(f"{count:,} {reason}" for reason, count in Counter(reasons).most_common())
