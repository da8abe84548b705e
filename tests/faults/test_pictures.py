"""Trainings on files: bad pictures among good ones, stops and resumes, data that change. Real processes."""

import io
import json
import os
import signal
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from clipctl.cli.app import app
from clipctl.runs.metrics import read_rows
from clipctl.runs.rundir import RunDir
from tests.conftest import MICRO
from tests.data import files
from tests.faults.trainer import digest, finish, start, wait_for_epochs

MICRO_SETTINGS = {key: value for key, value in MICRO.items() if key != "data.source"}
SETTINGS = [f"--set={key}={value}" for key, value in MICRO_SETTINGS.items()]


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    """One application directory for all of these."""
    before = os.environ["CLIPCTL_HOME"]
    os.environ["CLIPCTL_HOME"] = str(tmp_path_factory.mktemp("home"))
    yield
    os.environ["CLIPCTL_HOME"] = before


def train(root, name, *arguments, workers=0):
    code, stdout, stderr = finish(start(root, *arguments, *SETTINGS, "--json", "--name", name, workers=workers))
    return code, json.loads(stdout) if code == 0 else None, stderr


# --- F14 ------------------------------------------------------------------------------------------------------


def saved(picture, format, **options):
    buffer = io.BytesIO()
    picture.save(buffer, format, **options)
    return buffer.getvalue()


def odd_pictures():
    """Files by name: those that must be used, and those that cannot be, with the reason."""
    exif = Image.Exif()
    exif[0x0112] = 6
    animated = [files.pixels(901), files.pixels(902)]
    good = {
        "cmyk.jpg": saved(files.pixels(900).convert("CMYK"), "JPEG"),
        "sixteen.png": saved(Image.fromarray(np.full((36, 48), 40_000, dtype=np.uint16)), "PNG"),
        "palette.png": saved(files.pixels(903).quantize(16), "PNG"),
        "animated.gif": saved(animated[0], "GIF", save_all=True, append_images=animated[1:]),
        "rotated.jpg": saved(files.pixels(904), "JPEG", exif=exif),
        "png_called.jpg": saved(files.pixels(905), "PNG"),
        "transparent.png": saved(files.pixels(906).convert("RGBA"), "PNG"),
    }
    bad = {
        "cut.jpg": (files.jpeg(907)[:-300], "truncated"),
        "empty.jpg": (b"", "empty"),
        "bomb.png": (files.bomb(50_000), "more than 150 megapixels"),
        "text.jpg": (b"<html>not found</html>", "not a picture"),
        "missing.jpg": (None, "missing"),
        "directory.jpg": (..., "a directory"),
    }
    return good, bad


def write_folder(root):
    files.write_pictures(root, [f"{number:03d}.jpg" for number in range(200)])
    rows = ["image,split,caption", *(f"{n:03d}.jpg,{'val' if n % 10 == 0 else 'train'},thing {n}" for n in range(200))]
    good, bad = odd_pictures()
    for name, content in good.items():
        (root / name).write_bytes(content)
    for name, (content, _) in bad.items():
        if content is ...:
            (root / name).mkdir()
        elif content is not None:
            (root / name).write_bytes(content)
    rows += [f"{name},train,odd {name}" for name in (*good, *bad)]
    (root / "captions.csv").write_text("\n".join(rows) + "\n")
    return {name: reason for name, (_, reason) in bad.items()}


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("odd")
    return root, write_folder(root)


def test_every_bad_picture_is_counted_and_none_is_fatal(tmp_path, odd_folder):
    folder, reasons = odd_folder
    code, result, stderr = train(tmp_path, "one", str(folder))
    assert code == 0, stderr
    assert {path.rsplit("/", 1)[-1]: reason for path, reason in result["bad_pictures"].items()} == reasons
    assert (
        stderr.count("be used") == 1
        and "6 pictures could not be used" in stderr
        and "1 truncated" in stderr
        and "cut.jpg (truncated)" in stderr
    )
    events = [row for row in read_rows(RunDir(tmp_path / "one").metrics_file) if row.get("event") == "bad_picture"]
    assert len(events) == 6 and events[0]["counts"] == {"missing": 1}  # the missing one was known before
    assert events[-1]["counts"] == dict(Counter(reasons.values()))
    watched = CliRunner().invoke(app, ["monitor", str(tmp_path / "one"), "--json"])
    (alert,) = [one for one in json.loads(watched.stdout)["alerts"] if one["name"] == "bad_pictures"]
    assert "6 pictures cannot be used: 1 missing" in alert["what"]
    steps = result["steps"]
    assert train(tmp_path, "two", str(folder), workers=2)[0] == 0
    assert digest(RunDir(tmp_path / "one"), steps) == digest(RunDir(tmp_path / "two"), steps)


