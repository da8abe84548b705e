"""Whether `clipctl bench` measures what a plain loop measures, how long it takes, and whether it says the same twice.

    python benchmarks/bench.py

1. The peak that the bench reports for products against plain timed loops before, between and after, in one process.
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

SIDES = (512, 1000, 1024, 2048)
LOOP_S = 0.3
TURNS = 7


def plain_loop() -> float:
    """GFLOP/s of products of two square matrices, called in a loop; of the side that reaches most."""
    torch.set_num_threads(cpu.usable_cores())
    rates = []
    for side in SIDES:
        left, right = torch.randn(side, side), torch.randn(side, side)
        left @ right
        calls, started = 0, time.perf_counter()
        while (seconds := time.perf_counter() - started) < LOOP_S:
            left @ right
            calls += 1
        rates.append(calls * 2 * side**3 / seconds / 1e9)
    return max(rates)


def compare_with_loop() -> None:
    request = BenchRequest(sizes=(10**6,), suites=("matmul",), dtypes=("fp32",), threads=(cpu.usable_cores(),))
    loops, peaks = [plain_loop()], []
    for _ in range(TURNS):
        peaks.append(bench(request).peaks[0].gflops)
        loops.append(plain_loop())
    peak, loop = statistics.median(peaks), statistics.median(loops)
    print(f"peak of products: bench {peak:.1f} GFLOP/s, plain loops {loop:.1f}: {peak / loop:.3f}")
    print(f"  bench {' '.join(f'{one:.0f}' for one in peaks)}, loops {' '.join(f'{one:.0f}' for one in loops)}")


def run(*arguments: str) -> tuple[dict, float]:
    started = time.perf_counter()
    command = [sys.executable, "-m", "clipctl", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout), time.perf_counter() - started


def compare_two_runs() -> None:
    (first, first_s), (second, second_s) = (run("bench", "--sizes", "1e6", "1e7") for _ in range(2))
    print(f"clipctl bench --sizes 1e6 1e7: {first_s:.1f} s and {second_s:.1f} s")
    for words in (*first["warnings"], *second["warnings"]):
        print(f"  {words}")

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
