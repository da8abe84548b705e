"""clipctl on an accelerator, from the choice to the resumed run; the accelerator is the fake one."""

import json
import re
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from clipctl.bench.measure import BenchRequest, bench
from clipctl.cli.app import app
from clipctl.config.layers import Layer, resolve
from clipctl.config.quantities import Interval
from clipctl.errors import DeviceError
from clipctl.hardware import devices, faults
from clipctl.hardware.devices import open_device
from clipctl.hardware.profile import load_profile
from clipctl.hardware.timing import Timing
from clipctl.model.workload import Setting, Workload
from clipctl.runs.rundir import RunDir
from clipctl.training import choice, loop, preflight, step
from clipctl.training.plan import make_plan
from clipctl.training.preflight import known_fault, verify_device
from clipctl.training.session import resume_run
from clipctl.training.trial import time_steps
from tests.conftest import MICRO
from tests.conftest import train as carry_out
from tests.devices import fake
from tests.faults.trainer import digest

fake.register()

SETTINGS = {**MICRO, "model.image.depth": 2, "model.text.depth": 2}
FLAGS = [f"--set={key}={value}" for key, value in SETTINGS.items()]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path / "home"))


def plan_for(**values):
    sections = {"device": "runtime", "precision": "runtime"}
    given = {f"{sections.get(name, 'train')}.{name}": value for name, value in values.items()}
    return make_plan(resolve([Layer("test", {**SETTINGS, **given})]))


def with_seed(plan, seed):
    return replace(plan, config=replace(plan.config, train=replace(plan.config.train, seed=seed)))


# --- what there is --------------------------------------------------------------------------------------------


def test_the_accelerator_is_found_and_described():
    assert devices.labels() == ["cpu", "fake"]
    device = open_device("fake")
    assert (device.kind, device.name, device.is_accelerator) == ("fake", "Fake accelerator", True)
    hybrid = open_device("hybrid")
    assert (hybrid.image.type, hybrid.text.type, hybrid.kind) == ("fake", "cpu", "hybrid")


def test_out_of_memory_is_recognised_and_says_what_would_fit(tmp_path):
    plan = plan_for(device="fake")
    run = RunDir.create(tmp_path, "tiny", "run")
    with fake.using(memory_bytes=20_000), pytest.raises(DeviceError, match="fake is out of memory") as caught:
        carry_out(plan, run)
    assert caught.value.hint is not None and caught.value.hint.startswith("try --micro-batch ")
    assert devices.is_out_of_memory(caught.value.__cause__)


# --- choosing -------------------------------------------------------------------------------------------------


def timings(seconds, monkeypatch):
    """Let trials take the seconds that are given by device."""

    def pretend(config, workload, settings, *, limit_s, min_samples=3):
        return {one: Timing(seconds[one.device], (seconds[one.device],) * 3) for one in settings}

    monkeypatch.setattr(choice, "time_steps", pretend)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"cpu": 0.10, "fake": 0.05, "hybrid": 0.07}, "fake"),
        ({"cpu": 0.05, "fake": 0.10, "hybrid": 0.07}, "cpu"),
        ({"cpu": 0.10, "fake": 0.09, "hybrid": 0.05}, "hybrid"),
        ({"cpu": 0.10, "fake": 0.095, "hybrid": 0.11}, "cpu"),  # five percent are not worth it
    ],
)
def test_the_device_that_was_measured_faster_is_chosen(seconds, expected, monkeypatch):
    timings(seconds, monkeypatch)
    plan = plan_for(precision="fp32", steps=1_000_000)
    assert plan.placement.device.label == expected
    assert plan.placement.device.reason.startswith(f"measured {1000 * seconds[expected]:g} ms per step")
    for label, value in seconds.items():
        assert label == expected or f"{label} {1000 * value:g} ms" in plan.placement.device.reason


def test_a_choice_is_remembered(monkeypatch):
    timings({"cpu": 0.10, "fake": 0.05, "hybrid": 0.07}, monkeypatch)
    first = plan_for(precision="fp32", steps=1_000_000)
    monkeypatch.setattr(choice, "time_steps", lambda *_, **__: pytest.fail("measured again"))
    assert plan_for(precision="fp32", steps=1_000_000).placement.device == first.placement.device


def test_a_short_run_is_not_worth_measuring(monkeypatch):
    monkeypatch.setattr(choice, "time_steps", lambda *_, **__: pytest.fail("measured"))
    plan = plan_for(steps=1)
    assert plan.placement.device.label == "cpu" and plan.placement.device.reason.startswith("finishes in about")


