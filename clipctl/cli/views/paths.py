"""Paths for people."""

from pathlib import Path


def shown(path: str) -> str:
    """Relative to here, if it is below."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
