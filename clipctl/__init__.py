"""clipctl: train CLIP models on the machine you own.

import clipctl

summary = clipctl.train("photos", {"train.epochs": 20})
model = clipctl.load(f"{summary.run}@best")
model.embed_texts(["a red cat"]) @ model.embed_images(["cat.jpg"]).T
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "load", "train"]

if TYPE_CHECKING:
    from clipctl.inference.embedder import load
    from clipctl.training.session import train


def __getattr__(name: str) -> Any:
    """`load` and `train` import torch, so they are imported when they are first used."""
    if name == "load":
        from clipctl.inference.embedder import load

        return load
    if name == "train":
        from clipctl.training.session import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
