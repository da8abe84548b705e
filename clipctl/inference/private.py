"""Indexes that clipctl keeps for itself in the application directory: searching a folder is a single command.

    KEY/          an index, named after the folder and the model
    KEY.0.use     locked by a process as long as it uses the index; KEY.1.use by the next
    .lock         held while a use begins, and while indexes are deleted

Those not used for longest are deleted when there are too many or too large ones; one in use never is.
"""

import hashlib
import os
from contextlib import suppress
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from clipctl import files
from clipctl.hardware.disk import free_bytes
from clipctl.hardware.profile import cache_dir
from clipctl.inference.embedder import Embedder
from clipctl.inference.embedding_store import EmbeddingStore
from clipctl.inference.gallery import BadFile, open_gallery
from clipctl.inference.refresh import refresh
from clipctl.progress import Count, Tell, silent

WAIT_S = 600.0  # two searches of one folder at the same time: the second waits
KEPT_INDEXES = 20
DISK_SHARE = 0.1  # that all of them may take, of what would be free without them


def private_index(
    place: str, embedder: Embedder, tell: Tell = silent, progress: Count = lambda done, total: None
) -> tuple[EmbeddingStore, list[BadFile]]:
    """The index of a folder, made or brought up to date, and pictures that cannot be used."""
    gallery = open_gallery([place], tell)
    home = cache_dir("embeddings")
    name = f"{os.path.abspath(place)}\0{embedder.identity.fingerprint}"
    key = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:24]
    use = _begin_use(home, key)
    done = refresh(home / key, embedder, gallery, [place], progress=progress, wait_s=WAIT_S)
    if done.embedded:
        sweep(home)
    return EmbeddingStore.open(home / key, guard=use), done.bad


def _begin_use(home: Path, key: str) -> FileLock:
    """Nobody sweeps the index while the lock exists: until this process ends, if not before."""
    with _locked(home):
        (home / key).mkdir(exist_ok=True)
        os.utime(home / key)  # when it was last used
        for number in count():
            use = FileLock(home / f"{key}.{number}.use", timeout=0)
            with suppress(Timeout):
                use.acquire()
                return use
    raise AssertionError


def _is_used(home: Path, key: str) -> bool:
    for file in home.glob(f"{key}.*.use"):
        try:
            with FileLock(file, timeout=0):
                continue
        except Timeout:
            return True
    return False


def sweep(home: Path) -> None:
    """Keep the indexes that were used last, as many as may be kept, and those in use."""
    with _locked(home):
        found = sorted((path for path in home.iterdir() if path.is_dir()), key=lambda path: -path.stat().st_mtime)
        sizes_bytes = {path: files.size_on_disk(path) for path in found}
        room_bytes = DISK_SHARE * (free_bytes(home) + sum(sizes_bytes.values()))
        kept = 0
        for path, size_bytes in sizes_bytes.items():
            is_left_over = path.name.startswith(".")  # of a sweep that was killed
            if not is_left_over and (_is_used(home, path.name) or (kept < KEPT_INDEXES and size_bytes <= room_bytes)):
                kept, room_bytes = kept + 1, room_bytes - size_bytes
            else:
                _delete(path)


def _delete(path: Path) -> None:
    with suppress(OSError):
        files.discard(path)
        for use in path.parent.glob(f"{path.name}.*.use"):
            files.delete(use)


def _locked(home: Path) -> FileLock:
    return FileLock(home / ".lock")
