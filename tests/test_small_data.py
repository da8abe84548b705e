"""What makes few pictures enough: convolutions, words, pictures of equal captions, views sampled on the device."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from clipctl.config.layers import Layer, resolve
from clipctl.data import tokenizers
from clipctl.data.batch import Views
from clipctl.data.images import Augmentation
from clipctl.data.sampling import epoch_batches
from clipctl.data.tokenizers import START_ID, UNKNOWN_ID, WordTokenizer
from clipctl.data.views import draws, random_jitter, random_views
from clipctl.errors import ConfigError
from clipctl.hardware.devices import open_device
from clipctl.model import cost
from clipctl.model.clip import Clip, normalise
from clipctl.model.loss import picture_loss
from clipctl.runs.rundir import RunDir
from clipctl.training.plan import make_plan
from clipctl.training.state import fresh_state
from clipctl.training.step import gradients
from tests.conftest import MICRO, train
from tests.test_micro_batch import a_batch
from tests.test_training import rows, weights

CONV = {"model.image.stem": "conv", "model.image.pool": "flat", "model.image.depth": 0, "model.text.vocab_size": 40}


def config(**values):
    return resolve([Layer("test", {**MICRO, **CONV, **values})])


# --- the image tower -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stem", "pool", "depth"),
    [*itertools.product(["patches", "conv"], ["mean", "flat"], [0, 1, 3]), ("conv", "class", 2)],
)
def test_parameters_are_counted_for_every_layout(stem, pool, depth):
    model = config(**{"model.image.stem": stem, "model.image.pool": pool, "model.image.depth": depth}).model
    assert sum(parameter.numel() for parameter in Clip(model).parameters()) == cost.parameters(model)


def test_a_flat_pool_knows_where_things_are_and_a_mean_does_not():
    """Without blocks, a mean over tokens sees the same in a picture whose patches are in another order."""
    images = torch.rand(2, 3, 16, 16)
    swapped = torch.roll(images, 8, dims=3)  # the left and the right patches change places
    for pool, differs in (("mean", False), ("flat", True)):
        values = {"model.image.stem": "patches", "model.image.pool": pool}
        tower = Clip(config(**values).model).image
        with torch.no_grad():
            tower.positions.zero_()
            same = torch.allclose(tower(images), tower(swapped), atol=1e-5)
        assert same is not differs


@pytest.mark.parametrize("pool", ["flat", "mean"])
def test_convolutions_stay_exact_in_micro_batches(pool):
    found = []
    for micro_batch in (None, 5):
        state = fresh_state(config(**{"model.image.pool": pool}), open_device("cpu"), "fp32", 1)
        state.picture_term, state.label_smoothing, state.micro_batch = 1.0, 0.1, micro_batch
        gradients(state, a_batch())
        found.append({name: parameter.grad for name, parameter in state.model.named_parameters()})
    for name, gradient in found[0].items():
        assert torch.norm(found[1][name] - gradient) <= 1e-5 * torch.norm(gradient), name


def test_layouts_that_cannot_be_built_are_refused():
    with pytest.raises(ConfigError, match="patch_px 12 is not a power of two"):
        config(**{"model.image.patch_px": 12, "model.image.size_px": 24})
    with pytest.raises(ConfigError, match=r"needs a model\.image\.depth of 1 or more"):
        config(**{"model.image.pool": "class"})
    with pytest.raises(ConfigError, match="is not a multiple"):
        config(**{"model.image.size_px": 20})


# --- pictures of equal captions --------------------------------------------------------------------------------


def test_the_picture_loss_is_the_mean_over_partners():
    image = F.normalize(torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    captions = torch.tensor([0, 1, 0, 2, 0])
    expected = 0.0
    for row in range(5):
        others = [column for column in range(5) if column != row]
        partners = [column for column in others if captions[column] == captions[row]]
        total = torch.logsumexp(torch.stack([7 * image[row] @ image[column] for column in others]), dim=0)
        expected += sum(float(total - 7 * image[row] @ image[one]) / len(partners) for one in partners)
    found = picture_loss(image, captions[:, None] == captions, 7.0)
    assert float(found) == pytest.approx(expected / 5, rel=1e-5)


def test_without_partners_it_is_nothing_and_has_no_slope():
    image = F.normalize(torch.randn(4, 8), dim=1).requires_grad_()
    loss = picture_loss(image, torch.eye(4, dtype=torch.bool), 100.0)
    loss.backward()
    assert float(loss.detach()) == 0 and image.grad is not None and not image.grad.any()


@pytest.mark.parametrize("captions", ["equal", "different"])
def test_smoothed_targets_are_those_of_torch(captions):
    batch, smoothing = a_batch(), 0.2
    if captions == "different":
        batch = batch._replace(positives=None)
    state = fresh_state(config(**{"train.label_smoothing": smoothing}), open_device("cpu"), "fp32", 1)
    image, text, scale, _ = state.model(normalise(batch.images, batch.jitter), batch.tokens)
    right = torch.eye(len(image)) if batch.positives is None else batch.positives.float()
    logits = scale * image @ text.T
    expected = sum(
        F.cross_entropy(side, right / right.sum(dim=1, keepdim=True), label_smoothing=smoothing)
        for side in (logits, logits.T)
    )
    wanted = torch.autograd.grad(expected / 2, list(state.model.parameters()))
    gradients(state, batch)
    for parameter, gradient in zip(state.model.parameters(), wanted, strict=True):
        assert torch.norm(parameter.grad - gradient) <= 1e-5 * torch.norm(gradient) + 1e-9


def test_smoothing_goes_with_the_softmax_loss_only():
    with pytest.raises(ConfigError, match=r"train\.label_smoothing needs train\.loss softmax"):
        config(**{"train.label_smoothing": 0.1, "train.loss": "sigmoid"})


@pytest.mark.parametrize("extra", ["picture_term", "label_smoothing"])
def test_the_reported_loss_stays_comparable_with_chance(extra):
    reported = []
    for weight in (0.0, 0.5):
        state = fresh_state(config(), open_device("cpu"), "fp32", 1)
        setattr(state, extra, weight)
        reported.append(float(gradients(state, a_batch()).loss))
    assert reported[0] == reported[1]


@given(
    groups=st.lists(st.integers(0, 12), min_size=2, max_size=80),
    batch_size=st.integers(2, 40),
    epoch=st.integers(1, 3),
)
def test_partners_meet_two_by_two_and_nobody_is_lost(groups, batch_size, epoch):
    numbers = np.unique(np.array(groups), return_inverse=True)[1]
    batches = epoch_batches(len(groups), batch_size, 0, epoch, numbers, partners=True)
    assert sorted(np.concatenate(batches)) == list(range(len(groups)))
    assert max(map(len, batches)) - min(map(len, batches)) <= 1 and max(map(len, batches)) <= batch_size
    row = numbers[np.concatenate(batches)]
    alone = 0
    for number in np.unique(row):
        places = np.flatnonzero(row == number)
        alone += len(places) - 2 * sum(int(places[at + 1] - places[at] == 1) for at in range(0, len(places) - 1, 2))
    assert alone <= len(np.unique(row))  # at most the odd one of each group


# --- words -----------------------------------------------------------------------------------------------------

CAPTIONS = ["a red car", "a red boat", "two red boats", "a car, blue", "the Zeppelin"]


def words(context=12, vocab_size=1000):
    return WordTokenizer.learn(CAPTIONS, vocab_size, context)


def test_frequent_words_are_one_id_and_rare_ones_are_spelled():
    tokenizer = words()
    assert tokenizer.length("a red car") == 5 and tokenizer.length("a boat") == 3 + len("boat")
    assert list(tokenizer.encode("red zeppelin")[:2]) == [START_ID, tokenizer.encode("red")[1]]
    assert UNKNOWN_ID not in tokenizer.encode("zeppelin") and UNKNOWN_ID in tokenizer.encode("ω")


def test_end_of_text_is_the_highest_id_also_when_a_caption_is_cut():
    tokenizer = words(context=6)
    for caption in ("red", "a zeppelin is a long word"):
        ids = tokenizer.encode(caption)
        assert ids.max() == tokenizer.end_id == tokenizer.vocab_size - 1 and len(ids) == 6


def test_pieces_are_the_longest_that_fit():
    tokenizer = WordTokenizer(["b", "boat", "##s", "##h", "##ouse"], 12)
    assert list(tokenizer.encode("boats")[1:3]) == [4, 5]
    assert list(tokenizer.encode("boathouse")[1:4]) == [4, 6, 7]


def test_the_vocabulary_is_bounded_and_survives_json():
    tokenizer = words(vocab_size=40)
    assert tokenizer.vocab_size <= max(40, 2 * len(set("".join(CAPTIONS).lower())) + 4)
    restored = tokenizers.from_dict(tokenizer.to_dict())
    assert all((restored.encode(caption) == tokenizer.encode(caption)).all() for caption in [*CAPTIONS, "unseen words"])


@given(st.text(max_size=40))
def test_any_text_can_be_encoded(text):
    ids = words().encode(text)
    assert ids.shape == (12,) and ids.max() == words().end_id


@pytest.mark.parametrize("spec", ["words:5", "words:x"])
def test_a_vocabulary_that_is_no_vocabulary_is_refused(spec):
    with pytest.raises(ConfigError, match="words:VOCABULARY"):
        config(**{"data.tokenizer": spec})


# --- views -----------------------------------------------------------------------------------------------------

NOTHING = Augmentation(max_shift=0.0, max_zoom=0.0, flip=False, min_crop=1.0, jitter=0.0, on_device=True)


def seen(pictures, how, side_px, *, epoch=1, flip=True):
    """What the model gets, in bytes again."""
    height, width = (max(picture.shape[axis] for picture in pictures) for axis in (0, 1))
    canvas = np.full((len(pictures), height, width, 3), 255, dtype=np.uint8)
    for place, picture in zip(canvas, pictures, strict=True):
        place[: picture.shape[0], : picture.shape[1]] = picture
    sizes = np.array([picture.shape[1::-1] for picture in pictures])
    drawn = draws(np.arange(len(pictures), dtype=np.uint64), 0, epoch)
    maps = random_views(drawn, sizes, how, np.full(len(pictures), flip))
    views = Views(torch.from_numpy(maps.astype(np.float32)), torch.from_numpy(sizes), side_px)
    return views.of(torch.from_numpy(canvas)).numpy()


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 200, (height, width, 3), dtype=np.uint8)


def test_without_augmentation_a_picture_of_the_right_size_is_seen_as_it_is():
    pictures = [noise(16, 16, seed) for seed in range(3)]
    assert np.allclose(seen(pictures, NOTHING, 16), np.stack(pictures), atol=1e-3)


def test_a_picture_of_another_shape_is_seen_in_its_middle_and_never_its_neighbours_place():
    wide, tall = noise(16, 24), noise(24, 16, 1)
    found = seen([wide, tall], NOTHING, 16)
    assert np.allclose(found[0], wide[:, 4:20], atol=1e-3) and np.allclose(found[1], tall[4:20], atol=1e-3)
    moved = replace(NOTHING, max_shift=0.4, max_zoom=0.3, min_crop=0.5)
    for epoch in range(5):
        assert seen([wide, tall], moved, 16, epoch=epoch).max() < 200.01  # the canvas around them is 255


def test_half_of_the_views_are_mirrored_unless_they_must_not():
    pictures = [noise(8, 8)] * 200
    mirrored = [
        np.allclose(view, pictures[0][:, ::-1], atol=1e-3) for view in seen(pictures, replace(NOTHING, flip=True), 8)
    ]
    assert 70 < sum(mirrored) < 130
    assert np.allclose(seen(pictures, replace(NOTHING, flip=True), 8, flip=False), pictures[0], atol=1e-3)


def test_a_quarter_turn_and_a_stretch():
    square = noise(8, 8)
    drawn = np.full((1, 13), 0.5)
    drawn[0, 7] = 1.0  # turned as far as it goes
    maps = random_views(drawn, np.array([[8, 8]]), replace(NOTHING, max_turn=90.0), np.array([False]))
    view = Views(torch.from_numpy(maps.astype(np.float32)), torch.tensor([[8, 8]]), 8)
    assert np.allclose(view.of(torch.from_numpy(square[None]))[0].numpy(), np.rot90(square), atol=1e-3)
    drawn[0, 7:9] = 0.5, 1.0
    wide = random_views(drawn, np.array([[8, 8]]), replace(NOTHING, max_stretch=0.1), np.array([False]))[0]
    assert wide[0, 0] == pytest.approx(4 * math.exp(0.1)) and wide[1, 1] == pytest.approx(4 * math.exp(-0.1))


def test_draws_are_a_function_of_seed_epoch_and_picture():
    some = draws(np.array([3, 5], dtype=np.uint64), 1, 2)
    assert (some[1] == draws(np.array([5], dtype=np.uint64), 1, 2)[0]).all()
    assert (some != draws(np.array([3, 5], dtype=np.uint64), 1, 3)).any()
    many = draws(np.arange(20_000, dtype=np.uint64), 0, 1)
    assert (
        np.allclose(many.mean(axis=0), 0.5, atol=0.01)
        and np.abs(np.corrcoef(many.T) - np.eye(many.shape[1])).max() < 0.03
    )


def test_jitter_lies_around_one():
    factors = random_jitter(draws(np.arange(1000, dtype=np.uint64), 0, 1), replace(NOTHING, jitter=0.2))
    assert factors is not None and 0.8 <= factors.min() < 0.81 and 1.19 < factors.max() <= 1.2


def test_a_view_of_the_whole_picture_is_the_picture():
    images = torch.from_numpy(noise(8, 8)[None])
    maps = torch.tensor([[[4.0, 0, 4], [0, 4, 4]]])
    views = Views(maps, torch.tensor([[8, 8]]), 8)
    jitter = torch.tensor([[1.1, 0.9, 1.0]])
    assert torch.allclose(normalise(views.of(images), jitter), normalise(images, jitter), atol=1e-5)


# --- a whole run -----------------------------------------------------------------------------------------------


def test_a_run_with_all_of_it_is_reproducible_with_any_number_of_workers(tmp_path):
    values = {"data.tokenizer": "words", "data.augment_on": "device", "train.picture_term": 1.0}
    asked = config(**values, **{"model.text.vocab_size": "auto"})
    runs = []
    for workers in (0, 2):
        runs.append(RunDir.create(tmp_path, "tiny", f"workers-{workers}"))
        train(make_plan(replace(asked, runtime=replace(asked.runtime, workers=workers))), runs[-1])
    assert [row["loss"] for row in rows(runs[0], "step")] == [row["loss"] for row in rows(runs[1], "step")]
    assert all(torch.equal(tensor, weights(runs[1])[name]) for name, tensor in weights(runs[0]).items())
