"""What it takes to decode a picture, from its header, before anything is decoded. No torch."""

import re

from PIL import Image, JpegImagePlugin, TiffImagePlugin

DEEP_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")  # more than eight bits of grey
MOST_SCANS = 100  # of a JPEG; programs write about ten
MOST_SCANNED_PIXELS = 3_000_000_000  # each scan passes over the whole picture

_RGB_BYTES = 4  # of a pixel as Pillow keeps it; the fourth is unused
_USED_BYTES = 2 * _RGB_BYTES  # once decoded: turned upright, cut, or copied into an array
_ONE_BYTE_MODES = ("1", "L", "P")
# These decoders hold the picture in their own form, and hand it over as another copy.
_DECODER_BYTES = {"WEBP": 12, "AVIF": 12, "HEIF": 12}
_BITS_TAG, _TILE_WIDTH_TAG, _TILE_HEIGHT_TAG = 258, 322, 323
_START_OF_SCAN, _END = 0xDA, 0xD9
_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")  # neither an escaped 0xFF among the pixels nor a restart


def decoding_bytes(picture: Image.Image, full_size: tuple[int, int], scans: int) -> int:
    """The most memory that it takes to turn a picture that was opened into one in RGB, and to use that. `full_size` is
    that of the file: a JPEG may be decoded smaller."""
    stored = 1 if picture.mode in _ONE_BYTE_MODES else 2 if picture.mode.startswith("I;16") else 4
    decoder = _DECODER_BYTES.get(picture.format or "", 0)
    per_pixel = max(stored + decoder + _conversion_bytes(picture), _USED_BYTES)
    weight = picture.width * picture.height * per_pixel
    if isinstance(picture, TiffImagePlugin.TiffImageFile):
        return max(weight, picture.width * picture.height * stored + _tiff_buffer_bytes(picture))
    if isinstance(picture, JpegImagePlugin.JpegImageFile) and scans > 1:
        coefficients = full_size[0] * full_size[1] * _coefficient_bytes(picture)
        return max(weight, picture.width * picture.height * stored + round(coefficients))
    return weight


def _conversion_bytes(picture: Image.Image) -> int:
    """Of a pixel, beside those in the picture's own mode."""
    if has_alpha(picture):  # a white ground and the mask; with colours, if they are not there yet
        return _RGB_BYTES + 1 + (0 if picture.mode == "RGBA" else 4)
    if picture.mode in DEEP_MODES:
        return _RGB_BYTES + 1  # strips
    return 0 if picture.mode == "RGB" else _RGB_BYTES


def has_alpha(picture: Image.Image) -> bool:
    return picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info


def _tiff_buffer_bytes(picture: TiffImagePlugin.TiffImageFile) -> int:
    """A tile, which may be far larger than the picture, or a strip, which may be all of it, as stored in the file."""
    bits = picture.tag_v2.get(_BITS_TAG, (8,))
    width, height = (int(picture.tag_v2.get(tag, 0)) for tag in (_TILE_WIDTH_TAG, _TILE_HEIGHT_TAG))
    if not width or not height:
        width, height = picture.size
    return width * height * max(1, sum(bits) // 8)


def _coefficient_bytes(picture: JpegImagePlugin.JpegImageFile) -> float:
    """Of a pixel: if there are several scans, the decoder keeps two bytes for every sample until the last one."""
    samples = [across * down for _, across, down, _ in picture.layer]
    across, down = (max((layer[place] for layer in picture.layer), default=1) for place in (1, 2))
    return 2 * sum(samples) / max(1, across * down)


def count_scans(picture: Image.Image, content: bytes) -> int:
    """How often the decoder passes over the pixels of a JPEG; once for other formats."""
    if not isinstance(picture, JpegImagePlugin.JpegImageFile):
        return 1
    place, scans = 2, 0
    while match := _MARKER.search(content, place):
        marker, place = match[1][0], match.end()
        if marker == _END:
            break
        if marker == _START_OF_SCAN:
            scans += 1
            if scans == 1 and "progressive" not in picture.info and content[place + 2] >= picture.layers:
                break  # all there is: what follows is not looked at
        if marker not in (0x01, 0xD8):  # these two stand alone
            place += max(2, int.from_bytes(content[place : place + 2], "big"))
    return scans
