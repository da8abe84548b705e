"""Room on a disk. No torch."""

import shutil
from pathlib import Path


def free_bytes(path: Path) -> int:
    """Free for us where `path` is or will be."""
    existing = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    return shutil.disk_usage(existing).free
