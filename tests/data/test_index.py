"""The memory-mapped index: what it holds, when it is built anew, what it costs."""

import os
import pickle

import numpy as np
import pytest

from clipctl.data.formats.rows import Hints
from clipctl.data.index import store
from clipctl.data.index.build import group
from clipctl.data.index.store import open_index
from tests.data import files


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def builds(monkeypatch):
    """How often an index was built."""
    calls = []
    build = store.build

    def counted(*arguments, **named):
        calls.append(1)
        return build(*arguments, **named)

    monkeypatch.setattr(store, "build", counted)
    return calls


@pytest.fixture
def data(tmp_path):
    return files.run_clip_csv(tmp_path / "data")


def opened(path):
    return open_index(str(path), Hints())


def test_it_is_built_once_and_beside_nothing_of_the_users(home, builds, data):
    before = sorted(data.parent.rglob("*"))
    first, second = opened(data), opened(data)
    assert len(builds) == 1 and first.facts == second.facts
    assert sorted(data.parent.rglob("*")) == before
    assert first.path.parent == home / "indexes"


def test_other_ways_of_reading_have_their_own(home, builds, data):
    opened(data)
    open_index(str(data), Hints(caption_column="image_path"))
    assert len(builds) == 2


def rewrite(data):
    data.write_text(data.read_text().replace("number 3", "number 4"))


def add_row(data):
    with data.open("a") as file:
        file.write('images/0.jpg,"A cat again"\n')


def replace_picture(data):
    (data.parent / "images/2.jpg").write_bytes(files.jpeg(99))


def remove_picture(data):
    (data.parent / "images/2.jpg").unlink()


@pytest.mark.parametrize("change", [rewrite, add_row, replace_picture, remove_picture])
def test_a_change_is_noticed_and_changes_the_fingerprint(home, builds, data, change):
    before = opened(data).facts.fingerprint
    change(data)
    assert opened(data).facts.fingerprint != before
    assert len(builds) == 2


def test_a_touch_is_no_change(home, data):
    before = opened(data).facts.fingerprint
    os.utime(data)
    os.utime(data.parent / "images/1.jpg")
    assert opened(data).facts.fingerprint == before


def test_the_fingerprint_does_not_say_where_the_data_lie(home, tmp_path, data):
    before = opened(data).facts.fingerprint
    data.parent.rename(tmp_path / "moved")
    assert opened(tmp_path / "moved" / data.name).facts.fingerprint == before


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"schema": "clipctl.index/1"}', '{"schema": "other"}'])
def test_a_damaged_index_is_built_anew(home, builds, data, damage):
    path = opened(data).path
    (path / "meta.json").write_text(damage)
    assert len(opened(data)) == 4 and len(builds) == 2


@pytest.mark.parametrize("name", ["caption_key.npy", "names.bin", "first.npy"])
def test_an_index_with_a_lost_column_is_built_anew(home, builds, data, name):
    (opened(data).path / name).unlink()
    assert len(opened(data)) == 4 and len(builds) == 2


def test_folders_are_looked_through_again(home, builds, tmp_path):
    root = files.sidecars(tmp_path / "data")
    opened(root)
    opened(root)
    assert len(builds) == 1
    (root / "0001.txt").write_text("a lighthouse")
    assert opened(root).captions(1) == ["a lighthouse"]


def test_indexes_of_data_that_are_gone_are_deleted(home, data, tmp_path):
    path = opened(data).path
    data.unlink()
    opened(files.run_clip_csv(tmp_path / "other"))
    assert not path.exists()


def test_a_home_that_cannot_be_written_is_no_obstacle(home, data):
    home.write_text("a file where the directory should be")
    first, second = opened(data), opened(data)
    assert len(first) == 4 and first.path == second.path


def test_equal_pictures_have_equal_keys(home, data):
    (data.parent / "images/3.jpg").write_bytes((data.parent / "images/0.jpg").read_bytes())
    keys = opened(data).picture_keys
    assert keys[0] == keys[3] and len(np.unique(keys)) == 3


def test_it_pickles_as_a_path_to_what_it_was(home, data):
    """A worker that starts late reads what the trainer reads, though the data have changed since."""
    index = opened(data)
    content, captions = pickle.dumps(index), index.captions(3)
    rewrite(data)
    assert opened(data).captions(3) != captions
    assert len(content) < 1000 and pickle.loads(content).captions(3) == captions


def test_states_before_the_last_are_deleted(home, data):
    paths = [opened(data).path]
    for _ in range(3):
        add_row(data)
        paths.append(opened(data).path)
    assert [path.exists() for path in paths] == [False, False, True, True]


def test_pictures_that_come_later_are_found(home, tmp_path):
    """The second folder of COCO's pictures, unpacked after the first try."""
    root = files.coco(tmp_path / "coco")
    (root / "val2017").rename(tmp_path / "later")
    assert opened(root).facts.missing == 2
    (tmp_path / "later").rename(root / "val2017")
    assert opened(root).facts.missing == 0


def test_a_cut_column_is_built_anew(home, builds, data):
    (opened(data).path / "side.npy").write_bytes(b"")
    assert len(opened(data)) == 4 and len(builds) == 2


def test_grouping_by_hand():
    digests = np.array([[5, 0], [1, 9], [5, 0], [1, 8], [1, 9]], dtype=np.uint64)
    things, first = group(digests)
    assert things.tolist() == [0, 1, 0, 2, 1] and first.tolist() == [0, 1, 3]


def test_two_processes_may_open_at_once(home, data):
    import subprocess
    import sys

    code = (
        "from clipctl.data.index.store import open_index; from clipctl.data.formats.rows import Hints; import sys;"
        "print(len(open_index(sys.argv[1], Hints())))"
    )
    started = [subprocess.Popen([sys.executable, "-c", code, str(data)], stdout=subprocess.PIPE) for _ in range(3)]
    assert [process.communicate()[0].strip() for process in started] == [b"4"] * 3


def test_columns_are_mapped_not_read(home, data):
    index = opened(data)
    columns = (index.sizes, index.row_keys, index.first_captions)
    assert all(isinstance(column.base, np.memmap) for column in columns)
