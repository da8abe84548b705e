"""One ranking: `train --device auto` and `recommend-device` never disagree on the same facts."""

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipctl.bench.recommend import Question, recommend
from clipctl.config.layers import Layer, resolve
from clipctl.hardware import faults
from clipctl.hardware.devices import Device
from clipctl.hardware.profile import HYBRID, DeviceFacts, Machine, Profile, Rates, StepSample
from clipctl.model import ranking
from clipctl.model.forecast import CostModel, Estimate
from clipctl.model.ranking import Place, rank
from clipctl.model.workload import Setting, Workload
from clipctl.training import choice

CORES = 4
MACHINE = Machine("a CPU", CORES, 16, "Linux x86_64", "2.13.0")
CONFIG = resolve([Layer("test", {"preset": "small", "model.text.vocab_size": 33})])
WORKLOAD = Workload(CONFIG.model, CONFIG.train.batch_size, 60)
NAMES = {"cpu": "a CPU", "mps": "Apple M1 GPU", "cuda:0": "a GPU", HYBRID: "both"}
ROOMY, TIGHT = 64 * 2**30, 2**30


def sample(setting, workload, step_s):
    return StepSample(setting.device, setting.precision, setting.threads, workload.to_dict(), step_s, 0.0, None, 1.0)


@st.composite
def machines(draw):
    """Devices with their memory, what products reach, and steps that were timed: of the workload, or in small."""
    labels = draw(st.sampled_from([["cpu"], ["cpu", "mps"], ["cpu", "cuda:0"]]))
    memory = {label: draw(st.sampled_from([ROOMY, ROOMY, TIGHT])) for label in labels}
    rates = [
        Rates(label, precision, threads, draw(st.sampled_from([1.0, 50.0, 100.0, 400.0])))
        for label in labels
        for precision in ("fp32", "bf16", "fp16")
        for threads in (1, CORES)
    ]
    steps = []
    for device in [*labels, HYBRID] if len(labels) > 1 else labels:
        for precision in ("fp32", "bf16"):
            for workload in (WORKLOAD, *ranking.device_stand_ins(WORKLOAD)):
                step_s = draw(st.sampled_from([None, None, 0.5, 1.0, 1.05, 2.0, 8.0]))
                if step_s is not None:
                    steps.append(sample(Setting(device, precision, CORES), workload, step_s))
    facts = [DeviceFacts(label, NAMES[label], memory[label]) for label in labels]
    profile = Profile(MACHINE).with_devices(facts).with_rates(rates).with_steps(steps)
    return SimpleNamespace(labels=labels, memory=memory, profile=profile)


def decided(machine, precision, total_steps):
    """What `auto` chooses when there is no time to measure."""

    def opened(label):
        known = label if label in machine.memory else next(one for one in machine.labels if one != "cpu")
        return Device(label, torch.device(known), torch.device("cpu"), NAMES[known], machine.memory[known])

    config = replace(CONFIG, runtime=replace(CONFIG.runtime, precision=precision))
    changes = {
        "devices": SimpleNamespace(labels=lambda: machine.labels, open_device=opened, facts=lambda: []),
        "load_profile": lambda: machine.profile,
        "time_steps": lambda *_, **__: pytest.fail("there was no time for this"),
        "time_attention": lambda *_: [],
        "LIMIT_S": 0.0,
        "LIMIT_WITH_ACCELERATOR_S": 0.0,
    }
    with ExitStack() as stack:
        for name, value in changes.items():
            stack.enter_context(patch.object(choice, name, value))
        stack.enter_context(patch.object(choice.cpu, "usable_cores", lambda: CORES))
        stack.enter_context(patch.object(choice.cpu, "thread_candidates", lambda: [CORES]))
        return choice.decide(config, WORKLOAD, total_steps)


@settings(max_examples=60, deadline=None)
@given(machines(), st.sampled_from(["auto", "fp32", "bf16"]), st.sampled_from([1, 20, 10_000]))
def test_auto_and_recommend_device_never_disagree_on_the_same_facts(machine, precision, total_steps):
    found = decided(machine, precision, total_steps)
    question = Question(
        WORKLOAD.model, WORKLOAD.batch_size, 60, precision=precision, pairs=WORKLOAD.batch_size, epochs=total_steps
    )
    with patch("clipctl.hardware.memory.available_bytes", lambda: machine.memory["cpu"]):
        answer = recommend(question, machine.profile)
    if answer.device is None:
        assert found.device.label == "cpu" and found.device.memory_bytes == TIGHT
        return
    assert answer.device == found.device.label
    chosen = next(one for one in answer.candidates if one.device == answer.device)
    assert chosen.ranked.setting.precision == found.precision.value


