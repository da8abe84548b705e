"""A large batch in micro-batches against plain steps of the micro-batch's size: memory, time per image, gradients.

    python benchmarks/micro_batch.py [--preset small] [--batch-size 768] [--micro-batch 12] [--rounds 1]

Each side is a process of its own, so that its peak memory is its own; they take turns, plain steps before and after
each large one. Gradients are compared in a third process, with a batch that fits at once (--check pairs).
"""

import argparse
import multiprocessing
import platform
import statistics
import time

import torch

from clipctl.config.layers import Layer, resolve
from clipctl.hardware import cpu
from clipctl.hardware.devices import open_device
from clipctl.hardware.memory import peak_rss_bytes
from clipctl.model.cost import ASSUMED_VOCAB_SIZE
from clipctl.model.workload import Workload
from clipctl.training.state import fresh_state
from clipctl.training.step import gradients, train_step
from clipctl.training.trial import trial_batch

TOKENS, PLAIN_STEPS = 30, 3


def ready(preset, batch_size, micro_batch):
    values = {"preset": preset, "model.text.vocab_size": ASSUMED_VOCAB_SIZE, "train.batch_size": batch_size}
    config = resolve([Layer("benchmark", {**values, "train.micro_batch": micro_batch})])
    state = fresh_state(config, open_device("cpu"), "fp32", cpu.usable_cores())
    return state, trial_batch(Workload(config.model, batch_size, TOKENS, micro_batch))


def serve(preset, batch_size, micro_batch, pipe):
    """Makes a step whenever it is asked to; says how long it took and how much memory it has needed so far."""
    state, batch = ready(preset, batch_size, micro_batch)
    # Two small steps before: the first one leaves the optimizer's moments, which later ones need memory beside.
    for _ in range(2):
        train_step(state, batch.split(2 * (micro_batch or batch_size))[0], lr=1e-4)
    pipe.send("ready")
    while pipe.recv():
        started = time.perf_counter()
        train_step(state, batch, lr=1e-4)
        pipe.send((time.perf_counter() - started, peak_rss_bytes()))


def largest_difference(preset, pairs, micro_batch, pipe):
    found = []
    for part in (None, micro_batch):
        state, batch = ready(preset, pairs, part)
        gradients(state, batch)
        found.append({name: one.grad.clone() for name, one in state.model.named_parameters()})
    whole, parts = found
    pipe.send(max(float(torch.norm(parts[name] - one) / torch.norm(one)) for name, one in whole.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--batch-size", type=int, default=768)
    parser.add_argument("--micro-batch", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--check", type=int, default=48, help="pairs of the batch whose gradients are compared")
    asked = parser.parse_args()
    context = multiprocessing.get_context("spawn")

    def start(target, *arguments):
        ours, theirs = context.Pipe()
        context.Process(target=target, args=(asked.preset, *arguments, theirs), daemon=True).start()
        return ours

    difference = start(largest_difference, asked.check, asked.micro_batch).recv()
    plain = start(serve, asked.micro_batch, None)
    parts = start(serve, asked.batch_size, asked.micro_batch)
    seconds, peaks = {side: [] for side in (plain, parts) if side.recv()}, {}

    def step(side):
        side.send(True)
        taken_s, peaks[side] = side.recv()
        seconds[side].append(taken_s)

    for _ in range(asked.rounds):
        for _ in range(PLAIN_STEPS):
            step(plain)
        step(parts)
    for _ in range(PLAIN_STEPS):
        step(plain)
    for side in (plain, parts):
        side.send(False)
    per_image = {side: statistics.median(taken) for side, taken in seconds.items()}
    plain_s, parts_s = per_image[plain] / asked.micro_batch, per_image[parts] / asked.batch_size
    print(f"{cpu.name()}, {cpu.usable_cores()} cores, Python {platform.python_version()}, torch {torch.__version__}")
    print(f"{asked.preset}: batch {asked.batch_size} in micro-batches of {asked.micro_batch}, {asked.rounds} round(s)")
    print(f"time per image  {parts_s:.4f} s against {plain_s:.4f} s: {parts_s / plain_s:.2f} ×")
    both = [f"{peaks[side] / 2**20:,.0f} MiB" for side in (parts, plain)]
    print(f"peak memory     {both[0]} against {both[1]}: {peaks[parts] / peaks[plain]:.2f} ×")
    print(f"gradients of {asked.check} pairs, whole and in parts: largest relative difference {difference:.1e}")


if __name__ == "__main__":
    main()
