"""What is kept of a machine, and what is not believed."""

import json
from dataclasses import replace

import pytest

from clipctl.config.sections import ModelConfig
from clipctl.hardware import profile
from clipctl.hardware.profile import (
    DeviceFacts,
    Machine,
    Profile,
    Rates,
    StepSample,
    load_profile,
    now_s,
    update_profile,
)
from clipctl.model.workload import Workload


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


SAVED_S = now_s()


def sample(batch_size=8, step_s=0.5, **others):
    values = {"device": "cpu", "precision": "fp32", "threads": 2, "iqr_s": 0.01, "peak_bytes": None, "saved_s": SAVED_S}
    return StepSample(workload=Workload(ModelConfig(), batch_size, 60).to_dict(), step_s=step_s, **{**values, **others})


def test_what_was_kept_is_found_again():
    rates = [Rates("cpu", "fp32", 2, 150.0, now_s())]
    assert update_profile(lambda kept: kept.with_steps([sample()]).with_rates(rates))
    found = load_profile()
    assert found.steps == (sample(),) and found.rates == tuple(rates) and found.machine == Machine.here()


def test_of_equal_steps_the_newest_counts_and_a_known_peak_stays():
    kept = Profile(Machine.here()).with_steps([sample(step_s=1.0, peak_bytes=77), sample(batch_size=9)])
    kept = kept.with_steps([sample(step_s=2.0)])
    assert [(one.workload["batch_size"], one.step_s, one.peak_bytes) for one in kept.steps] == [
        (9, 0.5, None),
        (8, 2.0, 77),
    ]


def test_rates_of_the_asked_number_of_threads_come_first():
    kept = Profile(Machine.here()).with_rates([Rates("cpu", "fp32", 1, 80.0), Rates("cpu", "fp32", 2, 150.0)])
    assert [kept.rate("cpu", "fp32", threads).gflops for threads in (1, 2, 7)] == [80.0, 150.0, 150.0]
    assert kept.rate("cpu", "bf16", 2) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"schema": "clipctl.machine/3"}',
        b'{"schema": "clipctl.machine/2", "machine": 3}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_counts_as_absent_and_is_written_anew(content):
    path = profile.profile_file(Machine.here())
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert load_profile() == Profile(Machine.here())
    assert update_profile(lambda kept: kept.with_steps([sample()]))
    assert load_profile().steps == (sample(),)


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("steps", "step_s", "x"),
        ("steps", "step_s", 0),
        ("steps", "model", 3),
        ("steps", "batch_size", None),
        ("steps", "peak_bytes", "x"),
        ("rates", "gflops", "x"),
        ("rates", "gflops", -1),
        ("devices", "memory_bytes", []),
    ],
)
def test_numbers_without_sense_damage_the_file(part, key, value):
    facts = [DeviceFacts("cpu", "some", 10)]
    update_profile(
        lambda kept: kept.with_steps([sample()]).with_rates([Rates("cpu", "fp32", 2, 1.0)]).with_devices(facts)
    )
    path = profile.profile_file(Machine.here())
    document = json.loads(path.read_text())
    document[part][0][key] = value
    path.write_text(json.dumps(document))
    assert load_profile() == Profile(Machine.here())


def test_another_machine_or_torch_has_a_file_of_its_own():
    here = Machine.here()
    update_profile(lambda kept: kept.with_steps([sample()]))
    other = replace(here, torch="2.99.0")
    assert load_profile(other).steps == ()
    assert here.differences(other) == [f"torch 2.99.0 instead of {here.torch}"]


def test_a_file_moved_from_another_machine_is_not_used():
    here, other = Machine.here(), replace(Machine.here(), cpu="Another CPU")
    update_profile(lambda kept: kept.with_steps([sample()]), other)
    profile.profile_file(other).rename(profile.profile_file(here))
    assert load_profile().steps == ()


def test_a_place_that_cannot_be_written_is_nobodys_failure(home, monkeypatch):
    home.parent.mkdir(exist_ok=True)
    home.write_text("a file where the directory should be")
    assert update_profile(lambda kept: kept) is False
    assert load_profile() == Profile(Machine.here())


def test_the_place_follows_the_system(monkeypatch, tmp_path):
    monkeypatch.delenv("CLIPCTL_HOME")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert profile.application_dir() == tmp_path / "clipctl"
    monkeypatch.setattr("sys.platform", "darwin")
    assert profile.application_dir().parts[-2:] == ("Application Support", "clipctl")


def test_devices_are_kept():
    facts = [DeviceFacts("cpu", "some", 10), DeviceFacts("mps", "other", 5)]
    update_profile(lambda kept: kept.with_devices(facts))
    assert load_profile().devices == tuple(facts)
