"""The SLURM example, with its two programs played by small scripts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from clipctl.runs.rundir import RunDir
from tests.conftest import MICRO
from tests.distributed.test_training import GONE_S, wait_for_step

EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm.sh"
SETTINGS = {**MICRO, "recipe": "plain", "train.epochs": 300, "train.eval_every": 100}


def sbatch(programs, runs):
    """A job of one node, as SLURM would start it."""
    for name, does in (("scontrol", "echo localhost"), ("srun", 'exec "$@"')):
        (programs / name).write_text(f"#!/bin/bash\n{does}\n")
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), os.path.dirname(sys.executable), os.environ["PATH"]])
    facts = {"SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here"}
    values = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    return subprocess.Popen(
        ["bash", str(EXAMPLE), *values],
        env={**os.environ, **facts, "PATH": path, "RUNS": str(runs), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_next_job_resumes(tmp_path):
    run = RunDir(tmp_path / "runs" / "clipctl")
    first = sbatch(tmp_path, run.path.parent)
    wait_for_step(run, 20, first)
    first.send_signal(signal.SIGTERM)
    output, _ = first.communicate(timeout=GONE_S)
    assert run.status().state == "stopped", output
    stopped_at = run.status().step
    second = sbatch(tmp_path, run.path.parent)
    output, _ = second.communicate(timeout=120)
    assert second.returncode == 0 and 0 < stopped_at < run.status().step, output
    assert run.status().state == "finished" and run.status().attempt == 2
