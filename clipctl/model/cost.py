"""What a model costs, by arithmetic alone: parameters, floating-point operations, bytes. No torch.

B is the batch, N the tokens of a tower, D its width. A multiply and an add count as two operations. How many seconds
that takes on a machine is measured: see `forecast.py`.
"""

from dataclasses import astuple, dataclass
from functools import cache
from typing import NamedTuple

from clipctl.config.sections import ImageTowerConfig, ModelConfig, TextTowerConfig, TrainConfig, TuneConfig
from clipctl.model.workload import Workload

MLP_RATIO = 4

# Symbols of the character tokenizer on plain English captions, where no tokenizer has been built yet.
ASSUMED_VOCAB_SIZE = 33


def block_parameters(width: int) -> int:
    """One transformer block: two norms, QKV, output projection, MLP."""
    norms = 2 * 2 * width
    attention = (3 * width * width + 3 * width) + (width * width + width)
    hidden = MLP_RATIO * width
    mlp = (width * hidden + hidden) + (hidden * width + width)
    return norms + attention + mlp


def image_parameters(tower: ImageTowerConfig, embed_dim: int) -> int:
    if tower.stem == "conv":
        stem = sum(layer.weights + 2 * layer.channels for layer in stem_layers(tower))  # with a norm each
    else:
        stem = 3 * tower.patch_px**2 * tower.width  # no bias
    positions, norm_post = tower.tokens * tower.width, 2 * tower.width
    class_and_norm_pre = 3 * tower.width if tower.pool == "class" else 0
    blocks = tower.depth * block_parameters(tower.width)
    return stem + positions + class_and_norm_pre + blocks + norm_post + tower.pooled * embed_dim


def workload_of(config: TrainConfig, text_tokens: int) -> Workload:
    """One step of a training run."""
    loop = config.train
    return Workload(
        config.model,
        loop.batch_size,
        text_tokens,
        loop.micro_batch,
        config.runtime.recompute,
        trained_parameters(config) / parameters(config.model),
        image_share=_tower_share("image", config.model.image.depth, config.tune),
        text_share=_tower_share("text", config.model.text.depth, config.tune),
    )


def _tower_share(name: str, depth: int, tune: TuneConfig) -> float:
    """Share of a tower's forward and backward pass. Gradients of activations are a third, those of weights another."""
    if name not in tune.locked:
        return 2 / 3 if tune.lora else 1.0
    if tune.has_features:
        return 0.0
    return 1 / 3 + 2 / 3 * min(1.0, tune.unlocked_blocks / max(1, depth))


def trained_parameters(config: TrainConfig) -> int:
    """The number of parameters that are trained: in a locked tower its projection and last blocks, with LoRA also the
    added matrices."""
    model, tune = config.model, config.tune
    towers = (
        ("image", model.image, model.image.pooled, image_parameters(model.image, model.embed_dim)),
        ("text", model.text, model.text.width, text_parameters(model.text, model.embed_dim)),
    )
    count = 1
    for name, tower, pooled, whole in towers:
        projection, blocks, is_locked = pooled * model.embed_dim, 0, name in tune.locked
        if tune.lora:  # of each matrix: rank × (rows + columns)
            sides = (1 + 3) + (1 + 1) + 2 * (1 + MLP_RATIO)
            blocks = 0 if is_locked else tower.depth * tune.lora * sides * tower.width
        elif is_locked and tune.unlocked_blocks:
            blocks = min(tune.unlocked_blocks, tower.depth) * block_parameters(tower.width) + 2 * tower.width
        count += projection + blocks if tune.lora or is_locked else whole
    return count


class StemLayer(NamedTuple):
    """A 3 × 3 convolution of stride 2: what it reads and what it writes."""

    side_px: int
    channels: int
    weights: int

    @property
    def values(self) -> int:
        return self.side_px**2 * self.channels

    @property
    def flops(self) -> int:
        return 2 * self.side_px**2 * self.weights


def stem_layers(tower: ImageTowerConfig) -> list[StemLayer]:
    layers, channels, side_px = [], 3, tower.size_px
    for width in tower.stem_widths:
        side_px //= 2
        layers.append(StemLayer(side_px, width, 9 * channels * width))
        channels = width
    return layers


def text_parameters(tower: TextTowerConfig, embed_dim: int) -> int:
    vocab_size = tower.vocab_size or ASSUMED_VOCAB_SIZE
    embeddings = (vocab_size + tower.context) * tower.width
    final_norm = 2 * tower.width
    return embeddings + final_norm + tower.depth * block_parameters(tower.width) + tower.width * embed_dim


def parameters(model: ModelConfig) -> int:
    """How many learnable numbers a model has, the temperature included."""
    return image_parameters(model.image, model.embed_dim) + text_parameters(model.text, model.embed_dim) + 1


