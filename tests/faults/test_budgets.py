"""Foreign files whose cost is out of proportion to their size: time and memory stay within bounds."""

import json
import os
import struct
import time
import zipfile
from glob import glob

import numpy as np
import pytest
from PIL import ExifTags, Image

from clipctl.data import tokenizers
from clipctl.data.cache import DiskCache, RamCache
from clipctl.data.formats import shards
from clipctl.data.formats.recognise import recognise
from clipctl.data.formats.rows import Hints
from clipctl.data.formats.tar import TarError, members
from clipctl.data.synthetic.scenes import SyntheticSource
from clipctl.data.tokenizers import LONGEST_PIECE, WordTokenizer
from clipctl.errors import DataError
from clipctl.inference import embedding_store
from clipctl.inference.embedding_store import Known, ModelFacts
from clipctl.inference.gallery import PictureId
from clipctl.runs.checkpoint import STATE
from clipctl.runs.rundir import RunDir
from tests.faults.fuzz import checkpoint_seed, run_seed
from tests.faults.test_foreign import tar_header
from tests.faults.test_hostile import measure, vouch

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


# --- caches and indexes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["a link", "a pipe"])
def test_the_cache_of_pictures_is_a_file_of_ours(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path / "home"))
    victim = tmp_path / "victim"
    victim.write_text("mine")
    cache = DiskCache(SyntheticSource(4, seed=0, validation=False), 16, 10**6)
    if kind == "a link":
        cache.path.symlink_to(victim)
    else:
        os.mkfifo(cache.path)
    expected = RamCache(SyntheticSource(4, seed=0, validation=False), 16, 0).get(2)
    assert (cache.get(2) == expected).all() and cache.path.is_file() and not cache.path.is_symlink()
    assert victim.read_text() == "mine"


@pytest.fixture
def index(tmp_path):
    model = ModelFacts("model", "runs/model", "0" * 64, 4)
    vectors = np.eye(4, dtype=np.float16)
    rows = [(PictureId(f"{row}.jpg", 9, 1), Known(vectors, row)) for row in range(4)]
    (tmp_path / "index").mkdir()
    embedding_store.write_state(tmp_path / "index", model, "float16", ["pictures"], rows, [])
    return tmp_path / "index"


OPEN_INDEX = """
import sys
from pathlib import Path
from clipctl.errors import StoreError
from clipctl.inference.embedding_store import EmbeddingStore
try:
    print(len(EmbeddingStore.open(Path(sys.argv[1])).all_pictures()))
except StoreError as error:
    print(error)
"""


def with_hole(file):
    os.truncate(file, 6 * 2**30)


def with_empty_lines(file):
    file.write_bytes(b"\n" * 3_000_000)


def packed(file):
    with file.open("wb") as stream:
        np.savez(stream, vectors=np.eye(4))


def emptied(file):
    with zipfile.ZipFile(file, "w"):
        pass


def of_objects(file):
    with file.open("wb") as stream:
        np.save(stream, np.array([{}] * 4), allow_pickle=True)


