"""Whether using a model stays within its bounds on a lot of data:

    python benchmarks/use.py [report] [eval] [suspects]      (default: all three)

report    a run of a million metric rows: under 15 s and 5 MB
eval      100,000 pictures × 500,000 captions: the memory that ranking takes beyond the embeddings, which are random;
          --pictures and --dimensions make it shorter
suspects  drawn scenes, 5% of their captions swapped: at least 60% of those are among the first 5% that
          `clipctl data suspects --folds 3` lists
"""

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from monitor import MEASURE, ROWS, write_rows

from clipctl.data.held_out import Matches
from clipctl.data.synthetic.scenes import SyntheticSource
from clipctl.hardware import cpu
from clipctl.inference import evaluation
from clipctl.runs.rundir import RunDir

SWAPPED_SHARE = 0.05


def clipctl(*arguments, home):
    """What a command prints."""
    environment = {**os.environ, "CLIPCTL_HOME": str(home), "CLIPCTL_RUNS": str(home / "runs")}
    command = [sys.executable, "-m", "clipctl", *map(str, arguments)]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def report(asked, home):
    run = RunDir.create(home / "runs", "tiny", "long")
    run.write_config("preset: tiny\n")
    last_step = write_rows(run.metrics_file)
    run.write_status("finished", attempt=1, step=last_step, total_steps=last_step)
    page = home / "report.html"
    command = [sys.executable, "-m", "clipctl", "report", str(run.path), "-o", str(page)]
    done = subprocess.run([sys.executable, "-c", MEASURE, *command], capture_output=True, text=True, check=True)
    seconds, memory_bytes, _ = map(float, done.stdout.split())
    size_mb = run.metrics_file.stat().st_size / 1e6
    print(f"report of {ROWS:,} rows ({size_mb:.0f} MB): {seconds:.1f} s, {memory_bytes / 1e6:.0f} MB of memory")
    print(f"the page has {page.stat().st_size / 1e6:.2f} MB")


# --- eval -----------------------------------------------------------------------------------------------------


def random_data(pictures, dimensions, captions_each=5):
    """Captions near their picture, in a random direction each."""
    rng = np.random.default_rng(0)

    def directions(count):
        found = rng.standard_normal((count, dimensions), dtype=np.float32)
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    image = directions(pictures)
    owners = np.concatenate([np.arange(pictures), np.repeat(np.arange(pictures), captions_each - 1)])
    text = directions(len(owners))
    text += image[owners] / 4
    text /= np.linalg.norm(text, axis=1, keepdims=True)
    captions = [f"caption {number}" for number in range(len(owners))]
    matches = Matches(owners.tolist(), captions, np.arange(pictures, dtype=np.uint64))
    return evaluation.EmbeddedData(image, text, owners, captions, matches, np.zeros((pictures, 1), np.float32), [])


def memory_bytes(key):
    """VmRSS: now; VmHWM: the most since `forget_peak`. Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


def evaluate(asked, home):
    data = random_data(asked.pictures, asked.dimensions)
    print(f"eval of {data.pictures:,} pictures × {len(data.captions):,} captions, {asked.dimensions} dimensions:")
    embedder = SimpleNamespace(identity=SimpleNamespace(name="random"), scale=100.0)
    found = {}
    stages = {
        "ranking": lambda: found.update(ranks=evaluation.rank(data)),
        "intervals": lambda: found["ranks"].resampled(),
        "chance": lambda: evaluation.chance_recalls(data),
        "difficulty": lambda: evaluation.difficulty(data),
        "calibration": lambda: evaluation.calibration(data, embedder.scale),
    }
    for name, stage in stages.items():
        forget_peak()
        before, started = memory_bytes("VmRSS"), time.perf_counter()
        stage()
        seconds, beyond_bytes = time.perf_counter() - started, memory_bytes("VmHWM") - before
        print(f"  {name:12s} {seconds:8.1f} s  {beyond_bytes / 2**20:6.0f} MiB beyond {before / 2**20:,.0f} MiB")
    print(f"  R@1 {found['ranks'].recalls()['i2t_r1']:.1%}, {found['ranks'].recalls()['t2i_r1']:.1%}")


# --- suspects -------------------------------------------------------------------------------------------------


def swapped_scenes(place, count):
    """Drawn scenes as files, with a table of captions; returns the names of those with another's caption."""
    rng = np.random.default_rng(0)
    source = SyntheticSource(count, seed=0, validation=False)
    captions = [str(rng.choice(source.captions(number))) for number in range(count)]
    chosen = rng.permutation(count)[: round(SWAPPED_SHARE * count)]
    own = [captions[number] for number in chosen]
    for number, caption in zip(chosen, [*own[1:], own[0]], strict=True):
        captions[number] = caption
    with (place / "captions.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["filepath", "caption"])
        for number, caption in enumerate(captions):
            source.square(number, 64).save(place / f"{number:05d}.png")
            writer.writerow([f"{number:05d}.png", caption])
    return {f"{number:05d}.png" for number in chosen}


def suspects(asked, home):
    place = home / "scenes"
    place.mkdir()
    swapped = swapped_scenes(place, asked.scenes)
    started = time.perf_counter()
    summary = json.loads(clipctl("train", place / "captions.csv", "--epochs", asked.epochs, "--json", home=home))
    trained_s = time.perf_counter() - started
    for folds in (0, 3):
        table = home / f"suspects-{folds}.csv"
        started = time.perf_counter()
        clipctl("data", "suspects", summary["run"], "--folds", folds, "-o", table, home=home)
        seconds = time.perf_counter() - started
        with table.open(newline="") as file:
            listed = [Path(row["filepath"]).name for row in csv.DictReader(file)]
        first = set(listed[: len(swapped)])
        print(f"suspects, {folds} folds: {len(first & swapped)} of {len(swapped)} swapped captions among the first")
        print(f"  {len(first)} of {len(listed):,}: {len(first & swapped) / len(swapped):.0%}, in {seconds:.0f} s")
    print(f"  after a training of {asked.epochs} epochs, {trained_s:.0f} s, R@1 {summary['i2t_r1']:.0%}")


def main():
    parts = {"report": report, "eval": evaluate, "suspects": suspects}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=", ".join(parts))
    parser.add_argument("--pictures", type=int, default=100_000)
    parser.add_argument("--dimensions", type=int, default=512)
    parser.add_argument("--scenes", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=40)
    asked = parser.parse_args()
    torch.set_num_threads(cpu.usable_cores())
    print(f"{cpu.name()}, {cpu.usable_cores()} cores, Python {platform.python_version()}, torch {torch.__version__}")
    for part in asked.parts or parts:
        with tempfile.TemporaryDirectory() as home:
            parts[part](asked, Path(home))


if __name__ == "__main__":
    main()
