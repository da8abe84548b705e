"""Where relative picture paths start from. No torch."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

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
    """The candidates under which some of a sample of pictures lie, the best first. Raises DataError if none does."""
    step = max(1, len(names) // PROBES)
    probes = [names[number] for number in range(0, len(names), step)]
    hits = {root: sum(os.path.isfile(os.path.join(root, name)) for name in probes) for root in candidates}
    found = [root for root in candidates if hits[root]]
    if found:
        return sorted(found, key=lambda root: -hits[root])[:KEPT_ROOTS]
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
