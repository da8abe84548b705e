"""How long-running work reports its progress."""

from collections.abc import Callable

Tell = Callable[[str], None]  # what is being done, in words
Count = Callable[[int, int], None]  # how many are done, of how many


def silent(words: str) -> None:
    """Tells nobody."""