def test_too_many_bad_pictures_end_the_run_with_their_list(tmp_path):
    folder = tmp_path / "data"
    files.write_pictures(folder, [f"{number}.jpg" for number in range(60)])
    sides = ["val" if number < 6 else "train" for number in range(60)]
    rows = ["image,split,caption", *(f"{number}.jpg,{side},thing {number}" for number, side in enumerate(sides))]
    (folder / "captions.csv").write_text("\n".join(rows) + "\n")
    for number in (10, 20, 30, 40):
        (folder / f"{number}.jpg").write_bytes(files.jpeg(number)[:-300])
    code, _, stderr = train(tmp_path, "run", str(folder))
    assert code == 2 and "Traceback" not in stderr
    assert "4 of 60 pictures cannot be used, more than 5%: 4 truncated" in stderr
    assert all(f"{number}.jpg (truncated)" in stderr for number in (10, 20, 30, 40))
    assert "data inspect DATA --deep" in stderr


# --- exact resume ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Pictures of many shapes, two captions each, some of them equal."""
    root = tmp_path_factory.mktemp("photos")
    rows = ["image,caption"]
    for number in range(40):
        (root / f"{number}.jpg").write_bytes(files.jpeg(number, width=40 + number, height=60 - number // 2))
        rows += [f"{number}.jpg,thing {number // 3} on the left", f"{number}.jpg,a thing called {number}"]
    (root / "captions.csv").write_text("\n".join(rows) + "\n")
    return root


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return files.img2dataset(tmp_path_factory.mktemp("shards"), shards=4, pairs=10)


STEPS = 48


@pytest.mark.parametrize(
    ("source", "cache", "workers", "more"),
    [
        ("photos", "ram", 0, []),
        ("photos", "disk", 2, ["--tokenizer", "bpe:300"]),
        ("shards", "off", 1, ["--set=data.jitter=0.3"]),
    ],
)
def test_a_stopped_training_on_files_goes_on_to_the_same_weights(request, tmp_path, source, cache, workers, more):
    data = str(request.getfixturevalue(source))
    settings = [data, *SETTINGS, "--set=train.epochs=16", "--set=train.batch_size=12", "--set=save.every=1e", *more]
    code, _, stderr = finish(start(tmp_path, *settings, "--name", "unbroken"))
    assert code == 0, stderr
    process = start(tmp_path, *settings, "--cache", cache, "--name", "broken", workers=workers)
    run = RunDir(tmp_path / "broken")
    wait_for_epochs(run, 2)
    os.killpg(process.pid, signal.SIGTERM)
    assert finish(process)[0] == 143
    code, _, stderr = finish(start(tmp_path, "--resume", "broken", "--cache", "auto", workers=0))
    assert code == 0, stderr
    assert digest(run, STEPS) == digest(RunDir(tmp_path / "unbroken"), STEPS)


# --- F16 ------------------------------------------------------------------------------------------------------


def change_caption(root):
    path = root / "captions.csv"
    path.write_text(path.read_text().replace("called 7", "called seven"))


def change_picture(root):
    (root / "7.jpg").write_bytes(files.jpeg(777))


def remove_picture(root):
    (root / "7.jpg").unlink()


@pytest.mark.parametrize("change", [change_caption, change_picture, remove_picture])
def test_data_that_changed_are_named_and_refused(tmp_path, photos, change):
    import shutil

    data = tmp_path / "data"
    shutil.copytree(photos, data)
    assert train(tmp_path, "run", str(data))[0] == 0
    change(data)
    code, _, stderr = finish(start(tmp_path, "--resume", "run", "--epochs", "3"))
    assert code == 2 and f"{data} has changed since the run was stopped" in stderr
    code, _, stderr = finish(start(tmp_path, "--resume", "run", "--epochs", "3", "--allow-change"))
    assert code == 0, stderr


def test_data_may_move(tmp_path, photos):
    import shutil

    shutil.copytree(photos, tmp_path / "old")
    assert train(tmp_path, "run", str(tmp_path / "old"))[0] == 0
    (tmp_path / "old").rename(tmp_path / "new")
    code, _, stderr = finish(start(tmp_path, str(tmp_path / "new"), "--resume", "run", "--epochs", "3"))
    assert code == 0, stderr
