"""Models from other libraries and for other libraries, with those libraries as the other side of every comparison."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor, AutoTokenizer, CLIPConfig, CLIPModel
from typer.testing import CliRunner

import clipctl
from clipctl.cli.app import app
from clipctl.config.layers import Layer, resolve
from clipctl.data.tokenizers import CharacterTokenizer, SubwordTokenizer, WordTokenizer
from clipctl.errors import CheckpointError, DataError
from clipctl.interop import hub, naming
from clipctl.interop.card import Card
from clipctl.interop.export import export_libraries, export_native
from clipctl.interop.foreign import Hints, recognise
from clipctl.interop.proof import prove
from clipctl.interop.tokenizer_files import library_tokenizer
from clipctl.model.clip import Clip
from clipctl.model.weights import TrainedModel, load_model
from clipctl.runs.checkpoint import read_checkpoint
from tests.launcher import launch

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

CAPTIONS = [
    "a red cat on the sea, at the top",
    "two Blue buses:  in the middle",
    "drawing of three yellow cakes",
    "naïve café — 3 ice-creams_here",
] * 3
STRANGE = ["", "жук in the café", "日本語 text", "A  B\tC\n", "!!!", "a" * 300, "x_y-z", "हिन्दी", "ΑΒΓ", "e\u0301clair"]
TOKENIZERS = {
    "characters": lambda: CharacterTokenizer(sorted(set("".join(CAPTIONS).lower())), 40),
    "words": lambda: WordTokenizer.learn(CAPTIONS, 500, 40),
    "subwords": lambda: SubwordTokenizer.learn(CAPTIONS, 400, 40),
}
SMALL = {
    "model.image.size_px": 32,
    "model.image.width": 64,
    "model.image.depth": 2,
    "model.text.width": 64,
    "model.text.context": 40,
    "model.embed_dim": 32,
}


def run_clipctl(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments])


@pytest.fixture(scope="module")
def open_clip():
    """The real library. It needs names from torchvision, which has no CPU build; nothing of it is called here."""
    names = ("", ".ops", ".ops.misc", ".transforms", ".transforms.functional")
    with mock.patch.dict(sys.modules, {f"torchvision{name}": mock.MagicMock() for name in names}):
        yield pytest.importorskip("open_clip")


def small_model(tokenizer, *, seed=1, **values) -> TrainedModel:
    torch.manual_seed(seed)
    config = resolve([Layer("test", {**SMALL, "model.text.vocab_size": tokenizer.vocab_size, **values})])
    model = Clip(config.model, loss=config.train.loss).eval()
    with torch.no_grad():  # norms and biases start at 0 and 1, which would hide mistakes
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return TrainedModel(model, config, tokenizer.to_dict())


def same_tensors(one, other):
    mine, others = one.model.state_dict(), other.model.state_dict()
    return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


# --- leaving ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
def test_both_libraries_compute_the_same_from_files_and_captions(tmp_path, open_clip, kind, activation):
    model = small_model(TOKENIZERS[kind](), **{"model.activation": activation})
    export_libraries(model, tmp_path / "out", ("transformers", "open_clip"), Card("out", "here"))
    for proof in prove(model, tmp_path / "out", ("transformers", "open_clip")):
        assert proof.missing is None
        assert max(proof.image, proof.text) < 1e-5 and proof.logits < 1e-4, proof


@pytest.mark.parametrize("library", ["transformers", "open_clip"])
def test_there_and_back_every_tensor_is_the_same(tmp_path, library):
    model = small_model(TOKENIZERS["words"](), **{"model.activation": "quick_gelu"})
    export_libraries(model, tmp_path / "out", (library,), Card("out", "here"))
    back = recognise(tmp_path / "out", Hints()).load()
    assert same_tensors(model, back)
    assert back.config.model == model.config.model


def test_other_pixel_statistics_come_along(tmp_path):
    values = {"model.image.mean": [0.5, 0.4, 0.3], "model.image.std": [0.2, 0.25, 0.3]}
    model = small_model(TOKENIZERS["words"](), **values)
    export_libraries(model, tmp_path / "out", ("transformers",), Card("out", "here"))
    assert recognise(tmp_path / "out", Hints()).load().config.model.image.mean == (0.5, 0.4, 0.3)
    [proof] = prove(model, tmp_path / "out", ("transformers",))
    assert proof.logits < 1e-4


def test_a_sigmoid_model_leaves_for_open_clip_with_its_bias(tmp_path, open_clip):
    model = small_model(TOKENIZERS["words"](), **{"train.loss": "sigmoid"})
    export_libraries(model, tmp_path / "out", ("open_clip",), Card("out", "here"))
    [proof] = prove(model, tmp_path / "out", ("open_clip",))
    assert proof.logits < 1e-4
    assert same_tensors(model, recognise(tmp_path / "out", Hints()).load())
    with pytest.raises(CheckpointError, match="no bias"):
        export_libraries(model, tmp_path / "other", ("transformers",), Card("out", "here"))
    assert not (tmp_path / "other").exists()


def test_a_tower_that_they_do_not_know_is_refused_with_a_way_out(tmp_path):
    values = {"model.image.stem": "conv", "model.image.pool": "flat", "model.image.depth": 0}
    model = small_model(TOKENIZERS["words"](), **values)
    with pytest.raises(CheckpointError) as refused:
        export_libraries(model, tmp_path / "out", ("transformers",), Card("out", "here"))
    assert "--to onnx" in refused.value.hint
    export_native(model, tmp_path / "native", Card("native", "here"))
    assert same_tensors(model, load_model(read_checkpoint(tmp_path / "native")))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizer_json_gives_the_same_ids(tmp_path, kind):
    tokenizer = TOKENIZERS[kind]()
    export_libraries(small_model(tokenizer), tmp_path / "out", ("transformers",), Card("out", "here"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for caption in [*CAPTIONS, *STRANGE]:
        found = theirs([caption], padding="max_length", max_length=40, truncation=True)["input_ids"][0]
        assert found == tokenizer.encode(caption).tolist(), caption


def test_a_word_with_an_unknown_letter_is_spelled_around_it():
    tokenizer = TOKENIZERS["words"]()
    ids = library_tokenizer(tokenizer).encode("reжd cat").ids
    assert ids == [one for one in tokenizer.encode("reжd cat").tolist() if one]
    assert len(ids) > 4 and ids.count(2) == 1


# --- arriving ---------------------------------------------------------------------------------------------------


def foreign_clip(directory: Path, tokenizer, **vision) -> CLIPModel:
    """A CLIPModel with random weights, as transformers saves it."""
    shared = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**shared, "vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.end_id, "hidden_act": "gelu"}
    text |= {"bos_token_id": 1, "pad_token_id": 0, "max_position_embeddings": 40}
    vision = {**shared, "image_size": 32, "patch_size": 8, "hidden_act": "gelu", **vision}
    torch.manual_seed(3)
    model = CLIPModel(CLIPConfig(vision_config=vision, text_config=text, projection_dim=32)).eval()
    model.save_pretrained(directory)
    from clipctl.interop.tokenizer_files import write_tokenizer

    write_tokenizer(tokenizer, directory)
    return model


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    directory = tmp_path_factory.mktemp("foreign") / "clip"
    return directory, foreign_clip(directory, TOKENIZERS["words"]())


def test_a_model_of_transformers_is_used_as_it_lies(foreign, tmp_path):
    directory, theirs = foreign
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (70, 50, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    model = clipctl.load(directory)
    image, text = model.embed_images([tmp_path / "a.png"]), model.embed_texts(CAPTIONS[:4])
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    pixels = processor(Image.open(tmp_path / "a.png"), return_tensors="pt")["pixel_values"]
    ids = AutoTokenizer.from_pretrained(directory)(CAPTIONS[:4], return_tensors="pt", padding=True)["input_ids"]
    with torch.no_grad():
        found = theirs(pixel_values=pixels, input_ids=ids)
    assert np.abs(image - found.image_embeds.numpy()).max() < 1e-5
    assert np.abs(text - found.text_embeds.numpy()).max() < 1e-5


def test_a_model_the_size_of_vit_b_32_gives_the_same_logits(tmp_path):
    """Saved by transformers with all of its defaults, which its config then leaves out."""
    torch.manual_seed(0)
    theirs = CLIPModel(CLIPConfig()).eval()
    theirs.save_pretrained(tmp_path / "b32")
    tokenizer = SubwordTokenizer.learn(CAPTIONS, 400, 77)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer.to_dict()["definition"]))
    ours = recognise(tmp_path / "b32", Hints(tokenizer=tmp_path / "tokenizer.json")).load()
    assert ours.config.model.activation == "quick_gelu" and ours.config.model.image.patch_px == 32
    images, tokens = torch.randn(2, 3, 224, 224), torch.randint(3, 49000, (2, 12))
    tokens[:, -1] = 49407
    with torch.no_grad():
        wanted, found = theirs(pixel_values=images, input_ids=tokens), ours.model(images, tokens)
    assert (found.scale * found.image @ found.text.T - wanted.logits_per_image).abs().max() < 1e-4


def test_a_state_dict_in_openai_names_is_read_without_running_anything(tmp_path, open_clip):
    vision = {"image_size": 32, "patch_size": 8, "width": 64, "layers": 2, "head_width": 64}
    text = {"context_length": 40, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 2}
    torch.manual_seed(0)
    theirs = open_clip.CLIP(32, vision, text, quick_gelu=True).eval()
    facts = {
        "input_resolution": torch.tensor(32),
        "context_length": torch.tensor(40),
        "vocab_size": torch.tensor(49408),
    }
    torch.save({**theirs.state_dict(), **facts}, tmp_path / "openai.pt")
    ours = recognise(tmp_path / "openai.pt", Hints()).load()
    assert ours.config.model.activation == "quick_gelu"
    images, tokens = torch.randn(2, 3, 32, 32), open_clip.SimpleTokenizer(context_length=40)(CAPTIONS[:2])
    with torch.no_grad():
        image, text, scale = theirs(images, tokens)
        found = ours.model(images, tokens)
    assert (scale * image @ text.T - found.scale * found.image @ found.text.T).abs().max() < 1e-4


def test_openai_vocabulary_is_split_as_open_clip_does(open_clip, tmp_path):
    vision = {"image_size": 32, "patch_size": 8, "width": 64, "layers": 1, "head_width": 64}
    text = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 1}
    save_file(open_clip.CLIP(32, vision, text).state_dict(), tmp_path / "model.safetensors")
    model = recognise(tmp_path / "model.safetensors", Hints(activation="gelu")).load()
    theirs = open_clip.SimpleTokenizer()
    ours = SubwordTokenizer(json.dumps(model.tokenizer["definition"]), 77)
    for caption in [*CAPTIONS, "Don't, it's WE'RE 1234!", "日本語 text 😀"]:
        assert ours.encode(caption).tolist() == theirs([caption])[0].tolist(), caption


def test_a_model_from_elsewhere_is_judged_on_data_that_are_named(foreign):
    alone = run_clipctl("eval", foreign[0])
    assert alone.exit_code == 2 and "no held-out pictures of its own" in alone.stderr
    judged = run_clipctl("eval", foreign[0], "synthetic:60", "--json")
    assert judged.exit_code == 0, judged.stderr
    assert 0 <= json.loads(judged.stdout)["i2t_r1"] <= 1


def test_import_makes_a_model_of_our_own(foreign, tmp_path):
    directory, _ = foreign
    done = run_clipctl("checkpoint", "import", directory, "-o", tmp_path / "mine", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["parameters"] == sum(one.numel() for one in clip_parameters(directory))
    assert same_tensors(load_model(read_checkpoint(tmp_path / "mine")), recognise(directory, Hints()).load())
    again = run_clipctl("checkpoint", "import", directory, "-o", tmp_path / "mine")
    assert again.exit_code == 2 and "already exists" in again.stderr


def clip_parameters(directory):
    return naming.from_transformers(load_file(directory / "model.safetensors")).values()


def test_export_prints_its_proof(foreign, tmp_path):
    done = run_clipctl("checkpoint", "export", foreign[0], "--to", "transformers", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert "transformers" in done.stdout and "the same" in done.stdout and "NOT" not in done.stdout
    assert AutoProcessor.from_pretrained(tmp_path / "out").tokenizer.model_max_length == 40
    assert "CLIPModel.from_pretrained" in (tmp_path / "out" / "README.md").read_text()


# --- what cannot be used ----------------------------------------------------------------------------------------


def broken(foreign, tmp_path, change):
    """A copy of a good model with one file changed."""
    import shutil

    target = tmp_path / "broken"
    shutil.copytree(foreign[0], target)
    change(target)
    return target


def edit_config(**changes):
    def change(directory):
        file = directory / "config.json"
        document = json.loads(file.read_text())
        for key, value in changes.items():
            section, _, name = key.partition("__")
            if name:
                document[section][name] = value
            else:
                document[section] = value
        file.write_text(json.dumps(document))

    return change


def drop_tensor(directory):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    del tensors["text_projection.weight"]
    save_file({**tensors, "surplus": torch.zeros(3)}, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (edit_config(model_type="bert"), "'bert' model, not a CLIP"),
        (edit_config(vision_config__hidden_act="relu", text_config__hidden_act="relu"), "'relu'"),
        (edit_config(vision_config__intermediate_size=100), "intermediate_size 100"),
        (edit_config(vision_config__hidden_size=96), "intermediate_size"),
        (edit_config(vision_config__image_size=48), "image.positions is 17×64, expected 37×64"),
        (drop_tensor, "text.projection.weight is absent"),
        (drop_tensor, "surplus is 3, expected absent"),
        (lambda directory: (directory / "config.json").unlink(), "no config.json"),
        (lambda directory: (directory / "model.safetensors").unlink(), "no weights"),
        (lambda directory: (directory / "config.json").write_text("[1]"), "not a JSON object"),
        (lambda directory: (directory / "model.safetensors").write_bytes(b"\x80\x04pickle"), "pickle"),
        (lambda directory: (directory / "tokenizer.json").unlink(), "without a tokenizer"),
    ],
)
def test_what_is_wrong_with_a_model_is_said(foreign, tmp_path, change, words):
    target = broken(foreign, tmp_path, change)
    with pytest.raises(CheckpointError) as error:
        recognise(target, Hints()).load()
    assert words in str(error.value)


def test_a_pickle_that_would_run_is_never_opened(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"visual.proj": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match="more than tensors"):
        recognise(tmp_path / "evil.pt", Hints()).load()
    assert not (tmp_path / "ran").exists()


def test_tensors_alone_need_to_be_told_their_activation(tmp_path):
    model = small_model(TOKENIZERS["words"]())
    save_file(naming.to_open_clip(model.model.state_dict()), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        recognise(tmp_path / "model.safetensors", Hints()).load()
    assert "--activation quick_gelu" in error.value.hint


def test_without_a_network_a_hub_name_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError) as error:
        hub.download("openai/clip-vit-base-patch32")
    assert "directory" in error.value.hint


def test_hub_names():
    assert hub.is_name("openai/clip-vit-base-patch32") and hub.is_name("hf-hub:laion/CLIP-ViT-B-32-laion2B-s34B-b79K")
    assert not any(map(hub.is_name, ("a1f3", "./models/mine", "/models/mine", "a/b/c", "a1f3@best")))


def test_a_name_that_is_nothing_lists_what_a_model_can_be(tmp_path):
    done = run_clipctl("checkpoint", "export", "nothing", "-o", tmp_path / "out", "--runs-dir", tmp_path)
    assert done.exit_code == 2 and "hub" in done.stderr


# --- the hub ----------------------------------------------------------------------------------------------------


class HubHandler(BaseHTTPRequestHandler):
    """As much of the hub as its client asks for: what a model has, and its files."""

    directory: Path
    asked: list[str]
    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, *, with_body):
        self.asked.append(f"{self.command} {self.path}")
        name = self.path.split("?")[0].rsplit("/", 1)[-1]
        file = self.directory / name
        if self.path.startswith("/api/models/org/clip"):
            siblings = [{"rfilename": one.name} for one in self.directory.iterdir()]
            tree = [
                {"type": "file", "path": one.name, "oid": "0" * 40, "size": one.stat().st_size}
                for one in self.directory.iterdir()
            ]
            facts = {"id": "org/clip", "modelId": "org/clip", "sha": self.COMMIT, "siblings": siblings, "tags": []}
            self._send(200, json.dumps(tree if "/tree/" in self.path else facts).encode(), with_body=with_body)
        elif "/resolve/" in self.path and file.is_file():
            self._send(200, file.read_bytes(), with_body=with_body, etag=hashlib.sha256(name.encode()).hexdigest())
        else:
            self._send(404, b"{}", with_body=with_body)

    def _send(self, code, body, *, with_body, etag=None):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        if etag:
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", self.COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


FROM_HUB = """
import sys, clipctl
from clipctl.interop import hub
said = []
print(hub.download("org/clip", tell=said.append).revision)
print(clipctl.load("org/clip").embed_texts(["a red cat"]).shape, len(said))
"""


def test_a_model_from_the_hub_is_downloaded_once_and_pinned(foreign, tmp_path):
    handler = type("Handler", (HubHandler,), {"directory": foreign[0], "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    env = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    try:
        done = subprocess.run([sys.executable, "-c", FROM_HUB], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert HubHandler.COMMIT in done.stdout and "(1, 32)" in done.stdout
        downloads = [one for one in handler.asked if one.startswith("GET") and one.endswith("model.safetensors")]
        assert len(downloads) == 1
    finally:
        server.shutdown()
    # Without a network, what was downloaded is used.
    offline = {**env, "HF_HUB_OFFLINE": "1"}
    again = subprocess.run([sys.executable, "-c", FROM_HUB], env=offline, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert HubHandler.COMMIT in again.stdout


# --- killed in the middle ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["import"], ["export", "--to", "both"], ["export", "--to", "safetensors"]])
def test_killed_at_any_moment_the_target_is_whole_or_absent(tmp_path, command):
    """Several moments, spread over what the command takes."""
    source = tmp_path / "source"
    foreign_clip(source, TOKENIZERS["words"](), num_hidden_layers=6)
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    seen = set()
    for number in range(6):
        target = tmp_path / f"out-{number}"
        program = launch("clipctl", "checkpoint", *command, str(source), "-o", str(target))
        time.sleep(0.4 + 0.35 * number)
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        seen.add(target.exists())
        if target.exists():
            model = recognise(target, Hints()).load() if "both" in command else load_model(read_checkpoint(target))
            assert model.config.model.image.depth == 6
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    assert seen, "no moment was tried"