def test_a_long_run_that_cannot_be_measured_goes_by_what_is_usual(monkeypatch):
    monkeypatch.setattr(choice, "LIMIT_WITH_ACCELERATOR_S", 0.0)
    plan = plan_for(steps=10_000_000)
    assert plan.placement.device.label == "fake" and "usually faster" in plan.placement.device.reason


def test_a_run_goes_on_elsewhere_in_a_precision_that_suits():
    before = Setting("fake", "bf16", 1)
    config = resolve([Layer("test", {**SETTINGS, "runtime.device": "cpu"})])
    assert make_plan(config, before).placement.precision.value == "fp32"


def test_real_trials_take_turns_on_all_devices():
    plan = plan_for(device="cpu")
    settings = [Setting(device, "fp32", 1) for device in ("cpu", "fake", "hybrid")]
    found = time_steps(plan.config, plan.forecast.workload, settings, limit_s=0.0)
    assert all(len(found[one].samples_s) == 3 for one in settings)
    assert found[settings[1]].median_s > found[settings[0]].median_s  # the fake one is Python


# --- training -------------------------------------------------------------------------------------------------


def train(root, name, plan, checkpoint=None):
    run = RunDir.create(root, "tiny", name)
    carry_out(plan, run, resume_from=checkpoint)
    run.release()
    return run


@pytest.mark.parametrize("device", ["fake", "hybrid"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_broken_run_ends_like_an_unbroken_one_bit_for_bit(tmp_path, device, precision):
    plan = plan_for(device=device, precision=precision)
    whole = train(tmp_path, "whole", plan)
    run = RunDir.create(tmp_path, "tiny", "broken")

    class Stop(Exception):
        pass

    def stop_after_three(original=loop.train_step):
        def step(state, *arguments, **options):
            if state.step == 3:
                raise Stop
            return original(state, *arguments, **options)

        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", stop_after_three())
        saving = replace(plan, config=replace(plan.config, save=replace(plan.config.save, every=Interval(1, "epochs"))))
        with pytest.raises(Stop):
            carry_out(saving, run)
    resumption = resume_run(run)
    assert (resumption.step, resumption.plan.placement.device.label) == (3, device)
    carry_out(resumption.plan, run, resume_from=resumption.checkpoint)
    assert digest(run, 6) == digest(whole, 6)


def test_auto_goes_on_where_the_run_began(tmp_path, monkeypatch):
    timings({"cpu": 0.10, "fake": 0.05, "hybrid": 0.07}, monkeypatch)
    begun = plan_for(precision="fp32", steps=1_000_000)
    assert begun.placement.device.label == "fake"
    run = train(tmp_path, "run", replace(begun, schedule=replace(begun.schedule, total_steps=3)))
    timings({"cpu": 0.01, "fake": 0.05, "hybrid": 0.07}, monkeypatch)
    monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path / "elsewhere"))
    resumption = resume_run(run)
    assert (resumption.plan.placement.device.label, resumption.plan.placement.device.reason) == (
        "fake",
        "as when the run started",
    )


def test_the_peak_is_that_of_the_device(tmp_path):
    run = RunDir.create(tmp_path, "tiny", "run")
    summary = carry_out(plan_for(device="fake"), run)
    assert summary.device == "fake" and 0 < summary.peak_memory_bytes < 50e6


# --- preflight ------------------------------------------------------------------------------------------------

