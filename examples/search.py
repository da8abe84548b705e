"""Find the pictures of a folder that match a caption best:  python examples/search.py RUN@best FOLDER "a red cat" """

import sys
from pathlib import Path

import clipctl
from clipctl.data.formats.rows import is_picture

SHOWN = 5


def main(name: str, folder: str, caption: str) -> None:
    model = clipctl.load(name)
    files = sorted(path for path in Path(folder).rglob("*") if is_picture(path.name))
    scores = model.embed_images(files) @ model.embed_texts([caption])[0]
    for place in scores.argsort()[::-1][:SHOWN]:
        sys.stdout.write(f"{scores[place]:6.3f}  {files[place]}\n")


if __name__ == "__main__":
    main(*sys.argv[1:4])
