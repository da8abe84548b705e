"""The monitor on a metrics file of a million rows, beside a live run, and over four runs:

python benchmarks/monitor.py [--rounds 5] [--seconds 60] [--recorded DIRECTORY_OF_RUNS]
"""

import argparse
import fcntl
import json
import math
import os
import platform
import pty
import random
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

import psutil

from clipctl.cli.views.dashboard import dashboard
from clipctl.cli.views.scene import Options, Scene
from clipctl.monitor.watch import RunWatcher
from clipctl.runs import metrics
from clipctl.runs.metrics import MetricsWriter
from clipctl.runs.rundir import RunDir

ROWS = 1_000_000
SPIKE_STEP, SPIKE_LOSS = 400_000, 9.75


def write_rows(path, count=ROWS):
    """Nine steps in ten, the rest system rows, evaluations and epochs, as the trainer writes them."""
    chance = random.Random(0)
    with path.open("w") as file:
        file.write('{"kind":"header","schema":1,"run_id":"run"}\n')
        rows, step = 1, 0
        while rows < count:
            step += 1
            base = {"time_s": 1e9 + step * 0.1, "elapsed_s": round(step * 0.1, 4)}
            loss = SPIKE_LOSS if step == SPIKE_STEP else 3.3 * math.exp(-step / 200_000) + 0.2 * chance.random()
            found = [{"kind": "step", **base, **step_values(step, loss, chance)}]
            if step % 10 == 0:
                found.append({"kind": "system", **base, **SYSTEM})
            if step % 100 == 0:
                scores = {"step": step, "epoch": step // 100, "val_loss": loss, "score": 0.5}
                found.append({"kind": "eval", **base, **scores})
            file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in found)
            rows += len(found)
    return step


SYSTEM = {
    "cpu_per_core": [0.5, 0.6],
    "process_cpu": 1.5,
    "rss_bytes": 10**9,
    "available_bytes": 10**10,
    "swap_used_bytes": 0,
    "disk_free_bytes": 10**11,
    "temperature_c": None,
    "power_w": None,
    "device_memory_bytes": None,
}


def step_values(step, loss, chance):
    return {
        "step": step,
        "epoch": step // 100 + 1,
        "loss": loss,
        "accuracy": chance.random(),
        "lr": 8e-4,
        "temperature": 0.07,
        "grad_norm": chance.random(),
        "batch_size": 27,
        "images_per_s": 270.0,
        "step_s": 0.1,
        "data_s": 0.001,
        "transfer_s": 0.0001,
        "forward_s": 0.03,
        "backward_s": 0.06,
        "optimizer_s": 0.005,
    }


MEASURE = """
import os, subprocess, sys, time
started = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE)
output = process.stdout.read()
_, _, usage = os.wait4(process.pid, 0)
print(time.perf_counter() - started, usage.ru_maxrss * 1024, len(output))
"""


def once(root):
    """Seconds and bytes of one look, measured in a small process because a child begins with its parent's memory."""
    command = [sys.executable, "-m", "clipctl", "monitor", "--once", "--runs-dir", str(root)]
    done = subprocess.run([sys.executable, "-c", MEASURE, *command], capture_output=True, text=True, check=True)
    seconds, memory_bytes, _ = done.stdout.split()
    return float(seconds), float(memory_bytes)


class Live:
    """A run that goes on: this process poses as its trainer, ten steps a second."""

    def __init__(self, run, first_step):
        self._run, self._step = run, first_step
        self._writer = MetricsWriter(run.metrics_file, "run")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._go_on)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopped.set()
        self._thread.join()
        self._writer.close()

    def _go_on(self):
        chance = random.Random(1)
        while not self._stopped.wait(0.1):
            self._step += 1
            self._writer.write(metrics.STEP, step_values(self._step, 0.3, chance), elapsed_s=self._step * 0.1)
            if self._step % 10 == 0:
                self._writer.write(metrics.SYSTEM, SYSTEM, elapsed_s=self._step * 0.1)
                self._run.write_status("running", attempt=1, step=self._step, total_steps=10**7)


