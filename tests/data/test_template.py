"""clipctl data template, as it is typed."""

import csv
import io
import json

import pytest
from typer.testing import CliRunner

from clipctl.cli.app import app
from clipctl.data.template import caption_from
from tests.data import files


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CLIPCTL_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)


def invoke(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def template(*arguments):
    done = invoke("data", "template", *arguments)
    assert done.exit_code == 0, done.output
    return list(csv.reader(io.StringIO(done.stdout))), done.stderr


def test_one_row_per_picture_to_fill_in(tmp_path):
    files.write_pictures(tmp_path / "photos", ["a, b.jpg", "more/golden_retriever.png", "IMG_1234.jpg"])
    (tmp_path / "photos" / "notes.doc").write_text("no picture")
    rows, prose = template("photos")
    paths = ["photos/IMG_1234.jpg", "photos/a, b.jpg", "photos/more/golden_retriever.png"]
    assert rows == [["image", "caption"], *([path, ""] for path in paths)]
    assert "3 pictures, 3 without a caption" in prose
    rows, prose = template("photos", "--from-names")
    assert [caption for _, caption in rows[1:]] == ["", "", "golden retriever"] and "2 without" in prose
    document = json.loads(invoke("data", "template", "photos", "--json").stdout)
    assert document["schema"] == "clipctl.data-template/1" and document["rows"][0] == {"image": paths[0], "caption": ""}


@pytest.mark.parametrize(
    ("name", "caption"),
    [
        ("two-red_apples 03.jpg", "two red apples"),
        ("x/blackCat.jpeg", "black cat"),
        ("Bäume im Wald.jpg", "bäume im wald"),
        ("1000268201_693b08cb0e.jpg", ""),
        ("DSC00042.jpg", ""),
        ("Screenshot 2024-01-02 at 10.11.12.png", ""),
    ],
)
def test_captions_from_names(name, caption):
    assert caption_from(name) == caption


def test_without_pictures_it_refuses(tmp_path):
    (tmp_path / "empty").mkdir()
    for place, words in (("empty", "contains no pictures"), ("nowhere", "no such file or directory")):
        done = invoke("data", "template", place)
        assert done.exit_code == 2 and words in done.stderr and not done.stdout


def test_names_that_would_harm_a_spreadsheet_or_a_terminal(tmp_path, monkeypatch):
    files.write_pictures(tmp_path / "photos", ["=cmd.jpg", "\x1b[2J.jpg"])
    monkeypatch.chdir(tmp_path / "photos")
    rows, prose = template(".")
    assert rows[1:] == [["./=cmd.jpg", ""]] and "1 picture left out" in prose


def test_a_half_filled_template_trains(tmp_path):
    files.write_pictures(tmp_path / "photos", [f"{number}.jpg" for number in range(12)])
    done = invoke("train", "photos")
    assert done.exit_code == 2 and "12 pictures and no captions" in done.stderr
    assert f"clipctl data template {tmp_path}/photos > captions.csv" in done.stderr.replace("\n", " ")
    rows, _ = template("photos")
    (tmp_path / "captions.csv").write_text("\n".join(f"{path},{caption}" for path, caption in rows))
    done = invoke("train", "captions.csv", "--dry-run")
    assert done.exit_code == 2 and "12 rows have no caption" in done.stderr and "fill in" in done.stderr
    filled = [rows[0], *([path, f"thing {n}" if n < 8 else ""] for n, (path, _) in enumerate(rows[1:]))]
    (tmp_path / "captions.csv").write_text("\n".join(f"{path},{caption}" for path, caption in filled))
    done = invoke("train", "captions.csv", "--dry-run", "--val-fraction", "0.3")
    assert done.exit_code == 0, done.output
    assert "4 rows have no caption: skipped" in done.output
