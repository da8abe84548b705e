"""What a training run is asked to do: frozen sections of settings. The defaults are the preset `tiny`.

Every setting has a dotted key (`optim.lr`); `layers.py` puts them together from files and flags.
"""

import os
from dataclasses import dataclass, field
from typing import Any, Literal

from clipctl.config.quantities import Interval, parse_duration

DeviceName = str  # "auto", "cpu", "mps", "cuda", "cuda:1", "hybrid"
PRECISIONS = ("fp32", "bf16", "fp16")  # the usual one first
Precision = Literal["auto", "fp32", "bf16", "fp16"]
AttentionName = Literal["auto", "fused", "plain"]
LossName = Literal["softmax", "sigmoid"]
CacheName = Literal["auto", "ram", "disk", "off"]
DataFormat = Literal[
    "csv",
    "tsv",
    "pipe",
    "flickr",
    "jsonl",
    "coco",
    "karpathy",
    "json",
    "webdataset",
    "imagefolder",
    "sidecar",
    "classes",
]

EVERY_FIVE_EPOCHS = Interval(5, "epochs")
# Statistics of OpenAI's training pictures; nearly every CLIP model normalises with them.
OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
MAX_SCALE = 100.0  # cap of 1 / temperature: beyond it the softmax saturates


def is_synthetic(source: str) -> bool:
    return source.partition(":")[0] == "synthetic"


def absolute(text: str) -> str:
    """An absolute path, so that a run can be resumed from anywhere; names of built-in data stay as they are."""
    is_name = is_synthetic(text) or text.partition(":")[0] in ("characters", "words", "bpe")
    return text if is_name else os.path.abspath(os.path.expanduser(text))


def check_template(text: str) -> None:
    if "{}" not in text:
        raise ValueError("a caption with {} where the class belongs, such as 'a photo of a {}'")


def check_tokenizer(text: str) -> None:
    name, _, number = text.partition(":")
    if name == "bpe" and not (number.isdecimal() and 300 <= int(number) <= 1_000_000):
        raise ValueError("bpe:VOCABULARY with 300 tokens or more, such as bpe:4096")
    if name == "words" and number and not (number.isdecimal() and 100 <= int(number) <= 1_000_000):
        raise ValueError("words, or words:VOCABULARY with 100 tokens or more, such as words:4096")
    if name == "characters" and number:
        raise ValueError("characters, words, bpe:4096, or the path of a tokenizer.json")


def check_lock(text: str) -> None:
    tower, _, blocks = text.partition(":")
    if tower not in ("image", "text", "both") or (blocks and not blocks.isdecimal()) or text.endswith(":"):
        raise ValueError("image, text or both, optionally with the number of last blocks to train: image:2")


