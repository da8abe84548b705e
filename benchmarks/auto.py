"""What `--device auto` costs the first time and the second, as a share of the run that it decides on.

    python benchmarks/auto.py [--presets tiny small base]

Each preset begins with an empty application directory. The bar: 3 s or 2% of the forecast run, whichever is less.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile

import torch

from clipctl.hardware import cpu


def plan(preset: str, home: str) -> dict:
    command = [sys.executable, "-m", "clipctl", "train", "--preset", preset, "--dry-run", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CLIPCTL_HOME": home}, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--presets", nargs="+", default=["tiny", "small", "base"])
    print(f"{cpu.name()}, {cpu.usable_cores()} cores, Python {platform.python_version()}, torch {torch.__version__}")
    for preset in parser.parse_args().presets:
        with tempfile.TemporaryDirectory() as home:
            first, second = plan(preset, home), plan(preset, home)
        run_s = first["seconds"]["value"]
        print(
            f"{preset:<7} run {run_s:>6.0f} s   allowed {min(3.0, 0.02 * run_s):.2f} s   "
            f"first {first['decided_s']:.2f} s   again {second['decided_s']:.3f} s   "
            f"{first['precision']}, {first['threads']} threads"
        )


if __name__ == "__main__":
    main()