INDEXES = {
    "as it was": ("vectors-00000001.npy", lambda file: None, "4"),
    "a hole": ("pictures-00000001.jsonl", with_hole, "is damaged: a line has more than 100,000 bytes"),
    "empty lines": ("pictures-00000001.jsonl", with_empty_lines, "is damaged: it has a line of 1 bytes"),
    "a zip": ("vectors-00000001.npy", emptied, "vectors-00000001.npy is damaged"),
    "an npz": ("vectors-00000001.npy", packed, "vectors-00000001.npy is damaged"),
    "objects": ("vectors-00000001.npy", of_objects, "does not hold 4 vectors of 4 numbers in float16"),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_an_index_costs_no_more_than_it_holds(index, kind):
    name, change, said = INDEXES[kind]
    change(index / name)
    code, output, seconds, memory_bytes = measure(index, "-c", OPEN_INDEX, str(index))
    assert code == 0 and said in output, output
    assert seconds < LIMIT_S and memory_bytes < LIMIT_BYTES


# --- shards -------------------------------------------------------------------------------------------------------

PATTERNS = {
    "many lists": "/x" + "{a,b}" * 24 + ".tar",
    "lists in lists": "/x" + "{a,{b,{c,{d,e}}}}" * 8 + ".tar",
    "ranges": "{0..999}{0..999}{0..999}.tar",
    "very many groups": ("{1..1}" * 40 + "/") * 16 + ".tar",
    "long names": "{0..999999}" + "/xxxx" * 700 + ".tar",
}


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_patterns_that_grow(pattern):
    started = time.process_time()
    with pytest.raises(DataError, match=r"expands to more than 1,000,000 shards|braces within") as error:
        recognise(pattern, Hints())
    assert time.process_time() - started < LIMIT_S and len(str(error.value)) < 300


def test_a_pattern_that_leads_everywhere_is_given_up(tmp_path, monkeypatch):
    for number in range(300):
        (tmp_path / "abc"[number % 3] / f"{number}").mkdir(parents=True)
    monkeypatch.setattr(shards, "SEARCH_LIMIT", 200)
    for words in ("*/*/*.tar", "{a,b,c}/*/*.tar"):
        with pytest.raises(DataError, match="leads through too many directories: gave up after 201 names"):
            recognise(f"{tmp_path}/{words}", Hints())


@pytest.mark.parametrize("pattern", ["*.tar", "?.tar", "*/[0-1].tar", "d/../*/0.tar", ".h*/*", "**/*.tar", "nothing*"])
def test_patterns_match_as_in_a_shell(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    for name in ("0.tar", "1.tar", "d/0.tar", "d/1.tar", "d/2.tar", ".hidden/0.tar", "d/.3.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for text in (pattern, f"{tmp_path}/{pattern}"):
        assert shards.Search(text).find(text) == sorted(glob(text))


def pax(records):
    return tar_header(size=b"%011o\0" % len(records), kind=b"x") + records + bytes(-len(records) % 512)


TARS = {
    "many properties": [pax(b"5 a=\n" * 200_000) for _ in range(20)],
    "many lists of them": [pax(b"12 path=abc\n" * 40) for _ in range(20_000)],
}


@pytest.mark.parametrize("parts", TARS.values(), ids=TARS)
def test_a_tar_of_many_small_records(tmp_path, parts):
    (tmp_path / "shard.tar").write_bytes(b"".join(parts) + tar_header() + bytes(512 + 1024))
    started = time.process_time()
    with (tmp_path / "shard.tar").open("rb") as file, pytest.raises(TarError, match="more than"):
        list(members(file))
    assert time.process_time() - started < LIMIT_S / 2


# --- tables and documents -----------------------------------------------------------------------------------------

READ_ROWS = """
import sys
from clipctl.data.formats.recognise import recognise
from clipctl.data.formats.rows import Hints
from clipctl.errors import DataError
try:
    print(sum(1 for _ in recognise(sys.argv[1], Hints()).rows()))
except DataError as error:
    print(error)
"""


def sparse(file):
    file.write_text("[")
    os.truncate(file, 900_000_000)


def of_endless_cells(file):
    """Each cell in quotation marks, each line short, and all of them one row."""
    file.write_text("image,caption\n0.png,a cat\n" + '"\n",' * 3_000_000)


def coco(file):
    images = [{"id": number, "file_name": f"{number:012d}.jpg", "height": 480} for number in range(20_000)]
    notes = [{"image_id": n // 5, "id": n, "caption": "A man on a small moped."} for n in range(100_000)]
    file.write_text(json.dumps({"images": images, "annotations": notes}, separators=(",", ":")))


TABLES = {
    "empty.json": (lambda file: file.write_text("[" + "{}," * 7_000_000 + "{}]"), "values in its first"),
    "sparse.json": (sparse, "it has 4,096 zero bytes in a row"),
    "coco.json": (coco, "20000"),
    "cells.csv": (of_endless_cells, "has more than 8,000,000 characters"),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_and_documents_cost_what_they_hold(tmp_path, name):
    write, said = TABLES[name]
    write(tmp_path / name)
    code, output, seconds, memory_bytes = measure(tmp_path, "-c", READ_ROWS, str(tmp_path / name))
    assert code == 0 and said in output, output
    assert seconds < LIMIT_S and memory_bytes < LIMIT_BYTES


# --- runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    return RunDir(run_seed(tmp_path))


def monitor(run):
    code, output, seconds, memory_bytes = measure(run.path, "-m", "clipctl", "monitor", "--once", str(run.path))
    assert "bug in clipctl" not in output and "Traceback" not in output, output
    assert seconds < LIMIT_S and memory_bytes < LIMIT_BYTES
    return code, output


def event(message):
    return json.dumps({"kind": "event", "time_s": 1.0, "elapsed_s": 1.0, "step": 3, "event": "x", "message": message})


RESUME = '{"kind":"resume","step":3}'
METRICS = {
    "empty lines": (b"\n" * 20_000_000, 0),
    "noise": (b"x\n" * 1_000_000, 2),
    "rows of nothing": (b"{}\n" * 1_000_000, 2),
    "resumes": (f"{RESUME}\n".encode() * 100_000, 2),
    "resumes in a line": (RESUME.encode() * 200_000 + b"\n", 0),
    "events of megabytes": (b"".join(event("x" * 3_900_000).encode() + b"\n" for _ in range(10)), 0),
}


@pytest.mark.parametrize("kind", METRICS)
def test_metrics_that_are_none_are_passed_over_or_damaged(run, kind):
    content, expected = METRICS[kind]
    with run.metrics_file.open("ab") as file:
        file.write(content)
    code, output = monitor(run)
    assert code == expected and ("is damaged" in output) == (code == 2), output


STATES = {
    "many settings": {"config": {str(number): number for number in range(100_000)}},
    "a long setting": {"config": {"preset": "x" * 5_000_000}},
    "many values": {"config": {}, "bad_pictures": {str(number): "" for number in range(610_000)}},
}


@pytest.mark.parametrize("changes", STATES.values(), ids=STATES)
def test_a_state_that_holds_too_much(tmp_path, changes):
    made = checkpoint_seed(tmp_path)
    state = json.loads((made.path / STATE).read_text())
    (made.path / STATE).write_text(json.dumps({**state, **changes}))
    vouch(made, STATE)
    code, output, seconds, memory_bytes = measure(tmp_path, "-m", "clipctl", "checkpoint", "show", str(made.path))
    assert code == 3 and "state.json cannot be read: it" in output, output
    assert seconds < LIMIT_S and memory_bytes < LIMIT_BYTES


WRITE_ANEW = """
import sys
from pathlib import Path
from clipctl.runs.retrieval import Query, Retrieval
from clipctl.runs.rundir import RunDir, overwrite
run = RunDir(Path(sys.argv[1]))
run.write_retrieval(Retrieval(25, 16, (Query("a red boat", 1, 3, ()),)))
overwrite(run.status_file, b"{}", 10_000)  # as on a full disk
"""


def test_what_is_written_over_is_no_larger_than_ours(run):
    for file in (run.retrieval_file, run.status_file):
        os.truncate(file, 3 * 2**30)
    code, output, seconds, memory_bytes = measure(run.path, "-c", WRITE_ANEW, str(run.path))
    assert code == 0 and seconds < LIMIT_S and memory_bytes < LIMIT_BYTES, output
    assert run.retrieval().step == 25
    assert max(file.stat().st_size for file in (run.retrieval_file, run.status_file)) < 10_000
