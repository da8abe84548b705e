"""Images per second of `clipctl embed` against the bare forward pass on the same batches; and how fast unchanged
pictures are passed over.

    python benchmarks/embed.py [--preset small] [--pictures 192] [--rounds 3] [--unchanged 10000]

Both sides take turns in one process. The model has random weights, the pictures are JPEG files of 640 × 480.
"""

import argparse
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from clipctl.config.layers import Layer, resolve
from clipctl.data.tokenizers import WordTokenizer
from clipctl.hardware import cpu
from clipctl.hardware.devices import open_device
from clipctl.inference.embedder import BATCH_SIZE, Embedder, Identity
from clipctl.inference.gallery import open_gallery
from clipctl.inference.refresh import refresh
from clipctl.inference.stream import square_of
from clipctl.model.clip import Clip
from clipctl.model.encoder import Encoder


def make_embedder(preset):
    config = resolve([Layer("benchmark", {"preset": preset, "model.text.vocab_size": 64})])
    tokenizer = WordTokenizer.learn(["a benchmark"], 64, config.model.text.context)
    encoder = Encoder(Clip(config.model).eval(), open_device("cpu"))
    return Embedder(encoder, tokenizer, config, Identity("random", "random", "0" * 64))


def draw(directory, count, size=(640, 480)):
    """Smooth noise: about as hard to decode as photographs."""
    rng = np.random.default_rng(0)
    for number in range(count):
        small = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        small.resize(size, Image.Resampling.BICUBIC).save(directory / f"{number:05d}.jpg", quality=88)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--pictures", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--unchanged", type=int, default=10_000)
    asked = parser.parse_args()
    torch.set_num_threads(cpu.usable_cores())
    embedder = make_embedder(asked.preset)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        (root / "pictures").mkdir()
        draw(root / "pictures", asked.pictures)
        gallery = open_gallery([str(root / "pictures")])
        numbers = range(asked.pictures)
        pixels = np.stack([square_of(gallery.content(number), embedder.size_px) for number in numbers])
        bare, whole = [], []
        embedder.embed_pixels(pixels[:BATCH_SIZE])  # warm up
        for number in range(asked.rounds):
            started = time.perf_counter()
            for start in range(0, asked.pictures, BATCH_SIZE):
                embedder.embed_pixels(pixels[start : start + BATCH_SIZE])
            bare.append(asked.pictures / (time.perf_counter() - started))
            started = time.perf_counter()
            refresh(root / f"index-{number}", embedder, gallery, ["pictures"])
            whole.append(asked.pictures / (time.perf_counter() - started))
        (root / "many").mkdir()
        draw(root / "many", asked.unchanged, (32, 24))
        tiny = make_embedder("tiny")
        refresh(root / "many.index", tiny, open_gallery([str(root / "many")]), ["many"])
        started = time.perf_counter()
        done = refresh(root / "many.index", tiny, open_gallery([str(root / "many")]), ["many"])
        unchanged_s = time.perf_counter() - started
        assert done.embedded == 0
    print(f"{cpu.name()}, {cpu.usable_cores()} cores, Python {platform.python_version()}, torch {torch.__version__}")
    ours, theirs = (statistics.median(side) for side in (whole, bare))
    print(f"{asked.preset}: embed {ours:.1f} images/s, bare forward pass {theirs:.1f}: {ours / theirs:.0%}")
    print(f"{asked.unchanged:,} unchanged pictures passed over in {unchanged_s:.2f} s")


if __name__ == "__main__":
    main()