def test_a_mixture_of_two_devices_is_an_option_only_if_it_was_measured():
    places = [Place(device, ROOMY) for device in ("cpu", "cuda:0", HYBRID)]
    steps = [sample(Setting(device, "fp32", CORES), WORKLOAD, step_s) for device, step_s in (("cpu", 2), ("cuda:0", 1))]
    for hybrid_s, expected in ((None, "cuda:0"), (0.5, HYBRID), (1.5, "cuda:0")):
        more = [] if hybrid_s is None else [sample(Setting(HYBRID, "fp32", CORES), WORKLOAD, hybrid_s)]
        model = CostModel(Profile(MACHINE).with_steps([*steps, *more]))
        verdict, _ = rank(model, WORKLOAD, places, precision="fp32", threads=CORES, total_steps=1000)
        assert verdict.setting.device == expected


def test_a_workload_that_a_device_gets_wrong_is_kept_away_from_it():
    long = replace(WORKLOAD, batch_size=400)
    limit = faults.product_limit("mps", "Apple M1 GPU")
    steps = [sample(Setting(device, "fp32", CORES), long, step_s) for device, step_s in (("cpu", 9.0), ("mps", 1.0))]
    places = [Place("cpu", 100 * ROOMY), Place("mps", 100 * ROOMY, limit)]
    verdict, _ = rank(
        CostModel(Profile(MACHINE).with_steps(steps)), long, places, precision="fp32", threads=CORES, total_steps=1000
    )
    assert limit == 32767 and long.longest_product > limit and verdict.setting.device == "cpu"


@pytest.mark.parametrize(
    ("low", "spread", "rival_s", "expected"),
    [(1.0, 0.1, 3.0, "high"), (1.0, 0.5, 3.0, "medium"), (1.0, 1.03, 9.0, "low"), (1.0, 0.1, 1.15, "low")],
)
def test_confidence_is_tied_to_the_interval(low, spread, rival_s, expected):
    best, rival = Estimate.around(low, spread, "measured"), Estimate.around(rival_s, 0.1, "interpolated")
    assert ranking._confidence(best, rival) == expected
    assert ranking._confidence(replace(best, basis="prior"), rival) == "low"


@pytest.mark.parametrize("order", [("cpu", "mps"), ("mps", "cpu"), (HYBRID, "mps", "cpu")])
def test_the_order_in_which_devices_are_named_does_not_matter(order):
    places = [Place(device, ROOMY) for device in order]
    model = CostModel(Profile(MACHINE))
    verdict, candidates = rank(model, WORKLOAD, places, precision="fp32", threads=CORES, total_steps=10_000)
    assert verdict.setting.device == "cpu" and "rule of thumb" in verdict.reason
    assert [one.setting.device for one in candidates] == list(order)


def test_an_unmeasured_mixture_may_be_all_there_is():
    model = CostModel(Profile(MACHINE))
    verdict, _ = rank(model, WORKLOAD, [Place(HYBRID, ROOMY)], precision="auto", threads=CORES, total_steps=10)
    assert (verdict.setting.device, verdict.confidence) == (HYBRID, "low")


def test_what_was_timed_of_the_close_ones_decides_whatever_is_known_of_the_others():
    """The Apple GPU is out of the question by rule of thumb; CPU and both together were timed."""
    timed = ((Setting("cpu", "fp32", CORES), 1.0), (Setting(HYBRID, "fp32", CORES), 0.5))
    small = resolve([Layer("test", {"model.text.vocab_size": 33})]).model
    workload = replace(WORKLOAD, model=small)
    model = CostModel(Profile(MACHINE).with_steps([sample(setting, workload, step_s) for setting, step_s in timed]))
    places = [Place(device, ROOMY) for device in ("cpu", "mps", HYBRID)]
    verdict, _ = rank(model, workload, places, precision="fp32", threads=CORES, total_steps=10_000)
    assert verdict.setting.device == HYBRID and verdict.reason.startswith("measured 500 ms per step")