@dataclass(frozen=True)
class Work:
    """What a training step asks of a device. Its time is close to a sum of these, each times a price of the device."""

    flops: float  # of matrix products
    moved_bytes: float  # activations read and written outside of matrix products
    parameter_bytes: float  # weights, gradients and moments that clipping and AdamW pass through
    kernels: float  # operations started

    def scaled(self, share: float) -> "Work":
        return Work(*(share * value for value in astuple(self)))

    def __add__(self, other: "Work") -> "Work":
        return Work(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


# Per token of a block and in units of its width, forward and backward: both norms (2 · 5), both residuals (2 · 3), the
# activation (4 · 5) and biases (9 · 1). Only the proportions between towers matter: the price per byte is measured.
_MOVED_PER_TOKEN = 45
_MOVED_PER_STEM_VALUE = 15  # per value that a convolution writes, forward and backward: norm and activation
_KERNELS_PER_STEM_LAYER = 12
_KERNELS_PER_BLOCK = 60  # forward and backward
_KERNELS_PER_PARAMETER = 0.5  # of norms, clipping and the fused update, which take all tensors in one call
_TENSORS_PER_BLOCK = 12
_PARAMETER_PASSES = 8  # write and read the gradient, scale it, read and write weight and both moments


def image_work(workload: Workload) -> Work:
    model = workload.model
    image = model.image
    parameters = image_parameters(image, model.embed_dim)
    tower = _tower_work(image, image.tokens, parameters, workload)
    more = (workload.forward_passes + 2) / 3
    if image.stem == "conv":
        layers = stem_layers(image)
        flops = sum(layer.flops for layer in layers)
        moved = 4 * _MOVED_PER_STEM_VALUE * sum(layer.values for layer in layers)
        kernels = _KERNELS_PER_STEM_LAYER * len(layers)
    else:
        flops, moved, kernels = 2 * image.patches * 3 * image.patch_px**2 * image.width, 0, 0
    pixels_bytes = 3 * image.size_px**2 * 4 * 4
    stem = Work(
        more * 3 * workload.batch_size * flops, more * workload.batch_size * (moved + pixels_bytes), 0, 20 + kernels
    )
    return tower + stem.scaled(workload.image_share)


def text_work(workload: Workload) -> Work:
    text = workload.model.text
    parameters = text_parameters(text, workload.model.embed_dim)
    return _tower_work(text, workload.text_tokens, parameters, workload)


def _tower_work(tower: ImageTowerConfig | TextTowerConfig, tokens: int, parameters: int, workload: Workload) -> Work:
    """Forward and backward: the backward pass costs two forward passes."""
    width, depth, batch_size = tower.width, tower.depth, workload.batch_size
    pooled = tower.pooled if isinstance(tower, ImageTowerConfig) else width
    if isinstance(tower, ImageTowerConfig) and tower.pool != "class":
        blocks = depth * _block_flops(width, tokens, written=tokens)
        moved = 4 * _MOVED_PER_TOKEN * width * tokens * (depth + 0.1)
    else:
        # The last block writes a single token, for which it reads the keys and values of all.
        blocks = (depth - 1) * _block_flops(width, tokens, written=tokens) + _block_flops(width, tokens, written=1)
        moved = 4 * _MOVED_PER_TOKEN * width * tokens * (depth - 0.75)
    share = workload.image_share if isinstance(tower, ImageTowerConfig) else workload.text_share
    forward = share * blocks + 2 * pooled * workload.model.embed_dim
    kernels = depth * (_KERNELS_PER_BLOCK + _KERNELS_PER_PARAMETER * _TENSORS_PER_BLOCK)
    updated_bytes = 4 * _PARAMETER_PASSES * parameters * workload.trained_share
    more = (workload.forward_passes + 2) / 3
    rounds = -(-batch_size // workload.kept_pairs)  # of kernels: one for each micro-batch
    passes = Work(
        more * 3 * batch_size * forward, more * share * batch_size * moved, 0, more * rounds * share * kernels
    )
    return passes + Work(0, 0, updated_bytes, 0)


def _block_flops(width: int, tokens: int, *, written: int) -> int:
    keys_and_values = 2 * tokens * 2 * width * width
    matrices = 2 * written * (2 + 2 * MLP_RATIO) * width * width  # query, output, MLP
    attention = 2 * 2 * written * tokens * width  # scores, and their product with the values
    return keys_and_values + matrices + attention


@cache
def step_work(workload: Workload) -> Work:
    """Both towers, the B × B × E similarity matrix, and the fixed work of every step."""
    batch_size = workload.batch_size
    similarity = 3 * 2 * batch_size * batch_size * workload.model.embed_dim
    loss = Work(similarity, 10 * 4 * batch_size * batch_size, 0, 50)
    return image_work(workload) + text_work(workload) + loss


@dataclass(frozen=True)
class Memory:
    """Bytes that a training step needs, by what holds them."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    batch_bytes: int
    process_bytes: int = 0  # Python, torch and its libraries
    pictures_bytes: int = 0  # decoded ones that are kept

    @property
    def total_bytes(self) -> int:
        return sum(astuple(self))


# Autocast keeps norms, residuals and what they feed in fp32, so that halving the precision does not halve the bytes.
ACTIVATION_BYTES = {"fp32": 4.0, "bf16": 3.0, "fp16": 3.0}
# What an optimizer keeps per trained parameter, in fp32: both moments of AdamW.
OPTIMIZER_BYTES = {"adamw": 8}


def training_memory(workload: Workload, precision: str = "fp32", attention: str = "fused") -> Memory:
    """Weights, gradients and moments in fp32 (16 bytes per parameter with AdamW); activations in `precision`. Plain
    attention keeps its scores, fused does not.

    A whole batch writes its gradients where its activations were a moment before. Micro-batches cannot: the gradients
    summed so far are kept beside all activations.
    """
    count = parameters(workload.model)
    trained = round(count * workload.trained_share)
    image, text, batch_size = workload.model.image, workload.model.text, workload.batch_size
    pictures = _kept_values(image.width, image.depth, image.tokens, workload.recompute)
    pictures += 4 * image.tokens * image.width  # patches, with the class token, with positions, normed
    if image.stem == "conv":  # convolved, normed, activated, and the gradient of one of them
        pictures += 4 * sum(layer.values for layer in stem_layers(image))
    captions = _kept_values(text.width, text.depth, workload.text_tokens, workload.recompute)
    kept = (_kept_share(workload.image_share) * pictures, _kept_share(workload.text_share) * captions)
    values = round(max(kept) if workload.micro_batch else sum(kept))  # in micro-batches, one tower after the other
    if attention == "plain":
        values += _score_values(workload)
    activations = round(workload.kept_pairs * values * ACTIVATION_BYTES[precision])
    activations += 4 * 4 * batch_size * batch_size  # the similarities and their softmax, both ways
    images = batch_size * 3 * image.size_px**2 + workload.kept_pairs * 3 * image.size_px**2 * 4  # bytes, normalised
    batch_bytes = images + batch_size * text.context * 8
    gradients = 4 * trained + (min(4 * trained, activations) if workload.micro_batch else 0)
    optimizer = OPTIMIZER_BYTES[workload.optimizer] * trained
    shards = workload.shards
    weights = 4 * count // shards + (_gathered_bytes(workload.model) if shards > 1 else 0)
    return Memory(weights, gradients // shards, optimizer // shards, activations, batch_bytes)


def _gathered_bytes(model: ModelConfig) -> int:
    """The part of a sharded model that is gathered at any one time: one block with its gradients, and what surrounds
    the blocks of each tower."""
    block = max((4 + 2 * MLP_RATIO) * tower.width**2 for tower in (model.image, model.text))
    surroundings = (model.text.vocab_size or ASSUMED_VOCAB_SIZE) * model.text.width
    return 4 * (2 * block + surroundings)


def _kept_share(share: float) -> float:
    """Share of a tower's activations that is kept: a locked tower keeps none, as it has no backward pass."""
    return 1.0 if share >= 2 / 3 else max(0.0, (share - 1 / 3) * 3 / 2)


def _score_values(workload: Workload) -> int:
    """Attention scores of one row: each block keeps their softmax, and in one block two gradients of them are alive."""
    kept = [
        (1 if workload.recompute else blocks) * shape.heads * shape.tokens**2
        for shape, blocks in workload.attention_shapes.items()
    ]
    passing = [2 * shape.heads * shape.tokens**2 for shape in workload.attention_shapes]
    return sum(kept) + max(passing, default=0)


def _kept_values(width: int, depth: int, tokens: int, recompute: bool) -> int:
    """Values of one row kept for the backward pass.

    Per token and block, in units of the width: the input of each norm (2), of QKV (1), q, k and v (3), the attention's
    result (1), the input of the MLP (1), before and after the activation (8). The last block keeps its input twice,
    keys and values. The widest gradients (before and after an activation) are alive beside all that. If blocks are
    recomputed, each keeps its input, and one at a time keeps the rest.
    """
    if depth == 0:
        return 0
    per_token = 2 + 1 + 3 + 1 + 1 + 2 * MLP_RATIO
    blocks = (depth - 1) + per_token if recompute and depth > 1 else (depth - 1) * per_token
    return width * tokens * (blocks + 4 + 2 * MLP_RATIO)
