"""Every error about data says which file, what is wrong, and the way out."""

import json
import os

import pytest

from clipctl.config.layers import Layer, resolve
from clipctl.data import tokenizers
from clipctl.data.catalog import open_data
from clipctl.data.formats.recognise import FORMATS
from clipctl.data.sheet import source_sheet
from clipctl.data.synthetic.scenes import SyntheticSource
from clipctl.data.template import template_of
from clipctl.errors import ConfigError, DataError
from tests.data import files

TABLE = "image,caption\n0.jpg,a dog\n1.jpg,a cat\n"
LINE = '{"file_name": "0.jpg", "text": "a dog"}\n'
COCO = {"images": [{"id": 1, "file_name": "0.jpg"}], "annotations": [{"image_id": 1, "caption": "a dog"}]}
KARPATHY = {"images": [{"filename": "0.jpg", "sentences": [{"raw": "a dog"}]}]}
FILES = {
    "an empty table": ("x.csv", ""),
    "a table without captions": ("x.csv", "image,width\n0.jpg,3\n1.jpg,4\n"),
    "a table with empty captions": ("x.csv", "image,caption\n0.jpg,\n1.jpg,\n"),
    "a table without pictures": ("x.csv", "title,caption\nfine,a dog on a hill\ngood,a cat in a tree\n"),
    "a table of other pictures": ("x.csv", "image,caption\na/5.jpg,b\na/6.jpg,c\n"),
    "a table of addresses": ("x.csv", "image,caption\nhttps://x.org/5.jpg,b\nhttps://x.org/6.jpg,c\n"),
    "a broken first line": ("x.jsonl", '{"file_name": \n'),
    "a broken line": ("x.jsonl", LINE + '{"file_name": \n'),
    "a line that is a list": ("x.jsonl", "[1]\n"),
    "lines without a picture": ("x.jsonl", '{"text": "a dog"}\n'),
    "lines without a caption": ("x.jsonl", '{"file_name": "0.jpg"}\n'),
    "broken JSON": ("x.json", '{"images": ['),
    "deep JSON": ("x.json", "[" * 100_000),
    "other JSON": ("x.json", '{"cats": 1}'),
    "an empty list": ("x.json", "[]"),
    "COCO without image_id": ("x.json", json.dumps({**COCO, "annotations": [{"caption": "a dog"}]})),
    "COCO without file_name": ("x.json", json.dumps({**COCO, "images": [{"id": 1}]})),
    "Karpathy without filename": ("x.json", json.dumps({"images": [{"sentences": [{"raw": "a dog"}]}, {}]})),
    "not a tar file": ("x.tar", "hello" * 500),
    "compressed shards": ("x.tar", b"\x1f\x8b" + b"\0" * 600),
    "a zip": ("x.zip", b"PK\x03\x04"),
    "a binary file": ("x", b"\0" * 600),
    "a picture": ("x", b"\xff\xd8\xff" + b"\0" * 600),
    "an endless line": ("x.jsonl", "x" * 20_000_000),
}

DRAWN = SyntheticSource(2, seed=0, validation=False)


def opened(source, **settings):
    return open_data(resolve([Layer("test", {"data.source": str(source), **settings})]).data)


def check(call, *words, kind=DataError):
    with pytest.raises(kind) as caught:
        call()
    message, hint = str(caught.value), caught.value.hint
    assert hint and "\n" not in message + hint and all(word in message for word in words), (message, hint)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path / "home"))


@pytest.fixture
def photos(tmp_path):
    files.write_pictures(tmp_path / "photos", ["0.jpg", "1.jpg"])
    return tmp_path / "photos"


@pytest.mark.parametrize("case", FILES)
def test_files(photos, case):
    name, content = FILES[case]
    path = photos / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    pictures = "pictures" if "other pictures" in case or "addresses" in case else name
    check(lambda: opened(path), pictures)


def table(photos):
    (photos / "x.csv").write_text(TABLE)
    return photos / "x.csv"


def folder(photos, name, content=""):
    (photos.parent / "folder").mkdir()
    (photos.parent / "folder" / name).write_text(content)
    return photos.parent / "folder"


