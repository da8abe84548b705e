"""A cache of decoded pictures, so that each is decoded only once: in memory, or in a file that all workers map.

Cached pixels are bit-identical to freshly decoded ones, so the cache affects speed and nothing else.
"""

import os
import struct
import zlib
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import PIL
import torch
from filelock import FileLock

from clipctl import files
from clipctl.data.decoding import Pixels, to_pixels
from clipctl.data.images import to_area
from clipctl.data.source import Source
from clipctl.hardware.profile import cache_dir

CacheKind = Literal["ram", "disk", "off"]


class PictureCache(Protocol):
    def get(self, index: int) -> Pixels:
        """The decoded picture. Raises BadPictureError."""


def open_cache(kind: CacheKind, source: Source, side_px: int, limit_bytes: int) -> PictureCache:
    if kind == "disk":
        return DiskCache(source, side_px, limit_bytes)
    return RamCache(source, side_px, limit_bytes if kind == "ram" else 0)


def decoded(source: Source, index: int, side_px: int) -> Pixels:
    """The pixels to cache for a picture. Raises BadPictureError."""
    return to_area(to_pixels(source.picture(index, side_px)), side_px)


class RamCache:
    """As many pictures as fit into `limit_bytes`. Each process has its own."""

    def __init__(self, source: Source, side_px: int, limit_bytes: int) -> None:
        self._source, self._side_px, self._room_bytes = source, side_px, limit_bytes
        self._pixels: dict[int, Pixels] = {}

    def get(self, index: int) -> Pixels:
        pixels = self._pixels.get(index)
        if pixels is None:
            pixels = decoded(self._source, index, self._side_px)
            if pixels.nbytes <= self._room_bytes:
                self._pixels[index] = pixels
                self._room_bytes -= pixels.nbytes
        return pixels


class DiskCache:
    """A file with one slot per picture. It outlives the run and is keyed by the pictures' identity.

    Slots are written through the file, not the memory map: on a full disk that is an error that costs one picture its
    slot, whereas a write through the map would kill the process. A slot's checksum is verified on first read: after a
    power cut, a header may be on disk without its pixels.
    """

    HEADER = struct.Struct("<HHI")  # height, width, CRC-32 (`checksum_of`); all zero in an empty slot

    def __init__(self, source: Source, side_px: int, limit_bytes: int) -> None:
        self._source, self._side_px = source, side_px
        self.slot_bytes = slot_bytes(side_px)
        self._slots = min(len(source), limit_bytes // self.slot_bytes)
        self.path = pictures_dir() / f"{cache_key(source, side_px)}.u8"
        self._is_open = False  # opened when the first picture is asked for

    def _open(self) -> None:
        # Locked, because a second process that sizes the file at the same time could shrink it again.
        with FileLock(self.path.with_suffix(".lock")):
            if self.path.is_symlink() or self.path.is_fifo():  # not ours: the name goes, what it stands for stays
                self.path.unlink()
            self._file = files.open_to_change(self.path)
            if os.fstat(self._file.fileno()).st_size < self._slots * self.slot_bytes:
                self._file.truncate(self._slots * self.slot_bytes)  # sparse: takes no space until written
        os.utime(self.path)  # marks the last use
        self._map = np.memmap(self._file, dtype=np.uint8, mode="r") if self._slots else np.zeros(0, dtype=np.uint8)
        self._checked = np.zeros(self._slots, dtype=bool)
        self._is_open = True

    def __getstate__(self) -> dict[str, object]:
        """Workers open the file themselves."""
        kept = {name: value for name, value in self.__dict__.items() if name not in ("_file", "_map", "_checked")}
        return {**kept, "_is_open": False}

    def get(self, index: int) -> Pixels:
        if index >= self._slots:
            return decoded(self._source, index, self._side_px)
        if not self._is_open:
            self._open()
        pixels = self._read(index)
        if pixels is None:
            pixels = decoded(self._source, index, self._side_px)
            with suppress(OSError):
                self._write(index, pixels)
        return pixels

    def _read(self, index: int) -> Pixels | None:
        slot = self._map[index * self.slot_bytes : (index + 1) * self.slot_bytes]
        height, width, checksum = self.HEADER.unpack_from(slot.data)
        end = self.HEADER.size + 3 * height * width
        if not height or not width or end > self.slot_bytes:
            return None
        pixels = slot[self.HEADER.size : end].reshape(height, width, 3)
        if not self._checked[index]:
            if checksum_of(index, pixels) != checksum:
                return None
            self._checked[index] = True
        return pixels

    def _write(self, index: int, pixels: Pixels) -> None:
        height, width, _ = pixels.shape
        content = np.ascontiguousarray(pixels)
        header = self.HEADER.pack(height, width, checksum_of(index, content))
        if self.HEADER.size + content.nbytes <= self.slot_bytes:
            self._file.seek(index * self.slot_bytes)
            self._file.write(header + content.tobytes())


def checksum_of(index: int, pixels: Pixels) -> int:
    """Of the pixels, their shape, and which picture it is."""
    return zlib.crc32(pixels.data, zlib.crc32(f"{index} {pixels.shape}".encode()))


def slot_bytes(side_px: int) -> int:
    return DiskCache.HEADER.size + 3 * side_px**2


def pictures_dir() -> Path:
    return cache_dir("pictures")


def kept_bytes() -> int:
    """Disk space taken by all cached pictures."""
    return sum(map(_occupied_bytes, pictures_dir().glob("*.u8")))


def cache_key(source: Source, side_px: int) -> str:
    """Changes with whatever changes the pixels: the pictures, the size, the decoder and the resizer."""
    versions = f"{PIL.__version__} {torch.__version__}"
    return sha256(f"{source.state} {side_px} {versions}".encode()).hexdigest()[:20]


def make_room(source: Source, side_px: int, limit_bytes: int) -> None:
    """Delete other data's cached pictures, least recently used first, until the cache is within `limit_bytes`."""
    own = f"{cache_key(source, side_px)}.u8"
    need_bytes = len(source) * slot_bytes(side_px)
    with suppress(OSError):
        others = sorted((path for path in pictures_dir().glob("*.u8") if path.name != own), key=os.path.getmtime)
        while others and need_bytes + sum(map(_occupied_bytes, others)) > limit_bytes:
            files.delete(others.pop(0))


def _occupied_bytes(path: Path) -> int:
    facts = path.lstat()
    return getattr(facts, "st_blocks", facts.st_size // 512) * 512
