"""Whether `clipctl bench` measures what a plain loop measures, how long it takes, and whether it says the same twice.

    python benchmarks/bench.py [--runs 2]

1. The peak that the bench reports for products against plain timed loops before, between and after, in one process.
2. `clipctl bench --sizes 1e6 1e7`, several times: seconds, and how many medians agree within 10% with those of the run
   before, and in how many pairs of all runs all do; the same for plain loops of the same cases, made after each.
3. `clipctl recommend-device --params 150M` from what was kept: seconds, as a whole program.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter

import torch

from clipctl.bench.measure import BenchRequest, bench
from clipctl.bench.operations import OPERATIONS
from clipctl.hardware import cpu
from clipctl.hardware.devices import DTYPES

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


def medians(document: dict) -> dict[tuple, float]:
    keys = ("operation", "size", "device", "dtype", "threads")
    return {tuple(row[key] for key in keys): row["median_s"] for row in document["results"]}


def plain_loops(cases: list[tuple]) -> dict[tuple, float]:
    """Seconds of a call of each of the bench's cases, in a loop of calls and nothing else, one case after the other."""
    operations = {operation.name: operation for operation in OPERATIONS}
    found = {}
    for case in cases:
        name, size, _, dtype, threads = case
        torch.set_num_threads(threads)
        operands = [operand.to(DTYPES[dtype]) for operand in operations[name].operands(size)]
        operations[name].run(*operands)
        calls, started = 0, time.perf_counter()
        while (seconds := time.perf_counter() - started) < LOOP_S or calls < 3:
            operations[name].run(*operands)
            calls += 1
        found[case] = seconds / calls
    return found


def agreement(before: dict[tuple, float], after: dict[tuple, float]) -> str:
    ratios = {case: after[case] / before[case] for case in before.keys() & after.keys()}
    within = sum(map(agrees, ratios.values()))
    worst = max(ratios, key=lambda case: abs(ratios[case] - 1))
    return f"{within} of {len(ratios)} within 10%; furthest off: {worst}, {ratios[worst]:.2f}"


def agrees(ratio: float) -> bool:
    return abs(ratio - 1) <= 0.1


def agreement_of_all(runs: list[dict[tuple, float]]) -> str:
    pairs = list(itertools.combinations(runs, 2))
    off = [[case for case in one.keys() & two.keys() if not agrees(two[case] / one[case])] for one, two in pairs]
    often = Counter(case for cases in off for case in cases).most_common(3)
    whole = sum(not cases for cases in off)
    return f"{whole} of {len(pairs)} pairs agree in all cases; most often off: {often}"


def compare_runs(count: int) -> None:
    """Runs of the bench and plain loops of the same cases, by turns: where plain loops do not agree with themselves,
    the machine is not idle, and no bench could."""
    benched: list[dict[tuple, float]] = []
    looped: list[dict[tuple, float]] = []
    for number in range(count):
        document, seconds = run("bench", "--sizes", "1e6", "1e7")
        warnings = "; ".join(document["warnings"]) or "no warning"
        print(f"clipctl bench --sizes 1e6 1e7: {seconds:.1f} s; {warnings}")
        benched.append(medians(document))
        looped.append(plain_loops(sorted(benched[0])))
        if number:
            print(f"  bench, this run and the one before: {agreement(*benched[-2:])}")
            print(f"  plain loops after both: {agreement(*looped[-2:])}", flush=True)
    print(f"bench: {agreement_of_all(benched)}")
    print(f"plain loops: {agreement_of_all(looped)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=2)
    arguments = parser.parse_args()
    os.environ["CLIPCTL_HOME"] = tempfile.mkdtemp()
    print(f"{cpu.name()}, {cpu.usable_cores()} cores, Python {platform.python_version()}, torch {torch.__version__}")
    compare_with_loop()
    compare_runs(arguments.runs)
    seconds = [run("recommend-device", "--params", "150M")[1] for _ in range(5)]
    print(f"recommend-device from kept results: {statistics.median(seconds):.2f} s")


if __name__ == "__main__":
    main()
