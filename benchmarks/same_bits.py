"""Does this tree train to the same bits as another revision? A refactoring is proven by it.

    python benchmarks/same_bits.py 42f96c3

Both revisions train the same runs with the same interpreter and libraries, each from its own source tree, in its own
process and with its own application directory. What is compared is the digest of every weight, every moment and the
random state in the last checkpoint. Runs that are killed must come to the same digest as those that are not, and one
run is begun by the other revision and finished by this tree. Exit 1 if any digest differs.
"""

import argparse
import csv
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
CSV_PICTURES, BROKEN_PICTURES = 80, 3
# Threads and device are named: what `auto` would choose depends on the moment.
FIXED = ("--device", "cpu", "--threads", "2")
# A preset, because the recipe may choose another tower in another revision.
SHORT = ("--preset", "tiny", "--epochs", "16", "--save-every", "1e")
SHORTEST = ("--preset", "tiny", "--steps", "16")


@dataclass(frozen=True)
class Case:
    name: str
    arguments: tuple[str, ...]
    workers: int = 0
    is_killed: bool = False
    changes_revision: bool = False  # begun by the other revision, resumed by this tree


def cases(table: Path) -> list[Case]:
    fp32, bf16 = ("--precision", "fp32"), ("--precision", "bf16")
    files = (str(table), *fp32, *SHORT, "--batch-size", "16")
    found = [
        Case("default recipe, whole run", fp32),
        Case("fp32, sigmoid loss", (*fp32, *SHORT, "--set", "train.loss=sigmoid")),
        Case("bf16", (*bf16, *SHORTEST)),
        Case("fp16", ("--precision", "fp16", *SHORTEST)),
        Case("blocks recomputed", (*fp32, *SHORTEST, "--recompute")),
        Case("CSV with broken pictures", files),
        Case("CSV, workers", files, workers=2),
    ]
    killed = [replace(case, name=f"{case.name}, killed and resumed", is_killed=True) for case in found[-2:]]
    handed = replace(killed[0], name="CSV, begun by the other revision", changes_revision=True)
    return [*found, *killed, handed]


def draw_table(directory: Path) -> Path:
    """Pictures with captions in a CSV file; a few are cut off and one is empty."""
    rng = np.random.default_rng(0)
    rows = [("filepath", "title")]
    for number in range(CSV_PICTURES):
        colours = rng.integers(0, 256, size=(4, 6, 3), dtype=np.uint8)
        path = directory / f"{number:03d}.jpg"
        Image.fromarray(colours).resize((120 + number, 90), Image.Resampling.BICUBIC).save(path)
        if number < BROKEN_PICTURES:
            path.write_bytes(path.read_bytes()[: 300 * number])
        rows.append((path.name, f"picture {number % 70} of the {'left' if number % 2 else 'upper'} side"))
    table = directory / "captions.csv"
    with table.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return table


def check_out(revision: str, directory: Path) -> Path:
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(directory, filter="data")
    return directory


class Tree:
    """The sources of one revision, and a place for its runs."""

    def __init__(self, source: Path, home: Path) -> None:
        home.mkdir(exist_ok=True)
        self.runs = home / "runs"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CLIPCTL_")}
        settings = (source / "clipctl" / "config" / "sections.py", source / "clipctl" / "config.py")
        known = next(file.read_text() for file in settings if file.exists())
        # What later revisions would decide by themselves is asked for as earlier ones did it.
        self.as_before = ("--recipe", "plain") if "recipe:" in known else ()
        if "attention:" in known:
            self.as_before += ("--set", "runtime.attention=fused")
        self.environment = {**kept, "PYTHONPATH": str(source), "CLIPCTL_HOME": str(home / "app"), "COLUMNS": "100"}

    def start(self, runs: Path, *arguments: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "clipctl", "train", "--runs-dir", str(runs), *arguments]
        # In a directory of its own: what lies in the current one would be imported first.
        runs.mkdir(parents=True, exist_ok=True)
        return subprocess.Popen(
            command, env=self.environment, cwd=runs, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )

    def finish(self, runs: Path, *arguments: str) -> None:
        process = self.start(runs, *arguments)
        _, stderr = process.communicate()
        if process.returncode:
            sys.exit(f"training failed ({' '.join(arguments)}):\n{stderr.decode()}")

    def train(self, case: Case, number: int, finisher: "Tree") -> str:
        """Carry out a case; `finisher` resumes it where it is killed."""
        name = f"case{number}"
        run = self.runs / name
        arguments = (*case.arguments, *self.as_before, *FIXED, "--workers", str(case.workers), "--name", name)
        if case.is_killed:
            process = self.start(self.runs, *arguments)
            wait_for_a_step_past_a_checkpoint(run, process)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            finisher.finish(self.runs, "--resume", name, "--workers", str(case.workers))
        else:
            self.finish(self.runs, *arguments)
        return digest(run)


def wait_for_a_step_past_a_checkpoint(run: Path, process: "subprocess.Popen[bytes]") -> None:
    """So that steps are lost and made again."""
    while process.poll() is None:
        saved = sorted((run / "checkpoints").glob("step-*/manifest.json"))
        if saved and last_step(run) > int(saved[-1].parent.name.removeprefix("step-")):
            return
        time.sleep(0.02)
    sys.exit("the run ended before it could be killed")


def last_step(run: Path) -> int:
    try:
        return int(json.loads((run / "run.json").read_text())["step"])
    except (OSError, ValueError):
        return 0


def digest(run: Path) -> str:
    """Of all tensors in the last checkpoint, by name."""
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    found = hashlib.sha256()
    for file in ("model.safetensors", "optimizer.safetensors"):
        with safe_open(last / file, framework="np") as tensors:
            for name in sorted(tensors.keys()):
                value = tensors.get_tensor(name)
                found.update(f"{name} {value.dtype} {value.shape}".encode())
                found.update(value.tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", help="what to compare this tree with")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        (directory / "pictures").mkdir()
        table = draw_table(directory / "pictures")
        theirs = Tree(check_out(arguments.revision, directory / "source"), directory / "theirs")
        ours = Tree(ROOT, directory / "ours")
        different = 0
        for number, case in enumerate(cases(table)):
            if arguments.only not in case.name:
                continue
            started = time.perf_counter()
            before = theirs.train(case, number, ours if case.changes_revision else theirs)
            now = ours.train(case, number, ours)
            different += before != now
            verdict = f"equal      {now[:16]}" if before == now else f"DIFFERENT  {before[:16]} {now[:16]}"
            print(f"{case.name:<46} {verdict}  {time.perf_counter() - started:5.0f} s", flush=True)
    print(f"{different} of the digests differ" if different else "every digest is equal")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
