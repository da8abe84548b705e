"""Every kind of picture file, good and bad (F14)."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from clipctl.config.sections import OPENAI_MEAN as MEAN
from clipctl.config.sections import OPENAI_STD as STD
from clipctl.data.bad import BadPictureError
from clipctl.data.decoding import open_picture, to_square
from clipctl.data.images import Augmentation, augment, crop_box, resized, to_area
from clipctl.model.clip import normalise
from tests.data.files import bomb, jpeg, pixels

RED, BLUE = (200, 30, 30), (30, 30, 200)


def saved(picture, format="PNG", **options):
    buffer = io.BytesIO()
    picture.save(buffer, format, **options)
    return buffer.getvalue()


def halves(mode="RGB", colours=(RED, BLUE)):
    """Left half one colour, right half another."""
    picture = Image.new(mode, (64, 48), colours[0])
    picture.paste(colours[1], (32, 0, 64, 48))
    return picture


def corners(content, least_px=16):
    """The colours near the left and the right edge."""
    array = np.asarray(open_picture(content, least_px)).astype(int)
    return array[array.shape[0] // 2, 2], array[array.shape[0] // 2, -3]


def is_near(colour, wanted, tolerance=12):
    return bool(np.abs(np.asarray(colour) - np.asarray(wanted)).max() <= tolerance)


def test_transparent_pixels_become_white():
    left, right = corners(saved(halves("RGBA", ((*RED, 255), (*BLUE, 0)))))
    assert is_near(left, RED) and is_near(right, (255, 255, 255))
    half = corners(saved(halves("LA", ((0, 255), (0, 128)))))[1]
    assert is_near(half, (127, 127, 127))


def test_a_palette_with_a_transparent_colour():
    picture = halves().quantize(4)
    content = saved(picture, transparency=picture.getpixel((60, 10)))
    assert is_near(corners(content)[0], RED) and is_near(corners(content)[1], (255, 255, 255))


def test_sixteen_bits_are_scaled_not_cut():
    values = np.zeros((48, 64), dtype=np.uint16)
    values[:, 32:] = 32768
    left, right = corners(saved(Image.fromarray(values)))
    assert is_near(left, (0, 0, 0)) and is_near(right, (128, 128, 128))


def test_cmyk_grey_one_bit_and_floats():
    assert is_near(corners(saved(halves().convert("CMYK"), "JPEG", quality=95))[0], RED, tolerance=25)
    assert is_near(corners(saved(halves("L", (10, 240))))[1], (240, 240, 240))
    assert is_near(corners(saved(halves("1", (0, 1))))[1], (255, 255, 255))
    floats = Image.fromarray(np.linspace(-3, 5, 48 * 64, dtype=np.float32).reshape(48, 64))
    array = np.asarray(open_picture(saved(floats, "TIFF"), 16))
    assert array.min() == 0 and array.max() == 255


def test_of_several_frames_the_first():
    content = saved(halves(), "GIF", save_all=True, append_images=[halves(colours=(BLUE, RED))])
    assert is_near(corners(content)[0], RED)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_undone(orientation):
    """A picture stored turned, with the note how, comes out upright."""
    upright = halves()
    turned = {
        1: lambda p: p,
        2: lambda p: p.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: lambda p: p.transpose(Image.Transpose.ROTATE_180),
        4: lambda p: p.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: lambda p: p.transpose(Image.Transpose.TRANSPOSE),
        6: lambda p: p.transpose(Image.Transpose.ROTATE_90),
        7: lambda p: p.transpose(Image.Transpose.TRANSVERSE),
        8: lambda p: p.transpose(Image.Transpose.ROTATE_270),
    }[orientation](upright)
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = saved(turned, "JPEG", quality=95, exif=exif)
    assert open_picture(content, 40).size == upright.size
    left, right = corners(content)
    assert is_near(left, RED, 30) and is_near(right, BLUE, 30)


def test_a_wrong_extension_does_not_matter_content_does():
    assert open_picture(saved(halves(), "WEBP"), 16).size == (64, 48)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"<html>404</html>", "not a picture"),
        (jpeg(1)[:-200], "truncated"),
        (saved(pixels(1))[:300], "truncated"),
        (bomb(50_000), "more than 150 megapixels"),
        (bomb(13_000), "more than 150 megapixels"),
        (bomb(400), "truncated"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),
    ],
)
def test_why_a_picture_cannot_be_used(content, reason):
    with pytest.raises(BadPictureError) as error:
        open_picture(content, 16)
    assert str(error.value) == reason


def test_any_cut_and_any_flipped_byte_is_a_picture_or_a_reason():
    rng = np.random.default_rng(0)
    for content in (
        jpeg(3),
        saved(pixels(3)),
        saved(pixels(3), "WEBP"),
        saved(pixels(3), "GIF"),
        saved(pixels(3), "TIFF"),
    ):
        for _ in range(60):
            damaged = bytearray(content)
            damaged[int(rng.integers(len(damaged)))] ^= 1 << int(rng.integers(8))
            for tried in (bytes(damaged), content[: int(rng.integers(1, len(content)))]):
                try:
                    assert open_picture(tried, 16).mode == "RGB"
                except BadPictureError as error:
                    assert str(error) in ("truncated", "damaged", "not a picture", "more than 150 megapixels")


# --- sizes and augmentation -----------------------------------------------------------------------------------


def test_a_jpeg_is_decoded_small_but_not_too_small():
    content = jpeg(1, width=1024, height=768)
    assert open_picture(content, 64).size == (128, 96)
    assert open_picture(content, 300).size == (512, 384)
    assert open_picture(content, 700).size == (1024, 768)


@pytest.mark.parametrize("size", [(1000, 1000), (1000, 500), (500, 2000), (30, 40), (4000, 10), (1, 1)])
def test_kept_pictures_have_equal_area_and_bounded_shape(size):
    height, width, _ = to_area(np.array(Image.new("RGB", size)), 73).shape
    assert width * height <= 73**2
    assert max(width, height) <= 2 * min(width, height) + 1
    if min(size) >= 100 and max(size) <= 2 * min(size):
        assert width * height > 0.95 * 73**2 and abs(width / height - size[0] / size[1]) < 0.05


def test_a_square_is_the_middle():
    picture = Image.new("RGB", (90, 30), RED)
    picture.paste(BLUE, (30, 0, 60, 30))
    square = np.asarray(to_square(picture, 10))
    assert square.shape == (10, 10, 3) and square[:, 2:-2].reshape(-1, 3).tolist() == [list(BLUE)] * 60


def test_crops_keep_their_share_and_stay_inside():
    rng = np.random.default_rng(0)
    shares = []
    for width, height in [(73, 73), (100, 53), (53, 100)] * 300:
        left, top, right, bottom = crop_box(rng, width, height, 0.5)
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        assert 0.73 < (right - left) / (bottom - top) < 1.37
        shares.append((right - left) * (bottom - top) / (width * height))
    assert max(shares) <= 1 and np.quantile(shares, 0.9) > 0.7 and np.quantile(shares, 0.05) > 0.35


def test_augmentation_follows_from_the_generator_alone():
    how = Augmentation(max_shift=0.1, max_zoom=0.1, flip=True, min_crop=0.5, jitter=0.2)
    picture = np.array(pixels(1, 90, 70))
    views = [augment(picture, np.random.default_rng([0, epoch, 3]), 32, how, flip=True) for epoch in (1, 1, 2)]
    assert (views[0] == views[1]).all() and not (views[0] == views[2]).all()
    assert views[0].shape == (32, 32, 3) and views[0].dtype == np.uint8


def test_jitter_changes_brightness_not_hue():
    images = torch.full((30, 4, 4, 3), 0, dtype=torch.uint8) + torch.tensor(RED, dtype=torch.uint8)
    factors = torch.from_numpy(np.random.default_rng(0).uniform(0.7, 1.3, (30, 3)).astype(np.float32))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    colours = (normalise(images, factors) * std + mean)[:, :, 0, 0]
    assert len(set(map(tuple, colours.tolist()))) == 30
    assert (colours[:, 0] > colours[:, 1]).all() and torch.allclose(colours[:, 1], colours[:, 2], atol=1e-4)
    assert torch.allclose(normalise(images, torch.ones(30, 3)), normalise(images), atol=1e-5)


def test_brightness_contrast_and_saturation_by_hand():
    images = torch.tensor([[[[100, 200, 50]]]], dtype=torch.uint8)
    grey = 0.299 * 100 + 0.587 * 200 + 0.114 * 50
    expected = [0.9 * (115 + 1.2 * (grey + 0.5 * (value - grey) - 115)) for value in (100, 200, 50)]
    mean, std = (torch.tensor(values) for values in (MEAN, STD))
    found = (normalise(images, torch.tensor([[0.9, 1.2, 0.5]])).flatten() * std + mean) * 255
    assert found.tolist() == pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize("size", [(100, 80), (40, 50), (13, 7), (200, 160)])
def test_resizing_does_what_pillows_bicubic_does(size):
    picture = pixels(1, 120, 90)
    expected = np.asarray(picture.resize(size, Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(resized(np.array(picture), (0, 0, 120, 90), *size) - expected).max() <= 2
