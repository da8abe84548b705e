"""safetensors headers, read without torch or trust: names, types and shapes, checked against the file's size.

A file is 8 bytes (length of the header, little-endian), a JSON header and the tensors' bytes:

    {"text.positions": {"dtype": "F32", "shape": [77, 128], "data_offsets": [0, 39424]}, "__metadata__": {…}}
"""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipctl.errors import CheckpointError
from clipctl.files import open_plain, parse_json

HEADER_LIMIT_BYTES = 16_000_000

BYTES_OF = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_PICKLE = re.compile(rb"\x80[\x02-\x05]|PK\x03\x04")


@dataclass(frozen=True)
class TensorInfo:
    dtype: str  # as safetensors names it: F32, BF16, …
    shape: tuple[int, ...]
    start: int  # of its bytes in the file
    end: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor in a file, by name. Raises CheckpointError unless it is a well-formed safetensors file."""
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, HEADER_LIMIT_BYTES):
                if _PICKLE.match(prefix):
                    raise ValueError("it looks like a pickle, which clipctl never opens")
                raise ValueError(f"its header claims {length} bytes, but the file has {size}")
            header = parse_json(file.read(length))
        return _tensors(header, 8 + length, size)
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path.name} is not a safetensors file: {error}") from None


def _tensors(header: dict[str, Any], data_start: int, size: int) -> dict[str, TensorInfo]:
    """The entries of a header. End to end they must fill the file exactly: no gap, no overlap, nothing left over."""
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if len(shape) > 16 or not all(type(number) is int and 0 <= number < 2**63 for number in (*shape, first, last)):
            raise ValueError(f"tensor {name[:80]!r} has no valid shape or offsets")
        info = TensorInfo(entry["dtype"], shape, data_start + first, data_start + last)
        if last - first != info.elements * BYTES_OF[info.dtype]:
            raise ValueError(f"tensor {name!r} of shape {shape} cannot have {last - first} bytes")
        tensors[name] = info
    position = data_start
    for name, info in sorted(tensors.items(), key=lambda entry: (entry[1].start, entry[1].end)):
        if info.start != position:
            raise ValueError(f"tensor {name!r} starts at {info.start}, but the one before it ends at {position}")
        position = info.end
    if position != size:
        raise ValueError(f"its tensors end at {position}, but the file ends at {size}")
    return tensors
