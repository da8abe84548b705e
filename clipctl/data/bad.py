"""Pictures that cannot be used: which ones, why, and how many are too many. No torch."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from clipctl.data.sampling import MIN_PAIRS
from clipctl.errors import DataError

LISTED_BAD = 10
USABLE_HINT = "JPEG, PNG, WebP and other common formats are read; open one in a viewer to see if it is damaged"


class BadPictureError(Exception):
    """A picture that cannot be used; the message is the reason, from a small fixed set."""


class BadPicture(NamedTuple):
    """A picture of a source that could not be used."""

    picture: int
    reason: str


def check_bad(reasons: Mapping[str, str], pictures: int, max_share: float) -> None:
    """Raise DataError, with a list, if more pictures are bad than a user expects."""
    if problem := too_many_bad(reasons, pictures, max_share):
        where = "" if _all_missing(reasons) else "clipctl data inspect DATA --deep lists them all; "
        raise DataError(f"{problem}: {'; '.join(bad_lines(reasons))}", f"{where}{problem.hint}")


def too_many_bad(
    reasons: Mapping[str, str], pictures: int, max_share: float, estimate: int | None = None
) -> DataError | None:
    """The error if more pictures are bad than a user expects: something is wrong with the data as a whole.
    `estimate`: how many are bad in all, if only a sample was decoded."""
    count = len(reasons) if estimate is None else estimate
    if count <= max_share * pictures:
        return None
    about = "about " if count > len(reasons) else ""
    root = "--image-root DIR if they are elsewhere; " if _all_missing(reasons) else ""
    return DataError(
        f"{about}{count:,} of {pictures:,} pictures cannot be used, more than {max_share:.0%}: "
        f"{bad_counts(reasons.values())}",
        f"{root}to train without them: --max-bad {math.ceil(100 * count / pictures)}%",
    )


def too_few_held_out(pictures: int, bad: Sequence[str]) -> DataError | None:
    """The error if the held-out pictures that can be used are too few; `bad` are the reasons of the others."""
    if pictures - len(bad) >= MIN_PAIRS:
        return None
    return DataError(
        f"too few of the {pictures:,} held-out pictures can be used: {bad_counts(bad)}",
        "repair or replace them, or hold out more with --val-fraction 0.3",
    )


def _all_missing(reasons: Mapping[str, str]) -> bool:
    return all(reason == "missing" for reason in reasons.values())


def bad_lines(reasons: Mapping[str, str], limit: int = LISTED_BAD) -> list[str]:
    """Pictures and why they cannot be used; at most `limit` of them."""
    lines = [f"{label} ({reason})" for label, reason in list(reasons.items())[:limit]]
    return lines + ([f"and {len(reasons) - limit:,} more"] if len(reasons) > limit else [])


def bad_counts(reasons: Iterable[str]) -> str:
    """3 missing, 1 truncated."""
    return ", ".join(f"{count:,} {reason}" for reason, count in Counter(reasons).most_common())
