"""Room on a disk. No torch."""

import shutil
from pathlib import Path


def free_bytes(path: Path) -> int:
    """Free for us where `path` is or will be."""
    return shutil.disk_usage(existing_part(path)).free


def existing_part(path: Path) -> Path:
    """The path, or the nearest of its parents that is there."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
