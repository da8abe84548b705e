"""The two transformers of CLIP, laid out as OpenAI's: pre-norm blocks, one QKV projection, class token, EOT pooling.
The image tower can also begin with convolutions and end with a projection of all its tokens.

In shapes: B pairs, N tokens, D width, H heads, E embedding.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clipctl.config.sections import ImageTowerConfig, TextTowerConfig
from clipctl.model.cost import MLP_RATIO


class QuickGELU(nn.Module):
    """x·σ(1.702 x): the approximation OpenAI's weights were trained with."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "quick_gelu": QuickGELU}


def needs_contiguous(device: torch.device) -> bool:
    """Apple's attention kernels have returned wrong values for strided inputs."""
    return device.type == "mps"


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, fused: bool, causal: bool = False, visible: Tensor | None = None
) -> Tensor:
    """softmax(q kᵀ / √d) v for q (B, H, M, d), k and v (B, H, N, d): (B, H, M, d). `visible` (B, 1, M, N) says which
    keys a query may read.

    The fused kernel never stores the M × N scores. Plain products do, and some processors are faster that way, above
    all in bf16; which way is faster is measured.
    """
    if fused:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (B, H, M, N)
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return torch.matmul(scores.softmax(dim=-1), v)


class Linear(nn.Linear):
    """A linear layer that can compute some of its outputs without the others."""

    def part(self, x: Tensor, first: int, last: int) -> Tensor:
        """Outputs `first` to `last` - 1."""
        return F.linear(x, self.weight[first:last], self.bias[first:last])


