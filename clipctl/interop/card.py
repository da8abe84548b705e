"""The model card of an export: what the model is, how good it is, what it was trained on, how to load it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import clipctl
from clipctl.config.layers import to_dict
from clipctl.config.presets import PRESETS
from clipctl.config.sections import TrainConfig
from clipctl.model import cost
from clipctl.model.weights import TrainedModel


@dataclass(frozen=True)
class Card:
    name: str
    source: str  # where the model was found
    metrics: Mapping[str, float] = field(default_factory=dict)  # on held-out pictures, 0 to 1
    base: str | None = None  # the model that it was trained from


def write_card(card: Card, trained: TrainedModel, directory: Path) -> None:
    (directory / "README.md").write_text("\n".join(_lines(card, trained, directory)) + "\n", encoding="utf-8")


def _lines(card: Card, trained: TrainedModel, directory: Path) -> list[str]:
    config, model = trained.config, trained.config.model
    text = model.text
    found = {one.name for one in directory.rglob("*")}
    lines = [
        "---",
        "pipeline_tag: zero-shot-image-classification",
        "tags: [clip, clipctl]",
        "---",
        "",
        f"# {card.name}",
        "",
        f"A CLIP model with {cost.parameters(model):,} parameters: it embeds pictures and captions into "
        f"{model.embed_dim} dimensions, where matches lie close together. Exported by clipctl {clipctl.__version__}.",
        "",
        "| | |",
        "|---|---|",
        f"| image tower | {model.image.words} |",
        f"| text tower | {text.width}×{text.depth}, {text.context} tokens, vocabulary {text.vocab_size:,} |",
        f"| activation | {model.activation} |",
        f"| tokenizer | {trained.tokenizer['kind']} |",
        *([f"| started from | {card.base} |"] if card.base else []),
        "",
        *_scores(card),
        *_training(config, card),
        "## Load it",
        "",
    ]
    if "vision_model.onnx" in found and not model.image.is_clip_layout:
        lines += ["transformers itself has no image tower like this one: config.json is for transformers.js only.", ""]
    return [*lines, *(line for way in _LOADING if found & way.needs for line in _code(way, card.name))]


class Way(NamedTuple):
    """How a library loads it."""

    needs: set[str]  # any of these files
    language: str
    code: str


_LOADING = (
    Way(
        {"model.safetensors"},
        "python",
        """from transformers import AutoProcessor, CLIPModel

model = CLIPModel.from_pretrained("{}")
processor = AutoProcessor.from_pretrained("{}")""",
    ),
    Way(
        {"open_clip_config.json"},
        "python",
        """import open_clip

model, preprocess = open_clip.create_model_from_pretrained("local-dir:{}")
tokenizer = open_clip.get_tokenizer("local-dir:{}")""",
    ),
    Way(
        {"vision_model.onnx"},
        "python",
        """import onnxruntime  # embeddings are not of length one yet

vision = onnxruntime.InferenceSession("{}/onnx/vision_model.onnx")  # pixel_values: image_embeds
text = onnxruntime.InferenceSession("{}/onnx/text_model.onnx")  # input_ids: text_embeds""",
    ),
    Way(
        {"vision_model.onnx"},
        "javascript",
        """import * as hf from "@huggingface/transformers"; // dtype: "fp32", or "q8" for 8 bits

const processor = await hf.AutoProcessor.from_pretrained("{}");
const tokenizer = await hf.AutoTokenizer.from_pretrained("{}");
const vision = await hf.CLIPVisionModelWithProjection.from_pretrained("{}", { dtype: "fp32" });
const text = await hf.CLIPTextModelWithProjection.from_pretrained("{}", { dtype: "fp32" });
const { image_embeds } = await vision(await processor(await hf.RawImage.read("boat.jpg")));
const { text_embeds } = await text(tokenizer(["a red boat"], { padding: true, truncation: true }));""",
    ),
    Way(
        {"ImageEncoder.mlpackage"},
        "swift",
        """// Xcode generates a class for each package. input_ids: tokenizer.json's, padded with 0 to the context.
let picture = try ImageEncoder().prediction(image: pixelBuffer).image_embeds
let caption = try TextEncoder().prediction(input_ids: ids).text_embeds  // similarity: their dot product""",
    ),
    Way(
        {"model.safetensors", "open_clip_model.safetensors", "clipctl.json"},
        "python",
        """import clipctl

model = clipctl.load("{}")""",
    ),
)


def _code(way: Way, name: str) -> list[str]:
    return [f"```{way.language}", *way.code.replace("{}", name).splitlines(), "```", ""]


def _scores(card: Card) -> list[str]:
    """Recall at 1, 5 and 10 in both directions, as far as it is known."""
    sides = {"i2t": "picture to caption", "t2i": "caption to picture"}
    rows = {side: [card.metrics.get(f"{side}_r{k}") for k in (1, 5, 10)] for side in sides}
    if not any(value is not None for row in rows.values() for value in row):
        return []
    table = [
        f"| {sides[side]} | " + " | ".join("–" if one is None else f"{100 * one:.1f}%" for one in row) + " |"
        for side, row in rows.items()
    ]
    return ["## Scores on held-out pictures", "", "| | R@1 | R@5 | R@10 |", "|---|---|---|---|", *table, ""]


def _training(config: TrainConfig, card: Card) -> list[str]:
    if not card.metrics:
        return []
    data, loop = config.data, config.train
    places = ", ".join(Path(one).name or one for one in data.source)
    length = f"{loop.steps:,} steps" if loop.steps else f"{loop.epochs:,} epochs"
    differing = [f"`{key}: {value}`" for key, value in _settings(config).items()]
    return [
        "## Training",
        "",
        f"On {places}, for {length} in batches of {loop.batch_size}, at a peak learning rate of {config.optim.lr:g}.",
        *(["", f"Other settings that differ from their defaults: {', '.join(differing)}."] if differing else []),
        "",
    ]


# Said in words, or of no interest elsewhere.
_SAID = ("data.source", "data.val", "data.image_root", "train.steps", "train.epochs", "train.batch_size", "optim.lr")


def _settings(config: TrainConfig) -> dict[str, Any]:
    """The chosen settings, apart from the shape, the location of the data and what the text above already says."""
    chosen, default = to_dict(config), to_dict(TrainConfig())
    preset = PRESETS.get(config.preset, {})
    found = {}
    for section in ("data", "optim", "train", "tune"):
        for key, value in chosen[section].items():
            name = f"{section}.{key}"
            said = name in (
                "data.source",
                "data.val",
                "data.image_root",
                "train.steps",
                "train.epochs",
                "train.batch_size",
            )
            if not said and name != "optim.lr" and value != preset.get(name, default[section][key]):
                found[name] = value
    return found
