"""One word decides how often things happen."""


def due(count: int, every: int, last: int) -> bool:
    """True on every `every`-th count and on the last one; `every` 0 means on the last only."""
    return count == last or (every > 0 and count % every == 0)
