"""A trained model in use: embed, search, classify, eval."""

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import clipctl
from clipctl.cli.app import app
from clipctl.config.layers import Layer, resolve
from clipctl.data.catalog import class_names, open_held_out, read_data
from clipctl.data.formats.rows import Hints
from clipctl.data.held_out import Matches
from clipctl.errors import ConfigError, DataError, StoreError
from clipctl.hardware.shelf import Shelf
from clipctl.inference import embedding_store, evaluation, private, refresh
from clipctl.inference.embedding_store import EmbeddingStore
from clipctl.inference.gallery import Originals, open_gallery
from clipctl.inference.labels import embed_labels, parse_labels
from clipctl.inference.refresh import refresh as refreshed
from clipctl.inference.search import nearest, without
from clipctl.runs.rundir import RunDir
from clipctl.training.plan import make_plan
from tests.conftest import MICRO, train

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 40, 220)}


def draw(path, colour, number=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((24, 24, 3), COLOURS[colour], dtype=np.uint8)
    pixels[number % 20 : number % 20 + 4] = 255
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Class folders: 12 pictures of each of three colours."""
    root = tmp_path_factory.mktemp("photos")
    for colour in COLOURS:
        for number in range(12):
            draw(root / colour / f"{number:02d}.png", colour, number)
    return root


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    """A model that has learnt the three colours."""
    run = RunDir.create(tmp_path_factory.mktemp("runs"), "tiny", "colours")
    values = {**MICRO, "data.source": str(photos), "data.val_fraction": 0.3, "train.epochs": 30, "optim.lr": 3e-3}
    train(make_plan(resolve([Layer("test", values)])), run)
    run.release()
    return run


@pytest.fixture(scope="module")
def model(run):
    return clipctl.load("colours", runs_dir=run.path.parent)


@pytest.fixture
def folder(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "photos")
    return tmp_path / "photos"


def make_index(path, model, folder):
    return refreshed(path, model, open_gallery([str(folder)]), [str(folder)])


# --- pictures ----------------------------------------------------------------------------------------------------


def test_a_folder_a_file_a_table_and_shards_are_galleries(folder, tmp_path):
    (folder / "notes.txt").write_text("no picture")
    whole = open_gallery([str(folder)])
    assert len(whole.pictures) == 36 and all(os.path.isabs(one.path) for one in whole.pictures)
    one = open_gallery([str(folder / "red" / "00.png")])
    assert one.pictures == [next(p for p in whole.pictures if p.path.endswith("red/00.png"))]
    table = tmp_path / "captions.csv"
    table.write_text("filepath,caption\nphotos/red/00.png,red\nphotos/blue/01.png,blue\n")
    assert [os.path.basename(p.path) for p in open_gallery([str(table)]).pictures] == ["00.png", "01.png"]
    red = (folder / "red/00.png").read_bytes()
    shard = open_gallery([str(write_shard(tmp_path / "shard.tar", {"a.png": red, "a.txt": b"red"}))])
    assert shard.content(0) == red
    assert Originals([str(tmp_path / "shard.tar")]).content(shard.pictures[0].path) == shard.content(0)


def write_shard(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def test_pictures_without_captions_are_embedded_from_shards_and_tables(invoke, folder, tmp_path):
    red, green, blue = ((folder / colour / "00.png").read_bytes() for colour in ("red", "green", "blue"))
    write_shard(tmp_path / "plain.tar", {"a.png": red, "b.png": green, "c.json": b"{}"})
    write_shard(tmp_path / "some.tar", {"a.png": red, "a.txt": b"red", "c.png": blue})
    (tmp_path / "captions.csv").write_text("filepath,caption\nphotos/red/00.png,red\nphotos/blue/01.png,\n")
    for place in ("plain.tar", "some.tar", "captions.csv"):
        done = invoke("embed", "colours", place, "-o", f"{place}.index", "--json")
        assert done.exit_code == 0 and json.loads(done.stdout)["pictures"] == 2, done.output
    found = invoke("search", "plain.tar.index", "a photo of a green", "--top", 1)
    assert found.stdout.strip().endswith("plain.tar/b.png")
    write_shard(tmp_path / "none.tar", {"c.json": b"{}"})
    assert "has no pictures: 1 row has no picture" in invoke("embed", "colours", "none.tar", "-o", "x").stderr
    refused = invoke("data", "inspect", "plain.tar")
    assert refused.exit_code == 2 and "has no captions" in refused.stderr  # training needs them


def test_pictures_of_an_odd_table_are_embedded_and_found_again(invoke, folder, tmp_path):
    """What was said about the table is kept in the index: a contact sheet opens the pictures in its shard again."""
    blue = (folder / "blue/00.png").read_bytes()
    write_shard(tmp_path / "shard.tar", {"a.png": blue})
    (tmp_path / "odd.csv").write_text("kind;where\nx;red/00.png\nx;red/01.png\n")
    flags = ("--image-column", "where", "--image-root", folder, "--separator", ";", "--caption-column", "kind")
    assert invoke("embed", "colours", "odd.csv", "-o", "index").exit_code == 2
    done = invoke("embed", "colours", "odd.csv", "-o", "index", *flags)
    assert done.exit_code == 0 and "2 pictures in index" in done.stdout, done.output
    hints = {"image_column": "where", "image_root": str(folder), "separator": ";", "caption_column": "kind"}
    manifest = embedding_store.read_manifest(tmp_path / "index")
    assert manifest.hints == hints
    assert [p.path for p in open_gallery(manifest.places, hints=Hints(**hints)).pictures] == [
        str(folder / "red/00.png"),
        str(folder / "red/01.png"),
    ]
    named = invoke("classify", "colours", "odd.csv", "--labels", "red,blue", "--template", "a photo of a {}", *flags)
    assert named.exit_code == 0 and named.stdout.count("red/0") == 2, named.output
    done = invoke("embed", "colours", "odd.csv", "shard.tar", "-o", "both", *flags)
    assert done.exit_code == 0, done.output
    manifest = embedding_store.read_manifest(tmp_path / "both")
    originals = Originals(manifest.places, Hints(**manifest.hints))
    assert originals.content(str(tmp_path / "shard.tar" / "a.png")) == blue


def test_pictures_in_other_formats_are_listed_and_not_passed_over(invoke, folder, tmp_path, without_heif):
    for name in ("IMG_1.HEIC", "IMG_2.nef"):
        (folder / "red" / name).write_bytes(b"\0\0\0\x18ftypheic")
    reasons = {"IMG_1.HEIC": "HEIC: pip install pillow-heif or save as JPEG", "IMG_2.nef": "camera raw: save as JPEG"}
    embedded = json.loads(invoke("embed", "colours", folder, "-o", "index", "--json").stdout)
    named = json.loads(invoke("classify", "colours", folder, "--labels", "red,blue", "--json").stdout)
    for document in (embedded, named):
        assert {os.path.basename(one["path"]): one["reason"] for one in document["bad"]} == reasons
    assert embedded["pictures"] == 36 == len(named["pictures"])
    found = invoke("search", folder, "a photo of a red", "--model", "colours")
    assert found.exit_code == 0 and "2 pictures cannot be used: 1 HEIC: pip install pillow-heif" in found.stderr
    for arguments in (("embed", "colours", folder / "red/IMG_1.HEIC", "-o", "one"), ("search", "index", "IMG_1.heic")):
        (tmp_path / "IMG_1.heic").write_bytes(b"\0\0\0\x18ftypheic")
        done = invoke(*arguments)
        assert done.exit_code == 2 and reasons["IMG_1.HEIC"] in done.stderr


def test_a_picture_in_two_places_counts_once(folder):
    gallery = open_gallery([str(folder / "red"), str(folder), str(folder / "red" / "03.png")])
    assert len(gallery.pictures) == 36 and gallery.pictures[0].path.endswith("red/00.png")
    assert gallery.content(0) == (folder / "red/00.png").read_bytes()


# --- the index ---------------------------------------------------------------------------------------------------


def test_an_index_holds_what_the_model_says(model, folder, tmp_path):
    done = make_index(tmp_path / "index", model, folder)
    assert (done.pictures, done.embedded, done.forgotten, done.bad) == (36, 36, 0, [])
    store = EmbeddingStore.open(tmp_path / "index")
    paths = [store.picture(row).path for row in range(len(store))]
    assert store.vectors.dtype == np.float16 and not embedding_store.problems_of(tmp_path / "index")
    assert np.allclose(store.vectors, model.embed_images(paths), atol=1e-3)
    manifest = json.loads((tmp_path / "index" / "manifest.json").read_text())
    by_numpy = np.load(tmp_path / "index" / manifest["files"]["vectors"])
    assert np.array_equal(by_numpy, store.vectors) and manifest["model"]["fingerprint"] == model.identity.fingerprint


def test_again_only_what_changed_is_embedded(model, folder, tmp_path, monkeypatch):
    make_index(tmp_path / "index", model, folder)
    before = {one.path: one for one in EmbeddingStore.open(tmp_path / "index").all_pictures()}
    assert make_index(tmp_path / "index", model, folder).embedded == 0
    (folder / "red" / "00.png").unlink()
    draw(folder / "blue" / "01.png", "red", 7)
    draw(folder / "new" / "deep" / "x.png", "green")
    (folder / "green" / "broken.jpg").write_bytes(b"no picture")
    done = make_index(tmp_path / "index", model, folder)
    assert (done.pictures, done.embedded, done.forgotten) == (36, 2, 1)
    assert [(os.path.basename(one.picture.path), one.reason) for one in done.bad] == [("broken.jpg", "not a picture")]
    store = EmbeddingStore.open(tmp_path / "index")
    now = {store.picture(row).path: row for row in range(len(store))}
    assert before.keys() - now.keys() == {str(folder / "red" / "00.png")}
    changed = now[str(folder / "blue" / "01.png")]
    assert np.allclose(store.vectors[changed], model.embed_images([folder / "blue" / "01.png"])[0], atol=1e-3)
    monkeypatch.setattr(
        refresh, "embed_stream", lambda _, decode, wanted, **_more: iter(()) if not wanted else pytest.fail()
    )
    again = make_index(tmp_path / "index", model, folder)
    assert again.embedded == 0 and len(again.bad) == 1  # known to be bad, and still said


def test_an_interrupted_refresh_goes_on_where_it_was(model, folder, tmp_path):
    gallery, index = open_gallery([str(folder)]), tmp_path / "index"

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refresh, "embed_stream", lambda *arguments, **_: _small_batches(*arguments))
        with pytest.raises(KeyboardInterrupt):
            refreshed(index, model, gallery, [str(folder)], progress=interrupt)
    assert not embedding_store.is_store(index)
    assert make_index(index, model, folder).embedded == 36 - 5
    assert not (index / ".parts").exists() and not embedding_store.problems_of(index)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_embed_keeps_what_is_done(run, model, tmp_path, number, code):
    """To a real process: before a command knows better, both signals end it on the spot."""
    photos = tmp_path / "photos"
    Image.effect_noise((600, 600), 80).convert("RGB").save(photos.with_suffix(".png"))
    photos.mkdir()
    for name in range(600):
        os.link(photos.with_suffix(".png"), photos / f"{name}.png")
    command = [sys.executable, "-m", "clipctl", "embed", run.path, photos, "-o", tmp_path / "index"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("embedding "):
            break
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == code and "the pictures embedded so far are kept" in said, said
    assert "error" not in said
    again = make_index(tmp_path / "index", model, photos)
    assert again.pictures == 600 and 0 < again.embedded < 600


def _small_batches(embedder, decode, wanted):
    from clipctl.inference.stream import embed_stream

    return embed_stream(embedder, decode, wanted, batch_size=5)


def test_readers_never_see_half_a_state(model, folder, tmp_path, monkeypatch):
    index = tmp_path / "index"
    make_index(index, model, folder)
    draw(folder / "new.png", "red")
    real = embedding_store.files.write_json
    monkeypatch.setattr(embedding_store.files, "write_json", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        make_index(index, model, folder)
    assert len(EmbeddingStore.open(index)) == 36
    monkeypatch.setattr(embedding_store.files, "write_json", real)
    assert make_index(index, model, folder).pictures == 37
    assert len(list(index.glob("vectors-*.npy"))) == 1


@pytest.mark.parametrize("kind", ["vectors", "pictures", "manifest"])
@pytest.mark.parametrize("how", ["cut", "gone", "garbage"])
def test_a_damaged_index_is_said_to_be(model, folder, tmp_path, kind, how):
    index = tmp_path / "index"
    make_index(index, model, folder)
    name = "manifest.json" if kind == "manifest" else embedding_store.read_manifest(index).names[kind]
    if how == "gone":
        (index / name).unlink()
    elif how == "cut":
        (index / name).write_bytes((index / name).read_bytes()[:-40])
    else:
        (index / name).write_bytes(b"\x93NUMPY garbage" * 20)
    with pytest.raises((StoreError, DataError)):
        store = EmbeddingStore.open(index)
        for row in range(len(store)):
            store.picture(row)


def test_damage_of_the_right_size_is_not_passed_on(model, folder, tmp_path):
    """A refresh would copy it into the next state, whose sha256 would be right."""
    index = tmp_path / "index"
    make_index(index, model, folder)
    draw(folder / "new.png", "red")
    for name in embedding_store.read_manifest(index).names.values():
        kept = (index / name).read_bytes()
        (index / name).write_bytes(kept[:-3] + b"{?\n")
        with pytest.raises(StoreError, match=f"{name} has changed"):
            make_index(index, model, folder)
        (index / name).write_bytes(kept)
    (index / embedding_store.read_manifest(index).bad_file).write_bytes(b"{?\n")
    with pytest.raises(StoreError, match="is damaged"):
        EmbeddingStore.open(index).bad()
    assert len(EmbeddingStore.open(index)) == 36


@pytest.mark.parametrize("content", [b"\0\0", b"\xff\x7f", b"\0\x7b"], ids=["zeros", "NaN", "too long"])
def test_a_search_in_damaged_vectors_fails(invoke, folder, tmp_path, content):
    invoke("embed", "colours", folder, "-o", "index")
    vectors = tmp_path / "index" / embedding_store.read_manifest(tmp_path / "index").vectors_file
    written = vectors.read_bytes()
    vectors.write_bytes(written[:128] + content * ((len(written) - 128) // 2))
    done = invoke("search", "index", "a photo of a red")
    assert done.exit_code == 3 and "is damaged: its vectors are not of length one" in done.stderr
    again = invoke("embed", "colours", folder, "-o", "index")
    assert again.exit_code == 3 and "has changed: its sha256" in again.stderr and "rm -r index" in again.stderr


def test_a_second_refresh_at_the_same_time_is_refused(model, folder, tmp_path):
    with embedding_store.locked(tmp_path / "index"), pytest.raises(DataError, match="another process"):
        make_index(tmp_path / "index", model, folder)


def test_an_index_of_another_model_is_refused(model, folder, tmp_path):
    make_index(tmp_path / "index", model, folder)
    other = clipctl.load(model.identity.path)
    other.identity = other.identity._replace(fingerprint="0" * 64, name="other@1")
    with pytest.raises(StoreError, match=r"made with another model \(colours@\d+\), not with other@1"):
        make_index(tmp_path / "index", other, folder)


def test_files_of_others_are_left_alone(model, folder, tmp_path):
    index = tmp_path / "index"
    make_index(index, model, folder)
    (index / "pictures-train.jsonl").write_text("mine")
    draw(folder / "new.png", "red")
    assert make_index(index, model, folder).embedded == 1 and (index / "pictures-train.jsonl").read_text() == "mine"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "manifest.json").write_text('{"name": "of an app"}')
    with pytest.raises(DataError, match="with other files in it"):
        make_index(tmp_path / "full", model, folder)


def test_another_dtype_is_written_and_known_from_then_on(model, folder, tmp_path):
    make_index(tmp_path / "index", model, folder)
    gallery = open_gallery([str(folder)])
    for embedded in (36, 0):
        done = refreshed(tmp_path / "index", model, gallery, [str(folder)], "float32")
        assert done.embedded == embedded and EmbeddingStore.open(tmp_path / "index").vectors.dtype == np.float32
    assert not (tmp_path / "index" / ".parts").exists()


def test_what_could_not_be_read_is_tried_again(model, folder, tmp_path, monkeypatch):
    from clipctl.data.bad import BadPictureError
    from clipctl.inference.gallery import Files

    real, index = Files.content, tmp_path / "index"

    def content(self, number):
        if self.pictures[number].path.endswith("red/00.png"):
            raise BadPictureError("unreadable (permission denied)")
        return real(self, number)

    monkeypatch.setattr(Files, "content", content)
    assert make_index(index, model, folder).pictures == 35
    monkeypatch.setattr(Files, "content", real)
    again = make_index(index, model, folder)
    assert (again.pictures, again.embedded, again.bad) == (36, 1, [])


def test_a_torn_part_is_no_part(model, folder, tmp_path):
    index = tmp_path / "index"
    (index / ".parts").mkdir(parents=True)
    name = f"{model.identity.fingerprint[:16]}-float16-00000001"
    (index / ".parts" / f"{name}.npy").write_bytes(b"")
    (index / ".parts" / f"{name}.jsonl").write_bytes(b"\0" * 80 + b"\n")
    assert make_index(index, model, folder).embedded == 36


# --- search ------------------------------------------------------------------------------------------------------


def store_of(tmp_path, vectors, dtype="float16"):
    facts = embedding_store.ModelFacts("model", "model", "f" * 64, vectors.shape[1])
    known = [
        (embedding_store.PictureId(f"/{row}", 1, 1), embedding_store.Known(vectors, row)) for row in range(len(vectors))
    ]
    with embedding_store.locked(tmp_path):
        embedding_store.write_state(tmp_path, facts, dtype, ["/"], known, [])
    return EmbeddingStore.open(tmp_path)


def test_search_equals_brute_force_and_breaks_ties_by_order(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(500, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors[[400, 77, 30]] = vectors[5]
    store = store_of(tmp_path / "index", vectors)
    queries = np.stack([vectors[5], vectors[200], -vectors[9]])
    monkeypatch.setattr("clipctl.inference.search.BLOCK_VALUES", 16 * 33)
    found = nearest(store, queries, 7)
    stored = np.asarray(store.vectors).astype(np.float32)
    for query, rows, scores in zip(queries, found.rows, found.scores, strict=True):
        exact = stored @ query
        assert rows.tolist() == np.argsort(-exact, kind="stable")[:7].tolist()
        assert np.allclose(scores, exact[rows], atol=1e-6)
    assert found.rows[0][:4].tolist() == [5, 30, 77, 400]
    assert [len(rows) for rows in nearest(store, queries, 900, threshold=0.99).rows] == [4, 1, 0]


def test_what_is_not_wanted_counts_half(tmp_path):
    store = store_of(tmp_path / "index", np.eye(3, dtype=np.float32))
    query = without(np.array([[0.8, 0.6, 0.0]], np.float32), np.array([[1.0, 0.0, 0.0]], np.float32))
    found = nearest(store, query, 3)
    assert found.rows[0].tolist() == [1, 0, 2] and found.scores[0].tolist() == pytest.approx([0.6, 0.3, 0.0])


# --- labels ------------------------------------------------------------------------------------------------------


def test_labels_are_read_from_text_or_file(tmp_path):
    (tmp_path / "labels.txt").write_text("\ufeffcat\n\n a  dog \ncat\n", encoding="utf-8")
    assert parse_labels(None, tmp_path / "labels.txt") == ["cat", "a dog"] == parse_labels("cat, a dog,cat,", None)
    for text, file, words in (
        (None, None, "pass either --labels"),
        ("one", None, "at least two"),
        (None, tmp_path / "absent", "cannot be read"),
    ):
        with pytest.raises((ConfigError, DataError), match=words):
            parse_labels(text, file)


def test_several_templates_are_averaged(model):
    both = embed_labels(model, ["red", "blue"], ["a {}", "the {} one"])
    parts = [model.embed_texts([f"a {label}", f"the {label} one"]).mean(axis=0) for label in ("red", "blue")]
    assert np.allclose(both, [part / np.linalg.norm(part) for part in parts], atol=1e-6)
    with pytest.raises(ConfigError, match=r"must contain \{\} once"):
        embed_labels(model, ["red", "blue"], ["no place"])


# --- evaluation --------------------------------------------------------------------------------------------------


def test_recall_equals_a_count_by_numpy_with_five_captions_and_ties():
    rng = np.random.default_rng(1)
    pictures, each, dimensions = 60, 5, 8
    image = rng.normal(size=(pictures, dimensions)).astype(np.float32)
    owners = np.array([*range(pictures), *np.repeat(np.arange(pictures), each - 1)])
    text = (image[owners] + 0.8 * rng.normal(size=(len(owners), dimensions))).astype(np.float32)
    image /= np.linalg.norm(image, axis=1, keepdims=True)
    text /= np.linalg.norm(text, axis=1, keepdims=True)
    text[7], image[20] = text[3], image[21]  # equal vectors: ties, which count against the model
    captions = [f"caption {number}" for number in range(len(owners))]
    matches = Matches(owners.tolist(), captions, np.arange(pictures, dtype=np.uint64))
    data = evaluation.EmbeddedData(image, text, owners, captions, matches, np.zeros((pictures, 1), np.float32), [])
    found = evaluation.rank(data).recalls()
    similarity = image @ text.T
    for k in (1, 5, 10):
        i2t = np.mean(
            [(similarity[p] >= similarity[p][owners == p].max())[owners != p].sum() < k for p in range(pictures)]
        )
        t2i = np.mean(
            [(np.delete(similarity[:, c], owners[c]) >= similarity[owners[c], c]).sum() < k for c in range(len(owners))]
        )
        assert found[f"i2t_r{k}"] == pytest.approx(i2t) and found[f"t2i_r{k}"] == pytest.approx(t2i)
    assert 0 < found["i2t_r1"] < 1 and found["i2t_r1"] < found["i2t_r5"] < found["i2t_r10"]


def test_intervals_and_differences_are_those_of_resampling():
    rng = np.random.default_rng(0)
    owners = np.arange(400)
    good, better = (np.where(rng.random(400) < share, 0, 50) for share in (0.5, 0.7))
    ranks = [evaluation.Ranks(one, one, owners) for one in (good, better)]
    low, high = evaluation.interval(ranks[0].resampled()["i2t_r1"])
    share = float((good == 0).mean())
    assert low < share < high and high - low == pytest.approx(2 * 1.96 * 0.5 / 20, rel=0.15)
    scores = [evaluation.ModelScores("m", one.recalls(), {}, one.resampled(), [None] * 3, 0.0, None) for one in ranks]
    gap, none = evaluation.difference(*scores), evaluation.difference(scores[0], scores[0])
    assert gap.is_more_than_chance and gap.low < gap.value < gap.high
    assert none == (0.0, 0.0, 0.0) and not none.is_more_than_chance


def test_a_model_is_judged_by_the_pictures_it_was_not_trained_on(run, model):
    from clipctl.data.catalog import open_data

    source = open_data(model.config.data).val
    data = evaluation.embed_data(model, source)
    found = evaluation.scores_of(model, data)
    assert found.recalls["i2t_r1"] > 0.9 and data.pictures == len(source)
    assert evaluation.chance_recalls(data)["i2t_r1"] == pytest.approx(1 / 3, abs=0.1)
    assert evaluation.baseline(data, open_data(model.config.data).train).recall > 0.9  # colours are easy for pixels too
    assert 0 <= found.modality_gap <= 2 and 0 <= found.calibration.error <= 1


def test_the_temperature_fits_at_which_right_captions_are_most_likely():
    """Against a softmax in 64 bits, with two captions a picture, on the same grid."""
    rng, pictures = np.random.default_rng(0), 60
    image, text = (rng.standard_normal((count, 8)).astype(np.float32) for count in (pictures, 2 * pictures))
    owners = np.arange(2 * pictures) % pictures
    text += image[owners]
    image, text = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (image, text))
    captions = [f"caption {number}" for number in range(2 * pictures)]
    matches = Matches(owners.tolist(), captions, np.arange(pictures, dtype=np.uint64))
    data = evaluation.EmbeddedData(image, text, owners, captions, matches, np.zeros((pictures, 1), np.float32), [])
    found = evaluation.calibration(data, 20.0)

    similarity = image.astype(np.float64) @ text.T
    shares = {one: np.exp(one * similarity) for one in (20.0, *np.exp(np.linspace(0, np.log(200), 60)))}
    shares = {one: weights / weights.sum(axis=1, keepdims=True) for one, weights in shares.items()}
    right = owners == np.arange(pictures)[:, None]
    likelihood = {one: np.log((share * right).sum(axis=1)).sum() for one, share in shares.items() if one != 20.0}
    assert found.fitting_temperature == pytest.approx(1 / max(likelihood, key=likelihood.get))
    assert found.sure == pytest.approx(shares[20.0].max(axis=1).mean(), rel=1e-4)
    assert found.right == np.mean(right[np.arange(pictures), similarity.argmax(axis=1)])


def test_guessing_takes_equal_captions_for_one_candidate():
    captions = ["a dog"] * 90 + [f"thing {number}" for number in range(10)]
    owners = np.arange(100)
    matches = Matches(owners.tolist(), captions, owners.astype(np.uint64))
    same = np.ones((100, 1), np.float32)
    data = evaluation.EmbeddedData(same, same, owners, captions, matches, same, [])
    assert evaluation.chance_recalls(data)["i2t_r1"] == pytest.approx(1 / 11)


def test_an_upright_file_and_its_picture_are_the_same(model, tmp_path):
    pixels = np.zeros((24, 36, 3), dtype=np.uint8)
    pixels[:, :9] = (220, 30, 30)
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera turned
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    by_file, by_picture = model.embed_images([tmp_path / "turned.png", Image.open(tmp_path / "turned.png")])
    assert np.allclose(by_file, by_picture, atol=1e-6)
    assert not np.allclose(by_file, model.embed_images([pixels])[0], atol=1e-3)


def test_zero_shot_on_class_folders(model, photos):
    source = open_held_out(resolve([Layer("test", {"data.source": str(photos)})]).data)
    truths = class_names(source, "a photo of a {}")
    assert truths is not None and set(truths) == set(COLOURS)
    data = evaluation.embed_data(model, source)
    found = evaluation.zero_shot(model, data, truths, sorted(COLOURS), ["a photo of a {}"])
    assert found.top1 > 0.9 and found.top5 == 1 and found.left_out == 0
    assert [(one.label, one.pictures) for one in found.classes] == [(label, 12) for label in sorted(COLOURS)]
    fewer = evaluation.zero_shot(model, data, [None if t == "red" else t for t in truths], ["blue", "green"], ["{}"])
    assert fewer.left_out == 12


# --- the command line --------------------------------------------------------------------------------------------


@pytest.fixture
def invoke(run, tmp_path, monkeypatch):
    monkeypatch.setenv("CLIPCTL_RUNS", str(run.path.parent))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        return CliRunner().invoke(app, [str(one) for one in arguments])

    return call


def test_from_folder_to_search(invoke, folder):
    done = invoke("embed", "colours", folder, "-o", "index")
    assert done.exit_code == 0 and "36 pictures in index" in done.stdout, done.output
    found = invoke("search", "index", "a photo of a red", folder / "blue" / "02.png", "--top", 5, "--json")
    document = json.loads(found.stdout)
    assert document["schema"] == "clipctl.search/1" and len(document["results"]) == 10
    first, second = document["results"][0], document["results"][5]
    assert "/red/" in first["path"] and first["rank"] == 1 and -1 <= first["score"] <= 1.001
    assert second["path"].endswith("blue/02.png") and second["score"] > 0.99
    words = invoke("search", "index", "a photo of a green", "--top", 2, "--sheet", "sheet.png")
    assert words.exit_code == 0 and words.stdout.count("photos/green/") == 2
    assert Image.open("sheet.png").size[0] > 300
    for name in ("my blue photo.png", "blue"):  # a file is a picture, whatever it is called
        shutil.copy(folder / "blue" / "02.png", name)
        assert invoke("search", "index", name, "--top", 1).stdout.strip().endswith("blue/02.png")
    lost = invoke("search", "index", "holidy.jpg")
    assert lost.exit_code == 2 and "holidy.jpg cannot be read" in lost.stderr
    none = invoke("search", "index", "a photo of a green", "--threshold", 2)
    assert none.exit_code == 0 and "nothing above the threshold" in none.stdout


def test_a_sheet_replaces_a_sheet_and_no_photograph(invoke, folder):
    picture = folder / "red" / "00.png"
    before = picture.read_bytes()
    command = ("search", folder, "a photo of a red", "--model", "colours", "--sheet")
    refused = invoke(*command, picture)
    assert refused.exit_code == 2 and "not a contact sheet" in refused.output and picture.read_bytes() == before
    for suffix in ("png", "jpg", "webp"):
        for _ in range(2):
            assert invoke(*command, f"sheet.{suffix}").exit_code == 0
    assert invoke(*command, "none.png", "--threshold", 2).exit_code == 0 and not os.path.exists("none.png")


def test_commands_to_type_next_are_quoted(invoke, folder):
    done = invoke("embed", "colours", folder, "-o", "my index")
    assert "clipctl search 'my index' " in done.stdout


def test_an_index_made_with_a_model_from_the_hub_is_searched(invoke, folder, tmp_path, monkeypatch):
    from clipctl.interop.hub import Download

    assert invoke("checkpoint", "export", "colours", "--to", "transformers", "-o", "clip").exit_code == 0
    asked = []

    def download(name, **_):
        asked.append(name)
        return Download(tmp_path / "clip", "0123abcd")

    monkeypatch.setattr("clipctl.interop.hub.download", download)
    done = invoke("embed", "openai/clip-vit-base-patch32", folder, "-o", "index")
    assert done.exit_code == 0, done.output
    found = invoke("search", "index", "a photo of a red", "--top", 1)
    assert found.exit_code == 0 and "/red/" in found.stdout, found.output
    assert "/red/" in clipctl.open_index("index").search("a photo of a red", top=1)[0].path
    # The index names the commit: what the hub has under that name may change.
    name = "openai/clip-vit-base-patch32"
    assert asked == [name, *[f"{name}@0123abcd"] * 2]


def test_an_index_finds_its_model_after_the_run_was_renamed(invoke, run, folder, tmp_path, monkeypatch):
    shutil.copytree(run.path, tmp_path / "runs" / "colours")
    monkeypatch.setenv("CLIPCTL_RUNS", "runs")
    assert invoke("embed", "colours", folder, "-o", "index").exit_code == 0
    assert invoke("runs", "rename", "colours", "paints").exit_code == 0
    found = invoke("search", "index", "a photo of a red", "--top", 1)
    assert found.exit_code == 0 and "/red/" in found.stdout, found.output
    shutil.rmtree("runs/paints")
    gone = invoke("search", "index", "a photo of a red")
    assert gone.exit_code == 2 and "the model of this index is gone" in gone.output


def test_a_run_may_have_the_name_of_a_folder_of_pictures(invoke, folder, tmp_path):
    """Most likely the one that it was trained on."""
    shutil.copytree(folder, tmp_path / "colours")
    found = invoke("search", folder, "a photo of a red", "--model", "colours", "--top", 1)
    assert found.exit_code == 0 and "/red/" in found.stdout, found.output
    for command in ("show", "verify"):
        done = invoke("checkpoint", command, "colours")
        assert done.exit_code == 0 and "colours" in done.stdout, done.output


def test_an_index_is_verified(invoke, folder, tmp_path):
    invoke("embed", "colours", folder, "-o", "index")
    sound = invoke("checkpoint", "verify", "index", "colours")
    assert sound.exit_code == 0 and sound.stdout.splitlines()[0].startswith("index") and "damaged" not in sound.stdout
    assert sound.stdout.count("ok") == len(sound.stdout.splitlines()) > 1
    alone = json.loads(invoke("checkpoint", "verify", "index", "--json").stdout)
    assert alone["checkpoints"] == [] and alone["indexes"][0]["valid"]
    names = embedding_store.read_manifest(tmp_path / "index").names
    vectors = tmp_path / "index" / names["vectors"]
    vectors.write_bytes(vectors.read_bytes()[:-1] + b"?")  # opens, but finds something else
    (tmp_path / "index" / names["bad"]).unlink()
    damaged = invoke("checkpoint", "verify", "index", "--json")
    problems = [f"{names['vectors']} has changed: its sha256 does not match", f"{names['bad']} is missing"]
    assert damaged.exit_code == 3 and json.loads(damaged.stdout)["indexes"][0]["problems"] == problems
    (tmp_path / "index" / "manifest.json").write_text('{"schema": "clipctl.index/1"')
    torn = invoke("checkpoint", "verify", "index")
    assert torn.exit_code == 3 and "manifest.json cannot be read" in torn.stdout


def test_a_folder_is_searched_with_one_command(invoke, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path / "home"))
    found = invoke("search", folder, "a photo of a red", "--model", "colours", "--top", 3, "--json")
    assert found.exit_code == 0 and all("/red/" in one["path"] for one in json.loads(found.stdout)["results"])
    assert not (folder / "manifest.json").exists()
    (folder / "red" / "00.png").unlink()
    again = invoke("search", folder, "a photo of a red", "--model", "colours", "--top", 99, "--json")
    assert json.loads(again.stdout)["pictures"] == 35


@pytest.mark.parametrize("kind", ["vectors", "pictures", "bad", "manifest"])
@pytest.mark.parametrize("how", ["garbage", "gone", "zeros"])
def test_a_damaged_index_of_a_folder_is_made_anew(search_folder, kind, how):
    """It is only a cache."""
    store = search_folder("a", at_s=1)
    names, path = {**store.manifest.names, "manifest": "manifest.json"}, store.path
    pictures = store.all_pictures()
    del store
    if how == "gone":
        (path / names[kind]).unlink()
    else:
        size = (path / names[kind]).stat().st_size
        (path / names[kind]).write_bytes((b"{?\n" if how == "garbage" else b"\0") * max(1, size))
    again = search_folder("a", at_s=2)
    assert again.all_pictures() == pictures and not embedding_store.problems_of(path)


def kept(home):
    return {path.name for path in (home / "embeddings").iterdir() if path.is_dir()}


@pytest.fixture
def search_folder(model, photos, tmp_path, monkeypatch):
    """Searches a folder of that name for the first or another time; returns the open index."""
    monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path / "home"))

    def search(name, at_s):
        if not (tmp_path / name).exists():
            shutil.copytree(photos / "red", tmp_path / name)
        store = private.private_index(str(tmp_path / name), model)[0]
        os.utime(store.path, (at_s, at_s))
        return store

    return search


def test_only_the_indexes_used_last_are_kept(search_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(private, "KEPT_INDEXES", 2)
    names = {name: search_folder(name, at_s).path.name for at_s, name in enumerate("abab", start=1)}
    assert kept(tmp_path / "home") == set(names.values())
    search_folder("b", at_s=5)
    search_folder("a", at_s=6)
    third = search_folder("c", at_s=7)
    assert kept(tmp_path / "home") == {names["a"], third.path.name}
    assert not list((tmp_path / "home" / "embeddings").glob(f"{names['b']}*"))
    again = search_folder("b", at_s=8)  # made anew
    assert again.path.name == names["b"] and not embedding_store.problems_of(again.path)


def test_indexes_take_a_share_of_the_disk_at_most(search_folder, tmp_path, monkeypatch):
    first, second = (search_folder(name, at_s).path for at_s, name in enumerate("ab"))
    monkeypatch.setattr(private, "free_bytes", lambda _: 0)
    monkeypatch.setattr(private, "DISK_SHARE", 0.7)  # one of two fits
    (tmp_path / "home" / "embeddings" / ".left.deleted").mkdir()
    private.sweep(Shelf("embeddings"))
    assert not first.exists() and kept(tmp_path / "home") == {second.name}


def test_an_index_in_use_is_not_swept(search_folder, tmp_path, monkeypatch):
    """Neither by this process nor by another, however many use it."""
    monkeypatch.setattr(private, "KEPT_INDEXES", 1)
    used, also = search_folder("a", at_s=1), search_folder("a", at_s=1)
    code = "from clipctl.hardware.shelf import Shelf; from clipctl.inference import private; private.KEPT_INDEXES = 0; "
    code += "private.sweep(Shelf('embeddings'))"
    subprocess.run([sys.executable, "-c", code, used.path.parent], check=True)
    search_folder("b", at_s=2)
    del used
    search_folder("c", at_s=3)
    assert also.path.exists() and len(also.all_pictures()) == 12
    path = also.path
    del also
    search_folder("d", at_s=4)
    assert not path.exists()


def test_pictures_are_named(invoke, folder):
    (folder / "red" / "bad.png").write_bytes(b"")
    labels = ("--labels", "red,green,blue", "--template", "a photo of a {}")
    table = invoke("classify", "colours", folder / "red", *labels)
    assert table.exit_code == 0 and table.stdout.splitlines()[1].split()[1] == "red"
    assert "1 picture cannot be used: 1 empty" in table.stderr
    document = json.loads(invoke("classify", "colours", folder / "red", *labels, "--top", 3, "--json").stdout)
    assert len(document["pictures"]) == 12 and document["bad"][0]["reason"] == "empty"
    shares = [one["probability"] for one in document["pictures"][0]["labels"]]
    assert sum(shares) == pytest.approx(1) and shares == sorted(shares, reverse=True)
    rows = list(csv.DictReader(io.StringIO(invoke("classify", "colours", folder, *labels, "--csv").stdout)))
    assert len(rows) == 36 and {row["label"] for row in rows} == set(COLOURS)


def test_a_model_is_judged(invoke, photos, run):
    own = invoke("eval", "colours")
    assert (
        own.exit_code == 0 and "picture to caption" in own.stdout and "nearest training picture by pixels" in own.stdout
    )
    step = clipctl.load("colours@last", runs_dir=run.path.parent).identity.name
    document = json.loads(invoke("eval", "colours", photos, "--against", "colours@last", "--json").stdout)
    assert document["pictures"] == 36 and document["zero_shot_top1"] > 0.9 and document["i2t_r1"] > 0.9
    assert document["against"][0]["model"] == step and len(document["classes"]) == 3
    shown = invoke("eval", "colours", photos, "--classes", "red,blue", "--template", "a {}")
    assert "12 pictures belong to none of these classes" in shown.stdout


def test_a_model_is_told_from_what_it_was_trained_on(invoke, run, photos, tmp_path):
    trained = read_data(clipctl.load(run.path).config.data).train.picture_keys.tolist()
    for number, colour in enumerate(COLOURS):
        draw(tmp_path / "new" / colour / "0.png", colour, number + 12)
        for known in range(3):
            shutil.copy(photos / colour / f"{known:02d}.png", tmp_path / "new" / colour)
    source = open_held_out(resolve([Layer("test", {"data.source": str(tmp_path / "new")})]).data)
    count = sum(one in trained for one in source.picture_keys.tolist())
    assert 0 < count < 12
    document = json.loads(invoke("eval", "colours", "new", "--against", "colours@last", "--json").stdout)
    assert document["trained_on"] == count == document["against"][0]["trained_on"]
    shown = invoke("eval", "colours", "new").stdout
    assert f"{count} of 12 pictures were in the training data of colours@" in shown and "are too high" in shown
    own = json.loads(invoke("eval", "colours", "--json").stdout)
    assert own["trained_on"] == 0 and "too high" not in invoke("eval", "colours").stdout


def test_the_baseline_does_not_find_the_pictures_themselves(invoke, run, photos, tmp_path):
    everything = invoke("eval", "colours", photos)
    assert "no pixel baseline: all training pictures are among these pictures" in everything.stdout
    assert "worse than this baseline" not in everything.stdout
    (tmp_path / "new.csv").write_text(f"filepath,caption\n{photos}/red/00.png,one\n{photos}/red/01.png,two\n")
    strange = invoke("eval", "colours", "new.csv")
    assert "no pixel baseline: none of these captions occurs in the training data" in strange.stdout
    invoke("checkpoint", "export", "colours", "--to", "safetensors", "-o", "clip")
    unknown = invoke("eval", "clip", photos)
    assert "no pixel baseline: the training data of clip is unknown" in unknown.stdout, unknown.output


def test_a_calibrated_temperature_is_not_corrected():
    from clipctl.cli.views.evaluation import calibration_line

    scores = evaluation.ModelScores(
        "m", {}, {}, {}, [None] * 3, 0.0, evaluation.Calibration(0.9, 0.9, 0.01, 0.05, 0.04)
    )
    assert calibration_line(scores).plain.endswith("accuracy 90% – calibrated")
    unsure = replace(scores, calibration=evaluation.Calibration(0.5, 0.9, 0.4, 0.05, 0.04))
    assert calibration_line(unsure).plain.endswith("– underconfident; 0.040 would calibrate it")


def test_what_is_asked_of_eval_is_checked_before_anything_is_embedded(invoke, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "embed_data", lambda *_: pytest.fail("embedded"))
    (tmp_path / "new.csv").write_text(f"filepath,caption\n{photos}/red/00.png,one\n{photos}/red/01.png,two\n")
    for arguments, words in (
        (("--template", "a {}"), "--template needs class folders or --classes"),
        (("--classes", "cat,dog"), "no picture has one of these classes as its caption"),
    ):
        done = invoke("eval", "colours", "new.csv", *arguments)
        assert done.exit_code == 2 and words in done.stderr, done.output


def test_evaluation_from_python_says_what_the_command_says(invoke, run, photos):
    found = clipctl.evaluate(run.path, photos, against=[f"{run.path}"], classes=["red", "blue"], templates=["a {}"])
    command = (
        "eval",
        "colours",
        photos,
        "--against",
        "colours",
        "--classes",
        "red,blue",
        "--template",
        "a {}",
        "--json",
    )
    document = json.loads(invoke(*command).stdout)
    assert json.loads(json.dumps({"schema": "clipctl.eval/1", **found.to_dict()})) == document
    assert found.recalls == found.scores.recalls and found.chance["i2t_r1"] == pytest.approx(1 / 3)
    assert found.scores.zero_shot.left_out == 12 and not found.differences[0].is_more_than_chance
    with pytest.raises(TypeError, match="pass lists"):
        clipctl.evaluate(run.path, photos, classes="red")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("embed", "colours", "empty", "-o", "index"), 2, "there are no pictures in empty"),
        (("embed", "colours", "absent", "-o", "index"), 2, "no such file"),
        (("embed", "colours", "bad", "-o", "index"), 2, "none of the 1 pictures can be used"),
        (("embed", "nobody", "bad", "-o", "index"), 2, "nobody"),
        (("embed", "colours", "bad", "-o", "index", "--dtype", "int8"), 2, "float16 or float32"),
        (("embed", "colours", "bad", "-o", "bad/x.png"), 2, "cannot be created: a file is in the way"),
        (("embed", "colours", "bad", "-o", "bad/x.png/index"), 2, "cannot be created: a file is in the way"),
        (("embed", "colours", "synthetic", "-o", "index"), 2, "built-in pictures, which are drawn while training"),
        (("report", "colours", "-o", "empty"), 2, "empty is a directory"),
        (("search", "empty", "red"), 2, "is not an index"),
        (("search", "empty", " "), 2, "the query is empty"),
        (("search", "empty", "red", "--sheet", "x.doc"), 2, "unknown file type"),
        (("search", "index-of-nothing", "red"), 2, "no such file or directory: index-of-nothing"),
        (("embed", "colours", "bad", "-o", "bad"), 2, "with other files in it"),
        (("data", "suspects", "colours", "--folds", "3", "--sheet", "x.doc"), 2, "unknown file type"),
        (("data", "suspects", "colours", "--folds", "3", "-o", "nowhere/x.csv"), 2, "there is no directory nowhere"),
        (("search", "empty", "red", "--sheet", "nowhere/x.png"), 2, "there is no directory nowhere"),
        (("report", "colours", "-o", "captions.csv"), 2, "use captions.html"),
        (("runs", "export", "colours", "--to", "csv", "-o", "bad/x.png"), 2, "bad/x.png is a file"),
        (("train", "--detach", "--live"), 2, "contradict each other"),
        (("report", "colours", "-o", "nowhere/x.html"), 2, "there is no directory nowhere"),
        (("monitor", "colours", "--png", "nowhere/x.png"), 2, "there is no directory nowhere"),
        (("data", "inspect", "synthetic", "--sheet", "nowhere/x.png"), 2, "there is no directory nowhere"),
        (("classify", "colours", "bad", "--labels-file", "absent"), 2, "cannot be read"),
        (("classify", "colours", "bad", "--labels", "a,b"), 2, "none of the 1 pictures can be used"),
        (("classify", "colours", "bad", "--labels", "a,b", "--csv", "--json"), 2, "cannot be combined"),
        (("eval", "nobody"), 2, "nobody"),
        (("eval", "colours", "--template", "a {}", "--set", "data.seed=1"), 0, ""),
    ],
)
def test_mistakes(invoke, tmp_path, arguments, code, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.png").write_bytes(b"no picture")
    done = invoke(*arguments)
    assert done.exit_code == code and words in done.output, done.output
    assert not (tmp_path / "index" / "manifest.json").exists()


# --- suspects ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swapped(tmp_path_factory):
    """Pictures of three colours, three of 60 with a wrong caption; and a run that was trained on them."""
    root = tmp_path_factory.mktemp("swapped")
    rows, wrong = [], {"07.png": "red", "31.png": "blue", "50.png": "green"}
    for number in range(60):
        colour, name = list(COLOURS)[number % 3], f"{number:02d}.png"
        draw(root / name, colour, number)
        rows.append(f"{name},a {wrong.get(name, colour)} wall\n")
        assert wrong.get(name) != colour
    (root / "captions.csv").write_text("filepath,caption\n" + "".join(rows))
    run = RunDir.create(root / "runs", "tiny", "walls")
    values = {**MICRO, "data.source": str(root / "captions.csv"), "data.val_fraction": 0.2, "train.epochs": 25}
    train(make_plan(resolve([Layer("test", {**values, "optim.lr": 3e-3})])), run)
    run.release()
    return run, set(wrong)


def test_wrong_captions_come_first(swapped, tmp_path, monkeypatch):
    run, wrong = swapped
    monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path / "home"))
    table, sheet = tmp_path / "suspects.csv", tmp_path / "sheet.png"
    arguments = [
        "data",
        "suspects",
        str(run.path),
        "--folds",
        "2",
        "--top",
        "5",
        "--sheet",
        str(sheet),
        "-o",
        str(table),
    ]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert {os.path.basename(one["path"]) for one in document["suspects"][:3]} == wrong and document["folds"] == 2
    assert document["suspects"][0]["suggestion"] != document["suspects"][0]["caption"]
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 60 == document["pairs"] and Image.open(sheet).size[0] > 300
    assert not list((tmp_path / "home" / "folds").iterdir())  # what was trained for it is gone
    by_itself = CliRunner().invoke(app, ["data", "suspects", str(run.path), "--top", "3"])
    assert by_itself.exit_code == 0 and "judged by the run itself" in by_itself.stdout
    assert CliRunner().invoke(app, ["data", "suspects", str(run.path), "--folds", "1"]).exit_code == 2


def test_the_csv_of_suspects_is_the_whole_data(invoke, tmp_path):
    """Trained on, it gives the same split: pictures of the test split and above the limit are still there, unused."""
    sides = dict.fromkeys(range(40), "")  # nothing said counts as train
    sides |= dict.fromkeys(range(40, 52), "validation") | dict.fromkeys(range(52, 60), "test")
    for number in sides:
        draw(tmp_path / "walls" / f"{number:02d}.png", list(COLOURS)[number % 3], number)
    (tmp_path / "walls" / "00.png").write_bytes(b"no picture")
    rows = [
        f"{number:02d}.png,a wall,{side}\n{number:02d}.png,wall {number},{side}\n" for number, side in sides.items()
    ]
    (tmp_path / "walls" / "captions.csv").write_text("filepath,caption,split\n" + "".join(rows))
    values = {**MICRO, "data.source": "walls/captions.csv", "data.val_limit": 8, "data.max_bad": 0.5}
    trained = clipctl.train("walls/captions.csv", values)
    config = clipctl.load(trained.run).config.data
    for folds in (0, 2):
        name = f"suspects-{folds}.csv"
        command = ("data", "suspects", trained.run, "--folds", folds, "-o", name, "--runs-dir", "runs")
        done = invoke(*command)
        assert done.exit_code == 0, done.output
        again = invoke(*command)  # it may have been edited meanwhile
        assert again.exit_code == 2 and f"{name} already exists" in again.output
        rows = list(csv.DictReader((tmp_path / name).open()))
        assert len(rows) == 120 and sum(row["misfit"] == "" for row in rows) == 2 * (8 + 4 + 1)
        before, after = (
            read_data(replace(config, source=(place,), val_limit=limit))
            for place, limit in (("walls/captions.csv", 12), (name, 12))
        )
        for side in ("train", "val"):
            pairs = [
                sorted((os.path.abspath(one.label(n)), sorted(one.captions(n))) for n in range(len(one)))
                for one in (getattr(before, side), getattr(after, side))
            ]
            assert pairs[0] == pairs[1] and len(pairs[0]) == {"train": 40, "val": 12}[side]
        assert "8 pictures in the data's own test split are not used" in after.notes


def test_a_csv_cannot_name_pictures_in_shards(invoke, folder, tmp_path):
    members = {}
    for number, colour in enumerate(list(COLOURS) * 4):
        members[f"{number:02d}.png"] = (folder / colour / f"{number:02d}.png").read_bytes()
        members[f"{number:02d}.txt"] = f"a {colour} wall {number}".encode()
    write_shard(tmp_path / "walls.tar", members)
    trained = clipctl.train("walls.tar", {**MICRO, "data.source": "walls.tar", "data.val_fraction": 0.3})
    refused = invoke("data", "suspects", trained.run, "-o", "suspects.csv", "--runs-dir", "runs")
    assert refused.exit_code == 2 and "a CSV cannot name pictures in tar shards" in refused.stderr
    assert not (tmp_path / "suspects.csv").exists()
    assert invoke("data", "suspects", trained.run, "--runs-dir", "runs").exit_code == 0


def test_pictures_on_both_sides_of_the_split_are_found(model, photos, tmp_path):
    from clipctl.inference.suspects import DUPLICATE, _duplicates

    data = evaluation.embed_data(model, open_held_out(resolve([Layer("test", {"data.source": str(photos)})]).data))
    labels = [f"{number}" for number in range(36)]
    found = _duplicates({"train": data, "val": data}, {"train": labels, "val": labels})
    assert len(found) == 36 and all(one.similarity >= DUPLICATE for one in found)
    brighter = evaluation.EmbeddedData(*[*vars(data).values()][:5], -data.thumbnails, [])
    assert not _duplicates({"train": data, "val": brighter}, {"train": labels, "val": labels})


# --- from Python -------------------------------------------------------------------------------------------------


def test_the_lines_of_the_documentation_work(photos, tmp_path, monkeypatch, capsys):
    """docs/use.md, from a folder to a search."""
    page = (Path(__file__).parent.parent / "docs" / "use.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    shutil.copytree(photos, tmp_path / "photos")
    for name in ("boat.jpg", "dog.jpg"):
        draw(tmp_path / name, "red")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(clipctl, "train", lambda data, settings: real_train(data, {**MICRO, "data.source": data}))
    exec(compile(code, "docs/use.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert (tmp_path / "report.html").exists() and (tmp_path / "my-clip").is_dir()
    assert len(list(csv.DictReader((tmp_path / "suspects.csv").open()))) == 36 and lines[6].startswith("a photo of a ")
    assert len(lines) == 5 + 2 + 36 and "photos/" in lines[0] and 0 <= float(lines[5].split()[0]) <= 1


def real_train(data, settings):
    from clipctl.training.session import train

    return train(data, settings)


def test_an_index_opens_with_its_own_model(model, folder, tmp_path):
    made = clipctl.index(model, folder, tmp_path / "index")
    opened = clipctl.open_index(tmp_path / "index")
    picture = Image.open(folder / "blue" / "01.png")
    assert len(opened) == 36 and opened.search("a photo of a red", top=3) == made.search("a photo of a red", top=3)
    assert "/blue/" in opened.search(picture, top=1)[0].path == made.search(np.array(picture), top=1)[0].path
    assert "/red/" not in opened.search("a photo of a red", minus=["a photo of a red"] * 4, top=1)[0].path
