"""What it costs a run to write down, at every evaluation, which pictures a dozen captions find:

python benchmarks/retrieval.py [--evaluations 1000]

Bars: 0.5% of the run's time, 1% of the size of its metrics file.
"""

import argparse
import platform
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

import clipctl
from clipctl.hardware import cpu
from clipctl.runs.rundir import RunDir
from clipctl.training.evaluate import Evaluator


@contextmanager
def timed(owner, name, taken):
    """Adds up what calls of a method take."""
    method = getattr(owner, name)

    def call(*arguments, **options):
        started = time.perf_counter()
        try:
            return method(*arguments, **options)
        finally:
            taken[name] = taken.get(name, 0.0) + time.perf_counter() - started

    with patch.object(owner, name, call):
        yield


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=1000)
    asked = parser.parse_args()
    taken = {}
    parts = (Evaluator, "_retrieval"), (RunDir, "retrieval"), (RunDir, "write_retrieval"), (RunDir, "write_thumbnails")
    with tempfile.TemporaryDirectory() as directory:
        settings = {"train.epochs": asked.evaluations, "train.eval_every": 1}
        with ExitStack() as stack:
            for owner, name in parts:
                stack.enter_context(timed(owner, name, taken))
            started = time.perf_counter()
            run = RunDir(Path(clipctl.train("synthetic", settings, runs_dir=directory).run))
            seconds = time.perf_counter() - started
        file_bytes, metrics_bytes = run.retrieval_file.stat().st_size, run.metrics_file.stat().st_size
    print(f"{cpu.name()}, {cpu.usable_cores()} cores, Python {platform.python_version()}, torch {torch.__version__}")
    print(f"{asked.evaluations:,} evaluations in {seconds:.0f} s")
    for name, part_s in taken.items():
        print(f"  {name:20s} {part_s:7.2f} s  {part_s / seconds:.2%}")
    print(f"  {'together':20s} {sum(taken.values()):7.2f} s  {sum(taken.values()) / seconds:.2%}")
    print(f"retrieval.json {file_bytes:,} bytes, metrics.jsonl {metrics_bytes:,}: {file_bytes / metrics_bytes:.2%}")


if __name__ == "__main__":
    main()
