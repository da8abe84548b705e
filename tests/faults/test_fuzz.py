"""Every reader of what may come from elsewhere, with mutated files (see fuzz.py) and with documents of any shape."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clipctl.config.layers import from_dict
from clipctl.data import tokenizers
from clipctl.errors import ClipctlError
from clipctl.hardware.profile import SCHEMA, Profile
from clipctl.runs.rundir import RunDir
from clipctl.training.course import Course
from tests.faults.fuzz import LIMIT_BYTES, LIMIT_S, READERS, Reader, fuzz, mutate
from tests.faults.trainer import finish
from tests.launcher import launch

TRIES = 200


@pytest.mark.parametrize("kind", READERS)
def test_mutated_files_are_read_or_refused_in_words(kind):
    code, stdout, stderr = finish(launch("tests.faults.fuzz", kind, "--count", str(TRIES)))
    assert code == 0, stderr
    found = json.loads(stdout)
    assert not found["findings"], found["findings"][:3]
    assert found["tries"] == TRIES and found["slowest_s"] < LIMIT_S and found["memory_bytes"] < LIMIT_BYTES


def test_a_reader_that_fails_is_noticed(monkeypatch, tmp_path):
    """The measurement itself."""
    import tests.faults.fuzz as module

    def bad(home):
        def read(directory):
            if (directory / "file").read_bytes() != b"seed":
                (tmp_path / "outside").write_text("x")
                raise KeyError("x")

        return module.Reader("file", [b"seed"], read)

    monkeypatch.setitem(READERS, "bad", bad)
    found = fuzz("bad", 20, 0)["findings"]
    assert found and any("outside" in one["problem"] for one in found)


def test_a_seed_that_is_refused_before_it_is_parsed_is_noticed(tmp_path):
    reader = Reader("file", [b"{}"], lambda directory: False)
    with pytest.raises(AssertionError, match="refused before it is parsed"):
        reader.check_seeds(tmp_path)


def test_mutations_differ():
    import random

    rng = random.Random(0)
    changed = {mutate(b'{"a": [1, 2, {"b": "c"}]}', rng) for _ in range(100)}
    assert len(changed) > 60


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


def document(*keys):
    """Objects with some of these keys, whatever their values are."""
    return st.dictionaries(st.sampled_from(keys), values)


at_random = settings(max_examples=TRIES, deadline=None, suppress_health_check=list(HealthCheck))


@at_random
@given(
    document("evaluated_epochs", "evaluation", "best", "epoch_window", "skipped_in_a_row", "bad_pictures", "baseline")
)
def test_any_course(facts):
    try:
        Course.from_dict(facts)
    except (KeyError, TypeError, ValueError, AttributeError):
        return
    assert facts["evaluated_epochs"] >= 0


@at_random
@given(document("kind", "alphabet", "pieces", "definition", "context") | values)
def test_any_tokenizer(facts):
    with pytest.raises(ClipctlError):
        tokenizers.from_dict(facts)


@at_random
@given(document("preset", "model", "train", "optim", "data", "runtime", "train.epochs", "data.source"))
def test_any_settings(facts):
    try:
        from_dict(facts, "a test")
    except ClipctlError as error:
        assert all(len(str(problem)) < 500 for problem in error.problems)


@at_random
@given(
    document("state", "attempt", "step", "total_steps", "pid", "host", "progress", "heartbeat_s", "lost_rows") | values
)
def test_any_status(tmp_path_factory, facts):
    run = RunDir(tmp_path_factory.getbasetemp())
    run.status_file.write_text(json.dumps(facts))
    assert run.status() is None  # a time of its process is missing


@at_random
@given(document("machine", "devices", "rates", "steps", "attention", "checked", "benched_s") | values)
def test_any_profile(facts):
    if isinstance(facts, dict):
        facts["schema"] = SCHEMA
    with pytest.raises(ValueError):
        Profile.parse(facts)
