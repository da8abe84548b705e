"""What a training run is asked to do: frozen sections, presets, and layers of settings resolved into one TrainConfig.

Every setting has a dotted key (`optim.lr`). Layers of keys lie over each other (preset, YAML file, flags); each value
is parsed by the type of its field, and all mistakes are reported together.
"""

import dataclasses
import difflib
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from clipctl.errors import ConfigError, ConfigErrors

CONFIG_FILE_LIMIT_BYTES = 1_000_000

DeviceName = str  # "auto", "cpu", "mps", "cuda", "cuda:1", "hybrid"
PRECISIONS = ("fp32", "bf16", "fp16")  # the usual one first
Precision = Literal["auto", "fp32", "bf16", "fp16"]
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


@dataclass(frozen=True)
class Interval:
    """How often something happens. Written 5e (epochs), 500s (steps) or 10m (minutes)."""

    count: float
    unit: Literal["e", "s", "m"]

    @classmethod
    def parse(cls, text: str) -> "Interval":
        """Raises ValueError saying what is expected."""
        match = re.fullmatch(r"(\d+)([es])|(\d+(?:\.\d+)?)(m)", text.strip())
        count = float(match[1] or match[3]) if match else 0.0
        if not match or not 0 < count < 1e12:
            raise ValueError("a number of epochs, steps or minutes such as 5e, 500s or 10m")
        return cls(count, typing.cast(Any, match[2] or match[4]))


def is_synthetic(source: str) -> bool:
    return source.partition(":")[0] == "synthetic"


def absolute(text: str) -> str:
    """A place on disk, wherever a run is resumed from; names of what is built in stay as they are."""
    is_name = is_synthetic(text) or text.partition(":")[0] in ("characters", "bpe")
    return text if is_name else os.path.abspath(os.path.expanduser(text))


def check_template(text: str) -> None:
    if "{}" not in text:
        raise ValueError("a caption with {} where the class belongs, such as 'a photo of a {}'")


def check_tokenizer(text: str) -> None:
    name, _, number = text.partition(":")
    if name == "bpe" and not (number.isdecimal() and 300 <= int(number) <= 1_000_000):
        raise ValueError("bpe:VOCABULARY with 300 symbols or more, such as bpe:4096")
    if name == "characters" and number:
        raise ValueError("characters, bpe:4096, or the path of a tokenizer.json")


