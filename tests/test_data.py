import pickle

import numpy as np
import pytest
import torch

from clipctl.config.sections import OPENAI_MEAN as MEAN
from clipctl.config.sections import OPENAI_STD as STD
from clipctl.config.sections import DataConfig
from clipctl.data import tokenizers
from clipctl.data.cache import RamCache
from clipctl.data.images import Augmentation, augment
from clipctl.data.loader import Collate, Pair, PairDataset, TrainLoader
from clipctl.data.sampling import EpochSampler, Key, epoch_batches
from clipctl.data.synthetic.scenes import SyntheticSource
from clipctl.data.tokenizers import PAD_ID, START_ID, UNKNOWN_ID, CharacterTokenizer
from clipctl.model.clip import normalise

DRAWN = Augmentation.of(DataConfig(), drawn=True)


@pytest.fixture
def tokenizer():
    return CharacterTokenizer(sorted(set("a red cat two blue cats")), context=16)


# --- tokenizer ------------------------------------------------------------------------------------------------


def test_end_of_text_is_the_highest_id_and_never_2(tokenizer):
    assert tokenizer.end_id == tokenizer.vocab_size - 1 == tokenizer.encode("a red cat").max()
    assert CharacterTokenizer([], context=8).end_id > 2


def test_encoding_is_start_characters_end_padding(tokenizer):
    ids = tokenizer.encode("cat")
    assert ids[0] == START_ID and ids[4] == tokenizer.end_id
    assert set(ids[5:]) == {PAD_ID}
    assert len(set(ids[1:4])) == 3


def test_unknown_characters_have_their_own_id(tokenizer):
    assert list(tokenizer.encode("xc")[1:3]) == [UNKNOWN_ID, tokenizer.encode("c")[1]]


def test_case_spaces_and_composition_do_not_matter(tokenizer):
    assert (tokenizer.encode("  A  RED\tcat ") == tokenizer.encode("a red cat")).all()
    assert tokenizers.normalise("e\u0301") == "\u00e9"


@pytest.mark.parametrize("caption", ["", "x" * 1000, "\x00\x1b[31m", "مرحبا", "🐈" * 40])
def test_any_text_becomes_context_many_ids_with_an_end(tokenizer, caption):
    ids = tokenizer.encode(caption)
    assert ids.shape == (16,) and tokenizer.end_id in ids and ids.min() >= 0


def test_a_tokenizer_survives_json(tokenizer):
    restored = tokenizers.from_dict(tokenizer.to_dict())
    assert (restored.encode("two red cats") == tokenizer.encode("two red cats")).all()


# --- sampling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pairs", "batch_size"), [(216, 36), (37, 36), (250, 36), (5, 2)])
def test_every_pair_once_in_batches_of_almost_equal_size(pairs, batch_size):
    batches = epoch_batches(pairs, batch_size, seed=0, epoch=3)
    assert sorted(np.concatenate(batches)) == list(range(pairs))
    sizes = [len(batch) for batch in batches]
    assert max(sizes) <= batch_size and max(sizes) - min(sizes) <= 1


def test_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        return np.concatenate(epoch_batches(50, 8, seed, epoch)).tolist()

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2) != order(1, 2)


# --- pictures -------------------------------------------------------------------------------------------------


def test_normalised_pictures_are_what_every_clip_expects():
    pixels = torch.randint(0, 256, (2, 5, 4, 3), dtype=torch.uint8)
    images = normalise(pixels)
    assert images.shape == (2, 3, 5, 4) and images.is_contiguous()
    expected = (pixels[1, 3, 2, 1] / 255 - MEAN[1]) / STD[1]
    assert images[1, 1, 3, 2].item() == pytest.approx(expected.item(), abs=1e-5)


def test_augmentation_is_determined_by_its_generator():
    pixels = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)
    results = [augment(pixels, np.random.default_rng(7), 16, DRAWN, flip=True) for _ in range(2)]
    assert (results[0] == results[1]).all() and results[0].shape == pixels.shape


def test_no_augmentation_leaves_the_picture_alone():
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    how = Augmentation(max_shift=0, max_zoom=0, flip=False, min_crop=1, jitter=0)
    assert (augment(pixels, np.random.default_rng(0), 8, how, flip=False) == pixels).all()


# --- loader ---------------------------------------------------------------------------------------------------


class SideSource:
    """A white left half, so that a mirrored picture is seen at once."""

    def __init__(self, caption):
        self._caption = caption

    def __len__(self):
        return 4

    def captions(self, index):
        return [self._caption]

    def caption(self, index, which):
        return self._caption

    def caption_key(self, index, which):
        return 0

    def picture_key(self, index):
        return index

    def picture(self, index, size_px):
        from PIL import Image

        picture = Image.new("RGB", (size_px, size_px))
        picture.paste((255, 255, 255), (0, 0, size_px // 2, size_px))
        return picture


@pytest.mark.parametrize(
    ("caption", "mirrored"), [("a cat on the left", False), ("Right: a cat", False), ("a cat", True)]
)
def test_pictures_whose_caption_names_a_side_are_not_mirrored(tokenizer, caption, mirrored):
    source, how = SideSource(caption), Augmentation(max_shift=0, max_zoom=0, flip=True, min_crop=1, jitter=0)
    dataset = PairDataset(source, tokenizer, how, 8, 0, RamCache(source, 8, 10**6))
    left_is_white = {bool(dataset[Key(epoch, 0, 0)].pixels[0, 0, 0] == 255) for epoch in range(30)}
    assert left_is_white == ({True, False} if mirrored else {True})


def make_loader(tokenizer, workers=0, cache_bytes=10**6):
    source = SyntheticSource(20, seed=0, validation=False)
    dataset = PairDataset(source, tokenizer, DRAWN, 16, 0, RamCache(source, 16, cache_bytes))
    return TrainLoader(dataset, EpochSampler(source, 6, seed=0), Collate(fixed_length=True), workers=workers)


def tensors(loader, epoch, first_batch=0):
    return [tensor for batch in loader.epoch(epoch, first_batch) for tensor in batch[:2]]


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_workers_and_cache_do_not_change_the_batches(tokenizer):
    alone, helped = make_loader(tokenizer), make_loader(tokenizer, workers=2, cache_bytes=0)
    for epoch in (1, 2):
        assert same(tensors(alone, epoch), tensors(helped, epoch))


def test_an_epoch_can_start_in_the_middle(tokenizer):
    loader = make_loader(tokenizer)
    assert same(tensors(loader, 1, first_batch=2), tensors(loader, 1)[4:])


def test_loading_leaves_the_global_generator_alone(tokenizer):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    tensors(make_loader(tokenizer), 1)
    assert torch.equal(before, torch.get_rng_state())


def test_the_dataset_pickles_for_spawned_workers(tokenizer):
    source = SyntheticSource(4, seed=0, validation=False)
    dataset = PairDataset(source, tokenizer, DRAWN, 16, 0, RamCache(source, 16, 10**6))
    key = Key(0, 1, 2)
    assert (pickle.loads(pickle.dumps(dataset))[key].pixels == dataset[key].pixels).all()


def test_tokens_are_cut_to_the_longest_caption_unless_fixed(tokenizer):
    pixels = np.zeros((2, 2, 3), np.uint8)
    pairs = [
        Pair(pixels, tokenizer.encode(caption), None, 1, number, True, number, number, ())
        for number, caption in enumerate(["a", "cats"])
    ]
    assert Collate(fixed_length=False)(pairs).tokens.shape == (2, 6)
    assert Collate(fixed_length=True)(pairs).tokens.shape == (2, 16)
