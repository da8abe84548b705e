"""Exports a model for other programs, and proves that it gives the same results there."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clipctl import files
from clipctl.errors import ConfigError
from clipctl.inference.rounding import Variant, compare
from clipctl.interop.card import Card
from clipctl.interop.export import LIBRARIES, check_target, export_libraries, export_native
from clipctl.interop.models import Found, load_any
from clipctl.interop.proof import Proof, prove
from clipctl.progress import Tell, silent
from clipctl.runs.rundir import runs_root

FORMATS = ("transformers", "open_clip", "both", "safetensors", "onnx", "coreml")


@dataclass(frozen=True)
class Exported:
    model: str
    path: str
    to: str
    size_bytes: int
    proofs: list[Proof]  # one for each library that reads it
    judged_on: str | None = None  # the pictures that 8-bit weights were evaluated on
    precisions: Sequence[Variant] = ()  # the full weights and the 8-bit ones

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        if self.judged_on is None:
            del found["judged_on"], found["precisions"]
        return found


def export(
    model: str | Path,
    path: str | Path,
    *,
    to: str = "both",
    int8: bool = False,
    runs_dir: str | Path | None = None,
    tell: Tell = silent,
) -> Exported:
    """Write a model to a new directory, in a format that other programs read, and compare their results with its own.
    `to`: transformers, open_clip, both, safetensors, onnx or coreml."""
    if to not in FORMATS:
        raise ConfigError(f"--to must be one of {', '.join(FORMATS)}, got {to!r}")
    if int8 and to != "onnx":
        raise ConfigError(f"--int8 is for --to onnx, not for --to {to}")
    out = Path(path)
    check_target(out)
    found = load_any(runs_root(runs_dir), str(model), tell=tell)
    tell(f"writing {out}")
    libraries = _write(found, out, to, int8=int8)
    tell("comparing with the libraries that read it")
    proofs = prove(found.model, out, libraries) if libraries else []
    judged_on, precisions = compare(out, tell) if int8 else (None, [])
    return Exported(found.identity.name, str(out), to, files.size_on_disk(out), proofs, judged_on, precisions)


def card_of(found: Found, out: Path) -> Card:
    return Card(out.name, found.identity.path, found.metrics, found.model.config.tune.base)


def _write(found: Found, out: Path, to: str, *, int8: bool) -> tuple[str, ...]:
    """Returns the libraries that it is for."""
    card = card_of(found, out)
    if to == "onnx":
        from clipctl.interop.onnx import export_onnx

        export_onnx(found.model, out, card, found.identity.fingerprint, int8=int8)
        return ("onnxruntime", "onnxruntime int8") if int8 else ("onnxruntime",)
    if to == "coreml":
        from clipctl.interop.coreml import export_coreml

        export_coreml(found.model, out, card)
        return ("coremltools",)
    if to == "safetensors":
        export_native(found.model, out, card)
        return ()
    export_libraries(found.model, out, LIBRARIES[to], card)
    return LIBRARIES[to]
