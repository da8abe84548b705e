"""Images per second of the `small` preset at batch 12: clipctl's train_step against transformers' CLIPModel.

Both have the same shape, precision, optimizer, batch and 77 tokens, and take turns in one process:

    python benchmarks/small_step.py [--rounds 7] [--preset small]

The last column trains on the same captions as clipctl does, cut to the longest of the batch.
"""

import argparse
import platform
import statistics
import time

import torch
import transformers
from transformers import CLIPConfig, CLIPModel

from clipctl.config import Layer, resolve
from clipctl.data.loader import Batch
from clipctl.hardware import cpu
from clipctl.training.loop import make_loader, make_state
from clipctl.training.plan import make_plan
from clipctl.training.step import train_step


def transformers_model(plan) -> CLIPModel:
    model, tokenizer = plan.config.model, plan.tokenizer
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


def transformers_step(model, optimizer, images, tokens):
    optimizer.zero_grad(set_to_none=True)
    loss = model(pixel_values=images, input_ids=tokens, return_loss=True).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--preset", default="small")
    arguments = arguments.parse_args()

    plan = make_plan(resolve([Layer("--preset", {"preset": arguments.preset, "runtime.device": "cpu"})]))
    state = make_state(plan)
    batch = next(make_loader(plan).epoch(1))
    padding = torch.zeros(len(batch.tokens), plan.tokenizer.context - batch.tokens.shape[1], dtype=torch.int64)
    whole = Batch(batch.images, torch.cat([batch.tokens, padding], dim=1))
    theirs = transformers_model(plan)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    images = torch.randn(len(batch.images), 3, plan.config.model.image.size_px, plan.config.model.image.size_px)

    sides = {
        "transformers": lambda: transformers_step(theirs, optimizer, images, whole.tokens),
        "clipctl, 77 tokens": lambda: train_step(state, whole, lr=1e-4),
        f"clipctl, {batch.tokens.shape[1]} tokens": lambda: train_step(state, batch, lr=1e-4),
    }
    seconds = {name: [] for name in sides}
    for step in sides.values():
        step()  # warm up
    for round_number in range(arguments.rounds):
        order = list(sides) if round_number % 2 == 0 else list(reversed(sides))
        for name in order:
            started = time.perf_counter()
            sides[name]()
            seconds[name].append(time.perf_counter() - started)

    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"{cpu.name()}, {plan.threads.value} threads, Python {platform.python_version()}, torch {torch.__version__},",
        end=" ",
    )
    print(f"transformers {transformers.__version__}")
    print(f"{arguments.preset}, batch {len(batch.images)}, {plan.parameters:,} parameters, {arguments.rounds} rounds\n")
    for name, values in seconds.items():
        speed = len(batch.images) / medians[name]
        ratio = medians["transformers"] / medians[name]
        spread = f"min {min(values):.3f}, max {max(values):.3f}"
        print(f"{name:<22} {medians[name]:7.3f} s/step ({spread}) {speed:6.2f} images/s  {ratio:.3f} x")


if __name__ == "__main__":
    main()
