"""Indexes that clipctl keeps for itself in the application directory: searching a folder is a single command. Each is
named after the folder and the model. The least recently used are deleted when there are too many or they take too much
space."""

import hashlib
import os

from clipctl import files
from clipctl.errors import StoreError
from clipctl.hardware.disk import free_bytes
from clipctl.hardware.shelf import Shelf
from clipctl.inference.embedder import Embedder
from clipctl.inference.embedding_store import MANIFEST, EmbeddingStore, clear, is_store
from clipctl.inference.gallery import BadFile, open_gallery
from clipctl.inference.refresh import Refreshed, refresh
from clipctl.progress import Count, Tell, silent

WAIT_S = 600.0  # two searches of one folder at the same time: the second waits
KEPT_INDEXES = 20
DISK_SHARE = 0.1  # that all of them may take, of what would be free without them


def private_index(
    place: str, embedder: Embedder, tell: Tell = silent, progress: Count = lambda done, total: None
) -> tuple[EmbeddingStore, list[BadFile]]:
    """The index of a folder, made or brought up to date, and pictures that cannot be used."""
    gallery = open_gallery([place], tell)
    shelf = Shelf("embeddings")
    name = f"{os.path.abspath(place)}\0{embedder.identity.fingerprint}"
    key = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:24]
    path, use = shelf.home / key, shelf.use(key)

    def refreshed() -> Refreshed:
        return refresh(path, embedder, gallery, [place], progress=progress, wait_s=WAIT_S)

    if (path / MANIFEST).exists() and not is_store(path):
        clear(path, WAIT_S)
    try:
        done = refreshed()
    except StoreError:  # damaged; the pictures are still there
        clear(path, WAIT_S)
        done = refreshed()
    if done.embedded:
        sweep(shelf)
    return EmbeddingStore.open(path, guard=use), done.bad


def sweep(shelf: Shelf) -> None:
    """Keep the indexes that were used last, up to the limits, and those in use."""
    with shelf.swept() as found:
        sizes_bytes = {path: files.size_on_disk(path) for path in found}
        room_bytes = DISK_SHARE * (free_bytes(shelf.home) + sum(sizes_bytes.values()))
        kept = 0
        for path, size_bytes in sizes_bytes.items():
            is_left_over = path.name.startswith(".")  # of a sweep that was killed
            if not is_left_over and (shelf.is_used(path) or (kept < KEPT_INDEXES and size_bytes <= room_bytes)):
                kept, room_bytes = kept + 1, room_bytes - size_bytes
            else:
                shelf.delete(path)
