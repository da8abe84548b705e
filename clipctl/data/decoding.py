"""Decodes picture files to RGB: all common formats, within limits, or the reason why one cannot be used. No torch."""

import io
import warnings
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from clipctl.data.bad import BadPictureError
from clipctl.data.weighing import DEEP_MODES, MOST_SCANNED_PIXELS, MOST_SCANS, count_scans, decoding_bytes, has_alpha

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")  # none that launches an external program
FILE_LIMIT_BYTES = 256 * 2**20
NO_HEIF = "HEIC: pip install pillow-heif or save as JPEG"  # why an iPhone's picture cannot be used
PIXEL_LIMIT = 150_000_000  # a 12,000 × 12,000 scan; more is a mistake or an attack
DECODED_LIMIT_BYTES = 900_000_000  # that one picture may take at once: 108 megapixels of a phone, on their side

Pixels = NDArray[np.uint8]  # (H, W, 3)

# Warnings about damaged EXIF and large pictures: we set our own limits. Set once per process, not per picture, because
# pictures are decoded in threads.
warnings.filterwarnings("ignore", module=r"PIL\b")

_WHITE = (255, 255, 255)
# EXIF orientation to the transpose that turns the picture upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@cache
def reads_heif() -> bool:
    """Whether HEIC can be read: if pillow-heif is installed, it is registered with Pillow."""
    try:
        import pillow_heif
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True


def _formats() -> tuple[str, ...]:
    return (*FORMATS, "HEIF") if reads_heif() else FORMATS


def _is_heif(content: bytes) -> bool:
    """Judged by the brand in its first box: many are called .jpg by the program that copied them."""
    return content[4:8] == b"ftyp" and content[8:12] in (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1")


def open_picture(content: bytes, least_px: int | None = None) -> Image.Image:
    """Decode a file's bytes: upright, in RGB, with transparency on white. With `least_px`, a JPEG may come out smaller
    than it is, with no side below that: its blocks are decoded at 1/2, 1/4 or 1/8 of their size, which is fast."""
    if not content:
        raise BadPictureError("empty")
    if len(content) > FILE_LIMIT_BYTES:
        raise BadPictureError(f"more than {FILE_LIMIT_BYTES // 2**20} MiB")
    try:
        picture = Image.open(io.BytesIO(content), formats=_formats())
        if picture.width * picture.height > PIXEL_LIMIT:
            raise BadPictureError(f"more than {PIXEL_LIMIT // 10**6} megapixels")
        full_size, scans = picture.size, count_scans(picture, content)
        if scans > MOST_SCANS or scans * picture.width * picture.height > MOST_SCANNED_PIXELS:
            raise BadPictureError(f"a JPEG of {scans} scans")
        if least_px and picture.format == "JPEG" and min(picture.size) >= 2 * least_px:
            picture.draft("RGB", _drafted(picture.size, least_px))
        if decoding_bytes(picture, full_size, scans) > DECODED_LIMIT_BYTES:
            raise BadPictureError(f"more than {DECODED_LIMIT_BYTES // 10**6} MB when decoded")
        orientation = picture.getexif().get(ExifTags.Base.Orientation)  # decodes a PNG, so not earlier
        rgb = to_rgb(picture)
        del picture  # makes room for turning the other
    except BadPictureError:
        raise
    except UnidentifiedImageError:
        is_unread_heif = _is_heif(content) and not reads_heif()
        raise BadPictureError(NO_HEIF if is_unread_heif else "not a picture") from None
    except Image.DecompressionBombError:
        raise BadPictureError(f"more than {PIXEL_LIMIT // 10**6} megapixels") from None
    except Exception as error:  # decoders raise anything: OSError, SyntaxError, struct.error, ZeroDivisionError
        raise BadPictureError("truncated" if "truncated" in str(error) else "damaged") from error
    return rgb.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else rgb


def picture_size(content: bytes) -> tuple[int, int]:
    """Width and height, from the file's header."""
    try:
        return Image.open(io.BytesIO(content), formats=_formats()).size
    except Exception:  # as in `open_picture`
        raise BadPictureError("not a picture") from None


def _drafted(size: tuple[int, int], least_px: int) -> tuple[int, int]:
    """The size to request from the decoder so that the shorter side is at least `least_px`."""
    scale = least_px / min(size)
    return round(size[0] * scale), round(size[1] * scale)


STRIP_ROWS = 64
STRIP_PIXELS = 4_000_000


def to_rgb(picture: Image.Image) -> Image.Image:
    """Eight bits each of red, green and blue. Only the first frame of an animation is used."""
    mode = picture.mode
    if mode == "RGB" and "transparency" not in picture.info:
        picture.load()
        return picture
    if mode in DEEP_MODES:  # convert() would clip everything above 255
        return _eight_bits(picture)
    if has_alpha(picture):
        above = picture if picture.mode == "RGBA" else picture.convert("RGBA")
        white = Image.new("RGB", picture.size, _WHITE)
        white.paste(above, mask=above.getchannel("A"))
        return white
    return picture.convert("RGB")


def _eight_bits(picture: Image.Image) -> Image.Image:
    """Grey values of more than eight bits, scaled by the range of their type; floats by their actual range. In strips:
    a copy of a large picture in eight bytes a pixel would take gigabytes."""
    width, height = picture.size
    strips = [(0, top, width, min(top + STRIP_ROWS, height)) for top in range(0, height, STRIP_ROWS)]
    ranges = [(float(values.min()), float(values.max())) for values in (_values(picture, strip) for strip in strips)]
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    if picture.mode != "F":
        low, high = 0.0, 255.0 if high <= 255 else 65535.0
    rgb = Image.new("RGB", picture.size)
    for strip in strips:
        values = _values(picture, strip).astype(np.float64)
        shares = np.clip((values - low) / max(high - low, 1e-12), 0, 1)
        rgb.paste(Image.fromarray((shares * 255).round().astype(np.uint8), "L").convert("RGB"), strip[:2])
    return rgb


def to_pixels(picture: Image.Image) -> Pixels:
    """As an array. A large one in strips, because Pillow hands out the pixels by way of two more copies."""
    width, height = picture.size
    if width * height <= STRIP_PIXELS:
        return np.array(picture)
    pixels = np.empty((height, width, 3), dtype=np.uint8)
    for top in range(0, height, STRIP_ROWS):
        pixels[top : top + STRIP_ROWS] = np.asarray(picture.crop((0, top, width, min(top + STRIP_ROWS, height))))
    return pixels


def _values(picture: Image.Image, strip: tuple[int, int, int, int]) -> NDArray[Any]:
    values = np.asarray(picture.crop(strip))
    return np.nan_to_num(values) if picture.mode == "F" else values


MAX_RATIO = 16  # of a picture that is scaled before it is cut: beyond that its ends are cut off first


def to_square(picture: Image.Image, size_px: int) -> Image.Image:
    """The centre of a picture as every CLIP library sees it, pixel for pixel: the shorter side is scaled to `size_px`,
    then the middle is cut out."""
    side = min(picture.size)
    if max(picture.size) > MAX_RATIO * side:
        picture = _middle(picture, min(picture.width, MAX_RATIO * side), min(picture.height, MAX_RATIO * side))
    width, height = (size_px if edge == side else int(size_px * edge / side) for edge in picture.size)
    if (width, height) != picture.size:
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    return _middle(picture, size_px, size_px)


def _middle(picture: Image.Image, width: int, height: int) -> Image.Image:
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return picture.crop((left, top, left + width, top + height))
