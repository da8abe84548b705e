"""A model's shape and preprocessing in other libraries' config files: read and written. No torch.

Whatever the two towers here cannot represent is refused by name, instead of being loaded as something else.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from clipctl.config.sections import OPENAI_MEAN, OPENAI_STD, ImageTowerConfig, ModelConfig, TextTowerConfig
from clipctl.errors import CheckpointError
from clipctl.model.cost import MLP_RATIO

Document = Mapping[str, Any]
_EPS = 1e-5  # of every norm
_BICUBIC = 3  # as Pillow counts

# What a value must be, if it is there, for the model to be one of ours.
_PLAIN_TOWER = {
    "ls_init_value": None,
    "final_ln_after_pool": False,
    "act_kwargs": None,
    "norm_kwargs": None,
    "qk_norm": False,
    "scaled_cosine_attn": False,
    "scale_heads": False,
    "scale_attn_inner": False,
    "scale_attn": False,
    "scale_fc": False,
    "mlp_ratio": float(MLP_RATIO),
}
_PLAIN_VISION = {
    **_PLAIN_TOWER,
    "attentional_pool": False,
    "no_ln_pre": False,
    "pos_embed_type": "learnable",
    "pool_type": "tok",
    "timm_model_name": None,
}
_PLAIN_TEXT = {
    **_PLAIN_TOWER,
    "embed_cls": False,
    "no_causal_mask": False,
    "pool_type": "argmax",
    "proj_bias": False,
    "proj_type": "linear",
    "hf_model_name": None,
}


# --- transformers ---------------------------------------------------------------------------------------------


def from_transformers(config: Document, preprocessor: Document | None) -> ModelConfig:
    kind = config.get("model_type")
    if kind != "clip":
        raise CheckpointError(f"it is a {kind!r} model, not a CLIP model", "transformers calls CLIP models 'clip'")
    # A saved config leaves out what equals transformers' defaults.
    vision = {**_VISION_DEFAULTS, **config.get("vision_config", {})}
    text = {**_TEXT_DEFAULTS, **config.get("text_config", {})}
    for name, tower in (("vision_config", vision), ("text_config", text)):
        wanted = {"intermediate_size": MLP_RATIO * tower["hidden_size"], "layer_norm_eps": _EPS}
        _check_plain(tower, wanted, name)
    if vision["hidden_act"] != text["hidden_act"]:
        both = _shown([vision["hidden_act"], text["hidden_act"]])
        raise CheckpointError(f"its towers have different activations: {both}")
    image = ImageTowerConfig(
        size_px=_whole(vision, "image_size"),
        patch_px=_whole(vision, "patch_size"),
        width=_whole(vision, "hidden_size"),
        depth=_whole(vision, "num_hidden_layers"),
        heads=_whole(vision, "num_attention_heads"),
    )
    return ModelConfig(
        image=_with_preprocessing(image, preprocessor or {}),
        text=TextTowerConfig(
            context=_whole(text, "max_position_embeddings"),
            vocab_size=_whole(text, "vocab_size"),
            width=_whole(text, "hidden_size"),
            depth=_whole(text, "num_hidden_layers"),
            heads=_whole(text, "num_attention_heads"),
        ),
        embed_dim=_whole({"projection_dim": 512, **config}, "projection_dim"),
        activation=_activation(str(vision["hidden_act"])),  # type: ignore[arg-type]
    )


_VISION_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": _EPS,
}
_TEXT_DEFAULTS = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": _EPS,
}


def _with_preprocessing(image: ImageTowerConfig, preprocessor: Document) -> ImageTowerConfig:
    """From preprocessor_config.json: the statistics, and that pictures are cut and scaled as here."""
    size, crop = preprocessor.get("size", image.size_px), preprocessor.get("crop_size", image.size_px)
    wanted = {"do_resize": True, "do_center_crop": True, "do_normalize": True, "do_rescale": True, "resample": _BICUBIC}
    _check_plain(preprocessor, wanted, "preprocessor_config.json")
    sides = {one for value in (size, crop) for one in (value.values() if isinstance(value, Mapping) else [value])}
    if sides != {image.size_px}:
        cut = _shown(sorted(sides, key=str))
        raise CheckpointError(f"its pictures are cut to {cut} px, but its model takes {image.size_px} px")
    mean, std = preprocessor.get("image_mean", OPENAI_MEAN), preprocessor.get("image_std", OPENAI_STD)
    return replace(image, mean=_colour(mean), std=_colour(std))


def to_transformers(model: ModelConfig, token_ids: Document) -> dict[str, Any]:
    image, text = model.image, model.text
    act = {"hidden_act": model.activation, "layer_norm_eps": _EPS, "projection_dim": model.embed_dim}
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": model.embed_dim,
        "dtype": "float32",
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": image.width,
            "intermediate_size": MLP_RATIO * image.width,
            "num_hidden_layers": image.depth,
            "num_attention_heads": image.heads,
            "image_size": image.size_px,
            "patch_size": image.patch_px,
            **act,
        },
        "text_config": {
            "model_type": "clip_text_model",
            "vocab_size": text.vocab_size,
            "hidden_size": text.width,
            "intermediate_size": MLP_RATIO * text.width,
            "num_hidden_layers": text.depth,
            "num_attention_heads": text.heads,
            "max_position_embeddings": text.context,
            **act,
            **token_ids,
        },
    }


def to_preprocessor(image: ImageTowerConfig) -> dict[str, Any]:
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": image.size_px},
        "resample": _BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": image.size_px, "width": image.size_px},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(image.mean),
        "image_std": list(image.std),
    }


# --- open_clip ------------------------------------------------------------------------------------------------


def from_open_clip(document: Document) -> ModelConfig:
    """The settings in an open_clip_config.json."""
    config = document.get("model_cfg", document)
    vision, text = config.get("vision_cfg"), config.get("text_cfg")
    if not isinstance(vision, Mapping) or not isinstance(text, Mapping):
        raise CheckpointError("its config has no vision_cfg and text_cfg, so it is not a CLIP model of open_clip")
    _check_plain(vision, _PLAIN_VISION, "vision_cfg")
    _check_plain(text, _PLAIN_TEXT, "text_cfg")
    preprocess = document.get("preprocess_cfg", {})
    _check_plain(preprocess, {"interpolation": "bicubic", "resize_mode": "shortest", "mode": "RGB"}, "preprocess_cfg")
    width = _whole({"width": 768, **vision}, "width")
    image = ImageTowerConfig(
        size_px=_whole({"image_size": 224, **vision}, "image_size"),
        patch_px=_whole({"patch_size": 16, **vision}, "patch_size"),
        width=width,
        depth=_whole({"layers": 12, **vision}, "layers"),
        heads=width // _whole({"head_width": 64, **vision}, "head_width"),
        mean=_colour(preprocess.get("mean", OPENAI_MEAN)),
        std=_colour(preprocess.get("std", OPENAI_STD)),
    )
    return ModelConfig(
        image=image,
        text=TextTowerConfig(
            context=_whole({"context_length": 77, **text}, "context_length"),
            vocab_size=_whole({"vocab_size": 49408, **text}, "vocab_size"),
            width=_whole({"width": 512, **text}, "width"),
            depth=_whole({"layers": 12, **text}, "layers"),
            heads=_whole({"heads": 8, **text}, "heads"),
        ),
        embed_dim=_whole(config, "embed_dim"),
        activation="quick_gelu" if config.get("quick_gelu") else "gelu",
    )


def to_open_clip(model: ModelConfig, *, has_bias: bool) -> dict[str, Any]:
    image, text = model.image, model.text
    size = {"size": [image.size_px, image.size_px], "mean": list(image.mean), "std": list(image.std)}
    return {
        "model_cfg": {
            "embed_dim": model.embed_dim,
            "quick_gelu": model.activation == "quick_gelu",
            **({"init_logit_bias": 0.0} if has_bias else {}),
            "vision_cfg": {
                "image_size": image.size_px,
                "patch_size": image.patch_px,
                "width": image.width,
                "layers": image.depth,
                "head_width": image.width // image.heads,
            },
            "text_cfg": {
                "context_length": text.context,
                "vocab_size": text.vocab_size,
                "width": text.width,
                "layers": text.depth,
                "heads": text.heads,
                "hf_tokenizer_name": "tokenizer.json",  # any name: the files of the same directory are read
            },
        },
        "preprocess_cfg": {**size, "interpolation": "bicubic", "resize_mode": "shortest", "mode": "RGB"},
    }


def from_shapes(shapes: Mapping[str, tuple[int, ...]], activation: str) -> ModelConfig:
    """The settings of a state dict in our names that came without a config: its shapes determine all but the activation
    and the heads, which are 64 wide in every such model."""
    try:
        width, _, patch_px, _ = shapes["image.patches.weight"]
        side = round((shapes["image.positions"][0] - 1) ** 0.5)
        vocab_size, text_width = shapes["text.tokens.weight"]
        depths = {tower: 1 + max(_block_numbers(shapes, tower)) for tower in ("image", "text")}
        return ModelConfig(
            image=ImageTowerConfig(
                size_px=side * patch_px, patch_px=patch_px, width=width, depth=depths["image"], heads=width // 64
            ),
            text=TextTowerConfig(
                context=shapes["text.positions"][0],
                vocab_size=vocab_size,
                width=text_width,
                depth=depths["text"],
                heads=text_width // 64,
            ),
            embed_dim=shapes["text.projection.weight"][0],
            activation=_activation(activation),  # type: ignore[arg-type]
        )
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"its tensors are not those of a CLIP model with two transformers: {error} is missing"
        ) from None


def _block_numbers(shapes: Mapping[str, tuple[int, ...]], tower: str) -> list[int]:
    return [int(name.split(".")[2]) for name in shapes if name.startswith(f"{tower}.blocks.")]


# --- checks ---------------------------------------------------------------------------------------------------


def _check_plain(document: Document, wanted: Document, where: str) -> None:
    for key, value in wanted.items():
        if key in document and document[key] != value:
            raise CheckpointError(f"{where} has {key} {_shown(document[key])}, and clipctl knows only {value!r}")


def _shown(value: Any) -> str:
    return repr(value)[:60]


def _whole(document: Document, key: str) -> int:
    value = document.get(key)
    value = value[0] if isinstance(value, list | tuple) and len(set(value)) == 1 else value
    if type(value) is not int or not 0 < value < 10_000_000:
        raise CheckpointError(f"its config has no valid {key}: {_shown(value)}")
    return value


def _colour(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list | tuple) or len(values) != 3 or not all(type(one) in (int, float) for one in values):
        raise CheckpointError(f"its pixel statistics are not three numbers: {_shown(values)}")
    return tuple(float(one) for one in values)


def _activation(name: str) -> str:
    if name not in ("gelu", "quick_gelu"):
        raise CheckpointError(f"its activation is {_shown(name)}; clipctl knows gelu and quick_gelu")
    return name
