"""Presets: models of several sizes, each with a recipe. `tiny` is what the sections default to."""

from typing import Any

# `small` (about 77M parameters) and `base` (ViT-B/16 with a shallow text tower, about 105M) share a recipe for small
# batches.
_SMALL_BATCH_RECIPE = {
    "optim.lr": 3e-4,
    "optim.weight_decay": 0.01,
    "train.epochs": 15,
    "train.batch_size": 12,
}
_VIT_B16_TOWERS = {
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
    "small": {**_SMALL_BATCH_RECIPE, **_VIT_B16_TOWERS, "model.image.depth": 8},
    "base": {**_SMALL_BATCH_RECIPE, **_VIT_B16_TOWERS, "model.image.depth": 12},
    "medium": {**_LARGE_RECIPE, **_VIT_B16_TOWERS, **_OPENAI_VOCAB, "model.image.depth": 12, "model.text.depth": 12},
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