MUTANTS = {
    "gradient_scaled": "gradient of",
    "bias_dropped": "loss differs",
    "frozen_parameter": "does not move",
    "garbage_past_length": "gradient of|product of length",
    "nondeterministic": "differs",
    "noncontiguous_wrong": "differs",
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_every_wrong_device_is_refused_by_name(fault):
    with fake.using(faults={fault}, garbage_length=36):
        verdict = verify_device(plan_for(device="fake"))
    assert verdict is not None and not verdict.passed
    assert re.search(MUTANTS[fault], verdict.words), verdict.words


@pytest.mark.parametrize(("cpu_limit_s", "pairs"), [(30.0, 12), (0.0, 4)])
def test_a_run_in_micro_batches_is_checked_in_them(cpu_limit_s, pairs, monkeypatch):
    """If the whole batch would take too long on the CPU, two of them stand for all."""
    taken = []

    def note(state, parts, *rest):
        taken.append((sum(len(part.images) for part in parts), len(parts[0].images), state.device.label))
        return cached(state, parts, *rest)

    cached = step._cached
    monkeypatch.setattr(step, "_cached", note)
    monkeypatch.setattr(preflight, "CPU_STEP_LIMIT_S", cpu_limit_s)
    verdict = verify_device(plan_for(device="fake", micro_batch=2))
    assert verdict.passed and ("for 4 pairs" in verdict.words) == (pairs == 4)
    assert [one for one in taken if one[0] == pairs] == [(pairs, 2, label) for label in ("fake", "cpu", "fake")]


def test_a_wrong_device_is_refused_in_micro_batches():
    with fake.using(faults={"gradient_scaled"}):
        assert not verify_device(plan_for(device="fake", micro_batch=5)).passed


@pytest.mark.parametrize("fault", MUTANTS)
def test_wrong_devices_are_caught_in_hybrid_too(fault):
    with fake.using(faults={fault}, garbage_length=36):
        verdict = verify_device(plan_for(device="hybrid"))
    assert verdict is not None and not verdict.passed


def test_a_correct_device_passes_a_hundred_seeds(tmp_path, monkeypatch):
    """It rounds otherwise than the CPU does, in every product."""
    shallow = {**SETTINGS, "model.image.depth": 1, "model.text.depth": 1, "runtime.device": "fake"}
    failed, plan = {}, make_plan(resolve([Layer("test", shallow)]))
    for seed in range(100):
        monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path / str(seed)))  # or it would be remembered
        with fake.using(faults={"rounding"}):
            verdict = verify_device(with_seed(plan, seed))
        if not verdict.passed or "before" in verdict.words:
            failed[seed] = verdict.words
    assert not failed


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_correct_device_passes_in_half_precision(precision, tmp_path, monkeypatch):
    plan = plan_for(device="fake", precision=precision)
    for seed in range(10):
        monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path / str(seed)))
        with fake.using(faults={"rounding"}):
            verdict = verify_device(with_seed(plan, seed))
        assert verdict.passed, (seed, verdict.words)


def test_what_passed_is_not_checked_again_and_what_failed_is(monkeypatch):
    assert verify_device(plan_for(device="fake")).passed
    monkeypatch.setattr(preflight, "_compare", lambda plan: pytest.fail("checked again"))
    assert "as verified before" in verify_device(plan_for(device="fake")).words
    with pytest.raises(pytest.fail.Exception):  # another precision was never checked
        verify_device(plan_for(device="fake", precision="bf16"))
    (kept,) = load_profile().checked.values()
    assert kept["passed"] and kept["device"] == "fake"


def test_what_failed_is_checked_again():
    with fake.using(faults={"gradient_scaled"}):
        assert not verify_device(plan_for(device="fake")).passed
    assert verify_device(plan_for(device="fake")).passed


def test_a_kernel_that_is_missing_is_a_failure_and_no_crash(monkeypatch):
    def lacks(plan):
        raise NotImplementedError("aten::something is not implemented for fake")

    monkeypatch.setattr(preflight, "_compare", lacks)
    verdict = verify_device(plan_for(device="fake"))
    assert not verdict.passed and "a training step fails: aten::something" in verdict.words


def test_the_cpu_needs_no_check():
    assert verify_device(plan_for(device="cpu")) is None


def invoke(*arguments):
    return CliRunner().invoke(app, [*arguments, *FLAGS])


def test_a_wrong_device_ends_the_command_before_a_run_is_made(tmp_path):
    with fake.using(faults={"gradient_scaled"}):
        done = invoke("train", "--device", "fake", "--runs-dir", str(tmp_path))
    assert done.exit_code == 4 and "does not give the same results as the CPU" in done.stderr
    assert "--allow-unverified-device" in done.stderr and not list(tmp_path.glob("*-tiny-*"))


def test_a_wrong_device_can_be_allowed_and_marks_the_run(tmp_path):
    with fake.using(faults={"gradient_scaled"}):
        done = invoke(
            "train", "--device", "fake", "--allow-unverified-device", "--runs-dir", str(tmp_path), "--name", "r"
        )
    assert done.exit_code == 0 and "warning: fake does not give the same results" in done.stderr
    assert json.loads((tmp_path / "r/environment.json").read_text())["device"]["verified"] == "failed"


