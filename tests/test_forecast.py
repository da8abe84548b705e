"""The cost model: prices that are known come out, and what is not known is said to be so."""

import json
from dataclasses import astuple, replace

import pytest

from clipctl.config.layers import Layer, resolve
from clipctl.hardware.profile import Machine, Profile, Rates, StepSample
from clipctl.model import cost
from clipctl.model.forecast import (
    TRAINER_BYTES,
    CostModel,
    Estimate,
    apple_speedup,
    fit_prices,
    with_margin,
)
from clipctl.model.workload import Setting, Workload

MACHINE = Machine("a CPU", 2, 24, "Linux x86_64", "2.13.0")
FP32 = Setting("cpu", "fp32", 2)
PRICES = (1 / 150e9, 1 / 9e9, 1 / 12e9, 45e-6)  # of a machine that never was


def workload(preset, batch_size, **depths):
    values = {"preset": preset, "model.text.vocab_size": 33} | {
        f"model.{tower}.depth": n for tower, n in depths.items()
    }
    return Workload(resolve([Layer("test", values)]).model, batch_size, 60)


def true_s(one, prices=PRICES):
    return sum(amount * price for amount, price in zip(astuple(cost.step_work(one)), prices, strict=True))


def sample(one, setting=FP32, step_s=None, peak_bytes=None):
    device, precision, threads = astuple(setting)
    return StepSample(
        device=device,
        precision=precision,
        threads=threads,
        workload=one.to_dict(),
        step_s=step_s or true_s(one),
        iqr_s=0.0,
        peak_bytes=peak_bytes,
        saved_s=0.0,
    )


MEASURED = [
    workload("tiny", 2),
    workload("tiny", 16),
    workload("tiny", 48),
    workload("small", 2),
    workload("small", 8, image=2, text=2),
    workload("small", 40, image=3, text=1),
]
TARGETS = [workload(preset, batch) for preset in ("tiny", "small", "base") for batch in (4, 12, 32)]


def cost_model(samples=(), rates=()):
    return CostModel(Profile(MACHINE).with_steps(list(samples)).with_rates(list(rates)))


@pytest.mark.parametrize("target", TARGETS, ids=lambda one: f"{cost.parameters(one.model)}-{one.batch_size}")
def test_steps_that_follow_the_prices_are_forecast_from_others(target):
    estimate = cost_model([sample(one) for one in MEASURED]).step_s(FP32, target)
    assert estimate.value == pytest.approx(true_s(target), rel=0.05)
    assert estimate.low < true_s(target) < estimate.high
    assert estimate.basis == "interpolated"


def test_a_measured_step_is_taken_as_it_is():
    model = cost_model([sample(one) for one in MEASURED] + [sample(TARGETS[0], step_s=123.0)])
    assert model.step_s(FP32, TARGETS[0]).value == 123.0
    assert model.step_s(FP32, TARGETS[0]).basis == "measured"
    assert model.step_s(FP32, TARGETS[1]).basis == "interpolated"


def test_a_machine_that_was_not_quiet_is_forecast_with_a_wider_interval():
    quiet = [sample(one) for one in MEASURED]
    noisy = [replace(one, iqr_s=0.4 * one.step_s) for one in quiet]
    calm, loud = (cost_model(samples).step_s(FP32, TARGETS[4]) for samples in (quiet, noisy))
    assert calm.value == loud.value and calm.high < 1.15 * calm.value
    assert loud.high == pytest.approx(1.4 * loud.value, rel=0.05)


def test_far_from_what_was_measured_it_says_so_and_is_less_sure():
    model = cost_model([sample(one) for one in MEASURED[:3]])
    near, far = model.step_s(FP32, workload("tiny", 32)), model.step_s(FP32, workload("huge", 32))
    assert (near.basis, far.basis) == ("interpolated", "extrapolated")
    assert far.high / far.value > near.high / near.value


def test_without_a_measurement_the_prior_is_wide():
    estimate = cost_model().step_s(FP32, TARGETS[0])
    assert estimate.basis == "prior" and estimate.high / estimate.low == pytest.approx(9)


def test_a_known_rate_moves_the_prior():
    slow, fast = (cost_model(rates=[Rates("cpu", "fp32", 2, gflops)]) for gflops in (20.0, 200.0))
    target = workload("base", 32)
    assert slow.step_s(FP32, target).value > 5 * fast.step_s(FP32, target).value


def test_another_precision_is_forecast_by_its_rate_and_unknown_without():
    samples, bf16 = [sample(one) for one in MEASURED], Setting("cpu", "bf16", 2)
    target = workload("base", 12)
    assert cost_model(samples).step_s(bf16, target) is None
    rates = [Rates("cpu", "fp32", 2, 150.0), Rates("cpu", "bf16", 2, 1.5)]
    emulated = cost_model(samples, rates).step_s(bf16, target)
    assert emulated.value > 50 * true_s(target) and emulated.basis == "prior"


