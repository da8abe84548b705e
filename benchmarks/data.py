"""What reading your own pictures costs: python benchmarks/data.py [index] [open] [decode] [step]

- index: a CSV of a million rows, from nothing: at most 20 s and 400 MB.
- open: ten million pairs from the index that was built before: below 1 s and 200 MB.
- decode: pictures a second on one core at 224 px from 1024-px JPEGs, against the plain way (open, convert, resize,
  crop, to tensor, normalise), in turns: at least 2 times, and from the cache in memory at least 10 times.
- step: the share of a step of `tiny` that data take, with pictures in the cache: below 5%.
"""

import argparse
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import PIL
import torch
from PIL import Image

from clipctl.config.sections import OPENAI_MEAN as MEAN
from clipctl.config.sections import OPENAI_STD as STD
from clipctl.data.cache import RamCache
from clipctl.data.decoding import open_picture
from clipctl.data.images import Augmentation, augment, kept_side
from clipctl.hardware import cpu
from clipctl.hardware.memory import keep_freed_memory
from clipctl.model.clip import normalise

INDEX_ROWS, OPEN_PAIRS = 1_000_000, 10_000_000
SIZE_PX = 224

MEASURED = """
import json, sys, time
from clipctl.config.sections import DataConfig
from clipctl.data.catalog import read_data
from clipctl.hardware.memory import peak_rss_bytes
started = time.perf_counter()
data = read_data(DataConfig(source=(sys.argv[1],)))
print(json.dumps([time.perf_counter() - started, peak_rss_bytes(), len(data.train) + len(data.val)]))
"""


def measure_opening(path: Path) -> tuple[float, float, int]:
    """Seconds, peak MB and pictures of a fresh process that opens the data."""
    done = subprocess.run([sys.executable, "-c", MEASURED, str(path)], capture_output=True, text=True, check=True)
    seconds, peak_bytes, pictures = json.loads(done.stdout)
    return seconds, peak_bytes / 1e6, pictures


def photo(seed: int, width: int = 1024, height: int = 1024) -> bytes:
    """A JPEG with as much detail as a photograph: smooth shapes, edges and grain."""
    rng = np.random.default_rng(seed)
    shapes, detail = (
        Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).resize(
            (width, height), Image.Resampling.BICUBIC
        )
        for side in (24, 256)
    )
    grain = rng.normal(0, 5, (height, width, 1))
    pixels = 0.8 * np.asarray(shapes, float) + 0.2 * np.asarray(detail, float) + grain
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=88)
    return buffer.getvalue()


