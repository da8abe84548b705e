"""Six commands at once, on one directory of runs and one application directory, while the data change underneath.

python -m tests.faults.crowd [--rounds 100] [--seed 0]
"""

import argparse
import os
import random
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
from PIL import Image

from clipctl.runs.rundir import RunDir
from tests.faults.trainer import SETTINGS, finish
from tests.launcher import launch

CODES = (0, 1, 2, 3, 129, 130, 143)
TRAIN = [one for one in SETTINGS if "data.source" not in one and "epochs" not in one]
PICTURES = 40


def write_data(place: Path, rng: random.Random) -> None:
    """Another choice of pictures and captions, some of them missing."""
    colours = [tuple(rng.randrange(256) for _ in range(3)) for _ in range(PICTURES)]
    lines = ["image,caption"]
    for number, colour in enumerate(colours):
        if rng.random() < 0.3:
            Image.fromarray(np.full((16, 16, 3), colour, np.uint8)).save(place / f"{number}.png")
        lines.append(f"{number}.png,a square of colour {rng.randrange(5)}")
    partial = place / "data.csv.new"
    partial.write_text("\n".join(rng.sample(lines[1:], PICTURES - rng.randrange(5))).join((lines[0] + "\n", "\n")))
    os.replace(partial, place / "data.csv")


def crowd(rounds: int, seed: int) -> tuple[int, list[str]]:
    """How many commands there were, and what went wrong."""
    rng, problems, count = random.Random(seed), list[str](), 0
    with tempfile.TemporaryDirectory(prefix="clipctl-crowd-") as directory:
        place = Path(directory)
        root, data = place / "runs", str(place / "data.csv")
        environment = {**os.environ, "CLIPCTL_HOME": str(place / "home"), "CLIPCTL_RUNS": str(root)}
        for number in range(PICTURES):
            Image.new("RGB", (16, 16), (number, 0, 0)).save(place / f"{number}.png")
        write_data(place, rng)
        for round_number in range(rounds):
            names = [f"run-{number}" for number in range(max(0, round_number - 2), round_number + 1)]
            commands = [
                ["train", data, *TRAIN, "--epochs", "3", "--name", names[-1]],
                ["data", "inspect", data],
                ["monitor", "--once"],
                ["checkpoint", "prune", "--yes"],
                ["stop", rng.choice(names), "--timeout", "20"],
                ["bench", "--sizes", "1e3", "--suites", "elementwise", "--dtypes", "fp32", "--threads", "1"],
            ]
            rng.shuffle(commands)
            changing = threading.Timer(rng.uniform(0, 2), write_data, (place, random.Random(rng.random())))
            changing.start()
            started = [(words, launch("clipctl", *words, env=environment)) for words in commands]
            for words, process in started:
                code, _, stderr = finish(process)
                count += 1
                is_clear = code == 0 or "error: " in stderr or "Usage" in stderr
                if code not in CODES or not is_clear or "Traceback" in stderr or "bug in clipctl" in stderr:
                    problems.append(f"round {round_number}, {' '.join(words[:2])}: exit {code}: {stderr[-600:]}")
            changing.join()
            problems += [problem for run in RunDir.all(root) for problem in unsound(run, environment)]
            if round_number % 10 == 9:
                sys.stderr.write(f"round {round_number + 1} of {rounds}: {len(problems)} problems\n")
    return count, problems


def unsound(run: RunDir, environment: dict[str, str]) -> list[str]:
    """A finished run verifies; so do the checkpoints of any other."""
    status = run.status()
    if status is None or status.state == "running":
        return [f"{run.name} was left as {status and status.state}"] if status else []
    code, stdout, stderr = finish(launch("clipctl", "checkpoint", "verify", str(run.path), env=environment))
    return [] if code == 0 else [f"{run.name} ({status.state}): {stdout}{stderr}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    count, problems = crowd(asked.rounds, asked.seed)
    sys.stdout.write("\n".join([*problems, f"{count} commands, {len(problems)} problems"]) + "\n")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
