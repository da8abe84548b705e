"""Each format, from files written exactly as their owners write them."""

import io
import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from clipctl.data import decoding
from clipctl.data.bad import BadPictureError
from clipctl.data.formats.rows import TEST, TRAIN, UNSAID, VAL, Hints
from clipctl.data.formats.shards import expand, split_name
from clipctl.data.index.columns import read_part
from clipctl.data.index.store import open_index
from clipctl.errors import DataError
from tests.data import files


@pytest.fixture(autouse=True)
def _home(tmp_path_factory, monkeypatch):
    """Beside the data, not among them; all indexes in one place would be looked through for each."""
    monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path_factory.mktemp("home")))


def index_of(path, **hints):
    return open_index(str(path), Hints(**hints))


def pairs_of(index):
    """Captions by the name of the picture."""
    return {index.name(picture): index.captions(picture) for picture in range(len(index))}


def sides_of(index):
    return {index.name(picture): int(index.sides[picture]) for picture in range(len(index))}


def assert_pictures_are_theirs(index, numbers):
    """Every picture is found, and is the one that its name says."""
    assert (index.sizes > 0).all()
    contents = [read_part(*index.extent(picture, 10**6)) for picture in range(len(index))]
    assert contents == [files.jpeg(number) for number in numbers]


def test_flickr8k_of_kaggle(tmp_path):
    index = index_of(files.flickr8k_kaggle(tmp_path))
    assert index.facts.format == "csv"
    assert "captions.txt" in index.facts.words and "column image, captions from column caption" in index.facts.words
    pairs = pairs_of(index)
    assert list(pairs) == list(files.FLICKR8K_NAMES)
    assert pairs[files.FLICKR8K_NAMES[1]] == [
        "A child in a pink dress is climbing up a set of stairs in an entry way .",
        *(f"A dog , wet and happy , runs number {number} ." for number in range(4)),
    ]
    assert_pictures_are_theirs(index, range(3))


def test_flickr8k_of_its_authors(tmp_path):
    index = index_of(files.flickr8k_tokens(tmp_path))
    assert index.facts.format == "flickr"
    assert pairs_of(index)[files.FLICKR8K_NAMES[0]] == [f"A man {number} walks ." for number in range(5)]
    assert_pictures_are_theirs(index, range(3))


def test_flickr30k_of_kaggle_with_its_broken_row(tmp_path):
    index = index_of(files.flickr30k_kaggle(tmp_path))
    assert index.facts.format == "pipe"
    pairs = pairs_of(index)
    assert [len(captions) for captions in pairs.values()] == [5, 5, 5]
    assert pairs["1000092795.jpg"][2] == "Two young guys with shaggy hair look at their hands 2 ."
    assert pairs["2199200615.jpg"][4] == "A dog runs across the grass ."
    assert_pictures_are_theirs(index, range(3))


def test_coco_takes_both_files_and_their_sides(tmp_path):
    index = index_of(files.coco(tmp_path))
    assert index.facts.format == "coco"
    assert pairs_of(index)["000000000001.jpg"] == [f"A bicycle 1 seen {k} times." for k in range(5)]
    assert list(sides_of(index).values()) == [TRAIN] * 4 + [VAL] * 2
    assert_pictures_are_theirs(index, range(1, 7))


def test_one_coco_file(tmp_path):
    files.coco(tmp_path)
    index = index_of(tmp_path / "annotations/captions_val2017.json")
    assert len(index) == 2 and set(sides_of(index).values()) == {VAL}
    assert_pictures_are_theirs(index, [5, 6])


def test_karpathys_splits(tmp_path):
    index = index_of(files.karpathy(tmp_path))
    assert index.facts.format == "karpathy"
    assert [int(side) for side in index.sides] == [TRAIN, TRAIN, TRAIN, VAL, VAL, TEST]
    assert pairs_of(index)["train2014/COCO_train2014_000000000000.jpg"][3] == "A man 0 with a red helmet 3."
    assert_pictures_are_theirs(index, range(6))


def test_blips_lists(tmp_path):
    index = index_of(files.blip(tmp_path))
    pairs = pairs_of(index)
    assert index.facts.format == "json"
    assert pairs["val2014/COCO_val2014_000000000001.jpg"] == ["a woman 1 eats", "lunch 1"]
    assert pairs["val2014/COCO_val2014_000000000003.jpg"] == ["a single caption"]
    assert_pictures_are_theirs(index, range(4))


def test_metadata_of_diffusers(tmp_path):
    index = index_of(files.diffusers(tmp_path) / "train")
    assert index.facts.format == "imagefolder"
    assert pairs_of(index)["0002.png"] == ["a drawing of pokemon 2"]
    assert_pictures_are_theirs(index, range(4))