def test_auto_falls_back_to_the_cpu(tmp_path, monkeypatch):
    timings({"cpu": 0.10, "fake": 0.05, "hybrid": 0.07}, monkeypatch)
    monkeypatch.setattr(choice, "SHARE_OF_RUN", 1e9)
    with fake.using(faults={"gradient_scaled"}):
        done = invoke("train", "--precision", "fp32", "--runs-dir", str(tmp_path), "--name", "r")
    assert done.exit_code == 0, done.output
    assert (
        "warning: fake does not give the same results" in done.stderr and "training on the CPU instead" in done.stderr
    )
    assert json.loads((tmp_path / "r/environment.json").read_text())["device"]["label"] == "cpu"


def test_a_device_that_lacks_a_kernel_is_not_chosen(monkeypatch):
    def lacks(*_, **__):
        raise NotImplementedError("aten::something is not implemented for fake")

    monkeypatch.setattr(choice, "time_steps", lacks)
    monkeypatch.setattr(choice, "SHARE_OF_RUN", 1e9)
    assert plan_for().placement.device.label == "cpu"


def test_a_right_device_is_noted(tmp_path):
    done = invoke("train", "--device", "fake", "--runs-dir", str(tmp_path), "--name", "r")
    assert done.exit_code == 0 and "match the CPU's" in done.stderr
    assert json.loads((tmp_path / "r/environment.json").read_text())["device"]["verified"] == "passed"


@pytest.mark.parametrize(
    ("chip", "torch_version", "preset", "limit"),
    [
        ("Apple M1", "2.13.0", "base", 166),
        ("Apple M2 Pro GPU", "2.10.1", "large", 127),
        ("Apple M3", "2.13.0", "base", None),
        ("Apple M1", "2.14.0", "base", None),
    ],
)
def test_products_that_apples_first_chips_get_wrong_are_refused(chip, torch_version, preset, limit, monkeypatch):
    monkeypatch.setattr(preflight, "torch_version", lambda: torch_version)
    monkeypatch.setattr(faults, "torch_version", lambda: torch_version)
    device = replace(open_device("cpu"), label="mps", image=torch.device("mps"), text=torch.device("mps"), name=chip)
    model = resolve([Layer("test", {"preset": preset})]).model
    if limit is None:
        assert known_fault(device, Workload(model, 10_000, 77)) is None
        return
    assert known_fault(device, Workload(model, limit, 77)) is None
    assert known_fault(device, Workload(model, 10 * limit, 77, micro_batch=limit)) is None
    for workload in (Workload(model, limit + 1, 77), Workload(model, 10 * limit, 77, micro_batch=limit + 1)):
        words = known_fault(device, workload)
        assert words.startswith(f"{limit + 1} pairs at once × ") and "193487" in words
        assert words.endswith(f"--micro-batch {limit} for the same result")


# --- bench ----------------------------------------------------------------------------------------------------


def test_the_accelerator_is_benchmarked_beside_the_cpu():
    request = BenchRequest(sizes=(1000, 50_000), suites=("elementwise", "matmul"), dtypes=("fp32",), threads=(1,))
    with fake.using(launch_s=2e-4):
        result = bench(request)
    on_fake = [row for row in result.results if row.device == "fake"]
    assert {row.operation for row in on_fake} == {"add", "gelu", "matmul"} and all(row.round_trip for row in on_fake)
    assert all(row.error == 0 for row in on_fake)
    assert {(one.operation, one.data) for one in result.crossover} >= {("add", "resident"), ("add", "round trip")}
    assert all(one.words == "none in range: cpu faster up to 5e4" for one in result.crossover)
    (overhead,) = (one for one in result.overheads if one.device == "fake")
    assert overhead.launch_s > 2e-4 and overhead.copy_in_gbytes_per_s > 0 and overhead.synchronize_s is not None
    assert load_profile().rate("fake", "fp32", 1) or load_profile().rate("fake", "fp32", 2)


def test_a_wrong_result_shows_in_the_bench():
    request = BenchRequest(sizes=(10_000,), suites=("matmul",), dtypes=("fp32",), threads=(1,))
    with fake.using(faults={"nondeterministic"}):
        result = bench(request)
    assert max(row.error for row in result.results if row.device == "fake") > 1e-3


def test_recommend_device_says_what_was_not_measured():
    done = CliRunner().invoke(app, ["recommend-device", "--preset", "tiny", "--batch-size", "2", "--json"])
    document = json.loads(done.stdout)
    assert [one["device"] for one in document["candidates"]] == ["cpu", "fake", "hybrid"]
    assert document["candidates"][1]["step_s"] is None and document["confidence"] == "low"
