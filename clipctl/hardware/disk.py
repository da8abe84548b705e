"""Free disk space, and whether it can be written to. No torch."""

import shutil
import tempfile
from pathlib import Path


def free_bytes(path: Path) -> int:
    """Space available to this user where `path` is or will be."""
    return shutil.disk_usage(existing_part(path)).free


def try_to_write(path: Path) -> None:
    """Raises OSError if nothing can be written where `path` is or will be. Actually tried, because permissions do not
    tell the whole story: not for root, not on a read-only disk."""
    with tempfile.TemporaryDirectory(prefix=".clipctl-", dir=existing_part(path)):
        pass


def existing_part(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
