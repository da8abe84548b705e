"""clipctl: train CLIP models on the machine you own.

import clipctl

summary = clipctl.train("photos", {"train.time": "10m"})
pictures = clipctl.index(summary.run, "photos", "photos.index")
pictures.search("a red boat")
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "classify",
    "evaluate",
    "export",
    "index",
    "load",
    "open_index",
    "suspects",
    "train",
    "write_report",
]

if TYPE_CHECKING:
    from clipctl.inference.embedder import load
    from clipctl.inference.library import classify, evaluate, index, open_index
    from clipctl.inference.proven_export import export
    from clipctl.inference.suspects import suspects
    from clipctl.report.writing import write_report
    from clipctl.training.session import train

_LIBRARY = "clipctl.inference.library"
_HOMES = {
    "load": "clipctl.inference.embedder",
    "train": "clipctl.training.session",
    "export": "clipctl.inference.proven_export",
    "suspects": "clipctl.inference.suspects",
    "write_report": "clipctl.report.writing",
    **dict.fromkeys(("classify", "evaluate", "index", "open_index"), _LIBRARY),
}


def __getattr__(name: str) -> Any:
    """Most of these import torch, so they are imported when they are first used."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
