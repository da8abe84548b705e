"""Models as ONNX files: what others compute with them, what clipctl does, and what 8 bits cost."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import CLIPTextModelWithProjection, CLIPVisionModelWithProjection

import clipctl
from clipctl.cli.views.convert import exported_text
from clipctl.data.synthetic.scenes import SyntheticSource
from clipctl.errors import CheckpointError
from clipctl.inference import engines
from clipctl.inference.embedder import Embedder
from clipctl.interop.card import Card
from clipctl.interop.export import export_libraries, export_native
from clipctl.interop.onnx import export_onnx
from clipctl.interop.onnx_model import DESCRIPTION, TEXT, VISION, OnnxEncoder, OnnxModel, graph_file
from clipctl.interop.proof import prove
from clipctl.model.weights import Identity
from tests.test_interop import CAPTIONS, STRANGE, TOKENIZERS, run_clipctl, small_model

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

LARGER = {"model.image.width": 128, "model.text.width": 128, "model.embed_dim": 64}
LAYOUTS = {
    "clip": ("words", {**LARGER, "model.activation": "quick_gelu"}),
    "conv": (
        "characters",
        {
            **LARGER,
            "model.image.stem": "conv",
            "model.image.pool": "flat",
            "model.image.depth": 1,
            "train.loss": "sigmoid",
        },
    ),
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """A model of each layout, and its export with 8 bits as well."""
    made = {}
    for layout, (kind, values) in LAYOUTS.items():
        target = tmp_path_factory.mktemp("exports") / layout
        made[layout] = small_model(TOKENIZERS[kind](), **values), target
        export_onnx(made[layout][0], target, Card(layout, "here"), "abc", int8=True)
    return made


@pytest.fixture(params=LAYOUTS)
def exported(request, exports):
    return exports[request.param]


@pytest.fixture
def clip(exports):
    return exports["clip"]


@pytest.fixture
def copied(clip, tmp_path):
    """A copy of it to do things to."""
    return Path(shutil.copytree(clip[1], tmp_path / "copied"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    directory, scenes = tmp_path_factory.mktemp("photos"), SyntheticSource(6, seed=0, validation=True)
    for number in range(6):
        scenes.square(number, 40).save(directory / f"{number}.png")
    return directory


def run_graph(target, tower, values):
    return onnxruntime.InferenceSession(graph_file(target, tower)).run(None, values)[0]


# --- what others compute ----------------------------------------------------------------------------------------


def test_onnxruntime_computes_the_same(exported):
    model, target = exported
    full, rounded = prove(model, target, ("onnxruntime", "onnxruntime int8"))
    assert max(full.image, full.text) < 1e-5 and full.logits < 1e-4, full
    assert max(rounded.image, rounded.text) < 0.05, rounded


@pytest.mark.parametrize("rows", [1, 5])
def test_any_number_of_pictures_and_any_length_of_captions(exported, rows):
    model, target = exported
    pixels, tokens = torch.randn(rows, 3, 32, 32), torch.randint(3, 20, (rows, 2 + 3 * rows))
    tokens[:, rows] = model.config.model.text.vocab_size - 1
    with torch.no_grad():
        image, text = model.model.image(pixels), model.model.text(tokens)
    assert np.abs(run_graph(target, VISION, {"pixel_values": pixels.numpy()}) - image.numpy()).max() < 1e-4
    assert np.abs(run_graph(target, TEXT, {"input_ids": tokens.numpy()}) - text.numpy()).max() < 1e-4


def test_names_and_values_are_those_of_transformers(clip, tmp_path):
    model, target = clip
    export_libraries(model, tmp_path / "theirs", ("transformers",), Card("theirs", "here"))
    pixels, tokens = torch.randn(2, 3, 32, 32), torch.tensor([[1, 5, 6, model.config.model.text.vocab_size - 1]])
    with torch.no_grad():
        vision = CLIPVisionModelWithProjection.from_pretrained(tmp_path / "theirs")(pixel_values=pixels)
        text = CLIPTextModelWithProjection.from_pretrained(tmp_path / "theirs")(input_ids=tokens)
    assert (
        np.abs(run_graph(target, VISION, {"pixel_values": pixels.numpy()}) - vision.image_embeds.numpy()).max() < 1e-4
    )
    assert np.abs(run_graph(target, TEXT, {"input_ids": tokens.numpy()}) - text.text_embeds.numpy()).max() < 1e-4
    outputs = [onnxruntime.InferenceSession(graph_file(target, one)).get_outputs()[0].name for one in (VISION, TEXT)]
    assert outputs == ["image_embeds", "text_embeds"]


def test_a_caption_that_was_cut_without_its_end_gets_it_back(clip):
    """As transformers.js cuts them."""
    model, target = clip
    whole = torch.randint(3, 20, (2, 40))
    cut = whole.clone()
    whole[:, -1] = model.config.model.text.vocab_size - 1
    found = run_graph(target, TEXT, {"input_ids": cut.numpy()})
    assert np.abs(found - run_graph(target, TEXT, {"input_ids": whole.numpy()})).max() < 1e-5


def test_the_directory_is_what_transformers_js_reads(exported):
    model, target = exported
    needed = {"config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "onnx"}
    assert needed <= {one.name for one in target.iterdir()}
    config = json.loads((target / "config.json").read_text())
    assert config["model_type"] == "clip" and config["logit_scale_init_value"] == model.model.log_scale.item()
    card = (target / "README.md").read_text()
    assert "CLIPVisionModelWithProjection" in card
    assert ("is for transformers.js only" in card) == (target.name == "conv")


def test_no_file_tells_where_it_was_made(exported):
    for file in exported[1].rglob("*.onnx"):
        assert b"towers.py" not in file.read_bytes() and os.fsencode(Path.home()) not in file.read_bytes()


def node_modules() -> str:
    """Where @huggingface/transformers is: not in CI, because installing it takes ten minutes."""
    place = os.environ.get("TRANSFORMERS_JS", "")
    if not shutil.which("node") or not (Path(place) / "node_modules" / "@huggingface" / "transformers").is_dir():
        pytest.skip("node, or @huggingface/transformers in TRANSFORMERS_JS/node_modules, is missing")
    return place


@pytest.mark.parametrize("dtype", ["fp32", "q8"])
def test_transformers_js_computes_the_same(exported, tmp_path, dtype):
    _, target = exported
    captions, scenes = [*CAPTIONS[:4], *STRANGE], SyntheticSource(6, seed=0, validation=True)
    pictures = [tmp_path / f"{number}.png" for number in range(len(scenes))]
    for number, picture in enumerate(pictures):
        scenes.square(number, 32).save(picture)  # of the model's size: another library would scale it otherwise
    asked = json.dumps({"captions": captions, "pictures": [str(one) for one in pictures]})
    script = Path(__file__).with_name("transformers_js.cjs")
    command = ["node", str(script), node_modules(), str(target), dtype]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    embedder = Embedder.of_graphs(OnnxModel.read(target), int8=dtype == "q8")
    text, image = embedder.embed_texts(captions), embedder.embed_images(pictures)
    found = {key: F.normalize(torch.tensor(answer[key]), dim=-1).numpy() for key in ("text", "image")}
    assert (found["text"] * text).sum(axis=1).min() > 0.9999
    assert (found["image"] * image).sum(axis=1).min() > 0.999


# --- 8 bits -----------------------------------------------------------------------------------------------------


def test_8_bits_take_less_than_a_third_of_the_space_and_mean_nearly_the_same(exported):
    _, target = exported
    sizes = [sum(graph_file(target, one, int8=int8).stat().st_size for one in (VISION, TEXT)) for int8 in (False, True)]
    assert sizes[1] <= 0.3 * sizes[0]
    full, rounded = (OnnxModel.read(target).open(int8=int8) for int8 in (False, True))
    pixels = torch.randint(256, (4, 32, 32, 3), dtype=torch.uint8)
    assert (full.images(pixels) * rounded.images(pixels)).sum(dim=1).min() > 0.995
    tokens = torch.randint(3, 20, (4, 40))
    assert (full.texts(tokens) * rounded.texts(tokens)).sum(dim=1).min() > 0.995


def test_export_prints_what_8_bits_cost_and_gain(tmp_path):
    export_native(small_model(TOKENIZERS["subwords"]()), tmp_path / "native", Card("native", "here"))
    command = ("checkpoint", "export", tmp_path / "native", "--to", "onnx", "--int8")
    done = run_clipctl(*command, "-o", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [one["library"] for one in answer["proofs"]] == ["onnxruntime", "onnxruntime int8"]
    assert [one["name"] for one in answer["precisions"]] == ["fp32", "int8"]
    assert all(one["images_per_s"] > 0 and 0 <= one["i2t_r1"] <= 1 for one in answer["precisions"])
    assert "held-out drawn pictures" in answer["judged_on"]
    words = exported_text(answer).plain
    assert "of the size" in words and "the same" in words and "quantised" in words and "NOT" not in words


def test_8_bits_alone_are_used_under_another_fingerprint(exported, tmp_path):
    target = Path(shutil.copytree(exported[1], tmp_path / "copied"))
    for tower in (VISION, TEXT):
        graph_file(target, tower).unlink()
    assert clipctl.load(target).identity.fingerprint == "abc int8"
    assert clipctl.load(target).embed_texts(["a cat"]).shape == (1, 64)


# --- using it ---------------------------------------------------------------------------------------------------


def test_an_export_embeds_as_its_model_does(exported, photos):
    model, target = exported
    theirs, ours = clipctl.load(target), Embedder.ready(model, Identity("ours", "here", "abc"))
    assert (theirs.dimensions, theirs.scale, theirs.identity.fingerprint) == (64, ours.scale, "abc")
    pictures = sorted(photos.iterdir())
    assert np.abs(theirs.embed_images(pictures) - ours.embed_images(pictures)).max() < 1e-5
    assert np.abs(theirs.embed_texts(CAPTIONS) - ours.embed_texts(CAPTIONS)).max() < 1e-5


def test_commands_take_an_export_for_a_model(clip, photos, tmp_path):
    target = clip[1]
    for command in (
        ("embed", target, photos, "-o", tmp_path / "index"),
        ("search", tmp_path / "index", "a red cat", "--json"),
        ("classify", target, photos, "--labels", "cat,bus", "--json"),
        ("eval", target, "synthetic:60", "--json"),
    ):
        done = run_clipctl(*command)
        assert done.exit_code == 0, (command, done.stderr)
    assert json.loads(done.stdout)["model"] == "clip"


@pytest.fixture
def both(clip, tmp_path):
    """A directory with weights for transformers, and ONNX files of the same model."""
    model, target = clip
    export_libraries(model, tmp_path / "both", ("transformers",), Card("both", "here"))
    shutil.copytree(target / "onnx", tmp_path / "both" / "onnx")
    return tmp_path / "both"


@pytest.mark.parametrize("winner", ["torch", "onnxruntime"])
def test_of_weights_and_onnx_files_the_faster_are_used(both, monkeypatch, winner):
    class Timed:
        def __init__(self, name):
            self.min_s = 0.1 if name == winner else 0.2

    monkeypatch.setattr(engines, "time_in_turns", lambda watches, **_: {name: Timed(name) for name in watches})
    assert isinstance(clipctl.load(both)._engine, OnnxEncoder) == (winner == "onnxruntime")


def test_measuring_takes_a_moment(both, clip):
    embedder = Embedder.ready(clip[0], Identity("ours", "here", "abc"))
    started = time.perf_counter()
    embedder.or_faster(both)
    assert time.perf_counter() - started < 5  # half a second, unless the machine is busy


@pytest.mark.parametrize("damage", ["other", "garbage"])
def test_onnx_files_of_another_model_are_left_alone(both, exports, damage):
    file = graph_file(both, VISION)
    if damage == "other":
        shutil.copy(graph_file(exports["conv"][1], VISION), file)
    else:
        file.write_bytes(b"no graph")
    assert not isinstance(clipctl.load(both)._engine, OnnxEncoder)


# --- what cannot be done ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_extra_is_named(clip, tmp_path, monkeypatch, package):
    export_native(clip[0], tmp_path / "native", Card("native", "here"))
    monkeypatch.setitem(sys.modules, package, None)
    done = run_clipctl("checkpoint", "export", tmp_path / "native", "--to", "onnx", "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert f"needs the {package} package" in done.stderr and "pip install 'clipctl[onnx]'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_8_bits_are_for_onnx_only(tmp_path):
    done = run_clipctl("checkpoint", "export", "any", "--to", "transformers", "--int8", "-o", tmp_path / "out")
    assert done.exit_code == 2 and "--int8 is for --to onnx" in done.stderr


def edit_description(**values):
    def change(directory):
        file = directory / DESCRIPTION
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda directory: graph_file(directory, VISION).write_bytes(b"no graph"), "has changed"),
        (lambda directory: os.truncate(graph_file(directory, TEXT), 1000), "has changed"),
        (lambda directory: graph_file(directory, TEXT).unlink(), "cannot be read"),
        (lambda directory: (directory / DESCRIPTION).write_text("[1]"), "not a JSON object"),
        (edit_description(schema="clipctl.onnx/9"), "schema"),
        (edit_description(scale="much"), "does not say which model"),
        (edit_description(config={"model": 1}), "does not say which model"),
    ],
)
def test_what_is_wrong_with_an_export_is_said(copied, photos, change, words):
    change(copied)
    done = run_clipctl("classify", copied, photos, "--labels", "cat,bus")
    assert done.exit_code == 3 and words in done.stderr, done.stderr


def test_a_graph_that_onnxruntime_cannot_read_is_said(copied):
    file = graph_file(copied, VISION)
    file.write_bytes(b"no graph")
    with pytest.raises(CheckpointError, match="cannot be read by onnxruntime"):
        OnnxEncoder(copied, OnnxModel.read(copied).config.model.image, 1.0)


def test_an_export_has_no_weights_to_export_again(clip, tmp_path):
    done = run_clipctl("checkpoint", "export", clip[1], "--to", "transformers", "-o", tmp_path / "out")
    assert done.exit_code == 3 and "exported from" in done.stderr


def test_an_export_runs_on_the_cpu(clip, photos):
    done = run_clipctl("classify", clip[1], photos, "--labels", "cat,bus", "--device", "cuda")
    assert done.exit_code == 4 and "run on the cpu" in done.stderr


KILLED = """
import os, signal, sys
from pathlib import Path
from clipctl.interop import onnx
from clipctl.interop.card import Card
from tests.test_interop import TOKENIZERS, small_model

def killed(graph, file):
    file.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

onnx._write_graph = killed
onnx.export_onnx(small_model(TOKENIZERS["words"]()), Path(sys.argv[1]), Card("out", "here"), "abc", int8=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_killed_on_the_way_nothing_is_left_under_its_name(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "out")], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "out").exists()


def test_what_fails_on_the_way_leaves_nothing(clip, tmp_path, monkeypatch):
    monkeypatch.setattr("clipctl.interop.onnx.quantise", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_onnx(clip[0], tmp_path / "out", Card("out", "here"), "abc", int8=True)
    assert not list(tmp_path.iterdir())
