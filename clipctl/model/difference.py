"""What changed between two checkpoints, tensor by tensor."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from clipctl.runs.tensors import TensorInfo, read_header


@dataclass(frozen=True)
class TensorChange:
    name: str
    shape_a: tuple[int, ...] | None  # None: it is not in the first
    shape_b: tuple[int, ...] | None
    relative: float | None = None  # |b - a| / |a|; None where the shapes differ, or a is zero and b is not
    largest: float | None = None  # of a single number


def tensor_changes(a: Path, b: Path) -> Iterator[TensorChange]:
    """Compare two verified safetensors files, one tensor in memory at a time."""
    headers = (read_header(a), read_header(b))
    with safe_open(a, framework="pt") as file_a, safe_open(b, framework="pt") as file_b:
        for name in sorted(headers[0].keys() | headers[1].keys()):
            shape_a, shape_b = (_shape(header.get(name)) for header in headers)
            if shape_a != shape_b:
                yield TensorChange(name, shape_a, shape_b)
                continue
            before, after = (file.get_tensor(name).double() for file in (file_a, file_b))
            change, norm = after - before, float(before.norm())
            relative = float(change.norm()) / norm if norm else (None if change.any() else 0.0)
            largest = float(change.abs().max()) if change.numel() else 0.0
            yield TensorChange(name, shape_a, shape_b, relative, largest)


def _shape(info: TensorInfo | None) -> tuple[int, ...] | None:
    return info.shape if info else None