def bounded(default: Any, *, low: float | None = None, high: float | None = None) -> Any:
    """A field whose value, when there is one, lies between `low` and `high`, both included."""
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True, kw_only=True)
class ImageTowerConfig:
    size_px: int = bounded(64, low=8, high=2048)
    patch_px: int = bounded(8, low=1, high=256)
    width: int = bounded(128, low=8, high=16384)
    depth: int = bounded(4, low=1, high=200)
    heads: int = bounded(4, low=1, high=256)

    @property
    def tokens(self) -> int:
        """Patches and the class token."""
        return (self.size_px // self.patch_px) ** 2 + 1


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
    val_limit: int = bounded(1000, low=2, high=10_000)  # pictures that an evaluation looks at, at most
    # Augmentation. None: what suits drawn scenes (shift and zoom), or pictures from files (crop and jitter).
    max_shift: float | None = bounded(None, low=0.0, high=0.5)  # random shift, as a share of the side
    max_zoom: float | None = bounded(None, low=0.0, high=0.5)  # random zoom in or out
    min_crop: float | None = bounded(None, low=0.05, high=1.0)  # smallest share of the area that a random crop keeps
    jitter: float | None = bounded(None, low=0.0, high=0.9)  # of brightness, contrast and saturation
    flip: bool = True  # mirror, except where the caption says left or right


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
        """Steps until the peak, in a run of that many."""
        return total_steps // 10 if self.warmup_steps is None else self.warmup_steps


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    epochs: int = bounded(50, low=1, high=1_000_000)
    steps: int | None = bounded(None, low=1, high=10**12)  # when given, the run ends after this many instead
    batch_size: int = bounded(27, low=2, high=1_000_000)
    seed: int = bounded(0, low=0, high=2**32 - 1)
    loss: LossName = "softmax"


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    every: str = field(default="5e", metadata={"check": Interval.parse})  # besides the last one
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


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    preset: str = "tiny"
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: LoopConfig = LoopConfig()
    save: SaveConfig = SaveConfig()
    runtime: RuntimeConfig = RuntimeConfig()


# The defaults above are `tiny`. `small` is the size the notes measured, `base` the towers they list; both follow
# their recipe (AdamW 3e-4, decay 0.01, 15 epochs of batch 12).
_NOTES_RECIPE = {
    "optim.lr": 3e-4,
    "optim.weight_decay": 0.01,
    "train.epochs": 15,
    "train.batch_size": 12,
}
_NOTES_TOWERS = {
    "model.image.size_px": 224,
    "model.image.patch_px": 16,
    "model.image.width": 768,
    "model.image.heads": 12,
    "model.text.width": 512,
    "model.text.depth": 6,
    "model.text.heads": 8,
    "model.embed_dim": 512,
}
_LARGE_RECIPE = {"optim.lr": 5e-4, "optim.weight_decay": 0.2, "train.epochs": 30, "train.batch_size": 64}
_OPENAI_VOCAB = {"model.text.vocab_size": 49_408}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "small": {**_NOTES_RECIPE, **_NOTES_TOWERS, "model.image.depth": 8},
    "base": {**_NOTES_RECIPE, **_NOTES_TOWERS, "model.image.depth": 12},
    "medium": {**_LARGE_RECIPE, **_NOTES_TOWERS, **_OPENAI_VOCAB, "model.image.depth": 12, "model.text.depth": 12},
    "large": {
        **_LARGE_RECIPE,
        **_OPENAI_VOCAB,
        "model.image.size_px": 224,
        "model.image.patch_px": 14,
        "model.image.width": 1024,
        "model.image.depth": 24,
        "model.image.heads": 16,
        "model.text.width": 768,
        "model.text.depth": 12,
        "model.text.heads": 12,
        "model.embed_dim": 768,
    },
    "huge": {
        **_LARGE_RECIPE,
        **_OPENAI_VOCAB,
        "model.image.size_px": 224,
        "model.image.patch_px": 14,
        "model.image.width": 1280,
        "model.image.depth": 32,
        "model.image.heads": 16,
        "model.text.width": 1024,
        "model.text.depth": 24,
        "model.text.heads": 16,
        "model.embed_dim": 1024,
    },
}


# --- from layers to a config ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """Settings from one place. `origin` names it in error messages: a file, a flag."""

    origin: str
    values: Mapping[str, Any]  # dotted key -> value as found


def resolve(layers: Sequence[Layer]) -> TrainConfig:
    """One config from layers, later ones over earlier ones, over the preset that the last layer naming one names."""
    problems: list[ConfigError] = []
    preset = next((layer.values["preset"] for layer in reversed(layers) if "preset" in layer.values), "tiny")
    if not isinstance(preset, str) or preset not in PRESETS:
        problems.append(ConfigError(f"unknown preset {preset!r}", _suggestion(str(preset), list(PRESETS), "presets")))
        preset = "tiny"
    values: dict[str, Any] = {"preset": preset}
    for layer in [Layer("preset", PRESETS[preset]), *layers]:
        for key, raw in layer.values.items():
            if key == "preset":
                continue
            leaf = LEAVES.get(key)
            if leaf is None:
                problems.append(ConfigError(f"unknown key {key}{_from(layer)}", _suggest_key(key)))
                continue
            try:
                values[key] = leaf.parse(raw)
            except (ValueError, OverflowError) as error:
                problems.append(ConfigError(f"{key} must be {error}, got {raw!r}{_from(layer)}"))
    problems += _contradictions(values)
    if problems:
        raise problems[0] if len(problems) == 1 else ConfigErrors(problems)
    return typing.cast(TrainConfig, _build(TrainConfig, values, ""))


def load_yaml(path: Path) -> Layer:
    """The settings of a YAML file as a layer."""
    try:
        if path.stat().st_size > CONFIG_FILE_LIMIT_BYTES:
            raise ConfigError(f"{path} is larger than 1 MB, which no config file is")
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no such config file: {path}", "examples/tiny.yaml shows what one looks like") from None
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file in UTF-8") from None
    except (ValueError, RecursionError):  # such as an impossible date, or ten thousand brackets
        raise ConfigError(f"{path} is not valid YAML: unreadable value") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise ConfigError(
            f"{path}{line} is not valid YAML: {getattr(error, 'problem', None) or 'unreadable'}"
        ) from None
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold keys and values, found a {type(document).__name__}")
    return Layer(str(path), dict(_flatten(document, "")))


