"""Models as Core ML packages. They run on macOS only; elsewhere they are written and read again."""

import json
import sys

import pytest
import torch

from clipctl.interop import coreml
from clipctl.interop.card import Card
from clipctl.interop.export import export_native
from clipctl.interop.proof import Inputs
from clipctl.model.clip import normalise
from tests.test_interop import TOKENIZERS, run_clipctl, small_model

LAYOUTS = {
    "clip": {"model.activation": "quick_gelu"},
    "conv": {"model.image.stem": "conv", "model.image.pool": "flat", "model.image.depth": 1, "train.loss": "sigmoid"},
}


@pytest.mark.parametrize("values", LAYOUTS.values(), ids=LAYOUTS)
def test_packages_are_written_and_read_again(tmp_path, values):
    pytest.importorskip("coremltools")
    export_native(small_model(TOKENIZERS["words"](), **values), tmp_path / "native", Card("native", "here"))
    done = run_clipctl("checkpoint", "export", tmp_path / "native", "--to", "coreml", "-o", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.stderr
    assert coreml.described(tmp_path / "out") == (
        "image 32×32 px to image_embeds 1×32; input_ids 1×40 to text_embeds 1×32"
    )
    [proof] = json.loads(done.stdout)["proofs"]
    if coreml.can_run():
        assert proof["logits"] < 1e-2
    else:
        assert "macOS only" in proof["missing"] and "32×32 px" in proof["missing"]


def test_what_becomes_a_package_computes_the_same(tmp_path):
    model = small_model(TOKENIZERS["words"]())
    inputs = Inputs(tmp_path, 32)
    pixels = inputs.pixels(32)
    encoder = coreml.ImageEncoder(model.model.image, model.config.model.image)
    with torch.no_grad():
        wanted = model.model.encode_image(normalise(pixels))
        found = encoder(pixels.permute(0, 3, 1, 2).float())
    assert (wanted - found).abs().max() < 1e-5


def test_what_coremltools_cannot_convert_is_said(tmp_path, monkeypatch):
    coremltools = pytest.importorskip("coremltools")

    def fail(*_, **__):
        raise ValueError("op 'strange' is not implemented\nand more")

    monkeypatch.setattr(coremltools, "convert", fail)
    export_native(small_model(TOKENIZERS["words"]()), tmp_path / "native", Card("native", "here"))
    done = run_clipctl("checkpoint", "export", tmp_path / "native", "--to", "coreml", "-o", tmp_path / "out")
    assert done.exit_code == 3 and "op 'strange'" in done.stderr and "--to onnx" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    export_native(small_model(TOKENIZERS["words"]()), tmp_path / "native", Card("native", "here"))
    monkeypatch.setitem(sys.modules, "coremltools", None)
    done = run_clipctl("checkpoint", "export", tmp_path / "native", "--to", "coreml", "-o", tmp_path / "out")
    assert done.exit_code == 2 and "pip install 'clipctl[coreml]'" in done.stderr
    assert not (tmp_path / "out").exists()
