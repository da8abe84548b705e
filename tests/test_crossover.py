"""Where a device overtakes the CPU, and never where nobody looked."""

import random

import pytest

from clipctl.bench.crossover import crossing, crossover, find_crossovers
from clipctl.bench.results import BenchRow

SIZES = [10**3, 10**4, 10**5, 10**6, 10**7]


def seconds(size, per_element_s, launch_s, noise, rng):
    return [(launch_s + per_element_s * size) * rng.uniform(1 - noise, 1 + noise) for _ in range(9)]


def sides(noise=0.03):
    """A CPU of 1 ns an element; a device of 0.1 ns and 90 µs for each call: equal at 100,000 elements."""
    rng = random.Random(1)
    on_cpu = {size: seconds(size, 1e-9, 0.0, noise, rng) for size in SIZES}
    on_device = {size: seconds(size, 1e-10, 9e-5, noise, rng) for size in SIZES}
    return on_cpu, on_device


def test_the_crossing_is_found_with_an_interval_around_it():
    found = crossover("add", "fp32", "mps", "resident", *sides())
    assert found.size == pytest.approx(1e5, rel=0.1)
    assert found.low <= found.size <= found.high and found.high / found.low < 1.5
    assert found.words.startswith("mps faster from about 1.0e5")


@pytest.mark.parametrize(
    ("kept", "words"),
    [(SIZES[:2], "none in range: cpu faster up to 1e4"), (SIZES[3:], "none in range: mps faster from 1e6 on")],
)
def test_nothing_is_said_beyond_the_sizes_measured(kept, words):
    on_cpu, on_device = ({size: side[size] for size in kept} for side in sides())
    found = crossover("add", "fp32", "mps", "resident", on_cpu, on_device)
    assert (found.size, found.low, found.words) == (None, None, words)


def test_the_interval_stays_within_the_sizes():
    found = crossover("add", "fp32", "mps", "resident", *sides(noise=0.6))
    assert found.size is not None
    assert SIZES[0] <= found.low <= found.high <= SIZES[-1]


def test_a_device_that_falls_back_again_has_not_won():
    assert crossing([1, 10, 100], [0.5, 2.0, 0.9]) is None
    assert crossing([1, 10, 100, 1000], [2.0, 0.5, 2.0, 2.0]) == pytest.approx(31.6, rel=0.01)


def row(device, size, samples_s, round_trip=None, threads=2):
    medians = sorted(samples_s)[len(samples_s) // 2]
    return BenchRow(
        "elementwise", "add", device, "fp32", size, threads, 0, medians, 0, 0, list(samples_s), round_trip=round_trip
    )


def test_resident_data_and_round_trips_are_judged_apart():
    on_cpu, on_device = sides()
    rows = [row("cpu", size, on_cpu[size]) for size in SIZES] + [row("cpu", size, [9.0], threads=1) for size in SIZES]
    rows += [row("mps", size, on_device[size], [10 * one for one in on_cpu[size]]) for size in SIZES]
    resident, trip = find_crossovers(rows)
    assert resident.size == pytest.approx(1e5, rel=0.1)
    assert (trip.data, trip.size, trip.words) == ("round trip", None, "none in range: cpu faster up to 1e7")


def test_a_device_that_won_in_between_is_not_denied():
    on_cpu = {1000: [2.0], 10**4: [2.0], 10**5: [0.9]}
    found = crossover("add", "fp32", "mps", "resident", on_cpu, {size: [1.0] for size in on_cpu})
    assert found.words == "none in range: cpu faster at 1e5"


def test_a_cpu_alone_crosses_nothing():
    assert find_crossovers([row("cpu", 1000, [1.0])]) == []
