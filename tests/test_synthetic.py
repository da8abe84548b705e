from collections import Counter

import numpy as np
import pytest

from clipctl.config.sections import DataConfig
from clipctl.data.catalog import open_data
from clipctl.data.synthetic.scenes import CATEGORIES, SyntheticSource
from clipctl.data.tokenizers import CharacterTokenizer
from clipctl.errors import DataError


def source(count=216, seed=0, validation=False) -> SyntheticSource:
    return SyntheticSource(count, seed=seed, validation=validation)


def test_the_default_is_216_and_24_pairs():
    split = open_data(DataConfig())
    assert (len(split.train), len(split.val)) == (216, 24)


def test_the_same_seed_and_index_give_the_same_pair():
    first, second = source(), source()
    for index in (0, 7, 215):
        assert first.captions(index) == second.captions(index)
        assert first.picture(index, 32).tobytes() == second.picture(index, 32).tobytes()


def test_another_seed_gives_other_pairs():
    assert [source().captions(i) for i in range(20)] != [source(seed=1).captions(i) for i in range(20)]


@pytest.mark.parametrize("pairs", [216, 30_000])
def test_no_held_out_combination_occurs_in_training(pairs):
    train, val = source(pairs), source(pairs // 9, validation=True)
    seen = {train.combination(i) for i in range(len(train))}
    assert not seen & {val.combination(i) for i in range(len(val))}


def test_held_out_combinations_differ_from_each_other():
    val = source(24, validation=True)
    assert len({val.combination(i) for i in range(24)}) == 24


def test_categories_and_subjects_are_balanced():
    train = source()
    categories = Counter(train.category(i) for i in range(len(train)))
    assert set(categories) == {"nature", "animals", "urban", "food"}
    assert max(categories.values()) - min(categories.values()) <= 4
    assert all(len(subjects) >= 4 for subjects in CATEGORIES.values())
    subjects = Counter(train.combination(i).subject for i in range(len(train)))
    assert max(subjects.values()) - min(subjects.values()) <= 1


def test_captions_say_what_is_drawn():
    train = source()
    for index in range(64):
        scene = train.combination(index)
        for caption in train.captions(index):
            for word in (scene.colour, scene.size, scene.place, scene.background, scene.phrase()):
                assert word in caption


def test_captions_determine_the_combination():
    """Two different combinations never share a caption."""
    owners = {}
    train = source(5000)
    for index in range(len(train)):
        for caption in train.captions(index):
            assert owners.setdefault(caption, train.combination(index)) == train.combination(index)


def test_every_caption_fits_the_context():
    train = source(20_000)
    tokenizer = CharacterTokenizer(source(216).alphabet(), context=77)
    assert max(tokenizer.length(caption) for i in range(len(train)) for caption in train.captions(i)) <= 77


def test_a_resolution_changes_detail_but_not_the_scene():
    small = np.asarray(source().picture(3, 32), dtype=float)
    large = np.asarray(source().picture(3, 128).resize((32, 32), resample=4), dtype=float)
    assert np.abs(small - large).mean() < 6


@pytest.mark.parametrize("text", ["synthetic:", "synthetic:3"])
def test_too_few_pairs(text):
    if text.endswith(":"):
        assert len(open_data(DataConfig(source=(text,))).train) == 216
    else:
        with pytest.raises(DataError, match="are needed"):
            open_data(DataConfig(source=(text,)))


@pytest.mark.parametrize("text", ["synthetic:abc", "synthetic:-5", "no-such-folder", "synthetic:0", "synthetic:1e12"])
def test_what_is_no_dataset(text):
    with pytest.raises(DataError, match=text.partition(":")[0]):
        open_data(DataConfig(source=(text,)))
