"""What a benchmark says about training here: on which device, in which precision, on how many threads. No torch."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from clipctl.bench.results import BenchResult, BenchRow

MARGIN = 1.1  # what is less than this much faster is no reason to leave fp32 on the CPU, or to use more threads
USUAL = ("cpu", "fp32")


@dataclass(frozen=True)
class Verdict:
    device: str
    precision: str
    threads: int
    speedup: float  # over fp32 on the CPU
    basis: str  # training steps, matrix products
    is_sure: bool  # nothing disturbed the measurement

    @property
    def words(self) -> str:
        where = f"on {self.device}" if self.device != "cpu" else f"on {self.threads} thread{'s' * (self.threads > 1)}"
        gain = f"{self.speedup:.1f} × as fast as in fp32 on the CPU"
        if self.speedup == 1:
            gain = "not clearly faster elsewhere"
        doubt = "" if self.is_sure else "; but the machine was not quiet, so measure again"
        return f"train in {self.precision} {where}: {self.basis} are {gain}{doubt}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "words": self.words}


def verdict_of(result: BenchResult) -> Verdict | None:
    """The verdict from training steps if there are any, else from matrix products; None if neither was measured in fp32
    on the CPU."""
    for suite, basis in (("step", "training steps"), ("matmul", "matrix products")):
        mine = [row for row in result.results if row.suite == suite]
        most = max((row.threads for row in mine), default=0)
        times_s: Times = {}
        for row in mine:
            if row.threads == most:
                times_s.setdefault((row.device, row.dtype), {})[row.operation, row.size] = row.median_s
        if USUAL in times_s:
            (device, precision), speedup = _fastest(times_s, USUAL)
            threads = _threads(result.results, most)
            return Verdict(device, precision, threads, speedup, basis, is_sure=not result.warnings)
    return None


def _threads(rows: Sequence[BenchRow], most: int) -> int:
    """The fewest threads that nothing clearly beats; `most` if other counts were not measured."""
    times_s: Times = {}
    for row in rows:
        if row.suite in ("matmul", "attention") and row.device == "cpu":
            times_s.setdefault(row.threads, {})[row.operation, row.size, row.dtype] = row.median_s
    return int(_fastest(times_s, min(times_s))[0]) if len(times_s) > 1 else most


Times = dict[Any, dict[tuple[Any, ...], float]]  # of each way to work: seconds of each piece of work


def _fastest(times_s: Times, usual: Any) -> tuple[Any, float]:
    """The way that is clearly faster than the usual one, and by how much, over the work that both have done."""
    speeds = {}
    for way, mine in times_s.items():
        ratios = [times_s[usual][work] / mine[work] for work in mine if work in times_s[usual]]
        speeds[way] = statistics.geometric_mean(ratios) if ratios else 0.0
    best = max(speeds, key=lambda way: speeds[way])
    return (best, speeds[best]) if speeds[best] > MARGIN else (usual, 1.0)