def test_imagefolder_with_splits(tmp_path):
    index = index_of(files.imagefolder(tmp_path))
    sides = sides_of(index)
    assert sides["train/train_3.jpg"] == TRAIN and sides["validation/validation_0.jpg"] == VAL
    assert sides["test/test_1.jpg"] == TEST
    assert pairs_of(index)["train/train_0.jpg"] == ["a train picture of train_0"]


@pytest.mark.parametrize("write", [files.open_clip_csv, files.run_clip_csv])
def test_tables_of_other_trainers(tmp_path, write):
    index = index_of(write(tmp_path))
    assert [captions[0][-8:] for captions in pairs_of(index).values()] == [f"number {number}" for number in range(4)]
    assert_pictures_are_theirs(index, range(4))


def test_sidecars(tmp_path):
    index = index_of(files.sidecars(tmp_path))
    assert index.facts.format == "sidecar"
    assert pairs_of(index)["0003.png"] == ["a castle, number 3, masterpiece"]


def test_class_folders(tmp_path):
    index = index_of(files.classes(tmp_path))
    assert index.facts.format == "classes"
    assert pairs_of(index)["train/golden_retriever/0.jpg"] == ["a photo of a golden retriever"]
    assert pairs_of(index)["val/tabby-cat/1.jpg"] == ["a photo of a tabby cat"]
    assert index.facts.side_counts == [0, 6, 4, 0]
    assert pairs_of(index_of(tmp_path, template="art: {}"))["val/tabby-cat/1.jpg"] == ["art: tabby cat"]


# --- shards ---------------------------------------------------------------------------------------------------


def test_img2dataset_shards_are_read_in_place(tmp_path):
    index = index_of(files.img2dataset(tmp_path))
    assert index.facts.format == "webdataset"
    assert pairs_of(index)["000010002.jpg"] == ["an old photo of town 000010002"]
    assert_pictures_are_theirs(index, [0, 1, 2, 3, 10, 11, 12, 13])
    assert not list(tmp_path.glob("**/*.jpg"))


def test_a_pattern_of_shards(tmp_path):
    files.img2dataset(tmp_path, shards=3)
    assert len(index_of(f"{tmp_path}/{{00000..00001}}.tar")) == 8
    with pytest.raises(DataError, match="1 of 4 shards do not exist"):
        index_of(f"{tmp_path}/{{00000..00003}}.tar")


def test_patterns_expand_as_in_a_shell():
    assert list(expand("a-{008..011}.tar")) == ["a-008.tar", "a-009.tar", "a-010.tar", "a-011.tar"]
    assert list(expand("{8..11}")) == ["8", "9", "10", "11"]
    assert list(expand("{a,b}/{1..2}")) == ["a/1", "a/2", "b/1", "b/2"]


def test_members_belong_together_up_to_the_first_dot():
    assert split_name("dir.v2/0001.left.JPG") == ("dir.v2/0001", "left.jpg")
    assert split_name("0001.json") == ("0001", "json")


def test_a_caption_in_json_counts_where_there_is_no_text(tmp_path):
    samples = [("a.jpg", files.jpeg(1)), ("a.json", b'{"caption": "from json"}'), ("b.txt", b"no picture")]
    samples += [
        ("c.png", files.jpeg(2)),
        ("c.txt", b"from text"),
        ("c.json", b'{"caption": "no"}'),
        ("d.cls", b"3"),
    ]
    index = index_of(files.shard(tmp_path / "x.tar", samples))
    assert pairs_of(index) == {"a.jpg": ["from json"], "c.png": ["from text"]}


