"""Files that appear whole or not at all."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; put it in place, durably, only on success."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        sync_file(partial)
        os.replace(partial, path)
        sync_directory(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, document: dict[str, Any]) -> None:
    with replaced(path) as partial:
        partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def sync_file(path: Path) -> None:
    """Wait until the file's bytes are on the disk."""
    with path.open("r+b") as file:  # r+: Windows cannot sync a read-only handle
        if sys.platform == "darwin":
            import fcntl

            # On macOS fsync stops at the drive's cache; F_FULLFSYNC goes through it.
            fcntl.fcntl(file.fileno(), fcntl.F_FULLFSYNC)
        else:
            os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk. Windows has no such call and does not need it."""
    if os.name != "nt":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