PLACES = {
    "nothing there": lambda photos: opened(photos / "nothing.csv"),
    "gone with its directory": lambda photos: opened(photos / "gone" / "x.csv"),
    "a long name": lambda photos: opened("x" * 300),
    "an address": lambda photos: opened("https://example.org/photos.csv"),
    "no captions": lambda photos: opened(photos),
    "no pictures": lambda photos: opened(folder(photos, "x.md")),
    "raw pictures only": lambda photos: opened(folder(photos, "x.nef")),
    "absent shards": lambda photos: opened(photos / "{00..03}.tar"),
    "too many shards": lambda photos: opened(photos / "{0..9999999}.tar"),
    "a wrong image root": lambda photos: opened(table(photos), **{"data.image_root": "nowhere"}),
    "a wrong column": lambda photos: opened(table(photos), **{"data.caption_column": "words"}),
    "a long separator": lambda photos: opened(table(photos), **{"data.separator": "--"}),
    "too few": lambda photos: opened(table(photos)),
    "too many synthetic": lambda photos: opened("synthetic:200000"),
    "no synthetic": lambda photos: opened("synthetic:0"),
    "synthetic words": lambda photos: opened("synthetic:many"),
    "synthetic and more": lambda photos: opened("synthetic", **{"data.val": str(table(photos))}),
    "no folder for a template": lambda photos: template_of(str(photos / "none"), from_names=False),
    "no pictures for a template": lambda photos: template_of(str(folder(photos, "x.md")), from_names=False),
    "no sheet": lambda photos: source_sheet(DRAWN, photos / "x.xyz"),
}


@pytest.mark.parametrize("case", PLACES)
def test_places(photos, case):
    check(lambda: PLACES[case](photos))


def test_no_place_for_a_sheet(photos):
    check(lambda: source_sheet(DRAWN, photos / "none" / "x.png"), "none", "x.png", kind=ConfigError)


def test_a_table_that_exists_is_not_overwritten_by_a_hint(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("captions.csv", "new-captions.csv"):
        with pytest.raises(DataError) as caught:
            opened(photos)
        assert caught.value.hint.endswith(f" > {name}")
        (tmp_path / "captions.csv").write_text("image,caption\n")


def test_a_table_that_is_gone_is_no_dataset_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, words in (("nope/x.csv", "pass its new location"), ("nope/birds", "hf download")):
        with pytest.raises(DataError) as caught:
            opened(name)
        assert words in caught.value.hint


@pytest.mark.parametrize("format", FORMATS)
def test_formats_that_the_data_does_not_have(photos, format):
    """A table read as something else, or a folder without what the format needs."""
    path = table(photos)
    for place in (path, photos):
        try:
            opened(place, **{"data.format": format, "data.max_bad": "1"})
        except DataError as error:
            assert error.hint, (format, place, str(error))


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(photos):
    path = table(photos)
    path.chmod(0)
    check(lambda: opened(path), "x.csv")


TOKENIZERS = {
    "nothing there": lambda root: tokenizers.read_tokenizer(root / "none.json", 77),
    "empty": lambda root: tokenizers.read_tokenizer(wrote(root, "{}"), 77),
    "no text": lambda root: tokenizers.read_tokenizer(wrote(root, "\udcff"), 77),
    "a name that is too long": lambda root: tokenizers.read_tokenizer(root / ("x" * 300), 77),
    "no description": lambda root: tokenizers.from_dict([]),
    "no context": lambda root: tokenizers.from_dict({"kind": "characters"}),
    "unknown": lambda root: tokenizers.from_dict({"kind": "runes", "context": 77}),
    "no subwords": lambda root: tokenizers.from_dict({"kind": "subwords", "context": 77, "definition": {}}),
}


def wrote(root, text):
    (root / "tokenizer.json").write_bytes(text.encode(errors="surrogateescape"))
    return root / "tokenizer.json"


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizers(tmp_path, case):
    check(lambda: TOKENIZERS[case](tmp_path), "tokenizer" if "long" not in case else "x")
