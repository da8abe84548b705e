"""Fine-tuning: from which model, in which shape, and with which settings.

The rules follow what is known of fine-tuning CLIP: small rates, a warm-up that is a share of the run, and the less data
there are, the less of the model is trained. Each can be overridden.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clipctl.config.layers import Layer, to_layer
from clipctl.config.sections import TrainConfig, TuneConfig
from clipctl.data.traits import Traits
from clipctl.errors import ConfigError
from clipctl.interop.foreign import train_config, with_weights
from clipctl.interop.models import Found, load_any
from clipctl.model import cost
from clipctl.model.adapting import resized_positions
from clipctl.progress import Tell, silent

MAX_BATCH, MIN_BATCH, MIN_STEPS_PER_EPOCH = 256, 16, 4
FULL_LR, LOCKED_LR, LORA_LR, PROJECTION_LR = 1e-5, 5e-5, 2e-4, 1e-3
OWN_LR_SHARE = 0.3  # of the rate that a model of ours was trained with
LAYER_DECAY, DEEP = 0.75, 8  # towers of so many blocks are trained with smaller rates below
LOCKED_BELOW = 10_000  # pictures: a tower with more parameters than they can teach stays as it is
LARGE_TOWER = 20_000_000  # parameters
PASSES = 40_000  # epochs × pictures
MIN_EPOCHS, MAX_EPOCHS = 5, 40
MAX_VIEWS, VIEWED_PICTURES = 8, 16_000  # views × pictures, of which features are kept


def open_base(root: Path, config: TrainConfig, asked: Sequence[Layer], tell: Tell = silent) -> Found | None:
    """The model to start from, in the shape that was asked for; None: from scratch."""
    if config.tune.base is None:
        return None
    _check_asked(asked)
    name = config.tune.base if config.tune.revision is None else f"{config.tune.base}@{config.tune.revision}"
    return _resized(load_any(root, name, tell=tell), config, asked)


def base_layer(base: Found) -> Layer:
    """Settings that come with a base: its shape and its loss."""
    shape = {key: value for key, value in to_layer(base.model.config).values.items() if key.startswith("model.")}
    pinned = {"tune.revision": base.revision} if base.revision else {}
    return Layer("the base", {**shape, "train.loss": base.model.config.train.loss, **pinned})


def tuning_settings(traits: Traits, base: Found, asked: TuneConfig, keys: set[str]) -> tuple[dict[str, Any], list[str]]:
    """Settings that follow from the base and the number of pictures, and why. `keys`: what was asked for."""
    model, pictures = base.model.config.model, traits.pictures
    batch_size = max(MIN_BATCH, min(MAX_BATCH, pictures // MIN_STEPS_PER_EPOCH))
    tower = cost.image_parameters(model.image, model.embed_dim)
    values: dict[str, Any] = {"train.batch_size": batch_size, "optim.weight_decay": 0.1, "save.every": "1min"}
    values["train.label_smoothing"] = 0.0  # its temperature is that of unsmoothed targets
    words = [f"starts from {base.identity.name}: evaluated before the first step; RUN@best never scores lower"]
    tune = asked
    if "tune.lock" not in keys and asked.lora is None and tower >= LARGE_TOWER and pictures < LOCKED_BELOW:
        values["tune.lock"] = "image"
        tune = replace(asked, lock="image")
        words.append(f"image tower locked: {tower / 1e6:.0f}M parameters are too many for {pictures:,} pictures")
    if tune.has_features and "image" in tune.locked and "tune.views" not in keys:
        values["tune.views"] = max(1, min(MAX_VIEWS, VIEWED_PICTURES // max(1, pictures)))
    if not tune.is_partial and max(model.image.depth, model.text.depth) >= DEEP:
        values["tune.layer_decay"] = LAYER_DECAY
        words.append(f"each block learns at {LAYER_DECAY:g} of the rate of the one above it")
    values["optim.lr"], why = usual_rate(base, tune)
    epochs = max(MIN_EPOCHS, min(MAX_EPOCHS, PASSES // max(1, pictures)))
    values["train.epochs"] = epochs
    words.append(f"learning rate {values['optim.lr']:g}: {why}; warm-up over a tenth of the steps; weight decay 0.1")
    return values, words


def usual_rate(base: Found, tune: TuneConfig) -> tuple[float, str]:
    """The peak learning rate, and why."""
    if tune.lora is not None:
        return LORA_LR, "LoRA starts at zero"
    if len(tune.locked) == 2 and not tune.unlocked_blocks:
        return PROJECTION_LR, "only projections are trained"
    if base.metrics:
        own = base.model.config.optim.lr
        return OWN_LR_SHARE * own, f"{OWN_LR_SHARE:.0%} of the base's own"
    if tune.locked:
        return LOCKED_LR, "a locked tower cannot forget"
    return FULL_LR, "higher ones make a pretrained model forget"


# --- its shape ------------------------------------------------------------------------------------------------

_OWN_KEYS = ("model.image.size_px", "model.image.mean", "model.image.std")


def _check_asked(asked: Sequence[Layer]) -> None:
    for layer in asked:
        for key in layer.values:
            if key == "preset" or (key.startswith("model.") and key not in _OWN_KEYS):
                raise ConfigError(f"{key} cannot be set with --from: the model already has its shape", "leave it out")
            if key == "data.tokenizer":
                raise ConfigError("--tokenizer cannot be set with --from: the model brings its own", "leave it out")


def _resized(found: Found, config: TrainConfig, asked: Sequence[Layer]) -> Found:
    """The model for pictures of another size, if that was asked for."""
    before = found.model.config.model.image
    size_px = config.model.image.size_px
    if not any("model.image.size_px" in layer.values for layer in asked) or size_px == before.size_px:
        return found
    if size_px % before.patch_px:
        raise ConfigError(
            f"model.image.size_px {size_px} is not a multiple of the model's patches of {before.patch_px} px",
            f"the nearest that fits is {max(1, round(size_px / before.patch_px)) * before.patch_px}",
        )
    if before.pool == "flat":
        raise ConfigError("this model reads all of its patches at once, so its picture size cannot change")
    after = replace(before, size_px=size_px)
    tensors = found.model.model.state_dict()
    tensors["image.positions"] = resized_positions(tensors["image.positions"], before, after)
    shape = replace(found.model.config.model, image=after)
    resized = with_weights(train_config(shape, has_bias="bias" in tensors), tensors)
    return found._replace(model=found.model._replace(model=resized, config=replace(found.model.config, model=shape)))