class LoraLinear(Linear):
    """A linear layer with a frozen matrix W, plus a learnt matrix of low rank: W + 2 B A (LoRA).

    B starts at zero, so that the layer starts as the one it was made of. The factor keeps the usual ratio of alpha to
    the rank.
    """

    FACTOR = 2.0

    def __init__(self, of: nn.Linear, rank: int) -> None:
        super().__init__(of.in_features, of.out_features, device="meta")
        self.weight, self.bias = of.weight, of.bias
        self.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.empty(rank, of.in_features, device=of.weight.device))
        self.lora_b = nn.Parameter(torch.zeros(of.out_features, rank, device=of.weight.device))
        nn.init.normal_(self.lora_a, std=of.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x, 0, self.out_features)

    def part(self, x: Tensor, first: int, last: int) -> Tensor:
        return super().part(x, first, last) + self.FACTOR * (x @ self.lora_a.T) @ self.lora_b[first:last].T

    @torch.no_grad()
    def merged(self) -> Linear:
        """The plain layer that computes the same."""
        plain = Linear(self.in_features, self.out_features, device="meta")
        plain.weight = nn.Parameter(self.weight + self.FACTOR * self.lora_b @ self.lora_a)
        plain.bias = nn.Parameter(self.bias.clone())
        return plain


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(width, 3 * width)  # rows: queries, keys, values
        self.out = Linear(width, width)
        self.fused = True  # see `attend`

    def forward(self, x: Tensor, *, causal: bool) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)  # (B, N, 3, H, D/H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, N, D/H)
        if needs_contiguous(x.device):
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        mixed = attend(q, k, v, fused=self.fused, causal=causal)  # (B, H, N, D/H)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))  # type: ignore[no-any-return]

    def at(self, x: Tensor, position: Tensor, *, causal: bool) -> Tensor:
        """`forward` for one token of each row only: (B, D). That token attends to the others, which need no output."""
        batch, tokens, width = x.shape
        head = (self.heads, width // self.heads)
        q = self.qkv.part(take(x, position), 0, width).view(batch, *head).unsqueeze(2)  # (B, H, 1, D/H)
        memory = self.qkv.part(x, width, 3 * width).view(batch, tokens, 2, *head)  # (B, N, 2, H, D/H)
        k, v = memory.permute(2, 0, 3, 1, 4)  # each (B, H, N, D/H)
        if needs_contiguous(x.device):
            k, v = k.contiguous(), v.contiguous()
        visible = None
        if causal:
            visible = (torch.arange(tokens, device=x.device) <= position.unsqueeze(1)).view(batch, 1, 1, tokens)
        mixed = attend(q, k, v, fused=self.fused, visible=visible)  # (B, H, 1, D/H)
        return self.out(mixed.reshape(batch, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, activation: str) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp_in = Linear(width, MLP_RATIO * width)
        self.activation = ACTIVATIONS[activation]()
        self.mlp_out = Linear(MLP_RATIO * width, width)

    def forward(self, x: Tensor, *, causal: bool) -> Tensor:
        return self._mlp(x + self.attention(self.norm_1(x), causal=causal))

    def at(self, x: Tensor, position: Tensor, *, causal: bool) -> Tensor:
        """`forward` for one token of each row only: (B, D)."""
        return self._mlp(take(x, position) + self.attention.at(self.norm_1(x), position, causal=causal))

    def _mlp(self, x: Tensor) -> Tensor:
        return x + self.mlp_out(self.activation(self.mlp_in(self.norm_2(x))))  # type: ignore[no-any-return]


def run_blocks(blocks: nn.ModuleList, x: Tensor, position: Tensor, *, causal: bool, recompute: bool) -> Tensor:
    """All blocks, pooled at one token of each row: (B, N, D) to (B, D). With `recompute` only their inputs are kept.

    A tower is pooled at a single token, so the last block is computed for that token alone. The result is the same, and
    five sixths of that block's work are saved: by arithmetic 11% of a step of `small`, 29% of `tiny`.
    """
    *body, last = blocks
    for block in body:
        x = run_block(block, x, causal=causal, recompute=recompute)
    assert isinstance(last, Block)
    return last.at(x, position, causal=causal)


def run_block(block: nn.Module, x: Tensor, *, causal: bool, recompute: bool) -> Tensor:
    if recompute:
        return checkpoint(block, x, causal=causal, use_reentrant=False)  # type: ignore[no-any-return]
    return block(x, causal=causal)  # type: ignore[no-any-return]


def take(x: Tensor, position: Tensor) -> Tensor:
    """Token `position[i]` of row i: (B, N, D) to (B, D)."""
    # x.shape[0], here and below: an exporter takes len(x) for a constant.
    return x[torch.arange(x.shape[0], device=x.device), position]


class ConvStem(nn.Module):
    """Convolutions of stride 2 in place of the patch embedding: (B, 3, H, W) to (B, D, H/P, W/P).

    Norms are over the channels of one position, never over a batch, so that micro-batches stay exact.
    """

    def __init__(self, config: ImageTowerConfig, activation: str) -> None:
        super().__init__()
        widths = config.stem_widths
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, width, kernel_size=3, stride=2, padding=1, bias=False)
            for channels, width in zip((3, *widths), widths, strict=False)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in widths)
        self.activation = ACTIVATIONS[activation]()

    def forward(self, images: Tensor) -> Tensor:
        # Channels last: what the norms want, and what convolutions on a CPU do fastest.
        x = images.contiguous(memory_format=torch.channels_last)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = self.activation(norm(convolution(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return x

    def reset_parameters(self) -> None:
        for convolution in self.convolutions:
            assert isinstance(convolution, nn.Conv2d)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")


class ImageTower(nn.Module):
    def __init__(self, config: ImageTowerConfig, embed_dim: int, activation: str) -> None:
        super().__init__()
        width = config.width
        self.pool = config.pool
        if config.stem == "conv":
            self.patches: nn.Module = ConvStem(config, activation)
        else:
            self.patches = nn.Conv2d(3, width, kernel_size=config.patch_px, stride=config.patch_px, bias=False)
        if self.pool == "class":
            self.class_embedding = nn.Parameter(torch.empty(width))
            self.norm_pre = nn.LayerNorm(width)
        self.positions = nn.Parameter(torch.empty(config.tokens, width))
        self.blocks = nn.ModuleList(Block(width, config.heads, activation) for _ in range(config.depth))
        self.norm_post = nn.LayerNorm(width)
        self.projection = nn.Linear(config.pooled, embed_dim, bias=False)
        self.recompute = False

    def forward(self, images: Tensor) -> Tensor:
        """Normalised images (B, 3, H, W), or features of them, to embeddings (B, E), not yet of length one."""
        pooled = images if images.ndim == 2 else self.features(images)
        return self.projection(pooled)  # type: ignore[no-any-return]

    def features(self, images: Tensor) -> Tensor:
        """What the projection reads of normalised images (B, 3, H, W): (B, P). It never changes in a locked tower."""
        patches = self.patches(images).flatten(2).transpose(1, 2)  # (B, N, D)
        return self._at_class(patches) if self.pool == "class" else self._of_all(patches)

    def _at_class(self, patches: Tensor) -> Tensor:
        """As CLIP does: blocks over the class token and all patches, pooled at the class token."""
        summary = self.class_embedding.expand(patches.shape[0], 1, -1)  # (B, 1, D)
        x = torch.cat([summary, patches], dim=1) + self.positions  # (B, N+1, D)
        at_class = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        x = self.norm_pre(x)
        pooled = run_blocks(self.blocks, x, at_class, causal=False, recompute=self.recompute)  # (B, D)
        return self.norm_post(pooled)  # type: ignore[no-any-return]

    def _of_all(self, patches: Tensor) -> Tensor:
        """Blocks over all patches, then their mean (B, D), or all of them concatenated (B, N·D)."""
        x = patches + self.positions
        for block in self.blocks:
            x = run_block(block, x, causal=False, recompute=self.recompute)
        normed: Tensor = self.norm_post(x)  # (B, N, D)
        return normed.mean(dim=1) if self.pool == "mean" else normed.flatten(1)

    def reset_parameters(self) -> None:
        width = self.positions.shape[1]
        scale = width**-0.5
        if isinstance(self.patches, ConvStem):
            self.patches.reset_parameters()
        if self.pool == "class":
            nn.init.normal_(self.class_embedding, std=scale)
        nn.init.normal_(self.positions, std=scale)
        with torch.no_grad():
            patches = self.positions[int(self.pool == "class") :]
            waves = plane_waves(math.isqrt(len(patches)), width // 4)
            patches[:, : waves.shape[1]] = POSITION_AMPLITUDE * waves
        _reset_blocks(self.blocks, width)
        nn.init.normal_(self.projection.weight, std=self.projection.in_features**-0.5)


# The one departure from CLIP's initialisation: patch positions start as waves instead of noise, so that neighbours are
# alike from the first step. With few pictures this decides whether "at the top" is learnt at all; see
# docs/training.md for the measurement. They are learnt like any other parameter.
POSITION_AMPLITUDE = 0.3
LONGEST_WAVE = 20.0


def plane_waves(side: int, frequencies: int) -> Tensor:
    """(side², 4 · frequencies): sine and cosine of the row and of the column of each patch, at falling frequencies."""
    frequency = LONGEST_WAVE ** -(torch.arange(frequencies) / frequencies)
    angles = torch.arange(side).unsqueeze(1) * frequency  # (side, F)
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)  # (side, 2F)
    rows = waves.unsqueeze(1).expand(side, side, -1)
    columns = waves.unsqueeze(0).expand(side, side, -1)
    return torch.cat([rows, columns], dim=2).reshape(side * side, -1)


class TextTower(nn.Module):
    def __init__(self, config: TextTowerConfig, embed_dim: int, activation: str) -> None:
        super().__init__()
        assert config.vocab_size is not None, "the tokenizer decides the vocabulary before the model is built"
        width = config.width
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Parameter(torch.empty(config.context, width))
        self.blocks = nn.ModuleList(Block(width, config.heads, activation) for _ in range(config.depth))
        self.norm_final = nn.LayerNorm(width)
        self.projection = nn.Linear(width, embed_dim, bias=False)
        self.recompute = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (B, N), N up to the context, or features of them, to embeddings (B, E), not yet of length one."""
        pooled = tokens if tokens.is_floating_point() else self.features(tokens)
        return self.projection(pooled)  # type: ignore[no-any-return]

    def features(self, tokens: Tensor) -> Tensor:
        """What the projection reads of token ids (B, N): (B, D)."""
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]  # (B, N, D)
        # The end-of-text token is the highest id, so its position is the argmax. Causal attention makes it the only
        # position that has seen the whole caption, and keeps the padding behind it without effect.
        end = tokens.int().argmax(dim=1)  # (B,); as 32 bits, because not every ONNX runtime compares 64
        pooled = run_blocks(self.blocks, x, end, causal=True, recompute=self.recompute)  # (B, D)
        return self.norm_final(pooled)  # type: ignore[no-any-return]

    def reset_parameters(self) -> None:
        width = self.positions.shape[1]
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.01)
        _reset_blocks(self.blocks, width)
        nn.init.normal_(self.projection.weight, std=width**-0.5)


def _reset_blocks(blocks: nn.ModuleList, width: int) -> None:
    """CLIP's initialisation: what adds to the residual stream shrinks with the depth, so its variance does not grow."""
    attention_std = width**-0.5
    residual_std = attention_std * (2 * max(1, len(blocks))) ** -0.5
    hidden_std = (2 * width) ** -0.5
    for block in blocks:
        assert isinstance(block, Block)
        nn.init.normal_(block.attention.qkv.weight, std=attention_std)
        nn.init.normal_(block.attention.out.weight, std=residual_std)
        nn.init.normal_(block.mlp_in.weight, std=hidden_std)
        nn.init.normal_(block.mlp_out.weight, std=residual_std)
        for linear in (block.attention.qkv, block.attention.out, block.mlp_in, block.mlp_out):
            nn.init.zeros_(linear.bias)
