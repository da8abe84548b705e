"""What clipctl keeps in the application directory because making it again takes time: indexes of data, embeddings.

    KEY/          an entry
    KEY.0.use     locked by a process as long as it uses the entry; KEY.1.use by the next
    .lock         held while a use begins, and while entries are deleted

An entry in use is never deleted.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from clipctl import files
from clipctl.hardware.profile import cache_dir


class Shelf:
    def __init__(self, name: str) -> None:
        self.home = cache_dir(name)

    def use(self, key: str) -> FileLock:
        """Mark an entry as in use, whether it exists yet or not: nobody deletes it until its lock is released or
        gone."""
        with self._locked():
            with suppress(FileNotFoundError):
                os.utime(self.home / key)  # when it was last used
            for number in count():
                use = FileLock(self.home / f"{key}.{number}.use", timeout=0)
                with suppress(Timeout):
                    use.acquire()
                    return use
        raise AssertionError

    @contextmanager
    def swept(self) -> Iterator[list[Path]]:
        """All entries, the most recently used first. Nobody can begin to use one before the block ends."""
        with self._locked():
            found = [(path.stat().st_mtime, path) for path in self.home.iterdir() if path.is_dir()]
            yield [path for _, path in sorted(found, reverse=True)]

    def is_used(self, entry: Path) -> bool:
        for file in self.home.glob(f"{entry.name}.*.use"):
            try:
                with FileLock(file, timeout=0):
                    continue
            except Timeout:
                return True
        return False

    def delete(self, entry: Path) -> None:
        """Delete an entry unless it is in use."""
        with suppress(OSError):
            if not self.is_used(entry):
                files.discard(entry)
                for use in self.home.glob(f"{entry.name}.*.use"):
                    files.delete(use)

    def _locked(self) -> FileLock:
        return FileLock(self.home / ".lock")