def watch(root, seconds, page="overview"):
    """Seconds to the first frame in a terminal, and the share of a core that the frames after it take."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 36, 120, 0, 0))
    command = [sys.executable, "-m", "clipctl", "monitor", "--page", page, "--runs-dir", str(root)]
    environment = {**os.environ, "TERM": "xterm-256color"}
    started = time.perf_counter()
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
    output = b""
    while b"q quit" not in re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", output):
        output += os.read(master, 65536)
    first_frame_s = time.perf_counter() - started
    threading.Thread(target=drain, args=(master,), daemon=True).start()
    share = None
    if seconds:
        time.sleep(2)
        watched = psutil.Process(process.pid)
        before, began = sum(watched.cpu_times()[:2]), time.perf_counter()
        time.sleep(seconds)
        share = (sum(watched.cpu_times()[:2]) - before) / (time.perf_counter() - began)
    os.write(master, b"q")
    process.wait(10)
    return first_frame_s, share


def overlay(root):
    """Seconds to read four runs of 100,000 rows and draw them over each other."""
    runs = [RunDir.create(root, "tiny", f"run-{number}") for number in range(4)]
    for run in runs:
        run.write_config("preset: tiny\n")
        run.write_status("finished", attempt=1, step=1, total_steps=10**5)
        write_rows(run.metrics_file, 100_000)
    started = time.perf_counter()
    first, *rivals = (RunWatcher(run).look(time.monotonic()) for run in runs)
    dashboard(Scene(first, Options(page=1), rivals=rivals), 120, 36)
    return time.perf_counter() - started


def lag(run):
    """The mean signed distance of the smoothed loss from the centred median of 21 steps, as a share of the loss."""
    series = RunWatcher(run).look(time.monotonic()).view.loss
    rows = (json.loads(line) for line in run.metrics_file.read_text().splitlines())
    losses = {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}
    medians = {
        step: statistics.median(losses[near] for near in range(step - 10, step + 11))
        for step in losses
        if step - 10 in losses and step + 10 in losses
    }
    pairs = [(value, medians[round(step)]) for step, value in series.smoothed() if round(step) in medians]
    return sum(value - median for value, median in pairs) / sum(median for _, median in pairs)


def drain(master):
    while True:
        try:
            os.read(master, 65536)
        except OSError:
            return


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--recorded", type=Path, help="runs to compare the smoothed loss with their data")
    asked = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as name:
        long, short = (RunDir.create(Path(name) / kind, "tiny", "run") for kind in ("long", "short"))
        for run in (long, short):
            run.write_config("preset: tiny\n")
            run.write_status("running", attempt=1, step=1, total_steps=10**7)
        last_step = write_rows(long.metrics_file)
        looks = []
        for _ in range(asked.rounds):
            long.write_status("running", attempt=1, step=1, total_steps=10**7)  # a fresh sign of life
            looks.append(once(long.path.parent))
        seconds, memory = (statistics.median(values) for values in zip(*looks, strict=True))
        size_mb = long.metrics_file.stat().st_size / 1e6
        print(f"--once on {ROWS:,} rows ({size_mb:.0f} MB): {seconds:.2f} s, {memory / 1e6:.0f} MB")
        for page in ("overview", "metrics"):
            with Live(long, last_step):
                _, share = watch(long.path.parent, asked.seconds, page)
            print(f"afterwards at 1 Hz, over {asked.seconds:g} s: {share:.1%} of a core on the page {page}")
        with Live(short, 1):
            time.sleep(2)
            first = statistics.median(watch(short.path.parent, 0)[0] for _ in range(asked.rounds))
        print(f"start to first frame on a live run: {first:.2f} s")
        print(f"four runs of 100,000 rows over each other: {overlay(Path(name) / 'four'):.2f} s")
    for run in RunDir.all(asked.recorded) if asked.recorded else ():
        print(f"{run.name}: the smoothed loss lies {lag(run):+.2%} from a centred median")


if __name__ == "__main__":
    main()
