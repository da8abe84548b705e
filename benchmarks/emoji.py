"""Two datasets for benchmarks/quality.py: emoji by several hands, tested on a hand that was never seen.

    pip install resvg-py
    npm pack @iconify/json@2.2.535            # about 100 MB
    python benchmarks/emoji.py iconify-json-2.2.535.tgz OUT
    python benchmarks/quality.py --data one=OUT/one/train.csv,OUT/one/val.csv --seconds 120 --seeds 1

A caption is an emoji's name in words, so most captions have one or two pictures to train on. Held-out pictures have
captions that occur in training.
"""

import csv
import json
import re
import sys
import tarfile
from pathlib import Path

import resvg_py

SETS = {"one": (("noto", "twemoji"), "emojione"), "two": (("openmoji", "fluent-emoji-flat"), "noto")}
SIDE_PX, MAX_WORDS = 64, 6
SKIN = re.compile(r"skin-tone|light|dark|medium")  # the same thing in another colour


def family(package, name):
    """Captions and drawings of one set, as SVG."""
    document = json.load(package.extractfile(f"package/json/{name}.json"))
    width, height = document.get("width", 24), document.get("height", 24)
    found = {}
    for key, icon in document["icons"].items():
        words = key.replace("-", " ").replace("_", " ")
        if icon.get("hidden") or SKIN.search(key) or not len(words) > 2 or len(words.split()) > MAX_WORDS:
            continue
        box = [icon.get("left", 0), icon.get("top", 0), icon.get("width", width), icon.get("height", height)]
        found[words] = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{" ".join(map(str, box))}" width="{SIDE_PX}" height="{SIDE_PX}">{icon["body"]}</svg>'
        )
    return found


def write_table(table, families, captions=None):
    """Pictures of some families, and a table of them; `captions`: only those. Returns the captions written."""
    written = set()
    with table.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["filepath", "caption"])
        for name, drawings in families.items():
            (table.parent / name).mkdir(parents=True, exist_ok=True)
            for caption, drawing in drawings.items():
                if captions is not None and caption not in captions:
                    continue
                picture = table.parent / name / f"{caption.replace(' ', '-')}.png"
                picture.write_bytes(bytes(resvg_py.svg_to_bytes(svg_string=drawing, background="#ffffff")))
                rows.writerow([picture.relative_to(table.parent), caption])
                written.add(caption)
    return written


def main(archive, out):
    with tarfile.open(archive) as package:
        for name, (known, held_out) in SETS.items():
            place = Path(out) / name
            place.mkdir(parents=True, exist_ok=True)
            captions = write_table(place / "train.csv", {one: family(package, one) for one in known})
            tested = write_table(place / "val.csv", {held_out: family(package, held_out)}, captions)
            print(f"{place}: {len(captions):,} captions to train on, {len(tested):,} pictures held out")


if __name__ == "__main__":
    main(*sys.argv[1:])