def test_fewer_threads_are_slower_where_work_is_spread_over_them():
    model = cost_model([sample(one) for one in MEASURED])
    one_thread = Setting("cpu", "fp32", 1)
    ratios = [model.step_s(one_thread, one).value / true_s(one) for one in (workload("base", 12), workload("tiny", 2))]
    assert 1.5 < ratios[0] <= 2.05
    assert ratios[1] < ratios[0]


@pytest.mark.parametrize(
    ("parameters", "speedup"),
    [(1, 0.1), (49e6, 0.1), (50e6, 0.3), (150e6, 0.8), (300e6, 1.5), (500e6, 3.0), (9e9, 3.0)],
)
def test_the_notes_thresholds_are_the_prior_of_an_apple_gpu(parameters, speedup):
    assert apple_speedup(parameters) == speedup


def test_an_unmeasured_apple_gpu_follows_the_notes_and_other_accelerators_are_unknown():
    model = cost_model([sample(one) for one in MEASURED])
    target = workload("base", 12)
    estimate = model.step_s(Setting("mps", "fp32", 2), target)
    assert estimate.value == pytest.approx(model.step_s(FP32, target).value / 0.8) and estimate.basis == "prior"
    assert model.step_s(Setting("cuda:0", "fp32", 2), target) is None


def test_a_measured_accelerator_needs_no_prior():
    mps = Setting("mps", "fp32", 2)
    prices = (1 / 2e12, 1 / 50e9, 1 / 50e9, 60e-6)
    model = cost_model([sample(one, mps, true_s(one, prices)) for one in MEASURED])
    target = workload("base", 12)
    assert model.step_s(mps, target).value == pytest.approx(true_s(target, prices), rel=0.1)
    assert model.step_s(mps, target).basis == "interpolated"


# --- memory ---------------------------------------------------------------------------------------------------


def test_memory_is_calibrated_by_peaks():
    """A machine whose torch takes 500 MiB, and whose activations take a tenth more than counted."""

    def peak(one):
        need = cost.training_memory(one)
        return round(500 * 2**20 + need.total_bytes + 0.1 * need.activations_bytes)

    plain = cost_model()
    model = cost_model([sample(one, peak_bytes=peak(one)) for one in MEASURED])
    for target in TARGETS:
        split, need = model.memory(FP32, target)
        assert need.value == pytest.approx(peak(target) + TRAINER_BYTES, rel=0.03)
        assert need.basis in ("interpolated", "extrapolated") and split.process_bytes > 450 * 2**20
        assert plain.memory(FP32, target)[1].basis == "prior"
        assert need.value == pytest.approx(split.total_bytes)


def test_weights_gradients_and_moments_take_sixteen_bytes_a_parameter():
    need = cost.training_memory(workload("small", 12))
    fixed = need.weights_bytes + need.gradients_bytes + need.optimizer_bytes
    assert fixed == 16 * cost.parameters(workload("small", 12).model)


@pytest.mark.parametrize("limit_gib", [1, 3, 8])
def test_the_largest_batch_fits_and_the_next_does_not(limit_gib):
    model, target = cost_model(), workload("small", 12)
    batch_size = model.largest_batch(FP32, target, limit_gib * 2**30)
    if limit_gib == 1:
        assert batch_size == 0
        return
    needs = [
        with_margin(model.memory(FP32, replace(target, batch_size=size))[1].value)
        for size in (batch_size, batch_size + 1)
    ]
    assert needs[0] <= limit_gib * 2**30 < needs[1]


# --- parts ----------------------------------------------------------------------------------------------------


def test_fitted_prices_are_never_negative_and_miss_little():
    rows, prior = [(1.0, 10.0), (2.0, 5.0), (4.0, 1.0)], (1.0, 1.0)
    prices = fit_prices(rows, [1.0, 2.0, 4.0], prior)
    assert prices[0] == pytest.approx(1.0, rel=0.01) and 0 <= prices[1] < 0.01
    assert fit_prices([], [], (3.0, 4.0)) == [3.0, 4.0]


def test_a_model_survives_being_kept():
    model = workload("large", 2).model
    one = replace(workload("tiny", 8), model=model, micro_batch=4, recompute=True, trained_share=0.5)
    assert Workload.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_a_micro_batch_that_is_the_whole_batch_is_none():
    parts = replace(workload("tiny", 16), micro_batch=8)
    assert replace(parts, micro_batch=16) == workload("tiny", 16)
    assert parts.cut(batch_size=8) == workload("tiny", 8).cut() and parts.cut(batch_size=9).micro_batch == 8


def test_samples_that_this_version_does_not_understand_are_left_out():
    strange = replace(sample(MEASURED[0]), workload={"model": {"model.image.wings": 2}})
    assert cost_model([strange]).step_s(FP32, TARGETS[0]).basis == "prior"


def test_an_interval_scales_with_its_value():
    estimate = Estimate.around(2.0, 0.25, "measured").scaled(10)
    assert (estimate.value, estimate.low, estimate.high) == (20.0, 16.0, 25.0)
