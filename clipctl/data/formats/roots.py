"""Finds the directories that picture paths start from, even if the paths are from another computer. No torch."""

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from clipctl.data.formats.rows import is_absolute, side_of
from clipctl.errors import DataError

PROBES = 64  # pictures looked up to find the roots
DEPTH_LIMIT = 32  # folders above a picture that are tried as its old home
FOLDER_LIMIT = 50
KEPT_ROOTS = 8


def candidate_roots(place: Path, image_root: str | None) -> list[Path]:
    """Directories that the paths in a file in `place` may start from, the most likely first: the one asked for; the
    file's own directory, its subfolders, its parent, the parent's subfolders; the working directory."""
    if image_root is not None:
        return [Path(image_root)]
    above = place.parent
    return list(dict.fromkeys([place, *_folders(place), above, *_folders(above), Path.cwd()]))


def _folders(place: Path) -> list[Path]:
    """Folders in `place` and one level below: archives unpack to flickr30k_images/flickr30k_images."""
    found: list[Path] = []
    for folder in _subfolders(place):
        found.append(folder)
        found += list(_subfolders(folder))[:3]
        if len(found) >= FOLDER_LIMIT:
            break
    return found[:FOLDER_LIMIT]


def _subfolders(place: Path) -> Iterator[Path]:
    try:
        with os.scandir(place) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except OSError:
        return
    yield from (place / name for name in names)


def find_roots(names: Sequence[str], candidates: Sequence[Path]) -> list[Path]:
    """Where the pictures are: the nearest candidate that holds a fair share of a sample, then the folders next to it
    that hold more pictures of the data (train2017 and val2017). A more distant candidate that holds more is another
    dataset with the same names. Raises DataError if none is found."""
    probes = _sample(names)
    hits = {root: {name for name in probes if _is_there(root, name)} for root in candidates}
    most = max(map(len, hits.values()))
    if not most:
        raise _not_found(probes, candidates)
    best = next(root for root in candidates if 2 * len(hits[root]) >= most)
    if best == candidates[0]:
        return [best]
    absent = _sample([name for name in names if not _is_there(best, name)])
    beside = [root for root in candidates if root != best and root.parent == best.parent]
    needed = [root for root in beside if _holds_more(root, absent, hits[best]) or side_of(root.name)]
    return [best, *needed][:KEPT_ROOTS]


def _not_found(probes: Sequence[str], candidates: Sequence[Path]) -> DataError:
    if all(name.startswith(("http://", "https://")) for name in probes):
        return DataError(
            f"the pictures are URLs, such as {probes[0]}",
            "clipctl reads local files: download them first, e.g. with img2dataset, and pass its directory of shards",
        )
    try:
        os.fsencode(probes[0])
    except UnicodeEncodeError:
        return DataError(
            f"this locale ({sys.getfilesystemencoding()}) cannot represent file names such as {probes[0]}",
            "set PYTHONUTF8=1, or LC_ALL to one such as C.UTF-8",
        )
    tried = ", ".join(str(root) for root in candidates[:6])
    more = f" and {len(candidates) - 6} more" if len(candidates) > 6 else ""
    return DataError(
        f"none of {len(probes)} pictures exists, such as {probes[0]}; looked in {tried}{more}",
        "pass --image-root DIR if they are elsewhere, or --image-column NAME if another column names them",
    )


# --- paths of another computer --------------------------------------------------------------------------------


def are_windows_paths(names: Sequence[str], candidates: Sequence[Path]) -> bool:
    """Whether the backslashes in these names separate folders. Except on Windows, one may be part of a name."""
    probes = _sample([name for name in names if "\\" in name])
    return bool(probes) and not any(_is_there(root, name) for name in probes for root in candidates)


def find_old_home(names: Sequence[str], candidates: Sequence[Path]) -> str:
    """The directory of another computer that absolute paths start with, ending with a slash: without it, they exist
    under one of the candidates. The shortest one that finds at least half as many as the best; empty if there is none,
    or if the paths exist as they are."""
    probes = _sample(names)
    absolute = [name for name in probes if is_absolute(name)]
    if 2 * len(absolute) < len(probes) or any(_is_there(root, name) for name in probes for root in candidates):
        return ""
    counts = Counter(home for name in absolute for home in _homes(name))
    homes = sorted((home for home, count in counts.items() if 2 * count >= len(absolute)), key=len)[:DEPTH_LIMIT]
    hits = {home: _hits(home, absolute, candidates) for home in homes}
    most = max(hits.values(), default=0)
    return next((home for home in homes if 2 * hits[home] >= most), "") if most else ""


def is_below(name: str, home: str) -> bool:
    """Whether what is left without `home` is a relative path that cannot leave the directory it is looked up in."""
    rest = name[len(home) :]
    is_relative = not is_absolute(rest) and not os.path.splitdrive(rest)[0] and ".." not in re.split(r"[/\\]", rest)
    return name.startswith(home) and bool(rest) and is_relative


def _homes(name: str) -> list[str]:
    """The directories above a path with forward slashes, the shortest first."""
    ends = [place + 1 for place, letter in enumerate(name) if letter == "/"]
    return [name[:end] for end in ends[:DEPTH_LIMIT]]


def _hits(home: str, names: Sequence[str], candidates: Sequence[Path]) -> int:
    """How many of the names exist without `home`, in the candidate that has the most of them."""
    rests = [name[len(home) :] for name in names if is_below(name, home)]
    return max(sum(_is_there(root, rest) for rest in rests) for root in candidates)


def _holds_more(root: Path, absent: Sequence[str], present: set[str]) -> bool:
    """Whether it has pictures that the best root lacks, and is not just another version of the same pictures."""
    return any(_is_there(root, name) for name in absent) and not any(_is_there(root, name) for name in present)


def _sample(names: Sequence[str]) -> list[str]:
    return [names[number] for number in range(0, len(names), max(1, len(names) // PROBES))]


def _is_there(root: Path, name: str) -> bool:
    return os.path.exists(os.path.join(root, name))
