"""The two towers in a form that can leave Python: what the exports to ONNX and to Core ML share."""

import importlib
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

from clipctl.errors import ConfigError
from clipctl.model.clip import Clip
from clipctl.model.towers import Attention, TextTower


class CaptionTower(nn.Module):
    """The text tower, for ids made by another program.

    transformers.js cuts off the end-of-text of a caption that is too long, where the tower is pooled. It is put back at
    the last place, which is where our own tokenizers leave it.
    """

    def __init__(self, tower: TextTower, end_id: int) -> None:
        super().__init__()
        self.tower, self.end_id = tower, end_id

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, N) to (B, E), not yet of length one."""
        has_end = (input_ids == self.end_id).any(dim=1)  # (B,)
        last = input_ids[:, -1].masked_fill(~has_end, self.end_id)
        return self.tower(torch.cat([input_ids[:, :-1], last.unsqueeze(1)], dim=1))  # type: ignore[no-any-return]


@contextmanager
def plain_attention(model: Clip) -> Iterator[None]:
    """Attention as plain products, which every runtime knows and fuses in its own way."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    before = [layer.fused for layer in layers]
    model.use_attention("plain")
    try:
        yield
    finally:
        for layer, fused in zip(layers, before, strict=True):
            layer.fused = fused


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the messages of exporters. Their exceptions are raised."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def extra(name: str, package: str) -> Any:
    """A package from one of clipctl's extras."""
    try:
        with quiet():
            return importlib.import_module(package)
    except ImportError as error:
        root = package.partition(".")[0]
        is_absent = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == root
        why = "which is not installed" if is_absent else f"which cannot be imported: {error}"
        raise ConfigError(f"this needs the {root} package, {why}", f"pip install 'clipctl[{name}]'") from None
