"""CLIP: two towers into one space, and a learnable temperature."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipctl.config.sections import MAX_SCALE, ModelConfig
from clipctl.model.loss import Embeddings
from clipctl.model.towers import ImageTower, TextTower

INITIAL_TEMPERATURE = 0.07

# Sigmoid loss: logits start at -10 because nearly all pairs of a batch do not belong together.
SIGMOID_LOG_SCALE = math.log(10.0)
SIGMOID_BIAS = -10.0


class Clip(nn.Module):
    """Maps pictures and captions to unit vectors whose dot product, times the scale, says how well they match."""

    def __init__(self, config: ModelConfig, *, loss: str = "softmax") -> None:
        super().__init__()
        self.image = ImageTower(config.image, config.embed_dim, config.activation)
        self.text = TextTower(config.text, config.embed_dim, config.activation)
        # exp(log_scale) is 1 / temperature; learning its logarithm keeps it positive.
        start = SIGMOID_LOG_SCALE if loss == "sigmoid" else math.log(1 / INITIAL_TEMPERATURE)
        self.log_scale = nn.Parameter(torch.tensor(start))
        # Only the sigmoid loss has a bias: a softmax does not change when all logits shift.
        self.bias = nn.Parameter(torch.tensor(SIGMOID_BIAS)) if loss == "sigmoid" else None
        self.image.reset_parameters()
        self.text.reset_parameters()

    def encode_image(self, images: Tensor) -> Tensor:
        """Normalised images (B, 3, H, W) to unit vectors (B, E), in full precision whatever the tower computed in."""
        return F.normalize(self.image(images).float(), dim=-1)

    def encode_text(self, tokens: Tensor) -> Tensor:
        """Token ids (B, N) to unit vectors (B, E), in full precision as well."""
        return F.normalize(self.text(tokens).float(), dim=-1)

    def forward(self, images: Tensor, tokens: Tensor) -> Embeddings:
        # Pictures first: an accelerator works on them while a text tower on the CPU reads the captions.
        image, text = self.encode_image(images), self.encode_text(tokens)
        return Embeddings(image, text.to(image.device), self.log_scale.exp(), self.bias)

    def place(self, image: torch.device, text: torch.device) -> "Clip":
        """Move each tower to its device; the temperature goes with the pictures, where the loss is."""
        self.to(image)
        self.text.to(text)
        return self

    @torch.no_grad()
    def clamp_scale(self) -> None:
        """Keep the scale at its cap or below, where the softmax does not saturate."""
        self.log_scale.clamp_(max=math.log(MAX_SCALE))