def test_long_names_links_and_folders_in_a_shard(tmp_path):
    import io
    import tarfile

    long_name = "very/" * 40 + "long.jpg"
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        folder = tarfile.TarInfo("very")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        link = tarfile.TarInfo("evil.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "../../secret"
        tar.addfile(link)
        for name, content in ((long_name, files.jpeg(5)), (long_name[:-3] + "txt", b"deep")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    index = index_of(tmp_path / "x.tar")
    assert pairs_of(index) == {long_name: ["deep"]}
    assert_pictures_are_theirs(index, [5])


# --- tables as people have them -------------------------------------------------------------------------------


def table(tmp_path, text, name="data.csv", pictures=4):
    files.write_pictures(tmp_path, [f"{number}.jpg" for number in range(pictures)])
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return tmp_path / name


@pytest.mark.parametrize("picture", ["path", "image", "img", "image_path", "filepath", "file_name", "Filename"])
@pytest.mark.parametrize("caption", ["caption", "text", "title", "Label", "description", "prompt", "comment"])
def test_columns_have_many_names(tmp_path, picture, caption):
    index = index_of(table(tmp_path, f"id,{picture},width,{caption}\n1,0.jpg,9,a dog\n2,1.jpg,9,a cat\n"))
    assert pairs_of(index) == {"0.jpg": ["a dog"], "1.jpg": ["a cat"]}


def test_a_table_without_a_header(tmp_path):
    index = index_of(table(tmp_path, "7;0.jpg;a dog on a hill\n8;1.jpg;a cat in the sun\n"))
    assert pairs_of(index) == {"0.jpg": ["a dog on a hill"], "1.jpg": ["a cat in the sun"]}
    assert "without a header" in index.facts.words


def test_columns_are_guessed_from_what_they_hold(tmp_path):
    index = index_of(table(tmp_path, "nr,bild,beschreibung\n1,0.jpg,ein Hund am Meer\n2,1.jpg,eine Katze im Gras\n"))
    assert pairs_of(index) == {"0.jpg": ["ein Hund am Meer"], "1.jpg": ["eine Katze im Gras"]}


def test_flags_override_what_was_guessed(tmp_path):
    path = table(tmp_path, "image,other,caption,alt\n0.jpg,1.jpg,a dog,ein Hund\n1.jpg,0.jpg,a cat,eine Katze\n")
    assert pairs_of(index_of(path, image_column="other", caption_column="ALT")) == {
        "1.jpg": ["ein Hund"],
        "0.jpg": ["eine Katze"],
    }
    assert pairs_of(index_of(path, caption_column="caption,alt"))["0.jpg"] == ["a dog", "ein Hund"]


def test_rows_of_one_picture_are_joined_wherever_they_stand(tmp_path):
    index = index_of(table(tmp_path, "image,caption\n0.jpg,one\n1.jpg,two\n0.jpg,three\n2.jpg,four\n1.jpg,five\n"))
    assert pairs_of(index) == {"0.jpg": ["one", "three"], "1.jpg": ["two", "five"], "2.jpg": ["four"]}
    assert [int(index.row_keys[row]) for row in index.caption_rows[:2]] == [
        int(index.row_keys[0]),
        int(index.row_keys[2]),
    ]


def test_a_split_column_is_respected(tmp_path):
    index = index_of(table(tmp_path, "image,split,caption\n0.jpg,train,a\n1.jpg,valid,b\n2.jpg,test,c\n3.jpg,,d\n"))
    assert list(sides_of(index).values()) == [TRAIN, VAL, TEST, UNSAID]


def test_several_caption_columns_and_lists(tmp_path):
    index = index_of(table(tmp_path, "image,caption_0,caption_1\n0.jpg,one,two\n1.jpg,three,\n"))
    assert pairs_of(index) == {"0.jpg": ["one", "two"], "1.jpg": ["three"]}
    rows = 'filename,raw\n0.jpg,"[""one"", ""two""]"\n1.jpg,"[sic] three"\n'
    assert pairs_of(index_of(table(tmp_path, rows, name="b.csv"))) == {
        "0.jpg": ["one", "two"],
        "1.jpg": ["[sic] three"],
    }


def test_marks_line_ends_and_broken_bytes(tmp_path):
    expected = {"0.jpg": ["über Öl"], "1.jpg": ["a b\ufffdc"]}
    content = "\ufeffimage,caption\r\n0.jpg,über Öl\r\n".encode() + b"1.jpg,a\x00b\xffc\r\n"
    assert pairs_of(index_of(table(tmp_path, content))) == expected
    windows = "image;caption\r\n0.jpg;Café für alle\r\n".encode("cp1252")
    assert pairs_of(index_of(table(tmp_path, windows, name="windows.csv"))) == {"0.jpg": ["Café für alle"]}
    utf16 = "image\tcaption\n0.jpg\tüber\n".encode("utf-16")
    assert pairs_of(index_of(table(tmp_path, utf16, name="excel.txt"))) == {"0.jpg": ["über"]}


def test_captions_are_cleaned_or_skipped_by_rule(tmp_path):
    rows = [
        "image,caption",
        "0.jpg,",
        '1.jpg,"  two\n lines\t\x1b[31m "',
        f"2.jpg,{'long ' * 200_000}",
        "3.jpg,[red]שלום[/]",
    ]
    index = index_of(table(tmp_path, "\n".join(rows)))
    pairs = pairs_of(index)
    assert index.facts.skipped == {"no caption": 1}
    assert pairs["1.jpg"] == ["two lines [31m"] and pairs["3.jpg"] == ["[red]שלום[/]"]
    assert len(pairs["2.jpg"][0]) <= 10_000


def test_json_lines_with_other_keys(tmp_path):
    lines = "\n".join(json.dumps({"image": f"{number}.jpg", "caption": [f"a {number}"]}) for number in range(3))
    assert pairs_of(index_of(table(tmp_path, lines, name="x.jsonl"))) == {f"{n}.jpg": [f"a {n}"] for n in range(3)}


def test_pictures_are_looked_for_beside_and_below_and_where_told(tmp_path):
    files.write_pictures(tmp_path / "elsewhere", ["0.jpg", "1.jpg"])
    (tmp_path / "lists").mkdir()
    path = tmp_path / "lists" / "data.csv"
    path.write_text("image,caption\n0.jpg,a dog\n1.jpg,a cat\nsub/2.jpg,a cow\n")
    assert index_of(path).facts.roots == [str(tmp_path / "elsewhere")]
    files.write_pictures(tmp_path / "far/away", ["0.jpg", "1.jpg", "sub/2.jpg"])
    index = index_of(path, image_root=str(tmp_path / "far/away"))
    assert index.facts.missing == 0 and index.facts.roots == [str(tmp_path / "far/away")]


def table_of(place, names):
    path = place / "list.csv"
    path.write_text("\n".join(["image,caption", *(f"{name},thing {number}" for number, name in enumerate(names))]))
    return path


def test_windows_paths_are_read_on_every_system(tmp_path):
    files.write_pictures(tmp_path, ["0.jpg", "pics/1.jpg", "pics/more/2.jpg"])
    index = index_of(table_of(tmp_path, ["0.jpg", "pics\\1.jpg", "pics\\more\\2.jpg"]))
    assert_pictures_are_theirs(index, range(3))
    assert index.facts.notes == ["Windows paths: backslashes read as slashes"]


@pytest.mark.skipif(os.name == "nt", reason="there a backslash is no part of a name")
def test_a_backslash_in_a_name_that_exists_is_kept(tmp_path):
    files.write_pictures(tmp_path, ["a\\0.jpg", "a\\1.jpg"])
    index = index_of(table_of(tmp_path, ["a\\0.jpg", "a\\1.jpg"]))
    assert_pictures_are_theirs(index, range(2))
    assert index.facts.notes == []


@pytest.mark.parametrize(
    ("old", "home"),
    [
        ("/home/someone/data/pics/{}.jpg", "/home/someone/data/"),
        ("C:\\Users\\x\\pics\\{}.jpg", "C:/Users/x/"),
        ("\\\\server\\share\\pics\\{}.jpg", "//server/share/"),
        ("/somewhere/else/{}.jpg", "/somewhere/else/"),
    ],
)
@pytest.mark.parametrize("root", [None, "elsewhere"])
def test_absolute_paths_of_another_computer(tmp_path, old, home, root):
    place = tmp_path / (root or "here")
    files.write_pictures(place, [f"pics/{number}.jpg" for number in range(3)])
    (tmp_path / "here").mkdir(exist_ok=True)
    if root and "pics" not in old:
        place = place / "pics"
    table = table_of(tmp_path / "here", [old.format(number) for number in range(3)])
    index = index_of(table, image_root=str(place) if root else None)
    assert_pictures_are_theirs(index, range(3))
    assert index.facts.notes[-1] == f"the paths are from another computer: found here without {home}"


def test_the_longest_tail_that_exists_is_taken(tmp_path):
    files.write_pictures(tmp_path, ["a/b/0.jpg", "a/c/0.jpg", "b/0.jpg"])
    index = index_of(table_of(tmp_path, ["/x/a/b/0.jpg", "/x/a/c/0.jpg"]))
    assert list(pairs_of(index)) == ["a/b/0.jpg", "a/c/0.jpg"]


def test_a_shortened_path_never_leaves_its_root(tmp_path):
    files.write_pictures(tmp_path, ["secret.jpg", "data/0.jpg", "data/1.jpg", "data/2.jpg"])
    good = [f"/old/home/{number}.jpg" for number in range(3)]
    bad = ["/old/home/../secret.jpg", f"/old/home/{tmp_path}/secret.jpg", "/old/home/a/../../secret.jpg"]
    index = index_of(table_of(tmp_path / "data", [*good, *bad]), image_root=str(tmp_path / "data"))
    assert (index.sizes > 0).tolist() == [True] * 3 + [False] * 3


def test_absolute_paths_that_match_nothing_are_named(tmp_path):
    files.write_pictures(tmp_path, ["0.jpg"])
    with pytest.raises(DataError, match=r"such as /home/someone/p7\.jpg; looked in") as caught:
        index_of(table_of(tmp_path, ["/home/someone/p7.jpg", "/home/someone/p8.jpg"]))
    assert "--image-root DIR" in caught.value.hint


def test_missing_pictures_are_counted_not_fatal(tmp_path):
    index = index_of(table(tmp_path, "image,caption\n0.jpg,a\nnone.jpg,b\n1.jpg,c\n"))
    assert index.facts.missing == 1 and list(index.sizes < 0) == [False, True, False]


# --- bad input ------------------------------------------------------------------------------------------------

BAD = {
    "no caption column": (
        "data.csv",
        "image,width,height\n0.jpg,3,4\n",
        "no caption column.*found image, width",
    ),
    "no picture column": ("data.csv", "who,what\nme,is here to stay\n", "no picture column.*found who, what"),
    "one column": ("data.csv", "0.jpg\n1.jpg\n", "single column"),
    "an empty table": ("data.csv", "", "is empty"),
    "empty captions": ("data.csv", "image,caption\n0.jpg,\n1.jpg,  \n", "has no captions: 2 rows have no caption"),
    "pictures elsewhere": ("data.csv", "image,caption\nx/9.jpg,a\nx/8.jpg,b\n", "none of 2 pictures.*looked in"),
    "web addresses": ("data.csv", "url,caption\nhttp://a/b.jpg,a dog\nhttp://a/c.jpg,a cat\n", "the pictures are URLs"),
    "an unclosed quote": ("data.csv", 'image,caption\n0.jpg,"' + "x" * 17_000_000, "line 2 has more than 8,000,000"),
    "unknown JSON": ("data.json", '{"cats": [1, 2], "dogs": 3}', "unknown JSON layout: an object with cats, dogs"),
    "a list of numbers": ("data.json", "[1, 2, 3]", "a list of 3 items, the first of which is a value of type int"),
    "broken JSON": ("data.json", '{"images": [', "not valid JSON"),
    "deep JSON": ("data.json", "[" * 100_000, "not valid JSON"),
    "JSON without captions": ("data.json", '[{"image": "0.jpg", "size": 3}]', "no key for the caption.*image, size"),
    "a broken line": ("data.jsonl", '{"image": "0.jpg", "text": "a"}\n{"image": \n', "line 2 is not JSON"),
    "a line that is no object": ("data.jsonl", "[1, 2]\n", "a list of 2 items, .*, not an object"),
    "no tar at all": ("data.tar", "hello" * 1000, "is not a tar file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_says_what_was_looked_for_and_found(tmp_path, case):
    name, text, message = BAD[case]
    with pytest.raises(DataError, match=message):
        index_of(table(tmp_path, text, name=name, pictures=2))


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.97])
def test_a_truncated_shard_is_refused(tmp_path, kept):
    path = files.img2dataset(tmp_path, shards=1) / "00000.tar"
    content = path.read_bytes()
    with_members = content[: content.rindex(b"ustar") + 1024]
    path.write_bytes(with_members[: int(len(with_members) * kept)])
    with pytest.raises(DataError, match=r"cut off|damaged"):
        index_of(path)


def test_a_compressed_shard_is_refused(tmp_path):
    import gzip

    path = files.img2dataset(tmp_path, shards=1) / "00000.tar"
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(DataError, match="is compressed") as error:
        index_of(path)
    assert f"tar -xf {path}" in error.value.hint


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("my photos.zip", "unzip -q '{0}/my photos.zip' -d '{0}/my photos'"),
        ("photos.tar.gz", "mkdir {0}/photos && tar -xf {0}/photos.tar.gz -C {0}/photos"),
        ("photos.7z", "7z x {0}/photos.7z -o{0}/photos"),
        ("photos.rar", "unrar x {0}/photos.rar {0}/photos/"),
        ("captions.csv.gz", "gunzip -k {0}/captions.csv.gz"),
    ],
)
def test_archives_are_to_be_unpacked_first(tmp_path, name, command):
    (tmp_path / name).write_bytes(b"PK\x03\x04\0\0")
    with pytest.raises(DataError, match=r"unpack it and pass") as error:
        index_of(tmp_path / name)
    assert error.value.hint == command.format(tmp_path)
    with pytest.raises(DataError, match="contains no pictures") as error:
        index_of(tmp_path)
    assert error.value.hint == command.format(tmp_path)


