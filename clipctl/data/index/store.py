"""Indexes stored in the user's application directory: reused, rebuilt when the data change, cleaned up. No torch.

A directory of columns is named after the data's path, how it was read and what was found, and never changes; a pointer
next to it says which one is current. An index is rebuilt when the files it was built from have changed, or when it has
changed since it was written. If there is no room for one, it is built in a temporary directory.
"""

import atexit
import json
import os
import tempfile
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from filelock import FileLock

from clipctl import files
from clipctl.data.formats.rows import Hints
from clipctl.data.index.build import build
from clipctl.data.index.columns import SCHEMA, Index, IndexFacts, read_facts, read_index
from clipctl.errors import RunError
from clipctl.hardware.shelf import Shelf
from clipctl.progress import Tell, silent

POINTER_LIMIT_BYTES = 1000


def open_index(source: str, hints: Hints, tell: Tell = silent, *, needs_captions: bool = True) -> Index:
    """The index of the data at a path, built if there is none or if the data have changed. If captions are not needed,
    it also has the pictures without one."""
    shelf = Shelf("indexes")
    identity = [source, asdict(hints), SCHEMA, *([] if needs_captions else ["all pictures"])]
    key = sha256(json.dumps(identity).encode()).hexdigest()[:20]
    try:
        return _kept_index(shelf, key, source, hints, tell, needs_captions=needs_captions)
    except OSError as error:
        return _passing_index(shelf.home, error, source, hints, tell, needs_captions=needs_captions)


def _kept_index(shelf: Shelf, key: str, source: str, hints: Hints, tell: Tell, *, needs_captions: bool) -> Index:
    if index := _current(shelf, key):
        return index
    with FileLock(shelf.home / f"{key}.lock"):
        if index := _current(shelf, key):  # another process built it meanwhile
            return index
        _sweep(shelf, key)
        with files.replaced(shelf.home / f"{key}.new") as partial:
            partial.mkdir()
            facts = build(source, hints, partial, tell, needs_captions=needs_captions)
        name = f"{key}-{facts.fingerprint[:12]}-{facts.state[:8]}"
        use = shelf.use(name)
        if read_facts(shelf.home / name) != facts or (index := read_index(shelf.home / name, use)) is None:
            files.delete(shelf.home / name)
            os.rename(shelf.home / f"{key}.new", shelf.home / name)
            index = read_index(shelf.home / name, use)
        files.write_sealed(shelf.home / f"{key}.json", {"directory": name})
        files.delete(shelf.home / f"{key}.new")
    if index is None:
        raise OSError(f"{shelf.home / name} has changed since it was written")
    return index


def _passing_index(
    home: Path, problem: OSError, source: str, hints: Hints, tell: Tell, *, needs_captions: bool
) -> Index:
    """An index for this process only, if there is no room for a permanent one."""
    try:
        directory = tempfile.TemporaryDirectory(prefix="clipctl-index-")
        atexit.register(directory.cleanup)  # kept until then
        place = Path(directory.name)
        build(source, hints, place, tell, needs_captions=needs_captions)
        index = read_index(place)
    except OSError as error:
        problem, index = error, None
    if index is None:
        raise RunError(
            f"the index of {source} cannot be written to {home}: {problem.strerror or problem}",
            "make room there, or set CLIPCTL_HOME to a directory that has some",
        )
    return index


def _current(shelf: Shelf, key: str) -> Index | None:
    name = _pointed_to(shelf, key)
    if not name or not (shelf.home / name).is_dir():
        return None
    index = read_index(shelf.home / name, shelf.use(name))
    return index if index is not None and index.is_current() else None


def _pointed_to(shelf: Shelf, key: str) -> str:
    """The name of the current index; empty if there is none."""
    try:
        name = str(files.read_sealed(shelf.home / f"{key}.json", POINTER_LIMIT_BYTES)["directory"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return name if name.startswith(f"{key}-") and os.sep not in name else ""


def _sweep(shelf: Shelf, key: str) -> None:
    """Delete what is no longer needed: all but the last earlier state of these data, and indexes of deleted data.
    Nothing that another process uses is deleted."""
    last = _pointed_to(shelf, key)
    with shelf.swept() as found:
        for path in found:
            facts = read_facts(path)
            is_old = path.name.startswith(f"{key}-") and path.name != last
            is_orphan = facts is not None and not os.path.exists(_place(facts))
            if is_old or is_orphan or path.name.endswith(".deleted"):
                shelf.delete(path)


def _place(facts: IndexFacts) -> str:
    """A path that exists as long as the data do."""
    return str(facts.stamps[0][0]) if facts.stamps else facts.source
