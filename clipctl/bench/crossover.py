"""The size above which a device is faster than the CPU. Never extrapolates beyond the measured sizes. No torch."""

import math
import random
import statistics
from collections.abc import Mapping, Sequence

from clipctl.bench.results import BenchRow, Crossover

RESAMPLES = 400
INTERVAL = (0.025, 0.975)

Samples = Mapping[int, Sequence[float]]  # size -> seconds


def find_crossovers(rows: Sequence[BenchRow]) -> list[Crossover]:
    """For every operation, precision and device other than the CPU, compared with the CPU at its most threads."""
    most = max((row.threads for row in rows), default=1)
    found = []
    for operation, dtype, device in dict.fromkeys((row.operation, row.dtype, row.device) for row in rows):
        if device == "cpu":
            continue
        chosen = [row for row in rows if (row.operation, row.dtype) == (operation, dtype)]
        on_cpu = {row.size: row.samples_s for row in chosen if row.device == "cpu" and row.threads == most}
        there = [row for row in chosen if row.device == device]
        ways = {
            "resident": {row.size: row.samples_s for row in there},
            "round trip": {row.size: row.round_trip for row in there if row.round_trip},
        }
        for data, on_device in ways.items():
            if on_device.keys() & on_cpu.keys():
                found.append(crossover(operation, dtype, device, data, on_cpu, on_device))
    return found


def crossover(operation: str, dtype: str, device: str, data: str, on_cpu: Samples, on_device: Samples) -> Crossover:
    sizes = sorted(on_cpu.keys() & on_device.keys())
    ratios = [statistics.median(on_cpu[size]) / statistics.median(on_device[size]) for size in sizes]
    size = crossing(sizes, ratios)
    if size is None:
        winner = device if ratios[-1] > 1 else "cpu"
        is_steady = winner == device or max(ratios) <= 1
        where = f"from {sizes[0]:.0e} on" if winner == device else f"{'up to' if is_steady else 'at'} {sizes[-1]:.0e}"
        words = f"none in range: {winner} faster {where}".replace("e+0", "e")
        return Crossover(operation, dtype, device, data, None, None, None, words)
    low, high = bootstrap(sizes, on_cpu, on_device)
    words = f"{device} faster from about {size:.1e} on ({low:.1e} to {high:.1e})".replace("e+0", "e")
    return Crossover(operation, dtype, device, data, size, low, high, words)


def crossing(sizes: Sequence[int], ratios: Sequence[float]) -> float | None:
    """Where CPU time / device time passes 1 for good; interpolated linearly between two sizes in log-log space."""
    if ratios[-1] <= 1 or all(ratio > 1 for ratio in ratios):
        return None
    last_loss = max(index for index, ratio in enumerate(ratios) if ratio <= 1)
    (x0, y0), (x1, y1) = ((math.log(sizes[i]), math.log(ratios[i])) for i in (last_loss, last_loss + 1))
    return math.exp(x0 + (x1 - x0) * -y0 / (y1 - y0))


def bootstrap(sizes: Sequence[int], on_cpu: Samples, on_device: Samples) -> tuple[float, float]:
    """95% bootstrap interval of the crossing, from resampled times; limited to the measured sizes."""
    rng = random.Random(0)
    found = []
    for _ in range(RESAMPLES):
        medians = [
            [statistics.median(rng.choices(side[size], k=len(side[size]))) for size in sizes]
            for side in (on_cpu, on_device)
        ]
        ratios = [cpu / device for cpu, device in zip(*medians, strict=True)]
        found.append(crossing(sizes, ratios) or (sizes[0] if ratios[-1] > 1 else sizes[-1]))
    found.sort()
    low, high = (found[round(share * (RESAMPLES - 1))] for share in INTERVAL)
    return low, high
