"""Foreign files whose cost is out of proportion to their size: time and memory stay within bounds."""

import struct
import time

import numpy as np
import pytest
from PIL import ExifTags, Image

from clipctl.data import tokenizers
from clipctl.data.tokenizers import LONGEST_PIECE, WordTokenizer
from clipctl.errors import DataError
from tests.faults.test_hostile import measure

LIMIT_S, LIMIT_BYTES = 2.0, 200e6

# --- words --------------------------------------------------------------------------------------------------------


def test_words_without_end_are_spelled_and_not_learnt():
    long = ["ab" * 4_999 + str(number) for number in range(20)]
    started = time.process_time()
    tokenizer = WordTokenizer.learn([*long, *long, "a cat", "a cat"], 1000, 20)
    lengths = [tokenizer.length(word) for word in long]
    assert time.process_time() - started < LIMIT_S
    assert lengths == [len(word) + 2 for word in long] and "cat" in tokenizer.pieces
    assert max(map(len, tokenizer.pieces)) == 3


def test_pieces_that_no_word_has_are_refused():
    pieces = ["a", "b", "##b" + "a" * LONGEST_PIECE]
    with pytest.raises(DataError, match="a piece of more than 64 characters"):
        tokenizers.from_dict({"kind": "words", "pieces": pieces, "context": 20})
    tokenizers.from_dict({"kind": "words", "pieces": ["a", "##" + "a" * LONGEST_PIECE], "context": 20})


# --- pictures (S8) ------------------------------------------------------------------------------------------------

DECODE = """
import sys
from pathlib import Path
from clipctl.data.bad import BadPictureError
from clipctl.data.decoding import open_picture, to_pixels
content = Path(sys.argv[1]).read_bytes()
try:
    print(to_pixels(open_picture(content, int(sys.argv[2]) or None)).shape)
except BadPictureError as error:
    print(error)
"""


def decode(file, least_px=0):
    """What is said of a picture, and the seconds and bytes that it takes beside the rest of the process."""
    code, output, seconds, memory_bytes = measure(file.parent, "-c", DECODE, str(file), str(least_px))
    assert code == 0, output
    return output.strip(), seconds, memory_bytes


@pytest.fixture(scope="module")
def idle(tmp_path_factory):
    """Seconds and bytes of a process that decodes nothing to speak of."""
    file = tmp_path_factory.mktemp("idle") / "idle.png"
    Image.new("RGB", (8, 8)).save(file)
    return decode(file)[1:]


def upturned():
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    return exif


def tiff_of_one_tile(file, side_px):
    Image.new("RGB", (8, 8)).save(file, compression="tiff_lzw")
    content = bytearray(file.read_bytes())
    count = struct.unpack_from("<H", content, struct.unpack_from("<I", content, 4)[0])[0]
    first = struct.unpack_from("<I", content, 4)[0] + 2
    tags = {
        struct.unpack_from("<H", content, first + 12 * n)[0]: bytes(content[first + 12 * n :][:12])
        for n in range(count)
    }
    place, size = (struct.unpack_from("<I", tags[tag], 8)[0] for tag in (273, 279))
    tags = {tag: entry for tag, entry in tags.items() if tag not in (273, 278, 279)}
    tags |= {
        tag: struct.pack("<HHII", tag, 4, 1, value)
        for tag, value in ((322, side_px), (323, side_px), (324, place), (325, size))
    }
    struct.pack_into("<I", content, 4, len(content))
    content += struct.pack("<H", len(tags)) + b"".join(tags[tag] for tag in sorted(tags)) + bytes(4)
    file.write_bytes(content)


def jpeg_of_many_scans(file, scans, side_px=64):
    """The last scan of a progressive JPEG, over and over."""
    Image.new("RGB", (side_px, side_px)).save(file, progressive=True)
    content = file.read_bytes()
    tables = content.rfind(b"\xff\xc4", 0, content.rfind(b"\xff\xda"))
    file.write_bytes(content[:-2] + content[tables:-2] * scans + content[-2:])


LARGE = {
    "deep.png": ("more than 900 MB", lambda file: Image.fromarray(np.zeros((12_200, 12_200), np.uint16)).save(file)),
    "transparent.png": (
        "more than 900 MB",
        lambda file: Image.new("RGBA", (10_500, 10_500)).save(file, compress_level=1),
    ),
    "tile.tif": ("more than 900 MB", lambda file: tiff_of_one_tile(file, 32_000)),
    "scans.jpg": ("a JPEG of 310 scans", lambda file: jpeg_of_many_scans(file, 300)),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_picture_is_weighed_before_it_is_decoded(tmp_path, idle, name):
    problem, write = LARGE[name]
    write(tmp_path / name)
    said, seconds, memory_bytes = decode(tmp_path / name)
    assert problem in said
    assert seconds - idle[0] < 1 and memory_bytes - idle[1] < 20e6


def test_a_turned_picture_takes_what_was_counted(tmp_path, idle):
    """Eight bytes a pixel at most: that of Pillow twice, or once with an array."""
    pixels = 4000 * 3000
    for name, options in {"a.png": {"compress_level": 1}, "b.jpg": {"subsampling": 2, "progressive": True}}.items():
        Image.new("RGB", (4000, 3000), (9, 8, 7)).save(tmp_path / name, exif=upturned(), **options)
        said, _, memory_bytes = decode(tmp_path / name)
        assert said == "(4000, 3000, 3)" and memory_bytes - idle[1] < 8.5 * pixels


def test_large_photographs_are_used(tmp_path):
    """Of 50 megapixels, in full and, much cheaper, as training sees it."""
    Image.new("RGB", (8160, 6120), (9, 8, 7)).save(tmp_path / "photo.jpg", exif=upturned())
    assert decode(tmp_path / "photo.jpg")[0] == "(8160, 6120, 3)"
    said, _, memory_bytes = decode(tmp_path / "photo.jpg", 224)
    assert said == "(1020, 765, 3)" and memory_bytes < LIMIT_BYTES
