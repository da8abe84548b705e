"""Batches without false negatives, splits by picture, and pictures that cannot be used."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from clipctl.config.sections import DataConfig
from clipctl.data.bad import BadPictureError
from clipctl.data.cache import DiskCache, RamCache, open_cache, pictures_dir
from clipctl.data.catalog import leakage_notes, leakage_of, open_data
from clipctl.data.held_out import read_held_out
from clipctl.data.images import Augmentation
from clipctl.data.loader import PairDataset
from clipctl.data.sampling import (
    EpochSampler,
    Key,
    chosen_captions,
    conflict_groups,
    epoch_batches,
    equal_pairs,
    loss_floor,
    plan_epoch,
)
from clipctl.data.tokenizers import CharacterTokenizer
from clipctl.errors import DataError
from tests.data import files

AS_IT_IS = Augmentation(max_shift=0, max_zoom=0, flip=False, min_crop=1, jitter=0)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path / "home"))


def table(tmp_path, rows, pictures=None):
    """A CSV of (picture number, caption), with its pictures."""
    numbers = pictures if pictures is not None else range(max(number for number, _ in rows) + 1)
    files.write_pictures(tmp_path / "data", [f"{number}.jpg" for number in numbers])
    lines = ["image,caption", *(f"{number}.jpg,{caption}" for number, caption in rows)]
    path = tmp_path / "data" / "captions.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def config_of(path, **settings):
    return DataConfig(source=(str(path),), **settings)


# --- captions and batches -------------------------------------------------------------------------------------


def test_captions_take_turns_evenly_and_by_epoch():
    indices, counts = np.arange(20_000), np.full(20_000, 5)
    first, again, next_epoch = (chosen_captions(indices, counts, 7, epoch) for epoch in (1, 1, 2))
    assert (first == again).all() and 0.7 < (first != next_epoch).mean() < 0.9
    assert np.bincount(first).min() > 3_700 and first.max() == 4
    assert chosen_captions(np.array([17]), np.array([5]), 7, 1)[0] == first[17]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=2, max_size=80), st.integers(2, 20), st.integers(0, 5))
def test_equal_things_are_spread_over_batches_as_thin_as_can_be(labels, batch_size, seed):
    groups = np.array(labels)
    batches = epoch_batches(len(labels), batch_size, seed, 1, groups)
    assert sorted(np.concatenate(batches)) == list(range(len(labels)))
    sizes = [len(batch) for batch in batches]
    assert max(sizes) - min(sizes) <= 1 and max(sizes) <= batch_size
    for label in set(labels):
        counts = [int((groups[batch] == label).sum()) for batch in batches]
        assert max(counts) - min(counts) <= 1


def test_groups_join_equal_captions_and_equal_pictures():
    captions, pictures = np.array([1, 2, 3, 2, 5, 6], np.uint64), np.array([10, 11, 12, 13, 13, 14], np.uint64)
    groups = conflict_groups(captions, pictures)
    assert groups[1] == groups[3] == groups[4]  # 1 and 3 share a caption, 3 and 4 a picture
    assert len(set(groups.tolist())) == 4
    assert conflict_groups(np.arange(4).astype(np.uint64), np.arange(4).astype(np.uint64)) is None


class Keyed:
    """A source of which only keys are asked."""

    def __init__(self, caption_keys, picture_keys):
        self._caption_keys, self.picture_keys = (np.array(keys, np.uint64) for keys in (caption_keys, picture_keys))
        self.caption_counts = np.ones(len(caption_keys), int)

    def __len__(self):
        return len(self.picture_keys)

    def caption_keys(self, choice):
        return self._caption_keys


def test_the_loss_floor_by_hand():
    """One batch: 0 and 1 share a caption, 1 and 2 a picture; 0 and 2 nothing, though 1 is right for both."""
    source = Keyed([1, 1, 2, 3], [5, 6, 6, 7])
    assert loss_floor(source, plan_epoch(source, 4, seed=0, epoch=1)) == pytest.approx(
        (np.log(2) + np.log(3) + np.log(2)) / 4, abs=1e-6
    )
    apart = Keyed([1, 1, 2, 3], [5, 6, 7, 8])
    assert loss_floor(apart, plan_epoch(apart, 2, seed=0, epoch=1)) == 0  # two batches, one of the equals in each
    different = Keyed([1, 2, 3, 4], [5, 6, 7, 8])
    assert loss_floor(different, plan_epoch(different, 4, seed=0, epoch=1)) == 0


def test_no_batch_holds_a_caption_twice_where_that_can_be(tmp_path):
    rows = [(number, f"caption {number % 20}") for number in range(66)]
    data = open_data(config_of(table(tmp_path, rows)))
    for epoch in (1, 2, 3):
        plan = plan_epoch(data.train, 10, seed=0, epoch=epoch)
        for batch in plan.batches:
            captions = [data.train.captions(int(index))[0] for index in batch]
            assert len(set(captions)) == len(captions)


def test_where_it_cannot_be_all_right_answers_count():
    positives = equal_pairs(np.array([1, 2, 1, 3], np.uint64), np.array([7, 8, 9, 8], np.uint64))
    expected = np.eye(4, dtype=bool)
    expected[0, 2] = expected[2, 0] = expected[1, 3] = expected[3, 1] = True
    assert (positives == expected).all()


# --- splits ---------------------------------------------------------------------------------------------------


def names(source):
    return {source.label(index).rsplit("/", 1)[-1] for index in range(len(source))}


def test_a_picture_with_all_its_captions_is_on_one_side(tmp_path):
    data = open_data(config_of(table(tmp_path, [(n, f"c {n} {k}") for k in range(3) for n in range(30)])))
    assert len(data.train) == 27 and len(data.val) == 3
    assert not names(data.train) & names(data.val)
    assert all(len(data.val.captions(index)) == 3 for index in range(3))


def test_held_out_pictures_stay_held_out_when_others_come(tmp_path):
    rows = [(n, f"c {n}") for n in range(200)]
    before = names(open_data(config_of(table(tmp_path, rows))).val)
    rows += [(n, f"c {n}") for n in range(200, 220)]
    after = names(open_data(config_of(table(tmp_path, rows))).val)
    assert len(before) == 20 and len(after) == 22 and len(before & after) >= 18


def test_the_seed_of_the_data_chooses_others(tmp_path):
    path = table(tmp_path, [(n, f"c {n}") for n in range(100)])
    assert names(open_data(config_of(path)).val) != names(open_data(config_of(path, seed=1)).val)


def test_equal_pictures_stay_together(tmp_path):
    path = table(tmp_path, [(n, f"c {n}") for n in range(60)])
    for number in range(1, 60, 2):
        (path.parent / f"{number}.jpg").write_bytes((path.parent / f"{number - 1}.jpg").read_bytes())
    data = open_data(config_of(path, val_fraction=0.3))
    held_out = {int(name[:-4]) for name in names(data.val)}
    assert len(held_out) in (18, 20) and all(number ^ 1 in held_out for number in held_out)
    assert leakage_of(data.train, data.val) == (0, 0)


def test_own_splits_are_respected_and_test_is_left_alone(tmp_path):
    data = open_data(config_of(files.karpathy(tmp_path)))
    assert (len(data.train), len(data.val)) == (3, 2)
    assert any("1 pictures in the data's own test split are not used" in note for note in data.notes)


def test_held_out_data_of_ones_own_and_leakage(tmp_path):
    path = table(tmp_path, [(n, f"c {n}") for n in range(10)])
    other = tmp_path / "val"
    files.write_pictures(other, ["a.jpg"])  # the same bytes as 0.jpg
    (other / "b.jpg").write_bytes(files.jpeg(77))
    (other / "v.csv").write_text("image,caption\na.jpg,new\nb.jpg,c 3\n")
    data = open_data(config_of(path, val=str(other / "v.csv")))
    assert (len(data.train), len(data.val)) == (10, 2)
    assert leakage_notes(leakage_of(data.train, data.val)) == [
        "1 held-out picture is also in the training set: scores will look too good",
        "1 held-out caption also belongs to training pictures",
    ]


def test_sources_are_joined(tmp_path):
    one = table(tmp_path / "one", [(n, f"c {n}") for n in range(20)])
    two = files.img2dataset(tmp_path / "two", shards=3)
    data = open_data(DataConfig(source=(str(one), str(two))))
    assert len(data.train) + len(data.val) == 32
    everything = {caption for side in (data.train, data.val) for i in range(len(side)) for caption in side.captions(i)}
    assert everything == {f"c {n}" for n in range(20)} | {
        f"an old photo of town {shard:05d}{row:04d}" for shard in range(3) for row in range(4)
    }
    keys = data.train.caption_keys(np.zeros(len(data.train), dtype=np.int64))
    assert [int(key) for key in keys] == [data.train.caption_key(i, 0) for i in range(len(data.train))]
    for index in range(len(data.train)):
        assert data.train.square(index, 8).size == (8, 8)
    with pytest.raises(DataError, match="synthetic cannot be combined"):
        open_data(DataConfig(source=(str(one), "synthetic")))


def test_a_large_validation_side_is_thinned(tmp_path):
    path = table(tmp_path, [(n, f"c {n}") for n in range(60)])
    assert len(open_data(config_of(path, val_fraction=0.5, val_limit=7)).val) == 7


# --- bad pictures ---------------------------------------------------------------------------------------------


def dataset_of(source, cache=None, augmentation=AS_IT_IS):
    tokenizer = CharacterTokenizer(source.alphabet(), 32)
    return PairDataset(source, tokenizer, augmentation, 16, 0, cache or RamCache(source, 19, 10**7))


def test_a_bad_picture_is_replaced_with_its_caption_by_the_next(tmp_path):
    path = table(tmp_path, [(n, f"c {n}") for n in range(40)])
    train = open_data(config_of(path)).train
    place = {train.label(index): index for index in range(len(train))}
    for index in (5, 6):
        Path(train.label(index)).write_bytes(b"broken")
    train = open_data(config_of(path)).train
    dataset = dataset_of(train)
    pair = dataset[Key(1, 5, 0)]
    assert [(bad.picture, bad.reason) for bad in pair.bad] == [(5, "not a picture"), (6, "not a picture")]
    good = dataset[Key(1, 7, 0)]
    assert (pair.tokens == good.tokens).all() and (pair.pixels == good.pixels).all()
    assert (pair.caption_key, pair.picture_key) == (good.caption_key, good.picture_key)
    assert len(place) == 36


def test_too_many_missing_pictures_end_it_with_a_list(tmp_path):
    rows = [(n, f"c {n}") for n in range(40)]
    path = table(tmp_path, rows, pictures=range(38))
    assert len(open_data(config_of(path)).missing) == 2  # five in a hundred are borne
    (path.parent / "3.jpg").unlink()
    with pytest.raises(DataError, match=r"3 of 40 pictures cannot be used.*: 3 missing: .*3\.jpg \(missing\)"):
        open_data(config_of(path))


def test_bad_held_out_pictures_are_left_out(tmp_path):
    path = table(tmp_path, [(n, f"c {n}") for n in range(40)])
    val = open_data(config_of(path)).val
    Path(val.label(1)).write_bytes(b"")
    held_out = read_held_out(val, CharacterTokenizer(val.alphabet(), 32), 16, 2)
    assert held_out.pictures == 3 and [bad.reason for bad in held_out.bad] == ["empty"]


def test_recall_counts_every_caption(tmp_path):
    path = table(tmp_path, [(n, f"c {n} {k}") for n in range(40) for k in range(n % 3 + 1)])
    val = open_data(config_of(path)).val
    held_out = read_held_out(val, CharacterTokenizer(val.alphabet(), 32), 16, 3)
    counts = [len(val.captions(index)) for index in range(len(val))]
    assert held_out.matches.rows(np.arange(len(val))).sum(axis=1).tolist() == counts and len(held_out.captions) == sum(
        counts
    )
    rows = sum(len(batch.tokens) for batch in held_out.batches) + sum(map(len, held_out.more_tokens))
    assert rows == sum(counts)


# --- the cache ------------------------------------------------------------------------------------------------


@pytest.fixture
def train(tmp_path):
    return open_data(config_of(table(tmp_path, [(n, f"c {n}") for n in range(40)]))).train


def test_every_cache_gives_the_same_pixels(train):
    plain, ram, disk = (open_cache(kind, train, 19, 10**7) for kind in ("off", "ram", "disk"))
    for _ in range(2):
        for index in range(len(train)):
            assert (plain.get(index) == ram.get(index)).all() and (plain.get(index) == disk.get(index)).all()


def test_pictures_on_disk_are_decoded_once_for_all(train, monkeypatch):
    first = DiskCache(train, 19, 10**7)
    expected = [first.get(index).copy() for index in range(len(train))]
    second = DiskCache(train, 19, 10**7)
    monkeypatch.setattr(type(train), "picture", lambda *_: pytest.fail("decoded again"))
    assert all((second.get(index) == pixels).all() for index, pixels in enumerate(expected))


def test_a_damaged_slot_is_decoded_again(train):
    cache = DiskCache(train, 19, 10**7)
    expected = cache.get(3).copy()
    content = bytearray(cache.path.read_bytes())
    content[3 * cache.slot_bytes + 40] ^= 1
    cache.path.write_bytes(content)
    assert (DiskCache(train, 19, 10**7).get(3) == expected).all()


def test_the_disk_cache_keeps_within_its_bound(train):
    cache = DiskCache(train, 19, limit_bytes=5 * (8 + 3 * 19**2))
    for index in range(len(train)):
        cache.get(index)
    assert cache.path.stat().st_size <= 5 * cache.slot_bytes


def test_a_full_disk_costs_the_slot_not_the_picture(train, monkeypatch):
    cache = DiskCache(train, 19, 10**7)
    monkeypatch.setattr(cache, "_write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert cache.get(2).shape[2] == 3


def test_changed_pictures_have_another_cache(train, tmp_path):
    DiskCache(train, 19, 10**7).get(0)
    Path(train.label(0)).write_bytes(files.jpeg(1234))
    changed = open_data(config_of(tmp_path / "data/captions.csv")).train
    DiskCache(changed, 19, 10**7).get(0)
    assert len(list(pictures_dir().glob("*.u8"))) == 2


def test_a_picture_that_vanishes_is_bad_not_fatal(train, tmp_path):
    (tmp_path / "data").rename(tmp_path / "gone")
    with pytest.raises(BadPictureError, match="missing"):
        train.picture(0, 19)
    (tmp_path / "data").mkdir()
    Image.new("RGB", (9, 9)).save(train.label(0))
    assert train.picture(0, 19).size == (9, 9)


def test_the_sampler_gives_every_picture_once(train):
    sampler = EpochSampler(train, 8, seed=0)
    sampler.start(1)
    keys = [key for batch in sampler for key in batch]
    assert sorted(key.picture for key in keys) == list(range(len(train))) and {key.epoch for key in keys} == {1}


# --- sides of their own, and more than one right answer -------------------------------------------------------


def two_sides(tmp_path, name="data", sides=("train", "val", "test"), count=4, first=0):
    root = tmp_path / name
    numbers = range(first, first + count * len(sides))
    files.write_pictures(root, [])
    rows = ["image,split,caption"]
    for number in numbers:
        (root / f"{number}.jpg").write_bytes(files.jpeg(number))
        rows.append(f"{number}.jpg,{sides[(number - first) // count]},c {number}")
    (root / "list.csv").write_text("\n".join(rows))
    return root


def test_val_data_leave_the_datas_own_sides_alone(tmp_path):
    data = open_data(
        DataConfig(
            source=(str(two_sides(tmp_path)),), val=str(two_sides(tmp_path, "other", ("train", "val"), first=100))
        )
    )
    assert names(data.train) == {f"{number}.jpg" for number in range(4)}
    assert names(data.val) == {f"{number}.jpg" for number in range(104, 108)}
    assert any("8 pictures" in note for note in data.notes)


def test_data_of_one_side_only_say_nothing(tmp_path):
    data = open_data(config_of(two_sides(tmp_path, sides=("val",), count=30)))
    assert (len(data.train), len(data.val)) == (27, 3)


def test_equal_held_out_pictures_are_right_for_each_others_captions(tmp_path):
    path = table(tmp_path, [(n, f"c {n}") for n in range(6)])
    (path.parent / "1.jpg").write_bytes((path.parent / "0.jpg").read_bytes())
    held_out = read_held_out(open_data(config_of(path, val=str(path))).val, CharacterTokenizer("c 0123456", 16), 16, 6)
    expected = np.eye(6, dtype=bool)
    expected[0, 1] = expected[1, 0] = True
    assert (held_out.matches.rows(np.arange(6)) == expected).all()
    assert (held_out.batches[0].positives.numpy() == expected).all()


def test_too_few_held_out_pictures_are_said(tmp_path):
    path = table(tmp_path, [(n, f"c {n}") for n in range(30)])
    val = open_data(config_of(path)).val
    for index in range(len(val)):
        Path(val.label(index)).write_bytes(b"")
    with pytest.raises(DataError, match="too few of the 3 held-out pictures can be used: 3 empty"):
        read_held_out(val, CharacterTokenizer(val.alphabet(), 32), 16, 2)


def test_many_pictures_are_told_apart_by_name_and_size(tmp_path, monkeypatch):
    """Two sources whose shards and members have the same names."""
    monkeypatch.setattr("clipctl.data.index.build.HASHED_PICTURES", 0)
    one = files.img2dataset(tmp_path / "one")
    two = tmp_path / "two"
    two.mkdir()
    for number in range(2):
        samples = []
        for row in range(4):
            key = f"{number:05d}{row:04d}"
            picture = files.jpeg(500 + 10 * number + row, width=60 + row)
            samples += [(f"{key}.jpg", picture), (f"{key}.txt", f"other {key}".encode())]
        files.shard(two / f"{number:05d}.tar", samples)
    data = open_data(DataConfig(source=(str(one),), val=str(two)))
    assert leakage_of(data.train, data.val) == (0, 0)
    assert len(np.unique(np.concatenate([data.train.picture_keys, data.val.picture_keys]))) == 16
