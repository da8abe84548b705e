"""The gradients of one batch in several processes, written to a file by the first of them:

torchrun --nproc-per-node 2 -m tests.distributed.gradients OUT
"""

import os
import sys
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as naive

from clipctl.config.layers import Layer, resolve
from clipctl.data.batch import Batch
from clipctl.hardware.devices import open_device
from clipctl.model.loss import LOSS_SHARES, softmax_loss
from clipctl.training import distributed
from clipctl.training.distributed import GradientSum
from clipctl.training.sharding import whole
from clipctl.training.state import fresh_state, shard_state, share_state, tensors_of
from clipctl.training.step import gradients, train_step
from tests.conftest import MICRO

PAIRS = 23  # not a multiple of anything
CASES = {
    "softmax": {},
    "sigmoid": {"train.loss": "sigmoid"},
    "picture term": {"train.picture_term": 0.5},
    "smoothed": {"train.label_smoothing": 0.2, "train.picture_term": 0.5},
    "micro-batches": {"train.micro_batch": 3},
    "sigmoid in micro-batches": {"train.loss": "sigmoid", "train.micro_batch": 2, "train.picture_term": 0.5},
    "locked": {"tune.base": "any", "tune.lock": "image"},
    "low rank": {"tune.base": "any", "tune.lora": 2},
    "recomputed": {"runtime.recompute": True},
    "split": {"runtime.shard": True, "train.picture_term": 0.5},
    "split, in micro-batches": {"runtime.shard": True, "train.micro_batch": 3},
    # With 2 processes of 12 and 11 pairs, parts of 11 would be two here and one there.
    "split, in uneven micro-batches": {"runtime.shard": True, "train.micro_batch": 11, "train.loss": "sigmoid"},
    "split, pair by pair": {"runtime.shard": True, "train.micro_batch": 1},
    "split, recomputed": {"runtime.shard": True, "runtime.recompute": True},
}
DIFFERENT = ("different captions", {})  # the same as the first, but no caption occurs twice


def a_batch(*, repeats=True):
    rng = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (PAIRS, 16, 16, 3), dtype=torch.uint8, generator=rng)
    tokens = torch.randint(1, 39, (PAIRS, 9), generator=rng)
    tokens[:, -1] = 39
    captions = torch.randint(0, PAIRS // 2, (PAIRS,), generator=rng) if repeats else torch.arange(PAIRS)
    jitter = 0.9 + 0.2 * torch.rand(PAIRS, 3, generator=rng)
    keys = torch.stack([captions, torch.arange(PAIRS)], dim=1)
    positives = captions[:, None] == captions if repeats else None
    return Batch(images, tokens, jitter, positives, keys=keys)


def part_of(batch, world):
    """What one process loads; as its loader does, it sees equal captions only among its own pairs."""
    if world is None:
        return batch
    own = torch.from_numpy(np.array_split(np.arange(PAIRS), world.size)[world.rank])
    positives = None if batch.positives is None else batch.positives[own][:, own]
    return Batch(batch.images[own], batch.tokens[own], batch.jitter[own], positives, keys=batch.keys[own])


def state_of(values, world):
    config = resolve([Layer("test", {**MICRO, "model.text.vocab_size": 40, **values})])
    state = fresh_state(config, open_device("cpu"), "fp32", 1)
    if world is not None:
        share_state(state, world)
        if config.runtime.shard:
            shard_state(state, config)
    return state


def found_in(values, batch, world):
    state = state_of(values, world)
    result = gradients(state, part_of(batch, world))
    named = {name: whole(one.grad) for name, one in state.model.named_parameters() if one.grad is not None}
    return {**named, "the loss": result.loss, "the accuracy": result.accuracy}


def out_of_memory(world):
    """The gradients if the last process fails in the first layer of its image tower, once; and what each of them made
    of it: its micro-batch, and how many buckets of gradients it had sent before that layer."""
    state, sent_before = state_of({}, world), []
    send = GradientSum._send

    def fail(parameter):
        hook.remove()
        sent_before.append(len(sums[0]._sent))
        if world.rank == world.size - 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    def remember(total):
        sums.append(total)
        send(total)

    sums = []
    hook = state.model.image.patches.weight.register_post_accumulate_grad_hook(fail)
    with patch.object(GradientSum, "_send", remember):
        result = gradients(state, part_of(a_batch(), world))
    found = {name: one.grad for name, one in state.model.named_parameters()}
    return {**found, "the loss": result.loss, "the accuracy": result.accuracy}, (state.micro_batch, sent_before)


def out_of_memory_in_the_loss(world):
    """The gradients if memory runs out once in the last process, after the embeddings were gathered."""
    state, share, calls = state_of({}, world), LOSS_SHARES["softmax"], []

    def fail(*arguments):
        calls.append(None)
        if world.rank == world.size - 1 and len(calls) == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return share(*arguments)

    with patch.dict(LOSS_SHARES, softmax=fail):
        result = gradients(state, part_of(a_batch(), world))
    found = {name: one.grad for name, one in state.model.named_parameters()}
    return {**found, "the loss": result.loss, "the accuracy": result.accuracy}


def after_steps(world, values, steps=50):
    state, batch = state_of(values, world), a_batch()
    for _ in range(steps):
        train_step(state, part_of(batch, world), lr=1e-3)
    return {name: whole(tensor) for name, tensor in state.model.state_dict().items()}


def usual_way(world):
    """What many trainers do: gather without gradients, average what each process finds."""
    state = state_of({}, world)
    batch = part_of(a_batch(repeats=False), world)
    state.world = None
    images = batch.images.permute(0, 3, 1, 2).float() / 255
    embeddings = state.model(images, batch.tokens)
    rows, counts = world.place_of(len(images))
    whole = []
    for side in embeddings[:2]:
        everyone = world.gather(side.detach(), counts)
        whole.append(torch.cat([everyone[: rows.start], side, everyone[rows.stop :]]))
    softmax_loss(embeddings._replace(image=whole[0], text=whole[1])).backward()
    for parameter in state.model.parameters():
        if parameter.grad is not None:
            parameter.grad.copy_(naive.all_reduce(parameter.grad) / world.size)
    return {name: one.grad for name, one in state.model.named_parameters() if one.grad is not None}


def everything(world):
    found = {name: found_in(values, a_batch(), world) for name, values in CASES.items()}
    name, values = DIFFERENT
    found[name] = found_in(values, a_batch(repeats=False), world)
    found["after 50 steps"] = after_steps(world, {})
    found["after 50 steps, split"] = after_steps(world, {"runtime.shard": True})
    return found


def main():
    world = distributed.join()
    distributed.BUCKET_BYTES = 4096  # many of them, although the model is small
    found = everything(world)
    found["the usual way"] = usual_way(world)
    found["out of memory in the loss"] = out_of_memory_in_the_loss(world)
    found["out of memory"], reaction = out_of_memory(world)
    equal = all(
        torch.equal(tensor, other[case][name])
        for other in world.all_of(found)
        for case, tensors in found.items()
        for name, tensor in tensors.items()
    )
    reactions = world.all_of(reaction)
    saved = world.all_of({file: len(one) for file, one in tensors_of(state_of({"runtime.shard": True}, world)).items()})
    if world.is_first:
        torch.save({"found": found, "equal": equal, "reactions": reactions, "saved": saved}, sys.argv[1])
    dist.barrier()
    distributed.leave()
    os._exit(0)  # as clipctl does: threads of a process group may abort an interpreter that is shutting down


if __name__ == "__main__":
    main()
