"""Saving a model of 77M parameters with its optimizer (0.9 GB), against torch.save and fsync of the same tensors; how
fast it is verified; how long 200 checkpoints take to list:

python benchmarks/checkpoint.py [--rounds 7] [--directory DIR]
"""

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from clipctl.config.layers import Layer, resolve
from clipctl.runs.checkpoint import NEEDED, STATE
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from clipctl.training.attempt import make_state
from clipctl.training.plan import make_plan
from clipctl.training.state import nonfinite_tensors, write_tensors

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"  # as a safetensors file


def trained_state():
    """The `small` preset after one update, so that the optimizer has its moments."""
    state = make_state(make_plan(resolve([Layer("benchmark", {"preset": "small"})])))
    for parameter in state.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    state.optimizer.step()
    return state


def seconds(action):
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def plain_save(state, path):
    torch.save({"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}, path)
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def our_save(state, store):
    """As the loop does it: look for numbers that are not finite, write, hash, sync, rename."""
    assert not nonfinite_tensors(state)

    def write(path):
        write_tensors(state, path)
        (path / STATE).write_text("{}")

    return store.save(write, step=1, epoch=1, metrics={})


def one_round(state, store, plain, *, ours_first):
    saved = []
    pair = {
        "torch.save + fsync": lambda: plain_save(state, plain),
        "clipctl": lambda: saved.append(our_save(state, store)),
    }
    taken = {label: seconds(pair[label]) for label in (reversed(pair) if ours_first else pair)}
    taken["verify"] = seconds(lambda: saved[0].verified())
    plain.unlink()
    shutil.rmtree(saved[0].path)
    return taken, saved[0].size_bytes


def list_time(directory, rounds):
    """Of `clipctl checkpoint list` over 200 checkpoints, the start of the program included."""
    run = RunDir.create(directory, "tiny", "many")
    run.write_config("preset: tiny\n")
    store = CheckpointStore(run, keep_last=1000)
    for step in range(200):
        store.save(
            lambda path: [(path / name).write_bytes(NO_TENSORS) for name in NEEDED] and None,
            step=step,
            epoch=step,
            metrics={"score": 0.5},
        )
    command = [sys.executable, "-m", "clipctl", "checkpoint", "list", "--runs-dir", str(directory)]
    return [seconds(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(rounds)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=None)
    asked = parser.parse_args()
    state = trained_state()
    times = {"torch.save + fsync": [], "clipctl": [], "verify": []}
    with tempfile.TemporaryDirectory(dir=asked.directory) as name:
        directory = Path(name)
        run = RunDir.create(directory / "runs", "small", "run")
        store = CheckpointStore(run)
        for round_number in range(asked.rounds + 1):
            taken, size_bytes = one_round(state, store, directory / "plain.pt", ours_first=round_number % 2 == 0)
            if round_number:  # the first one warms up
                for label, value in taken.items():
                    times[label].append(value)
        listing = list_time(directory / "listed", asked.rounds)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    print(f"{size_bytes / 1e9:.2f} GB, medians of {asked.rounds} rounds, interleaved")
    medians = {label: statistics.median(values) for label, values in times.items()}
    for label, values in times.items():
        print(f"{label:<20} {medians[label]:.3f} s   ({min(values):.3f} to {max(values):.3f})")
    print(f"clipctl / torch.save {medians['clipctl'] / medians['torch.save + fsync']:.2f} x")
    print(f"verify               {size_bytes / 1e9 / medians['verify']:.2f} GB/s from the page cache")
    print(f"list 200 checkpoints {statistics.median(listing):.3f} s, the start of the program included")


if __name__ == "__main__":
    main()
