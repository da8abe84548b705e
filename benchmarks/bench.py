"""Whether `clipctl bench` measures what a plain loop measures, how long it takes, and whether it says the same twice.

    python benchmarks/bench.py

1. The best product of the bench against a plain timed loop before, between and after, in one process.
2. `clipctl bench --sizes 1e6 1e7`, twice: seconds, and how many medians agree within 10 %.
3. `clipctl recommend-device --params 150M` from what was kept: seconds, as a whole program.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

import torch

from clipctl.bench.measure import BenchRequest, bench
from clipctl.hardware import cpu

SIDE = 1000
CALLS = 300


def plain_loop() -> float:
    """The best GFLOP/s of a product of two 1000 × 1000 matrices."""
    torch.set_num_threads(cpu.usable_cores())
    left, right = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    fastest = float("inf")
    for _ in range(CALLS):
        started = time.perf_counter()
        left @ right
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * SIDE**3 / fastest / 1e9


def compare_with_loop() -> None:
    request = BenchRequest(sizes=(SIDE**2,), suites=("matmul",), dtypes=("fp32",), threads=(cpu.usable_cores(),))
    loops, peaks = [plain_loop()], []
    for _ in range(3):
        (row,) = bench(request).results
        peaks.append(2 * SIDE**3 / row.min_s / 1e9)
        loops.append(plain_loop())
    peak, loop = statistics.median(peaks), statistics.median(loops)
    print(f"best product: bench {peak:.1f} GFLOP/s, plain loop {loop:.1f}: {peak / loop:.3f}")


def run(*arguments: str) -> tuple[dict, float]:
    started = time.perf_counter()
    command = [sys.executable, "-m", "clipctl", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout), time.perf_counter() - started


def compare_two_runs() -> None:
    (first, first_s), (second, second_s) = (run("bench", "--sizes", "1e6", "1e7") for _ in range(2))
    print(f"clipctl bench --sizes 1e6 1e7: {first_s:.1f} s and {second_s:.1f} s")

    def medians(document: dict) -> dict:
        keys = ("operation", "size", "device", "dtype", "threads")
        return {tuple(row[key] for key in keys): row["median_s"] for row in document["results"]}

    before, after = medians(first), medians(second)
    ratios = {key: after[key] / before[key] for key in before.keys() & after.keys()}
    within = sum(abs(ratio - 1) <= 0.1 for ratio in ratios.values())
    worst = max(ratios, key=lambda key: abs(ratios[key] - 1))
    print(f"{within} of {len(ratios)} medians agree within 10 %; furthest off: {worst}, {ratios[worst]:.2f}")


def main() -> None:
    os.environ["CLIPCTL_HOME"] = tempfile.mkdtemp()
    print(f"{cpu.name()}, {cpu.usable_cores()} cores, Python {platform.python_version()}, torch {torch.__version__}")
    compare_with_loop()
    compare_two_runs()
    seconds = [run("recommend-device", "--params", "150M")[1] for _ in range(5)]
    print(f"recommend-device from kept results: {statistics.median(seconds):.2f} s")


if __name__ == "__main__":
    main()
