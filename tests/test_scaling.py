"""Several machines: what they tell each other, and how far that carries."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clipctl.bench.recommend import Question, model_of_size
from clipctl.bench.scaling import node_counts, scale, scale_of
from clipctl.cli.app import app
from clipctl.config.layers import Layer, resolve
from clipctl.config.quantities import parse_bandwidth
from clipctl.hardware import cpu
from clipctl.hardware.profile import Machine, Profile
from clipctl.model.communication import BETWEEN, EXCHANGES, Network, communication_s, traffic
from clipctl.model.cost import parameters, training_memory
from clipctl.model.forecast import CostModel, Estimate
from clipctl.model.workload import Setting
from clipctl.training.plan import TURN_S, make_plan

FAST = Network(bytes_per_s=1e12, latency_s=0.0)
FASTER = Network(bytes_per_s=12.5e9, latency_s=20e-6)
SLOW = Network(bytes_per_s=125e6, latency_s=0.0002)
CPU = Setting("cpu", "fp32", 2)


@pytest.fixture
def question():
    return Question(resolve([Layer("test", {"preset": "small", "model.text.vocab_size": 100})]).model, batch_size=64)


@pytest.fixture
def profile():
    return Profile(Machine.here())


def test_gradients_and_embeddings_are_sent_once(question):
    sent = traffic(question.workload, 64, 2)
    embeddings = 64 * 2 * question.model.embed_dim * 4
    assert sent.gradient_bytes == 4 * parameters(question.workload.model)
    assert sent.embedding_bytes == embeddings / 2 + 64 * 16 / 2 and sent.slope_bytes == embeddings


def test_only_what_is_trained_is_sent(question):
    part = replace(question.workload, trained_share=0.02)
    assert traffic(part, 64, 4).gradient_bytes == pytest.approx(0.02 * traffic(question.workload, 64, 4).gradient_bytes)


def test_one_process_tells_nobody_anything(question):
    assert communication_s(question.workload, 64, 1, SLOW) == 0.0


def test_gradients_hide_behind_the_last_backward_pass(question):
    part = replace(question.workload, batch_size=32)
    exposed = communication_s(part, 64, 2, SLOW)
    gradient_s = traffic(part, 64, 2).gradient_bytes / SLOW.bytes_per_s
    assert communication_s(part, 64, 2, SLOW, 1e6) == pytest.approx(exposed - gradient_s)
    assert communication_s(part, 64, 2, SLOW, 1e-6) == pytest.approx(exposed, abs=1e-6)
    in_parts = replace(part, micro_batch=8)  # four, of which the last one's gradients are complete
    assert in_parts.last_backward_share == pytest.approx(2 / 4 / 4)
    assert communication_s(replace(part, shards=2), 64, 2, SLOW, 1e6) == communication_s(
        replace(part, shards=2), 64, 2, SLOW
    )


def test_a_network_without_cost_leaves_the_computing(question, profile):
    model = CostModel(profile)
    for one in scale(question, profile, CPU, [1, 2, 4], FAST):
        part = replace(question.workload, batch_size=64 // one.nodes)
        assert one.step_s.value == pytest.approx(model.step_s(CPU, part).value, rel=1e-3)
        assert one.pairs == 64 // one.nodes


def test_a_slow_network_costs_efficiency_and_money(question, profile):
    fast, slow = (scale(question, profile, CPU, [8], network, price_per_hour=2.0)[0] for network in (FAST, SLOW))
    assert slow.efficiency < fast.efficiency and slow.price > fast.price
    assert slow.price == pytest.approx(8 * 2.0 * slow.epoch_s / 3600)
    assert slow.step_s.value == pytest.approx(fast.step_s.value + slow.communication_s, rel=1e-3)


@pytest.mark.parametrize("nodes", [4, 1024])
@pytest.mark.parametrize(("name", "network"), [("1 Gbit/s", BETWEEN), ("100 Gbit/s", FASTER)])
def test_the_study_in_the_docs_is_what_this_version_forecasts(nodes, name, network):
    text = (Path(__file__).parents[1] / "docs" / "scaling.md").read_text(encoding="utf-8")
    compute_s = float(re.search(r"^\| 200M \|.* ([\d.]+) s f \|$", text, re.M)[1])
    row = re.search(rf"^\| {nodes:,} \| {name} \| ([\d.]+) s \| (\d+)% \| (\d+)% \| ([\d.]+) GB", text, re.M)
    question = Question(model_of_size(200_000_000), batch_size=32 * nodes)
    compute = Estimate.around(compute_s, 0.1, "measured")
    one = scale_of(question, nodes, compute.scaled(nodes), compute, network)
    found = [one.step_s.value, 100 * one.communication_s / one.step_s.value, 100 * one.efficiency, one.sent_bytes / 1e9]
    assert [float(figure) for figure in row.groups()] == [pytest.approx(value, rel=0.02, abs=1) for value in found]


def test_every_machine_has_pairs_to_contrast(question, profile):
    assert [one.nodes for one in scale(question, profile, CPU, node_counts(512), SLOW)] == [1, 2, 4, 8, 16, 32]


def test_node_counts():
    assert node_counts(6) == [1, 2, 4, 6] and node_counts(8) == [1, 2, 4, 8] and node_counts(2) == [1, 2]


@pytest.mark.parametrize(
    ("text", "expected"), [("1Gbps", 125e6), ("100Mbit/s", 12.5e6), ("10Gb", 1.25e9), ("1.5GB/s", 1.5e9)]
)
def test_bandwidths(text, expected):
    assert parse_bandwidth(text) == expected


@pytest.mark.parametrize("text", ["", "fast", "1G", "0Gbps", "-1Gbps", "1Gbps2"])
def test_what_is_no_bandwidth(text):
    done = CliRunner().invoke(app, ["recommend-device", "--preset", "tiny", "--nodes", "2", "--bandwidth", text])
    assert done.exit_code == 2 and "--bandwidth must be a bandwidth such as 1Gbps" in done.stderr


def test_the_command():
    words = ["recommend-device", "--preset", "small", "--batch-size", "64", "--nodes", "4", "--price", "1.5"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "machines like this one, 1Gbps between them" in done.stdout
    document = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert [one["nodes"] for one in document["scaling"]] == [1, 2, 4]
    assert all(one["price"] > 0 and 0 < one["efficiency"] < 3 for one in document["scaling"])


def test_too_few_pairs_for_so_many_machines():
    words = ["recommend-device", "--preset", "small", "--batch-size", "8", "--nodes", "8"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "8 machines need --batch-size 16 or more: 2 pairs each" in done.stdout, done.output


def test_processes_of_one_machine_share_its_memory_and_wait_for_its_cores(micro):
    plans = {ranks: make_plan(micro, ranks=ranks) for ranks in (1, 2, 2 * cpu.usable_cores())}
    alone, two, crowded = plans.values()
    assert two.placement.device.memory_bytes == pytest.approx(alone.placement.device.memory_bytes / 2, rel=0.2)
    assert crowded.forecast.step_s.value > EXCHANGES * TURN_S > two.forecast.step_s.value - alone.forecast.step_s.value


def test_a_split_model_needs_a_part_of_the_memory_and_half_as_much_traffic_again(question):
    whole, part = question.workload, replace(question.workload, shards=8)
    need, split = training_memory(whole), training_memory(part)
    assert (split.gradients_bytes, split.optimizer_bytes) == (need.gradients_bytes // 8, need.optimizer_bytes // 8)
    assert need.weights_bytes / 8 < split.weights_bytes < need.weights_bytes
    assert traffic(part, 64, 8).gradient_bytes == pytest.approx(1.5 * traffic(whole, 64, 8).gradient_bytes)
