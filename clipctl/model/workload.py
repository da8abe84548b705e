"""One training step as forecasts see it: which model, how much data, computed in which way. No torch."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from clipctl.config.layers import Layer, resolve, to_layer
from clipctl.config.sections import ModelConfig, TrainConfig
from clipctl.errors import ConfigError

SAMPLED_SCORES = 2_000_000  # in one timing of attention
ASSUMED_TEXT_TOKENS = 60  # of the longest caption in a batch, if no captions are known


@dataclass(frozen=True)
class Setting:
    """Where and how a step is computed."""

    device: str  # cpu, mps, cuda:0, hybrid
    precision: str
    threads: int


@dataclass(frozen=True)
class AttentionShape:
    """The shape of the attention in one block of a tower."""

    pairs: int
    heads: int
    tokens: int
    head_width: int
    causal: bool

    @property
    def sample(self) -> "AttentionShape":
        """A shape that takes milliseconds, in which the two ways of computing attention compare as in this one. Pairs
        are a power of two, so that batches of about the same size share a measurement."""
        enough = max(1, SAMPLED_SCORES // (self.heads * self.tokens**2))
        return replace(self, pairs=1 << (min(self.pairs, enough).bit_length() - 1))


@dataclass(frozen=True)
class Workload:
    """Everything about a step that its time and memory depend on, apart from the machine."""

    model: ModelConfig
    batch_size: int
    text_tokens: int  # of the longest caption in the batch, to which all are cut
    micro_batch: int | None = None  # pairs whose activations are kept at the same time; None: the whole batch
    recompute: bool = False  # blocks are computed again in the backward pass instead of being kept
    trained_share: float = 1.0  # of the parameters; the others get no gradient
    # Of a tower's forward and backward pass: 1 if it is trained, 1/3 if it is locked, 0 if its features are kept.
    image_share: float = 1.0
    text_share: float = 1.0
    optimizer: str = "adamw"
    shards: int = 1  # processes among which weights, gradients and moments are split

    def __post_init__(self) -> None:
        if self.micro_batch and self.micro_batch >= self.batch_size:  # the same step, so the same workload
            object.__setattr__(self, "micro_batch", None)

    @property
    def kept_pairs(self) -> int:
        """Pairs whose activations are kept at the same time."""
        return self.micro_batch or self.batch_size

    @property
    def forward_passes(self) -> int:
        """A backward pass costs two of them. Micro-batches are embedded once more, and so are recomputed blocks."""
        return 1 + (self.micro_batch is not None) + self.recompute

    @property
    def last_backward_share(self) -> float:
        """Of a step: the backward pass of the last micro-batch, in which gradients become complete."""
        return 2 / (2 + self.forward_passes) * self.kept_pairs / self.batch_size

    @property
    def attention_shapes(self) -> dict[AttentionShape, int]:
        """How many blocks compute attention in which shape. A last block that writes one token only is left out."""
        image, text = self.model.image, self.model.text
        towers = (
            (image, image.tokens, image.depth - (image.pool == "class"), False),
            (text, self.text_tokens, text.depth - 1, True),
        )
        return {
            AttentionShape(self.kept_pairs, tower.heads, tokens, tower.width // tower.heads, causal): blocks
            for tower, tokens, blocks, causal in towers
            if blocks > 0
        }

    @property
    def longest_product(self) -> int:
        """The length that the gradient of a weight sums over."""
        return self.kept_pairs * max(self.model.image.tokens, self.text_tokens)

    def cut(self, *, batch_size: int | None = None, blocks: int = 2) -> "Workload":
        """The same work cut down: a few blocks per tower instead of all, so that a step is affordable."""
        image, text = self.model.image, self.model.text
        shallow = replace(image, depth=min(blocks, image.depth)), replace(text, depth=min(blocks, text.depth))
        model = replace(self.model, image=shallow[0], text=shallow[1])
        return replace(self, model=model, batch_size=min(self.batch_size, batch_size or self.batch_size))

    def to_dict(self) -> dict[str, Any]:
        """As a measured sample stores it: plain values, the model by its dotted keys."""
        values = to_layer(TrainConfig(model=self.model)).values
        keys = {key: value for key, value in values.items() if key.startswith("model.")}
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in keys.items()}
        return {**asdict(self), "model": plain}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Workload":
        """What `to_dict` described. Raises ValueError if this version does not understand it."""
        try:
            return cls(**{**values, "model": resolve([Layer("sample", values["model"])]).model})
        except (ConfigError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a workload: {error}") from None
