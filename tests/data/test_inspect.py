"""clipctl data inspect, as it is typed."""

import json
import re
import shlex

import pytest
from PIL import Image
from typer.testing import CliRunner

from clipctl.cli.app import app
from tests.data import files


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path / "home"))


def inspect(*arguments):
    return CliRunner().invoke(app, ["data", "inspect", *map(str, arguments)])


def document(*arguments):
    done = inspect(*arguments, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == (0 if found["ready"] else 3), done.output
    return found


@pytest.fixture
def folder(tmp_path):
    """Thirty pictures with two captions, two of them equal, one broken, one missing."""
    root = tmp_path / "photos"
    files.write_pictures(root, [f"{number}.jpg" for number in range(29)])
    (root / "4.jpg").write_bytes((root / "3.jpg").read_bytes())
    (root / "7.jpg").write_bytes(files.jpeg(7)[:-200])
    rows = ["image,caption"]
    for number in range(30):
        rows += [f"{number}.jpg,a picture of thing {number}", f"{number}.jpg,thing again"]
    (root / "list.csv").write_text("\n".join(rows) + "\n")
    return root


def test_what_it_says(folder):
    found = document(folder)
    assert found["schema"] == "clipctl.data-inspect/1"
    assert found["understood"] == [
        "csv: list.csv: separated by commas, pictures from column image, captions from column caption"
    ]
    assert (found["pictures"], found["captions"]) == (30, 58)  # the captions of a missing picture do not count
    assert found["captions_per_picture"] == {"least": 2, "median": 2, "most": 2}
    assert found["train_pictures"] + found["held_out_pictures"] == 29
    assert found["equal_captions"] == 29 and found["equal_pictures"] == 2 and found["compared_by"] == "bytes"
    assert found["leaked_captions"] == found["held_out_pictures"] and found["leaked_pictures"] == 0
    assert found["caption_characters"]["least"] == len("thing again")
    assert found["captions_cut"] == 0 and found["context"] == 77 and found["distinct_words"] == 35
    assert found["loss_floor"] > 0 and found["decode_images_per_s"] > 0
    assert found["model_images_per_s"] is None  # the recipe has not chosen a model yet
    assert document(folder, "--preset", "tiny")["model_images_per_s"] > 0
    assert found["bad"][f"{folder}/29.jpg"] == "missing"


def test_pictures_on_both_sides_are_warned_about(folder):
    table = folder / "list.csv"
    found = document(table, "--val", table)
    assert found["leaked_pictures"] > 20 and any("scores will look too good" in note for note in found["notes"])


def test_deep_looks_at_every_picture(folder):
    found = document(folder, "--deep")
    assert found["decoded"] == 29 and found["bad_by_reason"] == {"missing": 1, "truncated": 1}
    assert found["equal_pictures"] == 2
    assert found["width_px"] == {"least": 48, "median": 48, "most": 48}


def test_for_people(folder):
    done = inspect(folder, "--deep", "--max-bad", "10%")
    assert done.exit_code == 0
    for text in ("separated by commas", "to train on", "2 per picture", "7.jpg (truncated)", "1 missing", "loss floor"):
        assert text in done.stdout


def test_more_than_a_few_bad_ones_are_shown_not_refused(folder):
    for number in range(10, 25):
        (folder / f"{number}.jpg").unlink()
    found = document(folder)
    assert found["bad_by_reason"]["missing"] == 16


def test_three_samples_shortened(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("COLUMNS", "120")
    (folder / "list.csv").write_text(
        "\n".join(["image,caption", *(f"{n}.jpg,word{' and word' * 20}" for n in range(9))])
    )
    samples = document(folder)["samples"]
    assert len(samples) == 3 and samples[0]["caption"] == f"word{' and word' * 20}"
    shown = re.findall(r"photos/\d.jpg: (.*?) *$", inspect("photos").stdout, re.MULTILINE)
    assert len(shown) == 3 and all(one.endswith("…") and len(one) <= 60 for one in shown)


def test_the_last_line_is_the_command_to_train_with(folder):
    (folder / "more.yaml").write_text("train: {epochs: 3}")
    flags = [
        "--max-bad",
        "10%",
        "--caption-column",
        "caption",
        "--config",
        folder / "more.yaml",
        "--set",
        "data.flip=false",
    ]
    done = inspect(folder, *flags)
    command = f"clipctl train {folder} --config {folder}/more.yaml --caption-column caption --max-bad 10%"
    command += " --set data.flip=false"
    assert done.exit_code == 0 and done.stdout.splitlines()[-1] == f"ready: {command}"
    arguments = shlex.split(command)[1:]
    assert CliRunner().invoke(app, [*arguments, "--dry-run"]).exit_code == 0


def all_broken_on_one_side(folder):
    rows = [f"{number}.jpg,{'val' if number in (7, 8) else 'train'},thing {number}" for number in range(29)]
    (folder / "list.csv").write_text("\n".join(["image,split,caption", *rows]))
    return [folder]


NOT_READY = {
    "too many bad": (lambda folder: [folder], "2 of 30 pictures cannot be used, more than 5%: 1 missing, 1 truncated"),
    "missing": (lambda folder: [(folder / "7.jpg").unlink() or folder], "--image-root DIR if they are elsewhere"),
    "too few held out": (lambda folder: [folder, "--val-fraction", "0.01", "--max-bad", "1"], "0 held-out pairs"),
    "held out and broken": (all_broken_on_one_side, "too few of the 2 held-out pictures can be used: 1 truncated"),
    "too few in all": (lambda folder: ["synthetic:3"], "ask for more pairs"),
}


@pytest.mark.parametrize("case", NOT_READY)
def test_the_verdict_is_that_of_train(folder, tmp_path, case):
    make, words = NOT_READY[case]
    arguments = [*map(str, make(folder)), "--tokenizer", "words"]
    done = inspect(*arguments)
    assert done.exit_code == 3 and done.stdout.splitlines()[-1].startswith("not ready: ") and words in done.stdout
    found = document(*arguments)
    assert not found["ready"] and len(found["problems"]) == 1 and words in found["problems"][0]
    settings = ["--preset", "tiny", "--steps", "40", "--runs-dir", str(tmp_path / "runs")]
    refused = CliRunner().invoke(app, ["train", *arguments, *settings])
    assert refused.exit_code == 2 and words in refused.stderr


def test_equal_captions_are_normal_in_class_folders(tmp_path):
    files.write_pictures(
        tmp_path / "photos", [f"{name}/{number}.jpg" for name in ("cat", "dog") for number in range(9)]
    )
    done = inspect(tmp_path / "photos")
    assert done.exit_code == 0 and "classes     2" in done.stdout
    assert "0 pictures occur more than once" in done.stdout and "loss floor" not in done.stdout
    planned = CliRunner().invoke(app, ["train", str(tmp_path / "photos"), "--dry-run"])
    assert planned.exit_code == 0 and "held-out captions also belong" not in planned.output


@pytest.mark.parametrize("name", ["sheet.png", "sheet.jpg"])
def test_a_contact_sheet(folder, tmp_path, name):
    assert inspect(folder, "--max-bad", "10%", "--sheet", tmp_path / name).exit_code == 0
    width, height = Image.open(tmp_path / name).size
    assert width == 1058 and height > 900


def test_a_sheet_of_another_kind_is_refused(folder, tmp_path):
    done = inspect(folder, "--sheet", tmp_path / "sheet.xyz")
    assert done.exit_code == 2 and ".png" in done.stderr


def test_hostile_names_are_printed_escaped(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    root = tmp_path / "photos"
    files.write_pictures(root, ["0.jpg", "1.jpg", "2.jpg", "3.jpg"])
    rows = [
        "image,\x1b[31mcaption,caption",
        *(f"{number}.jpg,x,[red]{number}" for number in range(4)),
        "\x1b[2J.jpg,x,y",
    ]
    (root / "list.csv").write_text("\n".join(rows))
    done = inspect(root, "--caption-column", "\x1b[31mcaption")
    assert done.exit_code == 3, done.output
    assert "\x1b" not in done.stdout and "\\x1b[31mcaption" in done.stdout and "\\x1b[2J.jpg" in done.stdout


def test_drawn_pictures_too():
    found = document("synthetic", "--deep")
    assert found["pictures"] == found["decoded"] == 240 and found["equal_pictures"] == 0 and found["bad"] == {}


BAD_INPUT = {
    "nothing there": (lambda root: root / "nothing", ["no such file or directory"]),
    "no pictures": (lambda root: (root / "x").mkdir() or root / "x", ["contains no pictures", "looked for"]),
    "no caption column": (
        lambda root: write(root, "image,width\n0.jpg,3\n1.jpg,4\n"),
        ["no caption column", "found image, width", "--caption-column"],
    ),
    "empty captions": (
        lambda root: write(root, "image,caption\n0.jpg,\n1.jpg,\n"),
        ["no captions", "--caption-column"],
    ),
    "missing pictures": (
        lambda root: write(root, "image,caption\na/0.jpg,b\na/1.jpg,c\n"),
        ["none of 2 pictures", "looked in", "--image-root"],
    ),
    "other JSON": (lambda root: write(root, '{"cats": 1}', "x.json"), ["unknown JSON layout", "cats"]),
    "a cut shard": (lambda root: cut_shard(root), ["cut off or damaged after 000000"]),
}


def write(root, text, name="x.csv"):
    files.write_pictures(root, ["0.jpg", "1.jpg"])
    (root / name).write_text(text)
    return root / name


def cut_shard(root):
    path = files.img2dataset(root, shards=1) / "00000.tar"
    path.write_bytes(path.read_bytes()[:4000])
    return path


@pytest.mark.parametrize("command", [["data", "inspect"], ["train"]])
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(tmp_path, case, command):
    make, texts = BAD_INPUT[case]
    done = CliRunner().invoke(app, [*command, str(make(tmp_path))])
    assert done.exit_code == 2 and "Traceback" not in done.output
    for text in texts:
        assert text in done.stderr
