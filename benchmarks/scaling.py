"""Several processes and machines: whether forecasts come true here, and how far machines like this one would carry.

    python benchmarks/scaling.py network              what two processes of this machine can tell each other per second
    python benchmarks/scaling.py check [--rounds 3]   steps of 1, 2 and 4 processes: forecast against measured
    python benchmarks/scaling.py overlap              gradients sent during the backward pass or after it, by two
                                                      machines with 1 Gbit/s between them (namespaces; root)
    python benchmarks/scaling.py study [--out docs]   200M, 500M and 1B parameters on 1 to 1,024 machines, as
                                                      scaling.md and scaling.png

`check` and `study` measure in an application directory of their own.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from clipctl.bench.recommend import Question, model_of_size
from clipctl.bench.scaling import scale
from clipctl.bench.steps import measure_workload
from clipctl.config.layers import Layer, resolve
from clipctl.config.quantities import parse_count
from clipctl.data.batch import Batch
from clipctl.hardware import cpu
from clipctl.hardware.devices import open_device
from clipctl.hardware.profile import load_profile
from clipctl.model import cost
from clipctl.model.communication import BETWEEN, Network
from clipctl.model.forecast import CostModel
from clipctl.model.workload import Setting
from clipctl.runs import metrics
from clipctl.training import distributed
from clipctl.training.distributed import GradientSum
from clipctl.training.state import fresh_state, share_state
from clipctl.training.step import train_step

RANKS = (1, 2, 4)
CASES = (("tiny", 32), ("tiny", 128), ("small", 12))
MEASURED_S, WARM_STEPS = 15.0, 3


def clipctl(*arguments):
    command = [sys.executable, "-m", "clipctl", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def machine():
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{cpu.name()}, {cpu.usable_cores()} cores, {versions}"


# --- network --------------------------------------------------------------------------------------------------


def network(asked):
    """Under torchrun, which starts this again: sums of gradients, and of nothing."""
    if "RANK" not in os.environ:
        words = ["--standalone", "--nproc-per-node", "2", __file__, "network"]
        subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], check=True)
        return
    dist.init_process_group("gloo")
    torch.set_num_threads(1)

    def seconds(numbers, repeats):
        tensor, taken = torch.zeros(numbers), []
        for _ in range(repeats):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(tensor)
            taken.append(time.perf_counter() - started)
        return statistics.median(taken)

    large, small = seconds(25_000_000, 11), seconds(1, 201)
    if dist.get_rank() == 0:
        print(machine())
        print(
            f"sum of 100 MB among 2 processes: {large:.3f} s, {100e6 / large / 1e9:.2f} GB/s; of 4 bytes: {small:.1e} s"
        )
    dist.destroy_process_group()


# --- overlap --------------------------------------------------------------------------------------------------

PORT = "29533"


def overlap(asked):
    """Starts itself again on two machines that are none."""
    if "RANK" in os.environ:
        return overlap_here(asked)
    from tests.distributed.link import ADDRESSES, inside, two_machines

    words = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", ADDRESSES[0], "--master-port", PORT]
    again = [__file__, "overlap", "--presets", *asked.presets, "--rounds", str(asked.rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "."}
    with two_machines(0.0002, BETWEEN.bytes_per_s):
        processes = []
        for side in (0, 1):
            place = ["--node-rank", str(side), *again]
            command = [*inside(side), sys.executable, "-m", "torch.distributed.run", *words, *place]
            processes.append(subprocess.Popen(command, env=environment))
        if any([process.wait() for process in processes]):
            raise SystemExit("a process failed")


def overlap_here(asked):
    """Steps with and without, in turns."""
    world = distributed.join()
    for preset, pairs in (("tiny", 64), ("small", 6)):
        if preset not in asked.presets:
            continue
        config = resolve([Layer("benchmark", {"preset": preset, "recipe": "plain", "model.text.vocab_size": 60})])
        state = fresh_state(config, open_device("cpu"), "fp32", 1)
        share_state(state, world)
        side, tokens = config.model.image.size_px, torch.randint(1, 30, (pairs, 60))
        keys = torch.stack([torch.arange(pairs) + world.rank * pairs] * 2, dim=1)
        images = torch.randint(0, 256, (pairs, side, side, 3), dtype=torch.uint8)
        batch = Batch(images, tokens, torch.ones(pairs, 3), None, keys=keys)
        taken = {True: [], False: []}
        for number in range(2 * (asked.rounds + 1)):
            overlaps = number % 2 == 0
            during = GradientSum.during_backward if overlaps else nullcontext
            with patch.object(GradientSum, "during_backward", during):
                world.wait()
                started = time.perf_counter()
                train_step(state, batch, lr=1e-5)
                world.wait()
                taken[overlaps].append(time.perf_counter() - started)
        if world.is_first:
            during, after = (statistics.median(taken[key][1:]) for key in (True, False))
            sent_bytes = 4 * sum(one.numel() for one in state.model.parameters())
            print(f"{machine()}, {preset}, {pairs} pairs each, {sent_bytes / 1e6:.0f} MB of gradients:", flush=True)
            print(f"  sent after the backward pass {after:.3f} s, during it {during:.3f} s ({during / after:.2f} x)")
    world.wait()
    distributed.leave()


# --- check ----------------------------------------------------------------------------------------------------


def case(preset, batch_size, ranks, directory):
    """Forecast and measured seconds of a step."""
    values = ["--recipe", "plain", "--preset", preset, "--batch-size", batch_size, "--precision", "fp32"]
    several = ["--nproc", ranks] if ranks > 1 else []
    forecast = clipctl("train", *values, *several, "--dry-run")["step_s"]["value"]
    steps = WARM_STEPS + max(4, min(300, round(MEASURED_S / forecast)))
    name = f"{preset}-{batch_size}-{ranks}-{time.monotonic_ns()}"
    summary = clipctl("train", *values, *several, "--steps", steps, "--name", name, "--runs-dir", directory)
    rows = metrics.read_rows(Path(summary["run"]) / "metrics.jsonl")
    return forecast, statistics.fmean(
        row["step_s"] for row in rows if row["kind"] == "step" and row["step"] > WARM_STEPS
    )


def check(asked):
    print(machine())
    with tempfile.TemporaryDirectory() as directory:
        os.environ["CLIPCTL_HOME"] = directory
        clipctl("bench", "--suites", "matmul", "step")
        found = {}
        for round_number in range(asked.rounds):
            order = [(*one, ranks) for one in CASES for ranks in RANKS if one[0] in asked.presets]
            for one in order if round_number % 2 == 0 else reversed(order):
                found.setdefault(one, []).append(case(*one, directory))
    print(f"{'preset':<7}{'batch':>6}{'processes':>11}{'forecast':>11}{'measured':>11}{'off':>7}   (rounds)")
    for preset, batch_size, ranks in order:
        pairs = found[preset, batch_size, ranks]
        forecast, measured = (statistics.median(side) for side in zip(*pairs, strict=True))
        each = ", ".join(f"{one:.3f}" for _, one in pairs)
        off = forecast / measured - 1
        print(f"{preset:<7}{batch_size:>6}{ranks:>11}{forecast:>9.3f} s{measured:>9.3f} s{off:>7.0%}   ({each})")


# --- study ----------------------------------------------------------------------------------------------------

SIZES = ("200M", "500M", "1B")
NODES = tuple(2**power for power in range(11))
SHOWN = (1, 4, 16, 64, 256, 1024)
PAIRS_EACH = 32  # of a batch: 32,768 on 1,024 machines, which is what CLIP was trained with
SAMPLE_PAIRS = 2  # in the step that is measured here
DATASETS = (("1M pairs", 1_000_000), ("12M pairs", 12_000_000), ("400M pairs (LAION-400M)", 400_000_000))
NETWORKS = (("1 Gbit/s", BETWEEN), ("100 Gbit/s", Network(bytes_per_s=12.5e9, latency_s=20e-6)))


def duration(seconds):
    for unit, length in (("y", 365.25 * 86400), ("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:,.0f} {unit}" if seconds >= 10 * length else f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def question(size, pairs):
    return Question(model_of_size(int(parse_count(size))), batch_size=pairs)


def study(asked):
    precision = asked.precision
    with tempfile.TemporaryDirectory() as directory:
        os.environ["CLIPCTL_HOME"] = directory
        for size in SIZES:
            # Two sizes of step give the price of a pair and that of an update. While nothing is known, and where a step
            # takes long, a model is cut to some blocks; so the first size is measured again.
            for pairs in (SAMPLE_PAIRS, 2 * SAMPLE_PAIRS, SAMPLE_PAIRS):
                measure_workload(question(size, pairs).workload, precision, ["cpu"], print)
        profile = load_profile()
    setting = Setting("cpu", precision, cpu.usable_cores())
    model, found = CostModel(profile), {}
    for size in SIZES:
        for name, between in NETWORKS:
            rows = [scale(question(size, PAIRS_EACH * nodes), profile, setting, [nodes], between) for nodes in NODES]
            found[size, name] = {nodes: row[0] for nodes, row in zip(NODES, rows, strict=True) if row}
    Path(asked.out, "scaling.md").write_text("\n".join(lines(found, model, setting)) + "\n", encoding="utf-8")
    draw(found, Path(asked.out, "scaling.png"))


def lines(found, model, setting):
    yield from (
        "# Scaling forecasts",
        "",
        "Made by `python benchmarks/scaling.py study`, on:",
        "",
        f"    {machine()}, steps in {setting.precision}",
        "",
        f"Each machine takes {PAIRS_EACH} pairs of every batch, so 1,024 machines contrast 32,768 pairs, as the",
        "original CLIP did. Compute time is forecast from steps measured here, communication time from",
        "[the amount of data sent](several-processes.md). Gradients are sent during the backward pass, so part of",
        "the communication costs no time; the tables show the rest. With a GPU in each machine, compute time shrinks",
        "and the network stays as slow as it is: to forecast that, run `clipctl recommend-device --nodes N` on such",
        "a machine.",
        "",
        "## One machine",
        "",
        "m: measured here; f: forecast.",
        "",
        "| parameters | memory | memory per process, sharded across 8 (`--shard`) "
        "| step of 2 pairs | step of 32 pairs |",
        "|---|---|---|---|---|",
    )
    for size in SIZES:
        workload = question(size, PAIRS_EACH).workload
        small = question(size, SAMPLE_PAIRS).workload
        need, part = (cost.training_memory(one, setting.precision).total_bytes for one in (workload, split(workload)))
        basis = "m" if model.measured(setting, small) else "f"
        yield (
            f"| {cost.parameters(workload.model) / 1e6:,.0f}M | {need / 2**30:.1f} GiB f | {part / 2**30:.1f} GiB f "
            f"| {model.step_s(setting, small).value:.2f} s {basis} | {model.step_s(setting, workload).value:.1f} s f |"
        )
    for size in SIZES:
        yield from ("", f"## {size} parameters", "", "All forecast.", "")
        yield (
            "| machines | network | step | communication | efficiency | sent per step | "
            + " | ".join(f"epoch of {name}" for name, _ in DATASETS)
            + " |"
        )
        yield "|---|---|---|---|---|---|" + "---|" * len(DATASETS)
        for nodes in SHOWN:
            for name, _ in NETWORKS[: 1 if nodes == 1 else None]:
                one = found[size, name][nodes]
                alone = found[size, name][1]
                talking, efficiency = one.communication_s / one.step_s.value, alone.step_s.value / one.step_s.value
                epochs = (duration(pairs / (PAIRS_EACH * nodes) * one.step_s.value) for _, pairs in DATASETS)
                yield (
                    f"| {nodes:,} | {'–' if nodes == 1 else name} | {one.step_s.value:.1f} s | {talking:.0%} "
                    f"| {efficiency:.0%} | {one.sent_bytes / 1e9:.2f} GB | {' | '.join(epochs)} |"
                )
    yield from ("", "![throughput by the number of machines](scaling.png)")


def split(workload):
    from dataclasses import replace

    return replace(workload, shards=8)


def draw(found, path):
    """Pairs per second over the number of machines; the thin line is perfect scaling."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for number, size in enumerate(SIZES):
        for (name, _), style in zip(NETWORKS, ("--", "-"), strict=True):
            rows = found[size, name]
            speeds = [PAIRS_EACH * nodes / one.step_s.value for nodes, one in rows.items()]
            axis.plot(list(rows), speeds, style, color=f"C{number}", label=f"{size}, {name}")
        perfect = [PAIRS_EACH * nodes / rows[1].step_s.value for nodes in rows]
        axis.plot(list(rows), perfect, ":", color=f"C{number}", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="machines", ylabel="pairs per second (forecast)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["network", "overlap", "check", "study"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--presets", nargs="+", default=["tiny", "small"], help="for check and overlap")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--out", default="docs")
    asked = parser.parse_args()
    {"network": network, "overlap": overlap, "check": check, "study": study}[asked.part](asked)


if __name__ == "__main__":
    main()
