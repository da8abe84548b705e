"""A model as ONNX files, in the directory that transformers.js reads; `onnx_model` says what is in it.

As in transformers' CLIPVisionModelWithProjection and CLIPTextModelWithProjection, embeddings are not yet normalised.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from clipctl.config.layers import to_dict
from clipctl.data import tokenizers
from clipctl.errors import CheckpointError
from clipctl.files import replaced, sha256_of
from clipctl.interop.card import Card, write_card
from clipctl.interop.export import check_target, transformers_config, write_document, write_shared
from clipctl.interop.foreign import TRANSFORMERS_CONFIG
from clipctl.interop.graphs import CaptionTower, extra, plain_attention, quiet
from clipctl.interop.onnx_model import DESCRIPTION, SCHEMA, TEXT, VISION, graph_file
from clipctl.model.weights import TrainedModel

OPSET = 18  # the lowest that torch exports to, so that older runtimes read it too
LIMIT_BYTES = 2_000_000_000  # of one file, by its format
EVERYTHING = 2**62


def export_onnx(trained: TrainedModel, target: Path, card: Card, fingerprint: str, *, int8: bool) -> None:
    """Write one directory, whole or not at all. With `int8`, each graph a second time with 8-bit weights."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        extra("onnx", package)
    check_target(target)
    with replaced(target.absolute()) as partial:
        partial.mkdir()
        write_shared(trained, partial)
        scale = {"logit_scale_init_value": float(trained.model.log_scale.detach())}
        write_document(partial / TRANSFORMERS_CONFIG, transformers_config(trained) | scale)
        _write_graphs(trained, partial, int8=int8)
        _write_description(trained, partial, fingerprint)
        write_card(card, trained, partial)


class Graph(NamedTuple):
    tower: nn.Module
    example: Tensor
    input: str
    output: str
    free: dict[int, Any]  # axes of the input that may have any length


def _graphs(trained: TrainedModel) -> dict[str, Graph]:
    model, image, text = trained.model, trained.config.model.image, trained.config.model.text
    batch, length = torch.export.Dim("batch_size"), torch.export.Dim("sequence_length", max=text.context)
    captions = CaptionTower(model.text, tokenizers.from_dict(trained.tokenizer).end_id)
    pixels, ids = torch.zeros(2, 3, image.size_px, image.size_px), torch.zeros(2, text.context, dtype=torch.int64)
    return {
        VISION: Graph(model.image, pixels, "pixel_values", "image_embeds", {0: batch}),
        TEXT: Graph(captions, ids, "input_ids", "text_embeds", {0: batch, 1: length}),
    }


def _write_graphs(trained: TrainedModel, directory: Path, *, int8: bool) -> None:
    (directory / "onnx").mkdir()
    with quiet(), torch.no_grad(), plain_attention(trained.model):
        for name, graph in _graphs(trained).items():
            size_bytes = sum(tensor.nbytes for tensor in graph.tower.parameters())
            if size_bytes > LIMIT_BYTES:
                raise CheckpointError(
                    f"an ONNX file holds at most 2 GB, but the weights of {name} have {size_bytes:,} bytes"
                )
            _write_graph(graph, graph_file(directory, name))
            if int8:
                quantise(graph_file(directory, name), graph_file(directory, name, int8=True))


def _write_graph(graph: Graph, file: Path) -> None:
    program: Any = torch.onnx.export(
        graph.tower,
        (graph.example,),
        input_names=[graph.input],
        output_names=[graph.output],
        dynamic_shapes=(graph.free,),
        opset_version=OPSET,
        dynamo=True,
        verbose=False,
    )
    # The last block uses parts of its weights. Only what is cut once, here, is a constant that can have 8 bits.
    extra("onnx", "onnxscript.optimizer").optimize(
        program.model, input_size_limit=EVERYTHING, output_size_limit=EVERYTHING
    )
    model = program.model_proto
    for node in model.graph.node:
        del node.metadata_props[:]  # the source of each operation, with paths of this machine
    del model.graph.value_info[:]  # shapes that are no longer true once the quantiser has turned a matrix around
    extra("onnx", "onnx").save(model, str(file))


def _write_description(trained: TrainedModel, directory: Path, fingerprint: str) -> None:
    files = sorted((directory / "onnx").iterdir())
    document = {
        "schema": SCHEMA,
        "fingerprint": fingerprint,
        "scale": float(trained.model.log_scale.detach().exp()),
        "bias": 0.0 if trained.model.bias is None else float(trained.model.bias.detach()),
        "files": {file.relative_to(directory).as_posix(): sha256_of(file) for file in files},
        "tokenizer": trained.tokenizer,
        "config": to_dict(trained.config),
    }
    write_document(directory / DESCRIPTION, document)


# --- 8 bits ---------------------------------------------------------------------------------------------------


def quantise(file: Path, target: Path) -> None:
    """The same graph with 8-bit weights.

    Matrix products are done in integers, with activations quantised on the fly. Tables and convolutions are only stored
    in 8 bits: integer convolutions are slower than float ones.
    """
    quantisation = extra("onnx", "onnxruntime.quantization")
    quantisation.quantize_dynamic(
        file,
        target,
        op_types_to_quantize=["MatMul", "Gather"],
        weight_type=quantisation.QuantType.QInt8,
        per_channel=True,
        reduce_range=True,  # 7 bits: products of 8 overflow on processors without instructions for them
    )
    _store_convolutions(target)


def _store_convolutions(file: Path) -> None:
    """Weights of convolutions as integers, with a scale for each output channel.

    A runtime folds cast and product when it opens the file, and is left with the same convolution as before. It would
    keep a DequantizeLinear, and compute it for every picture.
    """
    onnx = extra("onnx", "onnx")
    model = onnx.load(str(file))
    graph = model.graph
    weights = {one.name: one for one in graph.initializer}
    for name in [node.input[1] for node in graph.node if node.op_type == "Conv" and node.input[1] in weights]:
        values = onnx.numpy_helper.to_array(weights[name])  # (channels, …)
        largest = np.abs(values).max(axis=(1, 2, 3), keepdims=True)
        scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
        parts = {f"{name}_int8": np.rint(values / scale).astype(np.int8), f"{name}_scale": scale}
        graph.initializer.remove(weights[name])
        graph.initializer.extend(onnx.numpy_helper.from_array(part, key) for key, part in parts.items())
        cast = onnx.helper.make_node("Cast", [f"{name}_int8"], [f"{name}_whole"], to=onnx.TensorProto.FLOAT)
        product = onnx.helper.make_node("Mul", [f"{name}_whole", f"{name}_scale"], [name])
        graph.node.insert(0, product)
        graph.node.insert(0, cast)
    onnx.save(model, str(file))
