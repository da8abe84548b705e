"""Images per second of the `small` preset at batch 12: `clipctl train` against transformers' CLIPModel.

Both have the same shape, precision, optimizer, batch and 77 tokens. Each runs in a process of its own, set up as its
users would, and they take turns, one step at a time:

    python benchmarks/small_step.py [--rounds 9] [--preset small] [--precision bf16]

The third row trains on the same captions as clipctl does, cut to the longest of the batch; the fourth with `--compile`;
the fifth computes attention with the fused kernel, as clipctl did before it measured which way is faster. Beside them
stands how near each step of clipctl comes to its roof: its matrix products at the rate of one large product, which is
timed in every round.
"""

import argparse
import multiprocessing
import platform
import statistics
import time

import torch
import transformers
from transformers import CLIPConfig, CLIPModel

from clipctl.config.layers import Layer, resolve
from clipctl.data.batch import Batch
from clipctl.hardware import cpu
from clipctl.hardware.devices import DTYPES
from clipctl.model.clip import autocast, normalise
from clipctl.model.cost import step_work, workload_of
from clipctl.training.attempt import make_loader, make_state
from clipctl.training.plan import make_plan
from clipctl.training.step import train_step


def transformers_model(plan) -> CLIPModel:
    model, tokenizer = plan.config.model, plan.data.tokenizer
    shared = {"hidden_act": model.activation, "projection_dim": model.embed_dim, "attention_dropout": 0.0}

    def tower(config):
        return {
            "hidden_size": config.width,
            "intermediate_size": 4 * config.width,
            "num_hidden_layers": config.depth,
            "num_attention_heads": config.heads,
            **shared,
        }

    vision = {**tower(model.image), "image_size": model.image.size_px, "patch_size": model.image.patch_px}
    text = {
        **tower(model.text),
        "vocab_size": model.text.vocab_size,
        "max_position_embeddings": model.text.context,
        "eos_token_id": tokenizer.end_id,
        "pad_token_id": 0,
        "bos_token_id": 1,
    }
    return CLIPModel(CLIPConfig(vision_config=vision, text_config=text, projection_dim=model.embed_dim)).train()


def transformers_step(model, optimizer, images, tokens, precision):
    optimizer.zero_grad(set_to_none=True)
    with autocast(torch.device("cpu"), precision):
        loss = model(pixel_values=images, input_ids=tokens, return_loss=True).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def serve(side: str, preset: str, precision: str, pipe) -> None:
    """One side of the comparison: makes a step whenever it is asked to, and says how long it took."""
    runtime = {"runtime.device": "cpu", "runtime.precision": precision, "runtime.compile": side == "compiled"}
    if side == "fused":
        runtime["runtime.attention"] = "fused"
    plan = make_plan(resolve([Layer("--preset", {"preset": preset, **runtime})]))
    batch = next(make_loader(plan).epoch(1))
    padding = torch.zeros(len(batch.tokens), plan.data.tokenizer.context - batch.tokens.shape[1], dtype=torch.int64)
    whole = Batch(batch.images, torch.cat([batch.tokens, padding], dim=1))
    if side == "transformers":
        torch.set_num_threads(int(plan.placement.threads.value))
        model = transformers_model(plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
        images = normalise(whole.images)
        steps = {
            "transformers, 77 tokens": lambda: transformers_step(model, optimizer, images, whole.tokens, precision)
        }
        flops = {}
    else:
        state = make_state(plan)
        steps = {f"{side}, {batch.tokens.shape[1]} tokens": lambda: train_step(state, batch, lr=1e-4)}
        if side == "clipctl":
            steps = {"clipctl, 77 tokens": lambda: train_step(state, whole, lr=1e-4), **steps}
        flops = {name: step_work(workload_of(plan.config, int(name.split()[-2]))).flops for name in steps}
    description = f"{plan.forecast.parameters:,} parameters, batch {len(batch.images)}"
    pipe.send((list(steps), flops, description, len(batch.images)))
    while (name := pipe.recv()) is not None:
        started = time.perf_counter()
        steps[name]()
        pipe.send(time.perf_counter() - started)


def product_flops_per_s(precision: str) -> float:
    """The rate of one large matrix product, the best of a few."""
    rows, inner, columns = 2048, 1024, 4096
    left = torch.randn(rows, inner, dtype=DTYPES[precision])
    right = torch.randn(inner, columns, dtype=DTYPES[precision])
    taken_s = []
    for _ in range(8):
        started = time.perf_counter()
        left @ right
        taken_s.append(time.perf_counter() - started)
    return 2 * rows * inner * columns / min(taken_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    arguments = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    owners, processes, flops, products = {}, [], {}, []
    for side in ("transformers", "clipctl", "compiled", "fused"):
        ours, theirs = context.Pipe()
        asked = (side, arguments.preset, arguments.precision, theirs)
        processes.append(context.Process(target=serve, args=asked, daemon=True))
        processes[-1].start()
        names, work, description, batch_size = ours.recv()
        owners.update(dict.fromkeys(names, ours))
        flops.update(work)

    def step(name: str) -> float:
        owners[name].send(name)
        return owners[name].recv()

    for name in owners:
        step(name), step(name)  # warm up
    seconds = {name: [] for name in owners}
    for round_number in range(arguments.rounds):
        for name in list(owners) if round_number % 2 == 0 else list(reversed(owners)):
            seconds[name].append(step(name))
        products.append(product_flops_per_s(arguments.precision))
    for pipe in set(owners.values()):
        pipe.send(None)

    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{cpu.name()}, {cpu.usable_cores()} cores, {versions}")
    peak = statistics.median(products)
    print(f"{arguments.preset} in {arguments.precision}, {description}, {arguments.rounds} rounds")
    print(f"a large matrix product: {peak / 1e9:.0f} GFLOP/s\n")
    reference = statistics.median(seconds["transformers, 77 tokens"])
    for name, values in seconds.items():
        median = statistics.median(values)
        spread = f"min {min(values):.3f}, max {max(values):.3f}"
        speed, ratio = batch_size / median, reference / median
        roof = f"  {flops[name] / peak / median:4.0%} of the roof" if name in flops else ""
        print(f"{name:<24} {median:7.3f} s/step ({spread}) {speed:6.2f} images/s  {ratio:.3f} x{roof}")


if __name__ == "__main__":
    main()
