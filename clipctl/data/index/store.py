"""Indexes stored in the user's application directory: reused, rebuilt when the data change, cleaned up. No torch.

A directory of columns is named after the data's path, how it was read and the fingerprint of its content, and never
changes; a pointer next to it says which one is current. An index is rebuilt when the files it was built from have
changed.
"""

import json
import os
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from filelock import FileLock

from clipctl import files
from clipctl.data.formats.rows import Hints
from clipctl.data.index.build import build
from clipctl.data.index.columns import META, SCHEMA, Index, IndexFacts, read_index
from clipctl.hardware.profile import cache_dir
from clipctl.progress import Tell, silent


def open_index(source: str, hints: Hints, tell: Tell = silent, *, needs_captions: bool = True) -> Index:
    """The index of the data at a path, built if there is none or if the data have changed. If captions are not needed,
    it also has the pictures without one."""
    home = cache_dir("indexes")
    identity = [source, asdict(hints), SCHEMA, *([] if needs_captions else ["all pictures"])]
    key = sha256(json.dumps(identity).encode()).hexdigest()[:20]
    if index := _current(home, key):
        return index
    with FileLock(home / f"{key}.lock"):
        if index := _current(home, key):  # another process built it meanwhile
            return index
        _sweep(home, key)
        with files.replaced(home / f"{key}.new", durable=False) as partial:
            partial.mkdir()
            facts = build(source, hints, partial, tell, needs_captions=needs_captions)
        directory = home / f"{key}-{facts.fingerprint[:12]}"
        if read_index(directory) is None:
            files.delete(directory)
            os.rename(home / f"{key}.new", directory)
        else:  # rewritten with the same content: only the modification times have changed
            files.delete(home / f"{key}.new")
            files.write_json(directory / META, asdict(facts))
        files.write_json(home / f"{key}.json", {"directory": directory.name})
    index = read_index(directory)
    assert index is not None
    return index


def _current(home: Path, key: str) -> Index | None:
    try:
        pointer = json.loads(files.read_bounded(home / f"{key}.json", 1000))
        index = read_index(home / pointer["directory"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return index if index is not None and index.is_current() else None


def _sweep(home: Path, key: str) -> None:
    """Delete what is no longer needed: all but the last earlier state of these data, and indexes of deleted data."""
    try:
        last = json.loads(files.read_bounded(home / f"{key}.json", 1000))["directory"]
    except (OSError, ValueError, KeyError, TypeError):
        last = ""
    for path in home.iterdir():
        if not path.is_dir() or path.name == last:
            continue
        index = read_index(path)
        if path.name.startswith(f"{key}-") or (index is not None and not os.path.exists(_place(index.facts))):
            files.delete(path)


def _place(facts: IndexFacts) -> str:
    """A path that exists as long as the data do."""
    return str(facts.stamps[0][0]) if facts.stamps else facts.source
