"""What writing metrics and reading sensors costs, as a share of a training step.

The recorder thread shares the interpreter with the training, so its cost is measured as processor time:

    python benchmarks/overhead.py [--seconds 20] [--preset tiny]

prints the processor time of one system row and of one step row, times how often they are written, over one second.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from clipctl.hardware.devices import open_device
from clipctl.hardware.sensors import SystemSensors
from clipctl.runs import metrics
from clipctl.runs.metrics import MetricsWriter
from clipctl.runs.rundir import RunDir
from clipctl.training.journal import SYSTEM_INTERVAL_S
from clipctl.training.meter import StepMeter
from clipctl.training.step import StepResult


def timed(work, repeats: int) -> float:
    """Median processor seconds of one call."""
    samples = []
    for _ in range(repeats):
        started = time.thread_time()
        work()
        samples.append(time.thread_time() - started)
    return statistics.median(samples)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--step-s", type=float, default=0.15, help="length of a training step")
    arguments = arguments.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run = RunDir.create(Path(directory), "tiny")
        writer = MetricsWriter(run.metrics_file, run.name)
        sensors = SystemSensors(with_children=False)
        device = open_device("cpu")
        meter = StepMeter(device)
        value = torch.tensor(1.0)
        phases = ("transfer", "forward", "backward", "optimizer")

        def system_row() -> None:
            writer.write(metrics.SYSTEM, sensors.read(1.0))
            run.write_status("running", attempt=1, step=1, total_steps=2)

        def step_row() -> None:
            meter.begin()
            for phase in phases:
                meter.mark(phase)
            meter.end(StepResult(value, value, value, value), step=1, epoch=1, pairs=27, lr=1e-3)
            for row, _ in meter.read().rows:
                writer.write(metrics.STEP, row)

        system_s, step_s = timed(system_row, 200), timed(step_row, 200)
        run.release()
    per_step_s = step_s + system_s * arguments.step_s / SYSTEM_INTERVAL_S
    print(
        json.dumps(
            {
                "system_row_s": system_s,
                "step_row_s": step_s,
                "per_step_s": per_step_s,
                "share_of_step": per_step_s / arguments.step_s,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
