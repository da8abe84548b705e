"""Paths for people."""

from pathlib import Path


def shown(path: str) -> str:
    """Relative to the working directory, if the path is below it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
