"""Pieces of words: learnt from captions, or brought along in a tokenizer.json."""

import json
import pickle

import numpy as np
import pytest
import tokenizers as package

from clipctl.config.layers import Layer, resolve
from clipctl.config.sections import DataConfig
from clipctl.data import tokenizers
from clipctl.data.catalog import open_data
from clipctl.data.synthetic.scenes import SyntheticSource
from clipctl.data.tokenizers import (
    CharacterTokenizer,
    SubwordTokenizer,
    caption_fit,
    from_dict,
    make_tokenizer,
    read_tokenizer,
)
from clipctl.errors import ConfigError, DataError
from tests.data import files

CAPTIONS = ["a red cat on a hill", "two red cats on two hills", "a dog on a hill", "Ein Hügel, 山 и кот"] * 5


@pytest.fixture
def bpe():
    return SubwordTokenizer.learn(CAPTIONS, vocab_size=290, context=16)


def test_learnt_pieces_have_the_size_that_was_asked_for_and_end_highest(bpe):
    assert bpe.vocab_size == 290 and bpe.end_id == 289
    ids = bpe.encode("a red cat on a hill")
    assert ids[0] == 1 and ids.argmax() == list(ids).index(289) and set(ids[ids.argmax() + 1 :]) == {0}
    assert bpe.length("a red cat on a hill") < len("a red cat on a hill")


def test_every_text_can_be_written_and_read_back(bpe):
    for text in ("山 и кот", "zebra! 🦓", "[red]\u202e"):
        body = [int(id) for id in bpe.encode(text) if id not in (0, 1, bpe.end_id)]
        whole = SubwordTokenizer.learn(CAPTIONS, 290, context=64).encode(text)
        assert len(body) <= 14 and 2 not in whole
        decoded = bpe._tokenizer.decode([int(id) for id in whole if id not in (0, 1, bpe.end_id)])
        assert decoded.strip() == text.lower()


def test_case_and_composition_do_not_matter(bpe):
    assert (bpe.encode("EIN HU\u0308GEL") == bpe.encode("ein hügel")).all()


def test_learning_twice_gives_the_same(bpe):
    assert SubwordTokenizer.learn(CAPTIONS, 290, 16).to_dict() == bpe.to_dict()


def test_they_pickle_and_survive_json(bpe):
    for copy in (pickle.loads(pickle.dumps(bpe)), from_dict(json.loads(json.dumps(bpe.to_dict())))):
        assert all((copy.encode(caption) == bpe.encode(caption)).all() for caption in CAPTIONS)
        assert copy.vocab_size == bpe.vocab_size


def write(tmp_path, specials):
    """A tokenizer.json of words, with these special tokens at the end."""
    words = {word: number for number, word in enumerate(["[UNK]", "a", "cat", "dog"])}
    tokenizer = package.Tokenizer(package.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = package.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(specials)
    tokenizer.enable_padding(length=9)
    tokenizer.enable_truncation(3)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_openais_layout_keeps_its_start_and_end(tmp_path):
    tokenizer = read_tokenizer(write(tmp_path, ["<|startoftext|>", "<|endoftext|>"]), context=8)
    assert list(tokenizer.encode("a dog a cat")) == [4, 1, 3, 1, 2, 5, 0, 0]
    assert tokenizer.vocab_size == 6


def test_an_end_that_is_not_the_highest_gets_one_that_is(tmp_path):
    tokenizer = read_tokenizer(write(tmp_path, ["[SEP]", "[CLS]"]), context=6)
    assert list(tokenizer.encode("a dog")) == [5, 1, 3, 6, 0, 0] and tokenizer.vocab_size == 7


def test_a_directory_of_a_model_does_as_well(tmp_path):
    write(tmp_path, ["</s>"])
    assert read_tokenizer(tmp_path, context=6).encode("cat").max() == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such tokenizer"), ("{}", "is not a valid tokenizer.json"), ("\xff", "is not a valid tokenizer.json")],
)
def test_files_that_are_none(tmp_path, content, message):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=message):
        read_tokenizer(path, 8)


@pytest.mark.parametrize("spec", ["bpe", "bpe:12", "bpe:many", "characters:3"])
def test_names_that_are_none(spec):
    with pytest.raises(ConfigError, match=r"data\.tokenizer must be"):
        resolve([Layer("test", {"data.tokenizer": spec})])


def test_without_the_package_the_way_out_is_named(monkeypatch):
    import builtins

    real = builtins.__import__

    def refuse(name, *arguments):
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(DataError, match="needs the tokenizers package") as error:
        make_tokenizer("bpe:400", SyntheticSource(4, seed=0, validation=False), 77)
    assert "clipctl[hub]" in error.value.hint


# --- what is cut ----------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path / "home"))
    files.write_pictures(tmp_path, [f"{number}.jpg" for number in range(30)])
    rows = [f"{number}.jpg,{'cat ' * number}end ü" for number in range(30)]
    (tmp_path / "captions.csv").write_text("\n".join(["image,caption", *rows]))
    return open_data(DataConfig(source=(str(tmp_path),))).train


@pytest.mark.parametrize(
    "make", [lambda s: CharacterTokenizer(s.alphabet(), 40), lambda s: make_tokenizer("bpe:300", s, 24)]
)
def test_captions_that_are_cut_are_counted_before_training(source, make):
    tokenizer = make(source)
    captions = [source.caption_row(row) for row in range(30)]
    lengths = np.array([tokenizer.length(caption) for caption in captions])
    fit = caption_fit(tokenizer, source)
    assert fit.cut == (lengths > tokenizer.context).sum() > 3
    assert fit.longest == tokenizer.context == (tokenizer.encode(captions[-1]) > 0).sum()


def test_where_nothing_is_cut_the_longest_is_known(source):
    tokenizer = make_tokenizer("bpe:300", source, 400)
    longest = max(tokenizer.length(source.caption_row(row)) for row in range(30))
    assert caption_fit(tokenizer, source) == (longest, 0)


def test_of_very_many_long_captions_a_sample_is_counted(source, monkeypatch):
    tokenizer = make_tokenizer("bpe:300", source, 24)
    whole = caption_fit(tokenizer, source).cut
    monkeypatch.setattr(tokenizers, "COUNTED_CAPTIONS", 8)
    assert abs(caption_fit(tokenizer, source).cut - whole) <= 4
