"""What 8-bit weights cost and gain: size, speed and recall of an ONNX export, before and after."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from clipctl.config.sections import DataConfig, is_synthetic
from clipctl.data.catalog import read_data
from clipctl.data.index.source import IndexedSource
from clipctl.data.source import Source
from clipctl.data.synthetic.scenes import SyntheticSource
from clipctl.errors import DataError
from clipctl.hardware.timing import Stopwatch, time_in_turns
from clipctl.inference.embedder import Embedder
from clipctl.inference.evaluation import embed_data, rank
from clipctl.interop.onnx_model import TEXT, VISION, OnnxModel, graph_file
from clipctl.progress import Tell, silent

BATCH_SIZE, TIMED_S = 16, 1.0
PICTURES, JUDGED_S = (50, 500), 15.0  # at least, at most; in between, as many as fit into this time


@dataclass(frozen=True)
class Variant:
    """One set of weights. Shares are 0–1."""

    name: str
    size_bytes: int  # of both graphs
    images_per_s: float
    i2t_r1: float
    t2i_r1: float


def compare(directory: Path, tell: Tell = silent) -> tuple[str, list[Variant]]:
    """What they are evaluated on, in words; the full weights; the 8-bit ones."""
    model = OnnxModel.read(directory)
    embedders = {name: Embedder.of_graphs(model, int8=name == "int8") for name in ("fp32", "int8")}
    tell("timing")
    rates = _rates(embedders)
    low, high = PICTURES
    source, words = held_out(model.config.data, int(min(high, max(low, JUDGED_S * min(rates.values())))))
    tell(f"evaluating on {words}")
    found = []
    for name, embedder in embedders.items():
        recalls = rank(embed_data(embedder, source)).recalls()
        graphs = (graph_file(directory, tower, int8=name == "int8") for tower in (VISION, TEXT))
        size_bytes = sum(file.stat().st_size for file in graphs)
        found.append(Variant(name, size_bytes, rates[name], recalls["i2t_r1"], recalls["t2i_r1"]))
    return words, found


def _rates(embedders: dict[str, Embedder]) -> dict[str, float]:
    """Pictures per second, without decoding."""
    size_px = next(iter(embedders.values())).size_px
    pixels = np.random.default_rng(0).integers(0, 256, (BATCH_SIZE, size_px, size_px, 3), dtype=np.uint8)
    watches = {name: Stopwatch(partial(embedder.embed_pixels, pixels)) for name, embedder in embedders.items()}
    times = time_in_turns(watches, limit_s=TIMED_S)
    return {name: BATCH_SIZE / timing.median_s for name, timing in times.items()}


def held_out(config: DataConfig, pictures: int) -> tuple[Source, str]:
    """Pictures that the model was not trained on, and what they are; drawn ones if its own are gone."""
    if not any(map(is_synthetic, config.source)):
        try:
            source = read_data(config).val
        except (DataError, OSError):
            pass
        else:
            assert isinstance(source, IndexedSource)
            source = source.thinned(pictures)
            return source, f"{len(source):,} held-out pictures of {source.name}"
    return SyntheticSource(pictures, seed=config.seed, validation=True), f"{pictures:,} held-out drawn pictures"
