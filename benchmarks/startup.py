"""How long help takes to appear, against importing what any Typer and Rich program imports:

python benchmarks/startup.py [--rounds 15]
"""

import argparse
import statistics
import subprocess
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    commands = {
        "import typer, rich.live": ["-c", "import typer, rich.live"],
        "clipctl --help": ["-m", "clipctl", "--help"],
        "clipctl train --help": ["-m", "clipctl", "train", "--help"],
    }
    seconds = {name: [] for name in commands}
    for _ in range(rounds):
        for name, arguments in commands.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
            seconds[name].append(time.perf_counter() - started)
    reference = statistics.median(seconds["import typer, rich.live"])
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:<26} {median:.3f} s  {median / reference:.2f} x")


if __name__ == "__main__":
    main()