def index(place: Path) -> None:
    """A million rows, five captions a picture, pictures that are there."""
    names = [f"{number:07d}.jpg" for number in range(INDEX_ROWS // 5)]
    (place / "images").mkdir()
    content = photo(0, 32, 32)
    for name in names:
        (place / "images" / name).write_bytes(content)
    rng = np.random.default_rng(0)
    words = [f"word{number}" for number in range(5000)]
    with (place / "captions.csv").open("w") as file:
        file.write("image,caption\n")
        for name in names:
            for _ in range(5):
                file.write(f"{name},{' '.join(words[number] for number in rng.integers(0, 5000, 10))}\n")
    size = (place / "captions.csv").stat().st_size
    seconds, peak_mb, pictures = measure_opening(place / "captions.csv")
    print(
        f"index   {INDEX_ROWS:,} rows ({size / 1e6:.0f} MB) of {pictures:,} pictures: "
        f"{seconds:.1f} s, peak {peak_mb:.0f} MB"
    )
    seconds, peak_mb, _ = measure_opening(place / "captions.csv")
    print(f"        opened again: {seconds:.2f} s, peak {peak_mb:.0f} MB")


def open_large(place: Path) -> None:
    """Ten million pictures with a caption each. Folders that are links to their own directory make ten million names of
    one file."""
    root = place / "large"
    root.mkdir()
    (root / "0.jpg").write_bytes(photo(0, 32, 32))
    for digit in "0123456789":
        (root / digit).symlink_to(".")
    with (root / "captions.csv").open("w") as file:
        file.write("image,caption\n")
        for number in range(OPEN_PAIRS):
            file.write(f"{'/'.join(f'{number:07d}')}/0.jpg,a caption of picture {number} in a long list\n")
    seconds, peak_mb, pictures = measure_opening(root / "captions.csv")
    print(f"open    {pictures:,} pairs, first time: {seconds:.0f} s, peak {peak_mb:.0f} MB")
    for _ in range(3):
        seconds, peak_mb, _ = measure_opening(root / "captions.csv")
        print(f"        from the index: {seconds:.2f} s, peak {peak_mb:.0f} MB")


def plain_way(content: bytes) -> torch.Tensor:
    """As pictures are prepared without any of this: whole decoding, resize of the shorter side, crop, floats."""
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    scale = SIZE_PX / min(picture.size)
    picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BICUBIC)
    left, top = (picture.width - SIZE_PX) // 2, (picture.height - SIZE_PX) // 2
    picture = picture.crop((left, top, left + SIZE_PX, top + SIZE_PX))
    tensor = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
    return (tensor - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


class Photos:
    """What a cache asks of a source."""

    def __init__(self, contents: list[bytes]) -> None:
        self.contents = contents

    def picture(self, index: int, least_px: int) -> Image.Image:
        return open_picture(self.contents[index], least_px)


def ours(cache: RamCache, count: int) -> torch.Tensor:
    how = Augmentation(max_shift=0, max_zoom=0, flip=True, min_crop=0.6, jitter=0.1)
    views, jitter = [], []
    for index in range(count):
        rng = np.random.default_rng([0, 1, index])
        views.append(augment(cache.get(index), rng, SIZE_PX, how, flip=True))
        jitter.append(rng.uniform(0.9, 1.1, size=3))
    return normalise(torch.from_numpy(np.stack(views)), torch.tensor(np.array(jitter), dtype=torch.float32))


def compare(contents: list[bytes]) -> dict[str, float]:
    """Pictures a second of each way, in turns, on one core, from bytes in memory to normalised floats."""
    side, count = kept_side(SIZE_PX, drawn=False), len(contents)
    without, within = (RamCache(Photos(contents), side, limit_bytes) for limit_bytes in (0, 10**9))
    ways = {
        "plain": lambda: torch.stack([plain_way(content) for content in contents]),
        "ours": lambda: ours(without, count),
        "cached": lambda: ours(within, count),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(8):
        for name in list(ways)[:: 1 if round_number % 2 else -1]:
            started = time.perf_counter()
            ways[name]()
            times[name].append(time.perf_counter() - started)
    return {name: count / median(values[1:]) for name, values in times.items()}


def decode(_: Path) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as a training does
    for width, height in ((1024, 1024), (1024, 768)):
        contents = [photo(seed, width, height) for seed in range(32)]
        speeds = compare(contents)
        kilobytes = sum(map(len, contents)) / len(contents) / 1e3
        print(
            f"decode  {width}×{height} JPEG of {kilobytes:.0f} kB, one core: plain {speeds['plain']:.0f}/s, "
            f"decode and augment {speeds['ours']:.0f}/s ({speeds['ours'] / speeds['plain']:.1f} ×), "
            f"cached {speeds['cached']:.0f}/s ({speeds['cached'] / speeds['plain']:.1f} ×)"
        )


def step(place: Path) -> None:
    """Real trainings of the default model on 240 photographs."""
    root = place / "photos"
    root.mkdir()
    for number in range(240):
        (root / f"{number}.jpg").write_bytes(photo(number, 640, 480))
        (root / f"{number}.txt").write_text(f"photo number {number} of some place")
    command = [sys.executable, "-m", "clipctl", "train", str(root), "--epochs", "6", "--runs-dir", str(place / "runs")]
    command += ["--precision", "fp32", "--cache", "ram", "--json"]
    shares = []
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        run = Path(json.loads(done.stdout)["run"])
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if row["kind"] == "step" and row["epoch"] > 1]  # the first epoch decodes
        shares.append(sum(row["data_s"] for row in steps) / sum(row["step_s"] for row in steps))
    words = ", ".join(f"{share:.1%}" for share in shares)
    print(f"step    tiny, batch 27, pictures in memory: data take {words} of a step")


PARTS = {"index": index, "open": open_large, "decode": decode, "step": step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    parts = parser.parse_args().parts or list(PARTS)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, Pillow {PIL.__version__}"
    print(f"{cpu.name()}, {cpu.usable_cores()} cores, {versions}")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["CLIPCTL_HOME"] = str(Path(directory) / "home")
        for part in parts:
            PARTS[part](Path(directory))


if __name__ == "__main__":
    main()