def bounded(default: Any, *, low: float | None = None, high: float | None = None) -> Any:
    """A field whose value, if there is one, lies between `low` and `high`, both included."""
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True, kw_only=True)
class ImageTowerConfig:
    size_px: int = bounded(64, low=8, high=2048)
    patch_px: int = bounded(8, low=1, high=256)
    width: int = bounded(128, low=8, high=16384)
    depth: int = bounded(4, low=0, high=200)
    heads: int = bounded(4, low=1, high=256)
    # CLIP's layout is patches cut by one convolution, and a class token. What departs from it learns from fewer
    # pictures: several convolutions of stride 2 see edges before shapes, and a projection of all tokens knows where.
    stem: Literal["patches", "conv"] = "patches"
    pool: Literal["class", "mean", "flat"] = "class"
    mean: tuple[float, ...] = bounded(OPENAI_MEAN, low=0.0, high=1.0)  # of red, green and blue, subtracted from pixels
    std: tuple[float, ...] = bounded(OPENAI_STD, low=1e-3, high=1.0)  # what they are divided by after that

    @property
    def patches(self) -> int:
        return (self.size_px // self.patch_px) ** 2

    @property
    def tokens(self) -> int:
        """Patches, and the class token if there is one."""
        return self.patches + (self.pool == "class")

    @property
    def pooled(self) -> int:
        """How many values the projection reads."""
        return self.width * (self.patches if self.pool == "flat" else 1)

    @property
    def stem_widths(self) -> tuple[int, ...]:
        """Channels after each convolution of a conv stem: each halves the side and doubles the width."""
        halvings = self.patch_px.bit_length() - 1
        return tuple(max(8, self.width >> (halvings - 1 - number)) for number in range(halvings))

    @property
    def words(self) -> str:
        """What it is made of, in words for the user."""
        blocks = f"{self.width}×{self.depth}" if self.depth else f"width {self.width}"
        patches = f"in patches of {self.patch_px}"
        if self.stem == "conv":
            patches = f"through {len(self.stem_widths)} convolutions"
        return f"{blocks} at {self.size_px} px {patches}"

    @property
    def is_clip_layout(self) -> bool:
        """Whether other CLIP libraries know this tower."""
        return (self.stem, self.pool) == ("patches", "class")


@dataclass(frozen=True, kw_only=True)
class TextTowerConfig:
    context: int = bounded(77, low=4, high=4096)
    vocab_size: int | None = bounded(None, low=4, high=10_000_000)  # None: as many as the tokenizer has
    width: int = bounded(128, low=8, high=16384)
    depth: int = bounded(2, low=1, high=200)
    heads: int = bounded(4, low=1, high=256)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    image: ImageTowerConfig = ImageTowerConfig()
    text: TextTowerConfig = TextTowerConfig()
    embed_dim: int = bounded(128, low=4, high=16384)
    activation: Literal["gelu", "quick_gelu"] = "gelu"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    # synthetic, synthetic:PAIRS, or where your pictures are; several are joined
    source: tuple[str, ...] = field(default=("synthetic",), metadata={"convert": absolute})
    val: str | None = field(
        default=None, metadata={"convert": absolute}
    )  # held-out data, instead of a part of the source
    format: DataFormat | None = None  # None, here and below: found out from the files
    image_column: str | None = None
    caption_column: str | None = None  # several, separated by commas
    image_root: str | None = field(default=None, metadata={"convert": absolute})  # where picture paths start
    separator: str | None = None
    template: str = field(default="a photo of a {}", metadata={"check": check_template})  # captions of class folders
    tokenizer: str = field(
        default="characters", metadata={"check": check_tokenizer, "convert": absolute}
    )  # or bpe:4096, or a tokenizer.json
    seed: int = bounded(0, low=0, high=2**32 - 1)  # of drawn pictures and of the split; the training seed is train.seed
    val_fraction: float = bounded(0.1, low=0.001, high=0.9)
    max_bad: float = bounded(0.05, low=0.0, high=1.0)  # share of pictures that cannot be used; more end the run
    val_limit: int = bounded(1000, low=2, high=10_000)  # pictures that an evaluation looks at, at most
    # Augmentation. None: what suits drawn scenes (shift and zoom), or pictures from files (crop and jitter).
    max_shift: float | None = bounded(None, low=0.0, high=0.5)  # random shift, as a share of the side
    max_zoom: float | None = bounded(None, low=0.0, high=0.5)  # random zoom in or out
    min_crop: float | None = bounded(None, low=0.05, high=1.0)  # smallest share of the area that a random crop keeps
    jitter: float | None = bounded(None, low=0.0, high=0.9)  # of brightness, contrast and saturation
    flip: bool = True  # mirror, except where the caption says left or right
    # Where that is done: picture by picture in the loader, or for a whole batch on the model's device, blending pixels.
    augment_on: Literal["loader", "device"] = "loader"
    max_turn: float = bounded(0.0, low=0.0, high=180.0)  # random turn, in degrees; this and the next on the device only
    max_stretch: float = bounded(0.0, low=0.0, high=0.5)  # random change of the aspect ratio


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    lr: float = bounded(8e-4, low=1e-9, high=10.0)  # peak, reached after the warm-up
    weight_decay: float = bounded(0.1, low=0.0, high=10.0)
    beta1: float = bounded(0.9, low=0.0, high=0.9999)
    beta2: float = bounded(0.98, low=0.0, high=0.99999)
    eps: float = bounded(1e-6, low=1e-12, high=1e-2)
    warmup_steps: int | None = bounded(None, low=0, high=10**9)  # None: a tenth of the run
    final_lr_share: float = bounded(0.01, low=0.0, high=1.0)  # the cosine ends at this share of the peak
    grad_clip: float | None = bounded(1.0, low=1e-6, high=1e6)  # largest gradient norm; None: do not clip

    def warmup_of(self, total_steps: int) -> int:
        """Steps until the peak, in a run of so many steps."""
        return total_steps // 10 if self.warmup_steps is None else self.warmup_steps


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    epochs: int = bounded(50, low=1, high=1_000_000)
    steps: int | None = bounded(None, low=1, high=10**12)  # when given, the run ends after this many instead
    time: str | None = field(default=None, metadata={"check": parse_duration})  # 10m: as many steps as fit into it
    eval_every: int = bounded(1, low=1, high=1_000_000)  # epochs; and always at the end
    patience: int | None = bounded(None, low=1, high=1_000_000)  # evaluations without a new best that end the run
    batch_size: int = bounded(27, low=2, high=1_000_000)
    micro_batch: int | None = bounded(None, low=1, high=1_000_000)  # None: as large as memory allows
    seed: int = bounded(0, low=0, high=2**32 - 1)
    loss: LossName = "softmax"
    # Weight of the loss between pictures of equal captions, which then meet two by two in a batch; 0: none.
    picture_term: float = bounded(0.0, low=0.0, high=10.0)
    # Share of a target's probability that is spread evenly over all pairs of the batch.
    label_smoothing: float = bounded(0.0, low=0.0, high=0.9)


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    every: Interval = EVERY_FIVE_EPOCHS  # and always at the end
    keep_last: int = bounded(2, low=1, high=1_000_000)
    keep_best: int = bounded(1, low=0, high=1_000_000)  # 0: the best one is not saved for its own sake


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    device: DeviceName = "auto"
    precision: Precision = "auto"
    threads: int | None = bounded(None, low=1, high=4096)  # None: chosen for this machine
    workers: int | None = bounded(None, low=0, high=256)  # None: chosen for this machine and data
    cache: CacheName = "auto"  # decoded pictures: in memory, on disk, not at all
    recompute: bool = False  # blocks again in the backward pass instead of keeping what they computed: less memory
    compile: bool = False  # the image tower's blocks, by torch.compile
    shard: bool = False  # with several processes, each keeps its part of weights, gradients and moments
    attention: AttentionName = (
        "auto"  # in one fused kernel, or as plain products; auto: the faster one, kept for the run
    )


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """How a pretrained model is trained further."""

    base: str | None = None  # the model to start from; None: from nothing
    revision: str | None = None  # of a model from the hub: the commit that was used
    # Towers that stay as they are, but for their projection; image:2 trains the last two blocks as well.
    lock: str | None = field(default=None, metadata={"check": check_lock})
    lora: int | None = bounded(None, low=1, high=1024)  # rank of what is added to matrices; None: train the matrices
    layer_decay: float = bounded(1.0, low=0.1, high=1.0)  # a block's learning rate, as a share of the next one's
    # Augmented views of each picture, used in turn, so that a locked tower's features can be kept. None: always new.
    views: int | None = bounded(None, low=1, high=1000)
    keep_features: bool = True  # of a locked tower: computed once instead of in every epoch

    @property
    def locked(self) -> tuple[str, ...]:
        """Towers that are locked."""
        tower = (self.lock or "").partition(":")[0]
        return ("image", "text") if tower == "both" else (tower,) if tower else ()

    @property
    def unlocked_blocks(self) -> int:
        """Last blocks of a locked tower that are trained anyway."""
        return int((self.lock or "").partition(":")[2] or 0)

    @property
    def is_partial(self) -> bool:
        """Whether some weights are frozen."""
        return self.lock is not None or self.lora is not None

    @property
    def has_features(self) -> bool:
        """Whether a locked tower's features are kept."""
        return self.keep_features and bool(self.locked) and not self.unlocked_blocks


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    preset: str = "tiny"
    recipe: Literal["auto", "plain"] = "auto"  # what a new run does about settings that were left open
    layout: Literal["auto", "clip"] = "auto"  # clip: a model that other CLIP libraries know
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    tune: TuneConfig = TuneConfig()
    train: LoopConfig = LoopConfig()
    save: SaveConfig = SaveConfig()
    runtime: RuntimeConfig = RuntimeConfig()