@pytest.mark.parametrize(
    ("address", "command"),
    [
        ("https://example.org/a/pics.zip?x=1", "curl -L -o pics.zip 'https://example.org/a/pics.zip?x=1'"),
        ("hf://datasets/nlphuji/flickr30k", "hf download nlphuji/flickr30k --repo-type dataset --local-dir flickr30k"),
        (
            "https://huggingface.co/datasets/a/b/tree/main",
            "hf download a/b --repo-type dataset --local-dir b",
        ),
        ("s3://bucket/photos/", "aws s3 cp --recursive s3://bucket/photos/ photos"),
        ("gs://bucket/photos", "gcloud storage cp -r gs://bucket/photos ."),
    ],
)
def test_addresses_are_to_be_downloaded_first(address, command):
    with pytest.raises(DataError, match="download it first") as error:
        index_of(address)
    assert error.value.hint == command


def test_the_name_of_a_hub_dataset_says_how_to_download_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no such file or directory") as error:
        index_of(tmp_path / "nlphuji" / "flickr30k")  # settings hold absolute paths
    assert "hf download nlphuji/flickr30k --repo-type dataset" in error.value.hint


def test_missing_and_empty_places(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        index_of(tmp_path / "nothing.csv")
    with pytest.raises(DataError, match="contains no pictures: found nothing; looked for"):
        index_of(tmp_path)
    files.write_pictures(tmp_path, ["a.jpg", "b.jpg"])
    with pytest.raises(DataError, match="2 pictures and no captions"):
        index_of(tmp_path)
    with pytest.raises(DataError, match="a picture, not a list"):
        index_of(tmp_path / "a.jpg")
    files.write_pictures(tmp_path / "album" / "images", ["a.jpg", "b.jpg"])
    with pytest.raises(DataError, match="2 pictures and no captions"):
        index_of(tmp_path / "album")
    assert len(index_of(tmp_path / "album", format="classes")) == 2
    for format in ("sidecar", "imagefolder", "webdataset"):
        with pytest.raises(DataError, match=f"what --format {format} needs"):
            index_of(files.classes(tmp_path / format), format=format)


def test_two_lists_of_captions_are_for_the_user_to_choose_from(tmp_path):
    table(tmp_path, "image,caption\n0.jpg,a\n", name="one.csv")
    table(tmp_path, "image,caption\n0.jpg,b\n", name="two.csv")
    with pytest.raises(DataError, match=r"several files could hold the captions: one.csv, two.csv"):
        index_of(tmp_path)


def test_pictures_of_every_suffix_decode(tmp_path):
    """What `is_picture` takes, `open_picture` opens."""
    from clipctl.data.decoding import open_picture
    from clipctl.data.formats.rows import PICTURE_SUFFIXES

    for suffix in PICTURE_SUFFIXES:
        path = tmp_path / f"picture{suffix}"
        files.pixels(1).save(path)
        assert np.asarray(open_picture(path.read_bytes(), 30)).shape == (36, 48, 3)
        assert Image.open(path).size == (48, 36)


# --- what people really have ----------------------------------------------------------------------------------


def test_another_dataset_beside_it_lends_no_pictures(tmp_path):
    """Two holidays with the same camera names; the first lacks a picture, the second has all."""
    for name, count, first in (("h1", 39, 0), ("h2", 40, 100)):
        files.write_pictures(tmp_path / name / "images", [])
        for number in range(count):
            (tmp_path / name / "images" / f"{number}.jpg").write_bytes(files.jpeg(first + number))
    (tmp_path / "h1" / "c.csv").write_text("\n".join(["image,caption", *(f"{n}.jpg,thing {n}" for n in range(40))]))
    index = index_of(tmp_path / "h1")
    assert index.facts.roots == [str(tmp_path / "h1/images")] and index.facts.missing == 1
    assert read_part(*index.extent(5, 10**6)) == files.jpeg(5)


def test_the_same_name_on_two_sides_is_two_pictures(tmp_path):
    for side, first in (("train", 0), ("val", 50)):
        files.write_pictures(tmp_path / side, [])
        images, annotations = [], []
        for number in range(3):
            (tmp_path / side / f"{number}.jpg").write_bytes(files.jpeg(first + number))
            images.append({"id": number, "file_name": f"{number}.jpg"})
            annotations.append({"image_id": number, "caption": f"{side} {number}"})
        (tmp_path / "annotations").mkdir(exist_ok=True)
        document = {"images": images, "annotations": annotations}
        (tmp_path / "annotations" / f"captions_{side}.json").write_text(json.dumps(document))
    index = index_of(tmp_path)
    assert [index.captions(picture) for picture in (0, 3)] == [["train 0"], ["val 0"]]
    assert_pictures_are_theirs(index, [0, 1, 2, 50, 51, 52])


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_files_for_each_side(tmp_path, suffix):
    files.write_pictures(tmp_path, [f"{number}.jpg" for number in range(9)])
    for number, side in enumerate(("train", "val", "test")):
        names = [f"{3 * number + row}.jpg" for row in range(3)]
        if suffix == "csv":
            lines = ["image,caption", *(f"{name},a {name}" for name in names)]
        else:
            lines = [json.dumps({"image": name, "text": f"a {name}"}) for name in names]
        (tmp_path / f"{side}.{suffix}").write_text("\n".join(lines))
    assert index_of(tmp_path).facts.side_counts == [0, 3, 3, 3]


def test_split_words_with_more_to_them(tmp_path):
    rows = "image,split,caption\n0.jpg,train,a\n1.jpg,test-dev,b\n2.jpg,extra,c\n3.jpg,val_seen,d\n"
    index = index_of(table(tmp_path, rows))
    assert list(sides_of(index).values()) == [TRAIN, TEST, UNSAID, VAL]
    assert "extra counted as train" in index.facts.words


def test_a_folder_of_trains_is_a_class(tmp_path):
    for label in ("bus", "train"):
        files.write_pictures(tmp_path / label, ["0.jpg", "1.jpg"])
    files.write_pictures(tmp_path, ["loose.jpg"])
    (tmp_path / "linked").symlink_to(tmp_path / "bus", target_is_directory=True)
    index = index_of(tmp_path)
    assert pairs_of(index)["train/0.jpg"] == ["a photo of a train"]
    assert index.facts.skipped == {"no caption": 1} and index.facts.side_counts == [4, 0, 0, 0]


def test_a_quotation_mark_in_a_tab_separated_caption_is_one(tmp_path):
    rows = 'image\tcaption\n0.jpg\t"Stop signs\n1.jpg\ta cat\n2.jpg\t"ab\n'
    assert pairs_of(index_of(table(tmp_path, rows, name="x.tsv")))["1.jpg"] == ["a cat"]
    quoted = 'image\tcaption\n0.jpg\t"two\nlines"\n1.jpg\t"a ""cat"""\n'
    pairs = pairs_of(index_of(table(tmp_path, quoted, name="y.tsv")))
    assert pairs == {"0.jpg": ["two lines"], "1.jpg": ['a "cat"']}


def test_separators_in_a_caption_that_is_not_last(tmp_path):
    index = index_of(table(tmp_path, "image,caption,split\n0.jpg,a dog, a cat, a cow,val\n1.jpg,a bird,train\n"))
    assert pairs_of(index) == {"0.jpg": ["a dog, a cat, a cow"], "1.jpg": ["a bird"]}
    assert list(sides_of(index).values()) == [VAL, TRAIN]


def test_what_spreadsheets_and_pandas_write(tmp_path):
    assert pairs_of(index_of(table(tmp_path, "sep=;\nimage;caption\n0.jpg;a dog\n"))) == {"0.jpg": ["a dog"]}
    listed = 'image,captions\n0.jpg,"[\'a dog\', ""a cat\'s""]"\n'
    assert pairs_of(index_of(table(tmp_path, listed, name="p.csv"))) == {"0.jpg": ["a dog", "a cat's"]}


def test_odd_shards(tmp_path):
    samples = [("a.jpg", files.jpeg(1)), ("._a.jpg", b"fork"), ("a.txt", b"one")]
    samples += [("b.gif", files.jpeg(2)), ("b.txt", b"two"), ("c.txt", b"no picture")]
    samples += [("a.jpg", files.jpeg(3)), ("a.txt", b"appended later")]
    index = index_of(files.shard(tmp_path / "x.tar", samples))
    assert [(index.name(n), index.captions(n)) for n in range(len(index))] == [
        ("a.jpg", ["one"]),
        ("b.gif", ["two"]),
        ("a.jpg", ["appended later"]),
    ]
    assert_pictures_are_theirs(index, [1, 2, 3])
    assert index.facts.skipped == {"no picture": 1}


def test_a_stray_text_among_sidecars_and_shards_beside_a_table(tmp_path):
    root = files.sidecars(tmp_path / "side")
    (root / "zzz.txt").write_text("a red thing")
    assert len(index_of(root)) == 4
    path = table(tmp_path / "table", "image,caption\n0.jpg,a dog\n1.jpg,a cat\n")
    files.shard(path.parent / "images.tar", [("0.jpg", files.jpeg(0))])
    assert index_of(path.parent).facts.format == "csv"


def test_metadata_with_absolute_names_and_twice(tmp_path):
    root = files.imagefolder(tmp_path)
    rows = ["file_name,text", *(f"{root}/train/train_{n}.jpg,absolute {n}" for n in range(4))]
    (root / "train" / "metadata.csv").write_text("\n".join(rows))
    lines = [json.dumps({"file_name": f"test_{n}.jpg", "text": f"line {n}"}) for n in range(2)]
    (root / "test" / "metadata.jsonl").write_text("\n".join(lines))
    index = index_of(root)
    assert index.facts.missing == 0 and pairs_of(index)["test/test_0.jpg"] == ["line 0"]


def test_strange_ids_and_names_are_said(tmp_path):
    files.write_pictures(tmp_path, ["0.jpg", "1.jpg"])
    document = {
        "images": [{"id": "7", "file_name": "0.jpg"}, {"id": [1], "file_name": "1.jpg"}],
        "annotations": [{"image_id": 7, "caption": "a dog"}, {"image_id": [1], "caption": "a cat"}],
    }
    (tmp_path / "x.json").write_text(json.dumps(document))
    assert pairs_of(index_of(tmp_path / "x.json")) == {"0.jpg": ["a dog"], "1.jpg": ["a cat"]}
    del document["images"][0]["id"]
    (tmp_path / "y.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match="without file_name or id"):
        index_of(tmp_path / "y.json")
    lines = '{"image": "\\ud800.jpg", "text": "a"}\n{"image": "0.jpg", "text": "b\u2028c"}\n'
    index = index_of(table(tmp_path, lines, name="z.jsonl"))
    assert pairs_of(index) == {"0.jpg": ["b c"]} and index.facts.skipped == {"a name that no file can have": 1}


@pytest.mark.parametrize(
    ("name", "content"), [("x.jsonl", "[" * 200_000), ("x.csv", f"image,caption\n0.jpg,{'[' * 9000}]")]
)
def test_deep_nesting_is_no_obstacle(tmp_path, name, content):
    path = table(tmp_path, content, name=name)
    if name.endswith("csv"):
        assert len(index_of(path)) == 1
    else:
        with pytest.raises(DataError, match="not JSON"):
            index_of(path)


def test_pipes_never_keep_anyone_waiting(tmp_path):
    import os

    path = table(tmp_path, "image,caption\n0.jpg,a\npipe.jpg,b\n1.jpg,c\n")
    os.mkfifo(tmp_path / "pipe.jpg")
    assert len(index_of(path)) == 3
    root = files.sidecars(tmp_path / "side")
    (root / "0001.txt").unlink()
    os.mkfifo(root / "0001.txt")
    assert len(index_of(root)) == 3


def test_what_cannot_be_read_is_bad_data(tmp_path):
    root = files.sidecars(tmp_path / "side")
    (root / "0001.txt").unlink()
    (root / "0001.txt").symlink_to(tmp_path / "nowhere")
    assert len(index_of(root)) == 3
    with pytest.raises(DataError, match=r"cannot be read|no such file"):
        index_of(tmp_path / ("x" * 5000))


def test_json_keys_may_be_several(tmp_path):
    lines = json.dumps({"image": "0.jpg", "alt": "one", "caption": "two"}) + "\n"
    path = table(tmp_path, lines, name="x.jsonl")
    assert pairs_of(index_of(path, caption_column="alt,caption")) == {"0.jpg": ["one", "two"]}


def test_the_format_says_the_separator(tmp_path):
    with pytest.raises(DataError, match="single column"):
        index_of(table(tmp_path, "image,caption\n0.jpg,a\n"), format="pipe")


def test_greek_ends_of_words_are_known(tmp_path):
    assert "ς" in index_of(table(tmp_path, "image,caption\n0.jpg,ΟΔΟΣ\n1.jpg,ΜΑΣ\n")).facts.alphabet


def test_stars_name_shards_too(tmp_path):
    files.img2dataset(tmp_path, shards=3)
    assert len(index_of(f"{tmp_path}/*.tar")) == 12
    with pytest.raises(DataError, match="no such file"):
        index_of(f"{tmp_path}/*.zip")


def test_kinds_that_are_not_read_are_named(tmp_path, without_heif):
    root = files.sidecars(tmp_path / "phone")
    for number in range(3):
        (root / f"IMG_{number}.HEIC").write_bytes(b"heic")
        (root / f"IMG_{number}.txt").write_text("from a phone")
    (root / "a.nef").write_bytes(b"raw")
    index = index_of(root)
    assert len(index) == 4 and index.facts.words.endswith(
        "; not read: 3 HEIC: pip install pillow-heif or save as JPEG, 1 camera raw: save as JPEG"
    )
    only = tmp_path / "only"
    only.mkdir()
    for path in root.glob("IMG_*"):
        path.rename(only / path.name)
    with pytest.raises(DataError, match="no picture can be read: 3 HEIC: pip install pillow-heif"):
        index_of(only)


@pytest.fixture
def heic(without_heif, monkeypatch):
    """A stand-in for pillow-heif, and a file that it reads: a JPEG behind the first box of a HEIC."""

    def register():
        Image.init()
        monkeypatch.setattr(Image, "ID", [*Image.ID, "HEIF"])
        monkeypatch.setitem(Image.OPEN, "HEIF", (lambda file, _: Image.open(io.BytesIO(file.read()[12:])), None))

    monkeypatch.setitem(sys.modules, "pillow_heif", SimpleNamespace(register_heif_opener=register))
    return HEIC_BOX + files.jpeg(1)


HEIC_BOX = b"\0\0\0\x0cftypheic"


def test_heic_is_read_if_a_decoder_is_installed(tmp_path, heic):
    assert decoding.open_picture(heic, 30).size == decoding.picture_size(heic) == (48, 36)
    root = files.sidecars(tmp_path / "phone")
    (root / "IMG_1.HEIC").write_bytes(heic)
    (root / "IMG_1.txt").write_text("from a phone")
    assert len(index_of(root)) == 5 and "not read" not in index_of(root).facts.words


def test_heic_is_known_by_its_content(without_heif):
    with pytest.raises(BadPictureError, match="HEIC: pip install pillow-heif or save as JPEG"):
        decoding.open_picture(HEIC_BOX + files.jpeg(1), 30)


def test_hints_lead_to_what_was_meant(tmp_path):
    files.sidecars(tmp_path / "holiday")
    with pytest.raises(DataError) as error:
        index_of(tmp_path / "holyday")
    assert error.value.hint == "did you mean holiday?"
    with pytest.raises(DataError) as error:
        index_of(tmp_path / "sintetic")
    assert error.value.hint == "did you mean synthetic?"
    files.write_pictures(tmp_path / "excel", ["0.jpg"])
    (tmp_path / "excel" / "captions.xlsx").write_bytes(b"PK")
    with pytest.raises(DataError) as error:
        index_of(tmp_path / "excel")
    assert "save it as CSV" in error.value.hint
