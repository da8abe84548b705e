"""What a model costs, by arithmetic alone: parameters, floating-point operations, bytes. No torch.

B is the batch, N the tokens of a tower, D its width. A multiply and an add count as two operations.
"""

from dataclasses import dataclass

from clipctl.config import ImageTowerConfig, ModelConfig, TextTowerConfig

MLP_RATIO = 4

# Symbols of the character tokenizer on plain English captions, where no tokenizer has been built yet.
ASSUMED_VOCAB_SIZE = 33

BYTES_PER_VALUE = {"fp32": 4, "bf16": 2}


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


def forward_flops(model: ModelConfig, text_tokens: int | None = None) -> int:
    """Operations of one forward pass of one pair. Norms, softmax and activations are left out: they are below 2 %."""
    image, text = model.image, model.text
    text_tokens = text_tokens or text.context
    patches = 2 * (image.tokens - 1) * 3 * image.patch_px**2 * image.width
    towers = _tower_flops(image.width, image.depth, image.tokens) + _tower_flops(text.width, text.depth, text_tokens)
    projections = 2 * (image.width + text.width) * model.embed_dim
    return patches + towers + projections


def _tower_flops(width: int, depth: int, tokens: int) -> int:
    """All blocks; the last one writes a single token, for which it reads the keys and values of all."""
    return (depth - 1) * _block_flops(width, tokens, written=tokens) + _block_flops(width, tokens, written=1)


def _block_flops(width: int, tokens: int, *, written: int) -> int:
    keys_and_values = 2 * tokens * 2 * width * width
    matrices = 2 * written * (2 + 2 * MLP_RATIO) * width * width  # query, output, MLP
    attention = 2 * 2 * written * tokens * width  # scores, and their product with the values
    return keys_and_values + matrices + attention


def step_flops(model: ModelConfig, batch_size: int, text_tokens: int | None = None) -> int:
    """One training step: the backward pass costs twice the forward pass; the similarity matrix is B × B × E."""
    similarity = 3 * 2 * batch_size * batch_size * model.embed_dim
    return 3 * batch_size * forward_flops(model, text_tokens) + similarity


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes that a training step needs, by what holds them."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    batch_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes + self.batch_bytes
        )


def training_memory(model: ModelConfig, batch_size: int, precision: str = "fp32") -> MemoryForecast:
    """Weights, gradients and both moments of AdamW in fp32 (16 bytes a parameter); activations in `precision`."""
    count = parameters(model)
    image, text = model.image, model.text
    # Values kept for the backward pass, per token and block, in units of the width: the input of each norm (2), of QKV
    # (1), q, k and v (3), the attention's result (1), the input of the MLP (1), before and after the activation (8).
    per_token = 2 + 1 + 3 + 1 + 1 + 2 * MLP_RATIO
    values = image.depth * image.tokens * image.width + text.depth * text.context * text.width
    activations = batch_size * per_token * values * BYTES_PER_VALUE[precision]
    images = batch_size * 3 * image.size_px**2 * (1 + 4)  # as bytes, and normalised
    return MemoryForecast(4 * count, 4 * count, 8 * count, activations, images + batch_size * text.context * 8)
