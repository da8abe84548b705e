"""Timing with a clock of its own: what is timed, how often, in which order."""

import pytest

from clipctl.hardware import timing
from clipctl.hardware.timing import MAX_SAMPLES, Stopwatch, Timing, time_in_turns


class World:
    """A clock that only work moves."""

    def __init__(self, monkeypatch):
        self.now, self.log = 0.0, []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def work(self, name, seconds, first_s=None):
        calls = []

        def run():
            self.now += first_s if first_s and not calls else seconds
            calls.append(name)
            if not self.log or self.log[-1] != name:
                self.log.append(name)

        return Stopwatch(run)


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def test_the_first_call_is_timed_alone(world):
    found = time_in_turns({"a": world.work("a", 0.001, first_s=0.5)}, limit_s=10)["a"]
    assert found.first_s == pytest.approx(0.5)
    assert found.samples_s == pytest.approx([0.001] * MAX_SAMPLES)


def test_a_slow_first_call_does_not_make_an_operation_slow(world):
    found = time_in_turns({"a": world.work("a", 0.001, first_s=0.5)}, limit_s=0.4)["a"]
    assert found.first_s == pytest.approx(0.5)
    assert found.median_s == pytest.approx(0.001) and len(found.samples_s) > 10
    assert world.now > 0.5 + 10 * 0.015  # blocks of many calls, not single ones


def test_what_is_slow_is_called_no_more_often_than_it_is_sampled_and_once(world):
    found = time_in_turns({"a": world.work("a", 1.0)}, limit_s=0.4)["a"]
    assert found.samples_s == pytest.approx([1.0] * 3) and world.now == pytest.approx(4.0)


def test_what_is_warm_is_sampled_at_once_the_next_time(world):
    works = {"a": world.work("a", 1.0)}
    time_in_turns(works, limit_s=0.1, min_samples=1)
    before_s = world.now
    found = time_in_turns(works, limit_s=0.1, min_samples=1)["a"]
    assert world.now - before_s == pytest.approx(1.0) and len(found.samples_s) == 1  # no call but the sample


def test_turns_go_there_and_back(world):
    time_in_turns({"a": world.work("a", 0.05), "b": world.work("b", 0.05)}, limit_s=100)
    turns = world.log[2:]  # after each was warmed
    assert turns[:6] == ["a", "b", "a", "b", "a", "b"][: len(turns[:6])]
    # Each round begins with the one that ended the round before: A, B B, A A, B.
    assert len(turns) == MAX_SAMPLES + 1


def test_what_is_slow_gets_fewer_samples_spread_over_the_whole_time(world):
    found = time_in_turns({"slow": world.work("slow", 1.0), "fast": world.work("fast", 0.01)}, limit_s=2.0)
    assert len(found["slow"].samples_s) == 3 and len(found["fast"].samples_s) == MAX_SAMPLES
    positions = [index for index, name in enumerate(world.log) if name == "slow"]
    assert positions[-1] - positions[1] >= 2  # others had their turns in between


def test_a_wait_closes_every_block():
    waits = []
    watch = Stopwatch(lambda: None, lambda: waits.append(1))
    watch.sample()
    assert len(waits) == 2  # before the clock starts, and before it stops


def test_median_and_quartiles():
    samples = Timing(1.0, (1.0, 2.0, 3.0, 4.0, 100.0))
    assert (samples.median_s, samples.min_s, samples.iqr_s) == (3.0, 1.0, 2.0)
    assert Timing(1.0, (1.0,)).iqr_s == 0.0


def test_a_mean_counts_every_state_of_the_machine_but_no_outlier():
    bimodal = Timing(1.0, (3.0, 1.0, 3.0, 1.0, 1.0, 3.0, 1.0, 50.0, 1.0, 0.01))
    assert bimodal.mean_s == pytest.approx((5 * 1.0 + 3 * 3.0) / 8)
    assert Timing(1.0, (1.0, 9.0, 2.0)).mean_s == 2.0  # of three, the median
    assert Timing(1.0, (2.0, 4.0)).mean_s == 3.0
