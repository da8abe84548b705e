"""What `auto` decides on a CPU, and what it may cost."""

import os
import subprocess
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from clipctl.config.layers import Layer, resolve
from clipctl.hardware.devices import open_device
from clipctl.hardware.profile import AttentionTimes, Rates, load_profile, update_profile
from clipctl.hardware.timing import Timing
from clipctl.model.workload import Setting, Workload
from clipctl.training import choice
from clipctl.training.choice import Choice, Decision, decide
from clipctl.training.plan import make_plan
from clipctl.training.state import LossScale
from clipctl.training.trial import probe_rates, sample_of, time_attention, time_steps, trial_batch

CORES = 2


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(choice.cpu, "usable_cores", lambda: CORES)


@pytest.fixture
def machine(monkeypatch):
    """A machine of one's own: products reach these GFLOP/s, steps take these seconds."""

    pretended = SimpleNamespace(gflops={"fp32": 100.0, "bf16": 300.0, "fp16": 3.0}, seconds={}, trials=[])

    def steps(config, workload, settings, *, limit_s, min_samples=3):
        pretended.trials.append((list(settings), workload))
        found = {one: pretended.seconds[one.precision, one.threads] for one in settings}
        return {one: Timing(seconds, (seconds,) * 3) for one, seconds in found.items()}

    def rates(device, precision, threads):
        return Rates(device.label, precision, threads, pretended.gflops[precision])

    monkeypatch.setattr(choice, "time_steps", steps)
    monkeypatch.setattr(choice, "probe_rates", rates)
    return pretended


def decided(preset="tiny", steps=100_000, **runtime) -> Decision:
    config = resolve([Layer("test", {"preset": preset, **{f"runtime.{key}": value for key, value in runtime.items()}})])
    model = replace(config.model, text=replace(config.model.text, vocab_size=33))
    config = replace(config, model=model)
    return decide(config, Workload(model, config.train.batch_size, 60), steps)


def test_a_faster_precision_is_chosen_if_measured_faster(machine):
    machine.seconds = {("fp32", 2): 0.10, ("bf16", 2): 0.05, ("bf16", 1): 0.09}
    found = decided()
    assert found.precision.value == "bf16"
    assert found.precision.reason == "measured 50 ms per step, fp32 100 ms"
    assert (found.device.label, found.device.reason) == ("cpu", "no accelerator found")


def test_a_gain_of_five_percent_changes_nothing(machine):
    machine.seconds = {("fp32", 2): 0.10, ("bf16", 2): 0.095, ("fp32", 1): 0.2}
    assert decided().precision.value == "fp32"


def test_a_precision_whose_products_are_slow_is_never_stepped_through(machine):
    machine.gflops = {"fp32": 150.0, "bf16": 1.5, "fp16": 2.0}
    machine.seconds = {("fp32", 2): 0.1, ("fp32", 1): 0.2}
    found = decided()
    assert found.precision.value == "fp32" and "1.5 in bf16" in found.precision.reason
    assert all(one.precision == "fp32" for settings, _ in machine.trials for one in settings)


def test_what_was_asked_for_is_not_measured(machine):
    found = decided(precision="fp16", threads=1, device="cpu")
    assert (found.precision.value, found.threads.value, found.device.reason) == ("fp16", 1, "as requested")
    assert machine.trials == []


def test_the_second_time_costs_nothing(machine):
    machine.seconds = {("fp32", 2): 0.10, ("bf16", 2): 0.05, ("bf16", 1): 0.09}
    first = decided()
    count = len(machine.trials)
    second = decided()
    assert len(machine.trials) == count
    assert (second.precision.value, second.threads.value) == (first.precision.value, first.threads.value)


def test_one_thread_is_chosen_where_two_only_wait_for_each_other(machine):
    machine.gflops = {"fp32": 100.0, "bf16": 1.0, "fp16": 1.0}
    machine.seconds = {("fp32", 2): 0.010, ("fp32", 1): 0.006}
    update_profile(lambda kept: kept.with_steps([slow_start(2), slow_start(16), slow_start(48)]))
    found = decided()
    assert (found.threads.value, found.threads.reason) == (1, "measured 6 ms per step, 2 threads 10 ms")


def slow_start(batch_size):
    """A machine on which starting an operation is what takes the time."""
    model = resolve([Layer("test", {"model.text.vocab_size": 33})]).model
    return sample_of(Setting("cpu", "fp32", 2), Workload(model, batch_size, 60), Timing(0.01, (0.01,) * 3))


def test_what_is_too_large_to_try_is_tried_in_small(machine):
    """W4: the stand-in is a smaller model, all settings try the same, and the forecast at the real batch decides."""
    machine.seconds = {("fp32", 2): 1.0, ("bf16", 2): 0.5, ("bf16", 1): 0.9}
    decided("large", steps=10_000)
    for settings, workload in machine.trials:
        assert workload.model.image.depth <= 2 and workload.model.image.width == 1024 and len(settings) > 1