def parse_assignments(assignments: Sequence[str]) -> Layer:
    """`--set key=value` arguments as a layer."""
    problems = [
        ConfigError(f"--set {text!r} is not KEY=VALUE", "for example --set optim.lr=1e-3")
        for text in assignments
        if "=" not in text
    ]
    if problems:
        raise ConfigErrors(problems)
    pairs = (text.split("=", 1) for text in assignments)
    return Layer("--set", {key.strip(): value.strip() for key, value in pairs})


def to_dict(config: TrainConfig) -> dict[str, Any]:
    return dataclasses.asdict(config)


def to_layer(config: TrainConfig) -> Layer:
    """Every setting of a config, by its dotted key."""
    return Layer("config", dict(_flatten(to_dict(config), "")))


def from_dict(values: Mapping[str, Any], origin: str) -> TrainConfig:
    """The config that `to_dict` or a saved config.yaml describes."""
    return resolve([Layer(origin, dict(_flatten(values, "")))])


def to_yaml(config: TrainConfig) -> str:
    return yaml.safe_dump(to_dict(config), sort_keys=False)


# --- one value ------------------------------------------------------------------------------------------------

_SUFFIXES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def parse_count(text: str | float) -> int:
    """A whole number as people write one: 1_000_000, 1e6, 10M, 1.2B, 8G. Raises ValueError."""
    match = re.fullmatch(r"\s*([-+]?[\d_,.]+(?:[eE][-+]?\d+)?)\s*([kKmMgGbBtT]?)\s*", str(text))
    if not match:
        raise ValueError("a whole number such as 12, 1e6 or 10M")
    try:
        value = float(match[1].replace("_", "").replace(",", "")) * _SUFFIXES[match[2].upper()]
    except ValueError:
        raise ValueError("a whole number such as 12, 1e6 or 10M") from None
    if not math.isfinite(value) or value != int(value):
        raise ValueError("a whole number")
    return int(value)


