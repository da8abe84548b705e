"""Which library computes a model's embeddings, if its directory has both weights and ONNX files: the faster one."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from clipctl.config.sections import TrainConfig
from clipctl.hardware.timing import Stopwatch, time_in_turns
from clipctl.interop.onnx_model import OnnxEncoder
from clipctl.model.encoder import Engine

PICTURES, LIMIT_S = 4, 0.2  # that each engine gets to show its speed
SAME = 1e-3  # largest difference of unit vectors by two engines


def faster(engine: Engine, directory: Path, config: TrainConfig) -> Engine:
    """This engine, or the ONNX files in a directory, whichever embeds pictures faster on this machine. Files that
    cannot be used here, or that compute something else, are left alone."""
    size_px, text = config.model.image.size_px, config.model.text
    vocab_size = text.vocab_size or 2
    rng = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (PICTURES, size_px, size_px, 3), dtype=torch.uint8, generator=rng)
    tokens = torch.randint(vocab_size, (PICTURES, text.context), generator=rng)
    tokens[:, -1] = vocab_size - 1  # end-of-text, the highest id
    try:
        other = OnnxEncoder(directory, config.model.image, engine.scale)
        if not agree(engine, other, pixels, tokens):
            return engine
    except Exception:  # onnxruntime's errors have no class in common
        return engine
    engines: dict[str, Engine] = {"torch": engine, "onnxruntime": other}
    watches = {name: Stopwatch(partial(one.images, pixels)) for name, one in engines.items()}
    times = time_in_turns(watches, limit_s=LIMIT_S, min_samples=1)
    return engines[min(times, key=lambda name: times[name].min_s)]


def agree(one: Engine, other: Engine, pixels: Tensor, tokens: Tensor) -> bool:
    """Whether both compute the same, from pixels (B, S, S, 3) and token ids (B, N)."""
    pairs = ((one.images(pixels), other.images(pixels)), (one.texts(tokens), other.texts(tokens)))
    return all(mine.shape == theirs.shape and (mine - theirs).abs().max() < SAME for mine, theirs in pairs)
