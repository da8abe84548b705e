"""The numbers in a safetensors file, without torch."""

from pathlib import Path

import numpy as np

from clipctl.files import open_plain
from clipctl.runs.tensors import TensorInfo, read_header

_BLOCK_BYTES = 1 << 22
# NaN and the infinities are the numbers whose exponent bits are all set.
_EXPONENT_BITS = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}


def nonfinite_counts(path: Path) -> dict[str, int]:
    """How many numbers are NaN or infinite, for each tensor that has any."""
    counts = {name: _count(path, info) for name, info in read_header(path).items() if info.dtype in _EXPONENT_BITS}
    return {name: count for name, count in counts.items() if count}


def _count(path: Path, info: TensorInfo) -> int:
    integer, mask = _EXPONENT_BITS[info.dtype]
    count = 0
    with open_plain(path) as file:
        for start in range(info.start, info.end, _BLOCK_BYTES):
            file.seek(start)
            bits = np.frombuffer(file.read(min(_BLOCK_BYTES, info.end - start)), dtype=integer)
            count += int(np.count_nonzero((bits & integer(mask)) == integer(mask)))
    return count
