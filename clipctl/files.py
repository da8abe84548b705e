"""All file access: atomic writes (complete or not at all), and reading and appending that accept only plain files of a
plausible size. Whatever a run, a dataset or the application directory holds may come from elsewhere."""

import errno
import io
import json
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from clipctl.errors import ConfigError


@contextmanager
def replaced(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path next to `path`, for a file or a new directory; move it into place only on success.

    Durable means synced to disk before the name appears, so a power cut cannot leave a name without its content.
    """
    partial = path.with_name(f".{path.name}.partial")
    delete(partial)
    try:
        yield partial
        if durable:
            _sync(partial)
        os.replace(partial, path)
        if durable:
            sync_directory(path.parent)
    finally:
        delete(partial)


def check_parent(path: Path) -> None:
    """Raise if a file cannot be written because its directory does not exist, or because it is one itself: to be said
    before the work begins."""
    if path.is_dir():
        raise ConfigError(f"{path} is a directory", "name a file to write")
    if not path.absolute().parent.is_dir():
        problem = f"there is no directory {path.parent} to write {path.name} to"
        raise ConfigError(problem, f"create it first: mkdir -p {shlex.quote(str(path.parent))}")


def discard(directory: Path) -> None:
    """Rename a directory, then delete it: if killed halfway, no half-deleted directory keeps the original name."""
    doomed = directory.with_name(f".{directory.name}.deleted")
    delete(doomed)
    os.rename(directory, doomed)
    delete(doomed)


def write_json(path: Path, document: dict[str, Any]) -> None:
    with replaced(path) as partial:
        partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def overwrite(path: Path, content: bytes, limit_bytes: int) -> None:
    """Write over a small file, in one write and without using more disk space: any rest of the old content is filled
    with spaces. One of more than `limit_bytes` is not ours: it is cut off first."""
    with open_to_change(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > limit_bytes:
            file.truncate(len(content))
            size_bytes = 0
        file.write(content.ljust(size_bytes))


def open_plain(path: Path, *, follows_links: bool = False) -> io.FileIO:
    """Open a regular file for reading. An expected name may turn out to be a symbolic link that leaves the directory,
    or a pipe that would block forever; both raise an OSError that says so. In datasets, links are common."""
    return io.FileIO(_open_plain(path, os.O_RDONLY, follows_links=follows_links), "rb")


def open_to_append(path: Path) -> int:
    """The descriptor of a regular file, created if there is none. In a copied run, a symbolic link with an expected
    name would let us write to any of the user's files."""
    return _open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def open_to_change(path: Path) -> io.FileIO:
    """Open a regular file for reading and writing anywhere in it, created if there is none."""
    return io.FileIO(_open_plain(path, os.O_RDWR | os.O_CREAT), "r+b")


class NotPlainError(OSError):
    """A directory, a pipe or a device where a file is expected, or a link where none belongs."""


def _open_plain(path: Path, flags: int, *, follows_links: bool = False) -> int:
    if not follows_links:
        flags |= getattr(os, "O_NOFOLLOW", 0)
        if path.is_symlink():
            raise NotPlainError(f"{path.name} is a symbolic link")
    flags |= getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a pipe that nobody reads
            raise NotPlainError(f"{path.name} is not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlainError(f"{path.name} is not a regular file")
    return descriptor


def read_bounded(path: Path, limit_bytes: int) -> bytes:
    """The content of a regular file. Raises OSError if it is larger than such a file can plausibly be."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit_bytes:
            raise OSError(f"{path.name} has {size:,} bytes; the limit is {limit_bytes:,}")
        return file.read(limit_bytes)


def read_json(path: Path, limit_bytes: int) -> Any:
    """The document in a regular file. Raises OSError or ValueError."""
    return parse_json(read_bounded(path, limit_bytes))


def parse_json(text: str | bytes) -> Any:
    """Raises ValueError, for nesting that is too deep as well."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_sealed(path: Path, document: dict[str, Any]) -> None:
    """A document with its own sha256, for what must be trusted when it is read later."""
    write_json(path, {**document, "sha256": _seal(document)})


def read_sealed(path: Path, limit_bytes: int) -> dict[str, Any]:
    """What `write_sealed` wrote, unchanged to the last bit. Raises OSError or ValueError."""
    document = read_json(path, limit_bytes)
    if not isinstance(document, dict) or document.pop("sha256", None) != _seal(document):
        raise ValueError(f"{path.name} has changed since it was written")
    return document


def _seal(document: dict[str, Any]) -> str:
    import hashlib

    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """Of a regular file's content."""
    import hashlib  # not at the top: every command imports this module

    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_disk_full(error: OSError) -> bool:
    """Whether the disk, or the user's quota, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def sync_file(path: Path) -> None:
    """Wait until the file's content is on disk."""
    with path.open("r+b") as file:  # r+: Windows cannot sync a read-only handle
        if sys.platform == "darwin":
            import fcntl

            # On macOS fsync stops at the drive's cache; F_FULLFSYNC flushes that too, if the filesystem supports it.
            with suppress(OSError):
                fcntl.fcntl(file.fileno(), fcntl.F_FULLFSYNC)
                return
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until a directory's entries are on disk. Windows has no such call and does not need one."""
    if os.name != "nt":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:  # some network filesystems cannot sync directories
            if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)


def size_on_disk(directory: Path) -> int:
    """Bytes of all files in a directory and below; what another process has just deleted does not count."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _sync(path: Path) -> None:
    if path.is_dir():
        for inside in path.iterdir():
            _sync(inside)
        sync_directory(path)
    else:
        sync_file(path)


def delete(path: Path) -> None:
    """Delete a file or directory if it exists. Errors are ignored: leftovers are swept up later."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
