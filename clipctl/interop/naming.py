"""What three libraries call the same tensors: clipctl, open_clip (whose names are OpenAI's too) and transformers.

A state dict is translated by renaming. Two things differ besides: open_clip and OpenAI store projections transposed,
and transformers stores queries, keys and values in three matrices that are one here. Both are exact, there and back.
"""

import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from clipctl.errors import CheckpointError

Library = Literal["open_clip", "transformers"]
Tensors = dict[str, Tensor]

_OPEN_CLIP = {
    "log_scale": "logit_scale",
    "bias": "logit_bias",
    "image.patches.weight": "visual.conv1.weight",
    "image.class_embedding": "visual.class_embedding",
    "image.positions": "visual.positional_embedding",
    "image.norm_pre": "visual.ln_pre",
    "image.norm_post": "visual.ln_post",
    "image.projection.weight": "visual.proj",
    "text.tokens.weight": "token_embedding.weight",
    "text.positions": "positional_embedding",
    "text.norm_final": "ln_final",
    "text.projection.weight": "text_projection",
    "image.blocks": "visual.transformer.resblocks",
    "text.blocks": "transformer.resblocks",
    "norm_1": "ln_1",
    "norm_2": "ln_2",
    "attention.qkv.weight": "attn.in_proj_weight",
    "attention.qkv.bias": "attn.in_proj_bias",
    "attention.out": "attn.out_proj",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}
_TRANSPOSED = ("image.projection.weight", "text.projection.weight")

_TRANSFORMERS = {
    "log_scale": "logit_scale",
    "image.patches.weight": "vision_model.embeddings.patch_embedding.weight",
    "image.class_embedding": "vision_model.embeddings.class_embedding",
    "image.positions": "vision_model.embeddings.position_embedding.weight",
    "image.norm_pre": "vision_model.pre_layrnorm",  # their spelling
    "image.norm_post": "vision_model.post_layernorm",
    "image.projection.weight": "visual_projection.weight",
    "text.tokens.weight": "text_model.embeddings.token_embedding.weight",
    "text.positions": "text_model.embeddings.position_embedding.weight",
    "text.norm_final": "text_model.final_layer_norm",
    "text.projection.weight": "text_projection.weight",
    "image.blocks": "vision_model.encoder.layers",
    "text.blocks": "text_model.encoder.layers",
    "norm_1": "layer_norm1",
    "norm_2": "layer_norm2",
    "attention.out": "self_attn.out_proj",
    "mlp_in": "mlp.fc1",
    "mlp_out": "mlp.fc2",
}
_PARTS = ("q_proj", "k_proj", "v_proj")
_QKV = re.compile(r"(.*\.)attention\.qkv\.(weight|bias)")
_THEIR_QKV = re.compile(r"(.*\.)self_attn\.q_proj\.(weight|bias)")

# Facts that other libraries keep among their tensors.
_NOT_WEIGHTS = re.compile(r"input_resolution|context_length|vocab_size|attn_mask|.*\.position_ids")


def to_open_clip(ours: Mapping[str, Tensor]) -> Tensors:
    return {
        _renamed(name, _OPEN_CLIP): (tensor.T if name in _TRANSPOSED else tensor).contiguous()
        for name, tensor in ours.items()
    }


def from_open_clip(theirs: Mapping[str, Tensor]) -> Tensors:
    """Our tensors from a state dict of open_clip or OpenAI, in fp32."""
    found: Tensors = {}
    for name, tensor in theirs.items():
        # Some of open_clip's models keep the text tower in a room of its own.
        plain = name.removeprefix("text.") if "text.token_embedding.weight" in theirs else name
        if not _NOT_WEIGHTS.fullmatch(plain):
            ours = _renamed(plain, _reversed(_OPEN_CLIP))
            found[ours] = (tensor.T if ours in _TRANSPOSED else tensor).float().contiguous()
    return found


def to_transformers(ours: Mapping[str, Tensor]) -> Tensors:
    if "bias" in ours:
        raise CheckpointError(
            "transformers' CLIPModel has no bias for its logits, which a model trained with the sigmoid loss needs",
            "export to open_clip or onnx instead",
        )
    found: Tensors = {}
    for name, tensor in ours.items():
        if match := _QKV.fullmatch(name):
            block = _renamed(match[1], _TRANSFORMERS)
            for part, values in zip(_PARTS, tensor.chunk(3), strict=True):
                found[f"{block}self_attn.{part}.{match[2]}"] = values.contiguous()
        else:
            found[_renamed(name, _TRANSFORMERS)] = tensor.contiguous()
    return found


def from_transformers(theirs: Mapping[str, Tensor]) -> Tensors:
    """Our tensors from a CLIPModel's state dict, in fp32."""
    found: Tensors = {}
    for name, tensor in theirs.items():
        if match := _THEIR_QKV.fullmatch(name):
            block, kind = _renamed(match[1], _reversed(_TRANSFORMERS)), match[2]
            parts = [theirs.get(f"{match[1]}self_attn.{part}.{kind}") for part in _PARTS]
            whole = torch.cat([part for part in parts if part is not None])
            found[f"{block}attention.qkv.{kind}"] = whole.float()
        elif not _NOT_WEIGHTS.fullmatch(name) and not re.search(r"self_attn\.[kv]_proj\.", name):
            found[_renamed(name, _reversed(_TRANSFORMERS))] = tensor.float().contiguous()
    return found


def _reversed(names: Mapping[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, theirs in names.items()}


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """A tensor's name with its parts replaced: the whole of it, its module, or its block and what is inside."""
    if name in names:
        return names[name]
    if match := re.fullmatch(r"(.+)\.(\d+)\.(.*)", name):  # inside a block
        tower, number, inside = match[1], match[2], match[3]
        return f"{names.get(tower, tower)}.{number}.{_renamed(inside, names) if inside else ''}"
    module, _, kind = name.rpartition(".")  # weight or bias of a module
    return f"{names[module]}.{kind}" if module in names else name