def test_a_run_that_recomputes_is_decided_by_steps_that_recompute(machine):
    machine.seconds = {("fp32", 2): 1.0, ("bf16", 2): 0.5, ("bf16", 1): 0.9}
    config = resolve([Layer("test", {"model.text.vocab_size": 33, "runtime.recompute": "true"})])
    found = decide(config, Workload(config.model, 27, 60, recompute=True), 10_000)
    assert machine.trials and all(workload.recompute for _, workload in machine.trials)
    assert found.precision.value == "bf16"


def test_a_short_run_measures_nothing(machine):
    found = decided(steps=5)
    assert machine.trials == [] and found.precision.value == "fp32"


def test_a_run_goes_on_as_it_began(machine):
    config = resolve([Layer("test", {"model.text.vocab_size": 33})])
    workload = Workload(config.model, 27, 60)
    found = decide(config, workload, 1000, before=Setting("cpu", "bf16", 1))
    assert (found.precision.value, found.threads.value) == ("bf16", 1)
    assert found.precision.reason == found.threads.reason == found.device.reason == "as when the run started"
    gone = decide(config, workload, 5, before=Setting("mps", "fp16", 1))
    assert gone.device.label == "cpu" and gone.precision.value == "fp32"


def test_processes_of_one_machine_share_its_cores(machine):
    config = resolve([Layer("test", {"model.text.vocab_size": 33})])
    found = decide(config, Workload(config.model, 27, 60), 5, before=Setting("cpu", "fp32", 2), ranks=2)
    assert (found.threads.value, found.threads.reason) == (1, "2 processes share 2 usable cores")
    assert found.device.reason == "no CUDA device found"


def test_a_cut_job_keeps_every_shape_but_the_depth():
    workload = Workload(resolve([Layer("test", {"preset": "large"})]).model, 64, 60)
    small = workload.cut(batch_size=4)
    assert (small.model.image.depth, small.model.text.depth, small.batch_size) == (2, 2, 4)
    assert replace(small.model.image, depth=24) == workload.model.image and small.cut() == small


# --- the real machine -----------------------------------------------------------------------------------------


def test_a_decision_is_made_and_what_it_rests_on_is_kept():
    decided(steps=400)
    assert {one.precision for one in load_profile().rates} == {"fp32", "bf16", "fp16"}


SLOW_BF16 = """
import time
from clipctl.config.layers import Layer, resolve
from clipctl.hardware.devices import open_device
from clipctl.training.plan import make_plan
from clipctl.training.trial import probe_rates
started = time.perf_counter()
rates = {precision: probe_rates(open_device("cpu"), precision, 1).gflops for precision in ("fp32", "bf16", "fp16")}
spent = time.perf_counter() - started
plan = make_plan(resolve([Layer("test", {})]))
print(plan.placement.precision.value, rates["bf16"] < rates["fp32"] / 5, spent)
"""


@pytest.mark.skipif(sys.platform != "linux" or "x86" not in os.uname().machine, reason="limits oneDNN to AVX2")
def test_an_emulated_precision_is_found_out_quickly_and_never_chosen(tmp_path):
    """A real processor without instructions for bf16, as far as torch can tell."""
    limits = {"ONEDNN_MAX_CPU_ISA": "AVX2", "CLIPCTL_HOME": str(tmp_path / "slow")}
    done = subprocess.run(
        [sys.executable, "-c", SLOW_BF16], env={**os.environ, **limits}, capture_output=True, text=True
    )
    precision, is_slow, spent_s = done.stdout.split()
    assert (precision, is_slow) == ("fp32", "True"), done.stdout + done.stderr
    assert float(spent_s) < 3.0


def test_rates_are_of_the_right_order():
    rates = probe_rates(open_device("cpu"), "fp32", 1)
    assert 0.5 < rates.gflops < 10_000 and (rates.device, rates.precision, rates.threads) == ("cpu", "fp32", 1)


def test_a_busy_program_does_not_hide_what_fp32_reaches(monkeypatch):
    """W4: waiting for a busy core takes 12 ms however small the product is: only a large one tells anything."""
    monkeypatch.setattr("clipctl.training.trial.Stopwatch.sample", lambda _: 0.012)
    fp32, bf16 = (probe_rates(open_device("cpu"), precision, 1).gflops for precision in ("fp32", "bf16"))
    assert fp32 > 20 and bf16 < 0.1