def parse_bytes(text: str) -> int:
    """A memory size as people write one: 8G, 8GB, 8GiB, 512M, in powers of 1024. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT])(?:i?[bB])?\s*|\s*(\d+)\s*", text)
    if not match:
        raise ValueError("a memory size such as 8G or 512M")
    value = int(match[3]) if match[3] else round(float(match[1]) * 1024 ** (1 + "KMGT".index(match[2].upper())))
    if value < 1:
        raise ValueError("a memory size above zero")
    return value


def parse_counts(texts: Sequence[str], *, limit: int = 1000) -> list[int]:
    """Counts above zero as people write several: `1e6 1e7`, `1e6,1e7`, and `1e5:1e8:7` for seven from 1e5 to 1e8 at
    equal ratios. Sorted, each once. Raises ValueError."""
    found: set[int] = set()
    for part in (part for text in texts for part in text.split(",") if part.strip()):
        first, *rest = part.split(":")
        if not rest:
            found.add(parse_count(first))
            continue
        if len(rest) != 2:
            raise ValueError("written FROM:TO:HOW_MANY, such as 1e5:1e8:7")
        low, high, number = parse_count(first), parse_count(rest[0]), parse_count(rest[1])
        if not (0 < low < high and 2 <= number <= limit):
            raise ValueError("a range from a smaller to a larger number in two or more steps")
        found |= {round(low * (high / low) ** (step / (number - 1))) for step in range(number)}
    if not found or min(found) < 1:
        raise ValueError("above zero")
    return sorted(found)


@dataclass(frozen=True)
class Leaf:
    """One setting: how its values are written and which are allowed."""

    kind: Any  # int, float, bool, str, a tuple of str, or a Literal
    optional: bool
    low: float | None
    high: float | None
    check: Callable[[str], Any] | None  # of a text: raises ValueError saying what is expected
    convert: Callable[[str], str] | None  # of a text: how it is kept

    def parse(self, raw: Any) -> Any:
        """The value that `raw` (from YAML, a flag or Python) stands for. Raises ValueError saying what is expected."""
        if self.optional and (raw is None or str(raw).lower() in ("none", "null", "auto")):
            return None
        if typing.get_origin(self.kind) is Literal:
            choices = typing.get_args(self.kind)
            if raw not in choices:
                raise ValueError(f"one of {', '.join(choices)}")
            return raw
        if self.kind is bool:
            return _parse_bool(raw)
        if self.kind is str:
            return self._parse_text(raw)
        if self.kind == tuple[str, ...]:
            return tuple(self._parse_text(one) for one in (raw if isinstance(raw, list | tuple) and raw else [raw]))
        return self._parse_number(raw)

    def _parse_text(self, raw: Any) -> str:
        if not isinstance(raw, str) or not raw:
            raise ValueError("text")
        if self.check:
            self.check(raw)
        return self.convert(raw) if self.convert else raw

    def _parse_number(self, raw: Any) -> int | float:
        if isinstance(raw, bool) or not isinstance(raw, int | float | str):
            raise ValueError("a number")
        value: int | float
        if self.kind is int:
            value = parse_count(raw)
        else:
            try:
                value = float(raw)
            except ValueError:
                raise ValueError("a number") from None
        if not math.isfinite(value):
            raise ValueError("a finite number")
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            raise ValueError(f"between {self.low:g} and {self.high:g}")
        return value


def _parse_bool(raw: Any) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    try:
        return words[str(raw).lower()]
    except KeyError:
        raise ValueError("true or false") from None


# --- plumbing -------------------------------------------------------------------------------------------------


def _sections(cls: type) -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        yield item.name, hints[item.name], item


def _find_leaves(cls: type, prefix: str) -> Iterator[tuple[str, Leaf]]:
    for name, kind, item in _sections(cls):
        if dataclasses.is_dataclass(kind):
            yield from _find_leaves(typing.cast(type, kind), f"{prefix}{name}.")
            continue
        optional = typing.get_origin(kind) in (types.UnionType, typing.Union)
        if optional:
            kind = next(part for part in typing.get_args(kind) if part is not type(None))
        limits = (item.metadata.get(key) for key in ("low", "high", "check", "convert"))
        yield f"{prefix}{name}", Leaf(kind, optional, *limits)


LEAVES: dict[str, Leaf] = dict(_find_leaves(TrainConfig, ""))
_SECTIONS = {key.rsplit(".", depth)[0] for key in LEAVES for depth in range(1, key.count(".") + 1)}


def _flatten(document: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted keys of a nested document. Only known sections are entered, so that a hostile file cannot grow."""
    for name, value in document.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key in _SECTIONS:
            yield from _flatten(value, f"{key}.")
        elif not (value is None and key in _SECTIONS):  # an empty section says nothing
            yield key, value


def _build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    arguments = {}
    for name, kind, _ in _sections(cls):
        key = f"{prefix}{name}"
        if dataclasses.is_dataclass(kind):
            arguments[name] = _build(typing.cast(type, kind), values, f"{key}.")
        elif key in values:
            arguments[name] = values[key]
    return cls(**arguments)


def _contradictions(values: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Settings that are fine one by one but not together."""
    config = _build(TrainConfig, values, "")
    image, text = config.model.image, config.model.text
    if image.size_px % image.patch_px:
        yield ConfigError(
            f"model.image.size_px {image.size_px} is not a multiple of model.image.patch_px {image.patch_px}",
            f"the nearest that fits is {max(1, round(image.size_px / image.patch_px)) * image.patch_px}",
        )
    for name, tower in (("image", image), ("text", text)):
        if tower.width % tower.heads:
            fitting = [heads for heads in range(1, tower.width + 1) if tower.width % heads == 0]
            nearest = min(fitting, key=lambda heads: abs(heads - tower.heads))
            yield ConfigError(
                f"model.{name}.width {tower.width} is not a multiple of model.{name}.heads {tower.heads}",
                f"--set model.{name}.heads={nearest} would fit",
            )


def _from(layer: Layer) -> str:
    return f" ({layer.origin})"


def _suggestion(word: str, known: Sequence[str], noun: str) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"{noun}: {', '.join(known)}"


def _suggest_key(key: str) -> str:
    """A near key; else one whose last part is the same (`lr` for `optim.lr`); else the keys of that section."""
    close = difflib.get_close_matches(key, LEAVES, n=1)
    same_name = [known for known in LEAVES if known.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    if same_name or close:
        return f"did you mean {(same_name or close)[0]}?"
    section = key.split(".", 1)[0]
    inside = [known for known in LEAVES if known.startswith(f"{section}.")]
    return f"known keys: {', '.join(inside or LEAVES)}"
