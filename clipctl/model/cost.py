"""What a model costs, by arithmetic alone: parameters, floating-point operations, bytes. No torch.

B is the batch, N the tokens of a tower, D its width. A multiply and an add count as two operations. What a machine
makes of these numbers, in seconds, is measured: see `forecast.py`.
"""

from dataclasses import astuple, dataclass, replace

from clipctl.config.sections import ImageTowerConfig, ModelConfig, TextTowerConfig

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
    patch = 3 * tower.patch_px**2 * tower.width  # no bias
    class_and_positions = tower.width + tower.tokens * tower.width
    norms = 2 * 2 * tower.width  # before and after the blocks
    return patch + class_and_positions + norms + tower.depth * block_parameters(tower.width) + tower.width * embed_dim


def text_parameters(tower: TextTowerConfig, embed_dim: int) -> int:
    vocab_size = tower.vocab_size or ASSUMED_VOCAB_SIZE
    embeddings = (vocab_size + tower.context) * tower.width
    final_norm = 2 * tower.width
    return embeddings + final_norm + tower.depth * block_parameters(tower.width) + tower.width * embed_dim


def parameters(model: ModelConfig) -> int:
    """Every learnable number, the temperature included."""
    return image_parameters(model.image, model.embed_dim) + text_parameters(model.text, model.embed_dim) + 1


@dataclass(frozen=True)
class Work:
    """What a training step asks of a device. Its time is close to a sum of these, each times a price of the device."""

    flops: float  # of matrix products
    moved_bytes: float  # activations read and written outside of matrix products
    parameter_bytes: float  # weights, gradients and moments that clipping and AdamW pass through
    kernels: float  # operations started

    def __add__(self, other: "Work") -> "Work":
        return Work(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


# Per token of a block and in units of its width, forward and backward: both norms (2 · 5), both residuals (2 · 3), the
# activation (4 · 5) and biases (9 · 1). Only the proportions between towers matter: the price per byte is measured.
_MOVED_PER_TOKEN = 45
_KERNELS_PER_BLOCK = 60  # forward and backward
_KERNELS_PER_PARAMETER = 0.5  # of norms, clipping and the fused update, which take all tensors in one call
_TENSORS_PER_BLOCK = 12
_PARAMETER_PASSES = 8  # write and read the gradient, scale it, read and write weight and both moments


def image_work(model: ModelConfig, batch_size: int, *, recompute: bool = False) -> Work:
    image = model.image
    patches = 2 * (image.tokens - 1) * 3 * image.patch_px**2 * image.width
    parameters = image_parameters(image, model.embed_dim)
    tower = _tower_work(image, image.tokens, model.embed_dim, batch_size, parameters, recompute)
    return tower + Work(3 * batch_size * patches, batch_size * 3 * image.size_px**2 * 4 * 4, 0, 20)


def text_work(model: ModelConfig, batch_size: int, text_tokens: int | None = None, *, recompute: bool = False) -> Work:
    """`text_tokens`: of the longest caption of a batch, to which it is cut; None: the whole context."""
    text = model.text
    parameters = text_parameters(text, model.embed_dim)
    return _tower_work(text, text_tokens or text.context, model.embed_dim, batch_size, parameters, recompute)


def _tower_work(
    tower: ImageTowerConfig | TextTowerConfig,
    tokens: int,
    embed_dim: int,
    batch_size: int,
    parameters: int,
    recompute: bool,
) -> Work:
    """Forward and backward: the backward pass costs twice the forward pass; recomputing is a forward pass more."""
    width, depth = tower.width, tower.depth
    # The last block writes a single token, for which it reads the keys and values of all.
    blocks = (depth - 1) * _block_flops(width, tokens, written=tokens) + _block_flops(width, tokens, written=1)
    forward = blocks + 2 * width * embed_dim
    moved = 4 * _MOVED_PER_TOKEN * width * tokens * (depth - 0.75)
    kernels = depth * (_KERNELS_PER_BLOCK + _KERNELS_PER_PARAMETER * _TENSORS_PER_BLOCK)
    work = Work(3 * batch_size * forward, batch_size * moved, 4 * _PARAMETER_PASSES * parameters, kernels)
    if not recompute:
        return work
    return replace(work, flops=4 / 3 * work.flops, moved_bytes=4 / 3 * work.moved_bytes, kernels=4 / 3 * work.kernels)


def _block_flops(width: int, tokens: int, *, written: int) -> int:
    keys_and_values = 2 * tokens * 2 * width * width
    matrices = 2 * written * (2 + 2 * MLP_RATIO) * width * width  # query, output, MLP
    attention = 2 * 2 * written * tokens * width  # scores, and their product with the values
    return keys_and_values + matrices + attention


def step_work(model: ModelConfig, batch_size: int, text_tokens: int | None = None, *, recompute: bool = False) -> Work:
    """Both towers, the B × B × E similarity matrix, and what every step does besides."""
    similarity = 3 * 2 * batch_size * batch_size * model.embed_dim
    loss = Work(similarity, 10 * 4 * batch_size * batch_size, 0, 50)
    image = image_work(model, batch_size, recompute=recompute)
    return image + text_work(model, batch_size, text_tokens, recompute=recompute) + loss


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


def training_memory(
    model: ModelConfig,
    batch_size: int,
    precision: str = "fp32",
    text_tokens: int | None = None,
    *,
    recompute: bool = False,
) -> Memory:
    """Weights, gradients and both moments of AdamW in fp32 (16 bytes a parameter); activations in `precision`."""
    count = parameters(model)
    image, text = model.image, model.text
    values = _kept_values(image.width, image.depth, image.tokens, recompute)
    values += 4 * image.tokens * image.width  # patches, with the class token, with positions, normed
    values += _kept_values(text.width, text.depth, text_tokens or text.context, recompute)
    activations = round(batch_size * values * ACTIVATION_BYTES[precision])
    activations += 4 * 4 * batch_size * batch_size  # the similarities and their softmax, both ways
    images = batch_size * 3 * image.size_px**2 * (1 + 4)  # as bytes, and normalised
    return Memory(4 * count, 4 * count, 8 * count, activations, images + batch_size * text.context * 8)


def _kept_values(width: int, depth: int, tokens: int, recompute: bool) -> int:
    """Values of one row kept for the backward pass.

    Per token and block, in units of the width: the input of each norm (2), of QKV (1), q, k and v (3), the attention's
    result (1), the input of the MLP (1), before and after the activation (8). The last block keeps its input twice,
    keys and values. The widest gradients (before and after an activation) are alive beside all that. When blocks are
    recomputed, each keeps its input, and one at a time keeps the rest.
    """
    per_token = 2 + 1 + 3 + 1 + 1 + 2 * MLP_RATIO
    blocks = (depth - 1) + per_token if recompute and depth > 1 else (depth - 1) * per_token
    return width * tokens * (blocks + 4 + 2 * MLP_RATIO)
