"""What long work says about itself while it goes on."""

from collections.abc import Callable

Tell = Callable[[str], None]  # what is being done, in words
Count = Callable[[int, int], None]  # how many are done, of how many


def silent(words: str) -> None:
    """Tells nobody."""
