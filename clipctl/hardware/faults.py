"""What devices are known to compute wrongly, and silently. No torch."""

import re

from clipctl.hardware.profile import torch_version


def product_limit(device: str, name: str) -> int | None:
    """Matrix products at least this long are silently wrong on a device; None if no such limit is known.

    On Apple's M1 and M2, torch before 2.14 reads past the operands (pytorch issues 193487 and 195163).
    """
    is_first = device == "mps" and re.search(r"Apple M[12]\b", name)
    version = tuple(int(part) for part in re.findall(r"\d+", torch_version())[:2])
    return 32767 if is_first and version < (2, 14) else None
