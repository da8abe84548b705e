"""Free disk space. No torch."""

import shutil
from pathlib import Path


def free_bytes(path: Path) -> int:
    """Space available to this user where `path` is or will be."""
    return shutil.disk_usage(existing_part(path)).free


def existing_part(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
