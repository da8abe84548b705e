"""How well `clipctl bench` forecasts what `clipctl train` then measures.

Measures this machine in a fresh application directory, asks for the plan of each preset and batch (none of which was
timed), then trains a few steps of it in a process of its own and compares step time and peak memory:

    python benchmarks/forecast.py [--presets tiny small base] [--batches 4 12 32] [--precision fp32] [--rounds 1]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from clipctl.hardware import cpu
from clipctl.runs import metrics

MEASURED_S = 20.0  # of each cell, about
WARM_STEPS = 2  # the first steps of a process are slower: memory is new, kernels are not prepared


def clipctl(*arguments: str) -> dict:
    done = subprocess.run([sys.executable, "-m", "clipctl", *arguments, "--json"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def measured(arguments: list[str], directory: Path) -> tuple[float, int]:
    """Mean seconds of a step and peak memory of a training."""
    summary = clipctl("train", *arguments, "--runs-dir", str(directory))
    rows = metrics.read_rows(Path(summary["run"]) / "metrics.jsonl")
    steps = [row["step_s"] for row in rows if row["kind"] == "step" and row["step"] > WARM_STEPS]
    return statistics.fmean(steps), summary["peak_memory_bytes"]


def measured_often(arguments: list[str], times: int) -> tuple[float, float]:
    """The mean of several trainings. On a shared host the same small steps take half longer for seconds at a time."""
    with tempfile.TemporaryDirectory() as directory:
        found = [measured(arguments, Path(directory)) for _ in range(times)]
    return statistics.fmean(one[0] for one in found), statistics.median(one[1] for one in found)


def run(presets: list[str], batches: list[int], precision: str) -> list[tuple[float, float]]:
    os.environ["CLIPCTL_HOME"] = tempfile.mkdtemp()
    started = time.perf_counter()
    bench = clipctl("bench")
    print(f"clipctl bench took {time.perf_counter() - started:.0f} s; {'; '.join(bench['warnings']) or 'no warning'}")
    print(
        f"{'preset':<7}{'batch':>6}{'forecast':>11}{'measured':>11}{'off':>7}{'memory':>12}{'measured':>11}{'off':>7}"
    )
    off, within = [], 0
    for preset in presets:
        for batch in batches:
            arguments = ["--preset", preset, "--batch-size", str(batch), "--precision", precision]
            plan = clipctl("train", *arguments, "--steps", "10", "--dry-run")
            forecast_s, forecast_bytes = plan["step_s"]["value"], plan["memory"]["total_bytes"]
            times = 5 if preset == "tiny" else 1
            steps = WARM_STEPS + max(3, round(MEASURED_S / times / forecast_s))
            step_s, peak_bytes = measured_often([*arguments, "--steps", str(steps)], times)
            within += plan["step_s"]["low"] <= step_s <= plan["step_s"]["high"]
            off.append((forecast_s / step_s - 1, forecast_bytes / peak_bytes - 1))
            print(
                f"{preset:<7}{batch:>6}{forecast_s:>10.3f}s{step_s:>10.3f}s{off[-1][0]:>+7.0%}"
                f"{forecast_bytes / 2**20:>8.0f} MiB{peak_bytes / 2**20:>7.0f} MiB{off[-1][1]:>+7.0%}"
                f"  {plan['step_s']['basis']}, {plan['memory']['basis']}",
                flush=True,
            )
    print(f"{within} of {len(off)} step times lie in the interval that was forecast")
    return off


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--presets", nargs="+", default=["tiny", "small", "base"])
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 12, 32])
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    print(f"{cpu.name()}, {cpu.usable_cores()} cores, Python {platform.python_version()}, torch {torch.__version__}")
    for _ in range(arguments.rounds):
        off = run(arguments.presets, arguments.batches, arguments.precision)
        worst = [max(abs(pair[index]) for pair in off) for index in (0, 1)]
        print(f"largest error: step time {worst[0]:.0%}, peak memory {worst[1]:.0%}\n", flush=True)


if __name__ == "__main__":
    main()
