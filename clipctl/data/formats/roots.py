"""Where relative picture paths start from. No torch."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from clipctl.data.formats.rows import side_of
from clipctl.errors import DataError

PROBES = 64  # pictures that are looked for before all are
FOLDER_LIMIT = 50
KEPT_ROOTS = 8


def candidate_roots(place: Path, image_root: str | None) -> list[Path]:
    """Directories that the paths in a file in `place` may start from, the likeliest first: the one asked for; the
    file's own, the folders in it, the one above, the folders in that; the working directory."""
    if image_root is not None:
        return [Path(image_root)]
    above = place.parent
    return list(dict.fromkeys([place, *_folders(place), above, *_folders(above), Path.cwd()]))


def _folders(place: Path) -> list[Path]:
    """Folders in `place`, and folders in those, one deep: archives unpack to flickr30k_images/flickr30k_images."""
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
    """Where the pictures lie: the nearest candidate under which a fair share of a sample is found, then the folders
    beside it that hold other pictures of the data (train2017 and val2017). A farther one that holds more is another
    dataset with the same names. Raises DataError where none is found."""
    probes = _sample(names)
    hits = {root: {name for name in probes if _is_there(root, name)} for root in candidates}
    most = max(map(len, hits.values()))
    if most:
        best = next(root for root in candidates if 2 * len(hits[root]) >= most)
        if best == candidates[0]:
            return [best]
        absent = _sample([name for name in names if not _is_there(best, name)])
        beside = [root for root in candidates if root != best and root.parent == best.parent]
        needed = [root for root in beside if _holds_more(root, absent, hits[best]) or side_of(root.name)]
        return [best, *needed][:KEPT_ROOTS]
    if all(name.startswith(("http://", "https://")) for name in probes):
        raise DataError(
            f"pictures are given as web addresses, such as {probes[0]}",
            "clipctl reads files: download them first, for example with img2dataset, and pass its directory of shards",
        )
    tried = ", ".join(str(root) for root in candidates[:6])
    more = f" and {len(candidates) - 6} more" if len(candidates) > 6 else ""
    raise DataError(
        f"none of {len(probes)} pictures that were looked for exists, such as {probes[0]}; looked in {tried}{more}",
        "--image-root DIR says where they lie; --image-column NAME if another column names them",
    )


def _holds_more(root: Path, absent: Sequence[str], present: set[str]) -> bool:
    """Whether it has what the best root lacks, and is no other version of the same pictures."""
    return any(_is_there(root, name) for name in absent) and not any(_is_there(root, name) for name in present)


def _sample(names: Sequence[str]) -> list[str]:
    return [names[number] for number in range(0, len(names), max(1, len(names) // PROBES))]


def _is_there(root: Path, name: str) -> bool:
    return os.path.exists(os.path.join(root, name))