def test_steps_are_timed_for_every_setting(micro):
    model = replace(micro.model, text=replace(micro.model.text, vocab_size=33))
    workload = Workload(model, 4, 20)
    settings = [Setting("cpu", precision, 1) for precision in ("fp32", "bf16", "fp16")]
    found = time_steps(micro, workload, settings, limit_s=0.0)
    assert set(found) == set(settings) and all(len(one.samples_s) == 3 for one in found.values())


def test_a_trial_batch_has_the_shapes_of_its_job(micro):
    model = replace(micro.model, text=replace(micro.model.text, vocab_size=33))
    batch = trial_batch(Workload(model, 5, 20))
    assert batch.images.shape == (5, 16, 16, 3) and batch.tokens.shape == (5, 20)
    assert (batch.tokens.argmax(dim=1) == 19).all() and int(batch.tokens.max()) == 32


# --- fp16 -----------------------------------------------------------------------------------------------------


def test_the_loss_scale_falls_at_once_and_grows_slowly():
    scale = LossScale(torch.device("cpu"))
    start = float(scale.value)
    scale.adjust(torch.tensor(False))
    assert float(scale.value) == start / 2
    for _ in range(LossScale.GROWTH_STEPS):
        scale.adjust(torch.tensor(True))
    assert float(scale.value) == start
    scale.adjust(torch.tensor(True))
    assert float(scale.value) == start


# --- attention -------------------------------------------------------------------------------------------------


def pretend_attention(monkeypatch, fused_s, plain_s):
    """A machine on which attention takes this long; returns the settings it was timed for."""
    timed = []

    def times(setting, workload):
        timed.append(setting)
        return [
            AttentionTimes(
                setting.device,
                setting.precision,
                setting.threads,
                asdict(shape.sample),
                fused_s=fused_s,
                plain_s=plain_s,
            )
            for shape in workload.attention_shapes
        ]

    monkeypatch.setattr(choice, "time_attention", times)
    return timed


@pytest.mark.parametrize(
    ("fused_s", "plain_s", "way"), [(0.010, 0.004, "plain"), (0.010, 0.009, "fused"), (0.004, 0.010, "fused")]
)
def test_attention_is_computed_in_the_way_that_is_faster_here(machine, monkeypatch, fused_s, plain_s, way):
    machine.seconds = {("fp32", 2): 0.1, ("fp32", 1): 0.2, ("bf16", 2): 0.2}
    timed = pretend_attention(monkeypatch, fused_s, plain_s)
    found = decided().attention
    assert found.value == way and "times as fast as" in found.reason
    assert decided().attention == found and len(timed) == 1  # known from then on
    other = "plain" if way == "fused" else "fused"
    assert decided(attention=other).attention == Choice(other, "as requested")


def test_a_short_run_does_not_measure_attention(machine, monkeypatch):
    timed = pretend_attention(monkeypatch, 0.010, 0.004)
    assert decided(steps=10).attention.value == "fused" and not timed


def test_attention_is_really_timed_in_both_ways():
    model = resolve([Layer("test", {"preset": "tiny", "model.text.vocab_size": 33})]).model
    workload = Workload(model, 9, 20)
    found = time_attention(Setting("cpu", "fp32", 1), workload)
    assert [(one.shape["pairs"], one.shape["tokens"], one.shape["causal"]) for one in found] == [
        (8, 65, False),
        (8, 20, True),
    ]
    assert all(0 < one.fused_s < 1 and 0 < one.plain_s < 1 for one in found)


def test_a_run_keeps_its_way_of_attention_and_plain_needs_memory(monkeypatch):
    pretend_attention(monkeypatch, 0.010, 0.004)
    asked = resolve([Layer("test", {"runtime.device": "cpu", "runtime.threads": 1, "train.epochs": 100_000})])
    plan = make_plan(asked)
    assert plan.config.runtime.attention == "plain" and plan.placement.attention.value == "plain"
    fused = make_plan(replace(asked, runtime=replace(asked.runtime, attention="fused")))
    scores_bytes = plan.config.train.batch_size * 4 * 65**2 * 4  # of one block
    difference = plan.forecast.memory.activations_bytes - fused.forecast.memory.activations_bytes
    assert 3 * scores_bytes <= difference <= 12 * scores_bytes
    again = make_plan(plan.config)  # as a resumed run does
    assert again.config.runtime.attention == "plain" and again.placement.attention.reason == "as requested"
    free_bytes = (plan.forecast.memory_need.value + fused.forecast.memory_need.value) / 2 * 1.05
    small = replace(open_device("cpu"), memory_bytes=int(free_bytes) + plan.forecast.memory.pictures_bytes)
    monkeypatch.setattr(choice.devices, "open_device", lambda label: small)
    tight = make_plan(asked)
    assert tight.config.runtime.attention == "fused" and "do not fit in memory" in tight.placement.attention.reason
