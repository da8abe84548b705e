"""How fast this tree trains and starts, against another revision:

    python benchmarks/against.py 500a3e7 [--rounds 6] [--steps 150] [--starts 15]

Two trainings run at the same time, each with one thread on a core of its own, and swap cores after every round.
Whatever else the machine is busy with slows both, so their ratio is steadier than that of trainings one after the
other. Commands are started in turns.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from same_bits import ROOT, Tree, check_out

from clipctl.hardware import cpu

FIRST_STEPS = 20  # do not count: the other side may still be starting
COMMANDS = (("--version",), ("train", "--help"), ("monitor", "--once"), ("checkpoint", "list"), ("train", "--dry-run"))


def train(tree: Tree, name: str, core: int, steps: int) -> "subprocess.Popen[bytes]":
    fixed = ("--recipe", "plain", "--device", "cpu", "--threads", "1", "--precision", "fp32", "--workers", "0")
    words = ("train", "--runs-dir", str(tree.runs), "--name", name, *fixed, "--steps", str(steps))
    command = ["taskset", "-c", str(core), sys.executable, "-m", "clipctl", *words]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env=tree.environment, cwd=tree.runs, **quiet)


def step_s(tree: Tree, name: str) -> float:
    rows = map(json.loads, (tree.runs / name / "metrics.jsonl").read_text().splitlines())
    return statistics.median([row["step_s"] for row in rows if "step_s" in row][FIRST_STEPS:])


def start_s(tree: Tree, words: tuple[str, ...]) -> float:
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "clipctl", *words], env=tree.environment, cwd=tree.runs, capture_output=True, check=True
    )
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--starts", type=int, default=15)
    asked = parser.parse_args()
    print(f"{cpu.name()}, {cpu.usable_cores()} cores, Python {platform.python_version()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        theirs = Tree(check_out(asked.revision, directory / "source"), directory / "theirs")
        trees = theirs, Tree(ROOT, directory / "ours")
        for tree in trees:
            tree.environment["CLIPCTL_RUNS"] = str(tree.runs)
            tree.runs.mkdir()
        ratios = []
        for number in range(asked.rounds):
            name = f"round{number}"
            for process in [train(tree, name, (side + number) % 2, asked.steps) for side, tree in enumerate(trees)]:
                if process.wait():
                    sys.exit("a training failed")
            before_s, now_s = (step_s(tree, name) for tree in trees)
            ratios.append(before_s / now_s)
            times = f"{before_s * 1e3:.1f}, now {now_s * 1e3:.1f} ms a step"
            print(f"round {number}: {times} ({ratios[-1]:.3f} x)", flush=True)
        print(f"training: {statistics.geometric_mean(ratios):.3f} x as fast as {asked.revision}")
        for words in COMMANDS:
            seconds = [[start_s(tree, words) for tree in trees] for _ in range(asked.starts)]
            before_s, now_s = map(statistics.median, zip(*seconds, strict=True))
            print(f"{' '.join(words):16} {before_s:.3f}, now {now_s:.3f} s ({now_s / before_s:.2f} x)", flush=True)


if __name__ == "__main__":
    main()
