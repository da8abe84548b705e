"""clipctl bench and recommend-device as a person uses them."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from typer.testing import CliRunner

from clipctl.bench import measure, operations, steps
from clipctl.bench.countdown import Countdown
from clipctl.bench.measure import place_under_roof, raise_peaks
from clipctl.bench.recommend import BANDS, model_of_size, profile_of
from clipctl.bench.results import BenchResult, BenchRow, Overhead, Peak, compare, load_result, save_result
from clipctl.bench.steps import CALIBRATION, StepProbe
from clipctl.bench.verdict import verdict_of
from clipctl.cli.app import app
from clipctl.cli.views import bench as bench_view
from clipctl.config.quantities import parse_bytes, parse_counts
from clipctl.errors import DataError
from clipctl.hardware.devices import open_device
from clipctl.hardware.profile import Machine, load_profile
from clipctl.model import cost
from clipctl.model.forecast import TRAINER_BYTES, CostModel
from clipctl.model.workload import Setting
from tests.launcher import launch

QUICK = ("bench", "--sizes", "2000", "20000", "--threads", "1")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _home(home, monkeypatch):
    monkeypatch.setenv("CLIPCTL_HOME", str(home))


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def saved(home, tmp_path_factory):
    """A real benchmark, small, kept in a file."""
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPCTL_HOME", str(home))
        done = invoke(*QUICK, "--save", path, "--plot", path.with_suffix(".png"), "--json")
    assert done.exit_code == 0, done.output
    return path, json.loads(done.stdout)


# --- what is typed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "counts"),
    [
        (["1e6", "1e7"], [10**6, 10**7]),
        (["1e6,1e7"], [10**6, 10**7]),
        (["10M", "1_000_000", "1e6"], [10**6, 10**7]),
        (["1e5:1e8:4"], [10**5, 10**6, 10**7, 10**8]),
        (["2:9:8"], [2, 2, 3, 4, 5, 6, 7, 9]),
    ],
)
def test_sizes_are_read_as_people_write_them(texts, counts):
    assert parse_counts(texts) == sorted(set(counts))


@pytest.mark.parametrize(
    "text", ["", "-3", "0", "abc", "1e5:1e3:4", "1:2", "1e5:1e8:1", "1:2:3:4", "1.5", "nan", "1e400"]
)
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises((ValueError, OverflowError)):
        parse_counts([text])


@pytest.mark.parametrize(
    ("text", "count"),
    [("8G", 2**33), ("8GB", 2**33), ("8 GiB", 2**33), ("512m", 2**29), ("1.5g", 3 * 2**29), ("1024", 1024)],
)
def test_memory_sizes_are_powers_of_1024(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "0", "8X", "-8G", "G", "8GG"])
def test_what_is_no_memory_size_is_refused(text):
    with pytest.raises(ValueError, match="memory size"):
        parse_bytes(text)


@pytest.fixture
def asked(monkeypatch):
    """What would have been measured."""
    requests = []

    def end_here(request, tell):
        requests.append(request)
        raise DataError("that is all")

    monkeypatch.setattr(measure, "bench", end_here)
    return requests


def test_values_after_one_option_belong_to_it(asked):
    for arguments in (["--sizes", "1e6", "1e7"], ["--sizes", "1e6", "--sizes", "1e7"], ["--sizes=1e6,1e7"]):
        invoke("bench", *arguments, "--dtypes", "fp32", "bf16")
    assert [request.sizes for request in asked] == [(10**6, 10**7)] * 3
    assert all(request.dtypes == ("fp32", "bf16") and "step" not in request.suites for request in asked)


def test_every_batch_is_timed_in_every_micro_batch(asked):
    invoke("bench", "--model", "tiny", "--batch-sizes", "32", "64", "--micro-batch", "8", "16")
    invoke("bench", "--model", "tiny", "--batch-sizes", "32")
    probes = [[(probe.batch_size, probe.micro_batch) for (probe,) in request.groups] for request in asked]
    assert probes == [[(32, 8), (32, 16), (64, 8), (64, 16)], [(32, None)]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sizes", "abc"], "--sizes must be a whole number"),
        (["--sizes", "-3"], "--sizes must be above zero"),
        (["--suites", "matmull"], "--suites 'matmull' is not one of"),
        (["--dtypes", "fp8"], "--dtypes 'fp8' is not one of fp32, bf16, fp16"),
        (["--model", "giant"], "--model 'giant' is not one of"),
        (["--batch-sizes", "8"], "--batch-sizes needs --model"),
        (["--micro-batch", "4"], "--micro-batch needs --model"),
        (["--model", "tiny", "--micro-batch", "9"], "--micro-batch 9 is larger than a batch of 8"),
        (["--model", "tiny", "--batch-sizes", "4", "64", "--micro-batch", "8"], "is larger than a batch of 4"),
        (["--model", "tiny", "--micro-batch", "0"], "--micro-batch must be above zero"),
        (["--model", "tiny", "--micro-batch", "some"], "--micro-batch must be a whole number"),
        (["--devices", "gpu"], "unknown device 'gpu'"),
        (["--devices", "cpu", "cpu"], "a device is named twice"),
        (["--format", "xml"], "--format must be one of table, md, csv, json"),
        (["--plot", "bench.pdf"], "neither a .png nor an .svg"),
        (["--threads", "0"], "--threads must be above zero"),
        (["--compare", "nowhere.json"], "no such file: nowhere.json"),
        (["--save", "no/such/place.json"], "there is no directory no/such"),
    ],
)
def test_mistakes_are_named_before_anything_is_measured(arguments, words):
    done = invoke("bench", *arguments)
    assert done.exit_code == 2 and words in done.stderr, done.stderr


def test_a_missing_device_has_its_own_exit_code():
    done = invoke("bench", "--devices", "cuda:7")
    assert done.exit_code == 4 and "cuda:7 is not available" in done.stderr


def test_operands_that_are_moved_lie_elsewhere_and_give_the_same():
    work = measure._Operands(torch.add, (torch.arange(1000.0), torch.ones(1000)))
    before, places = work(), [one.data_ptr() for one in work._operands]
    work.move()
    assert torch.equal(work(), before)
    assert not set(places) & {one.data_ptr() for one in work._operands}


def test_sizes_that_do_not_fit_are_refused_with_the_need():
    done = invoke("bench", "--sizes", "1e12")
    assert done.exit_code == 4 and "needs about 40978.2 GiB" in done.stderr and "fits" in done.stderr


# --- what comes out -------------------------------------------------------------------------------------------


def test_json_carries_what_other_programs_rely_on(saved):
    _, document = saved
    assert document["schema"] == "clipctl.bench/1"
    keys = "suite operation device dtype size threads median_s iqr_s gflops gbytes_per_s samples_s"
    for row in document["results"]:
        assert set(keys.split()) <= row.keys() and row["median_s"] > 0 and len(row["samples_s"]) >= 3
    assert {row["suite"] for row in document["results"]} == {"elementwise", "matmul", "attention"}
    assert document["crossover"] == [] and document["peaks"] and document["overheads"]
    assert {row["size"] for row in document["results"]} == {2000, 20000}


def test_results_are_kept_for_forecasts(saved):
    profile = load_profile()
    assert profile.benched_s is not None and profile.rates and profile.devices[0].kind == "cpu"


def test_a_picture_is_drawn(saved):
    path, _ = saved
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("format", ["table", "md", "csv"])
def test_other_forms_hold_the_same_rows(saved, format):

    result = load_result(saved[0])
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        patch.setenv("COLUMNS", "80")
        bench_view.show(result, format)
    text = output.getvalue()
    if format == "csv":
        assert len(list(csv.DictReader(io.StringIO(text)))) == len(result.results)
    else:
        assert text.count("attention") >= 2 and "no crossover" in text
    if format == "table":
        assert max(len(line) for line in text.splitlines() if not line.startswith(("warning", "skipped"))) <= 80


def test_a_comparison_says_what_changed_and_where_it_was_made(saved, tmp_path):
    path, _ = saved
    before = load_result(path)
    slower = [replace(row, median_s=2 * row.median_s, iqr_s=0.0) for row in before.results]
    other = replace(before, results=slower, machine=replace(before.machine, torch="2.1.0"))
    save_result(other, tmp_path / "other.json")
    done = invoke(*QUICK, "--suites", "matmul", "--compare", tmp_path / "other.json")
    assert done.exit_code == 0
    assert "a different machine or version: torch 2.1.0 instead of" in done.stderr
    assert {round(change.ratio, 6) for change in compare(before, other)} == {0.5}


@pytest.mark.parametrize("content", ["", "{}", '{"schema": "clipctl.bench/1"}', "\x00"])
def test_a_damaged_file_is_refused(content, tmp_path):
    (tmp_path / "bad.json").write_text(content)
    done = invoke("bench", "--compare", tmp_path / "bad.json")
    assert done.exit_code == 2 and "is not a result of clipctl bench" in done.stderr


# --- the roof -------------------------------------------------------------------------------------------------


def row(operation="matmul", size=1000, seconds=1.0, gflops=None, gbytes=None, **values):
    numbers = {"first_s": seconds, "median_s": seconds, "iqr_s": 0.0, "min_s": seconds, "samples_s": [seconds]}
    setting = {"device": "cpu", "dtype": "fp32", "threads": 2, **values}
    return BenchRow(
        suite=operation, operation=operation, size=size, **setting, **numbers, gflops=gflops, gbytes_per_s=gbytes
    )


PEAK = Peak("cpu", "fp32", 2, 100.0, 20.0)
OVERHEAD = Overhead("cpu", None, 1.0, 1.0, 1.0, 1.0, 1e-5, None, None, None, None, 1.0)


@pytest.mark.parametrize(
    ("one", "bound", "share"),
    [
        (row(gflops=80.0, gbytes=1.0), "compute", 0.8),
        (row(gflops=5.0, gbytes=15.0), "memory", 0.75),
        (row(gbytes=90.0), "cache", None),
        (row(seconds=2e-5, gflops=0.1, gbytes=0.1), "launch", None),
        (row(gflops=80.0, threads=1), None, None),  # the roof was measured with two
    ],
)
def test_what_holds_an_operation_back(one, bound, share):
    (placed,) = place_under_roof([one], [PEAK], [OVERHEAD])
    assert (placed.bound, placed.roof_share) == (bound, share)


def test_a_roof_is_as_high_as_the_best_that_was_seen():
    (raised,) = raise_peaks([PEAK], [row(gflops=120.0), row(seconds=1.0, gbytes=25.0), row(seconds=1e-4, gbytes=99.0)])
    assert (raised.gflops, raised.gbytes_per_s) == (120.0, 25.0)


@pytest.mark.parametrize("operation", operations.OPERATIONS, ids=lambda one: one.name)
def test_operations_hold_about_as_many_elements_as_asked(operation):
    for size in (1000, 151_296, 1_000_000):
        operands = operation.operands(size)
        assert operands[0].numel() == pytest.approx(size, rel=0.25)
        assert operation.run(*operands).shape[-1] > 0
        assert sum(one.numel() for one in operands) * 4 <= operations.need_bytes(size)


# --- steps ----------------------------------------------------------------------------------------------------


def test_probes_leave_out_what_forecasts_are_tested_with():
    whole = {(probe.preset, probe.batch_size) for group in CALIBRATION for probe in group if probe.depths is None}
    assert not whole & {(preset, batch) for preset in ("tiny", "small", "base") for batch in (4, 12, 32)}


def test_a_step_is_measured_in_a_process_of_its_own_and_kept():
    results = steps.measure_probes([(StepProbe("tiny", 2),)], ["fp32"], ["cpu"], 1, [])
    (found,) = results.rows
    assert found.operation == "tiny" and found.peak_bytes > 50e6 and found.workload["model"]["model.image.width"] == 128
    assert any(sample.workload["batch_size"] == 2 and sample.peak_bytes for sample in load_profile().steps)


def test_a_step_in_micro_batches_is_measured_and_answers_for_itself():
    probe = StepProbe("tiny", 6, micro_batch=2)
    (found,) = steps.measure_probes([(probe,)], ["fp32"], ["cpu"], 1, []).rows
    assert (found.operation, found.size, found.workload["micro_batch"]) == ("tiny in micro-batches of 2", 6, 2)
    model, setting = CostModel(load_profile()), Setting("cpu", "fp32", 1)
    for micro_batch, is_measured in ((2, True), (3, False), (None, False)):
        workload = replace(probe.workload, micro_batch=micro_batch)
        estimates = model.step_s(setting, workload), model.memory(setting, workload)[1]
        assert [one.basis == "measured" for one in estimates] == [is_measured] * 2
        assert (estimates[1].value == found.peak_bytes + TRAINER_BYTES) == is_measured


def test_a_micro_batch_as_large_as_the_batch_is_the_whole_batch():
    whole, part = StepProbe("tiny", 4), StepProbe("tiny", 4, micro_batch=4)
    assert (part.name, part.workload) == ("tiny", whole.workload)


def test_long_names_of_steps_leave_the_table_in_80_columns():
    named = {"operation": "small 3+1 in micro-batches of 128", "peak_bytes": 2**30, "suite": "step"}
    result = BenchResult(Machine.here(), [replace(row("step", 1024, 123.4, gflops=123.4), **named)])
    header, name, figures = bench_view._step_table(result).plain.splitlines()
    assert name == named["operation"] and figures.split()[0] == "1024" and len(figures) <= 80
    assert header.index("batch") + len("batch") == figures.index("1024") + len("1024")


def test_groups_take_turns_each_in_one_process():
    two, three = (StepProbe("tiny", 2),), (StepProbe("tiny", 3),)
    told, processes = [], set()

    def look(line):
        told.append("2" if "batch 2" in line else "3")
        processes.update(_spawned())

    found = steps.measure_probes([two, three], ["fp32"], ["cpu"], 1, [], look)
    assert "".join(told) == "2332233223" and len(processes) == 2
    assert [(row.size, len(row.samples_s) >= steps.ROUNDS) for row in found.rows] == [(2, True), (3, True)]
    assert not _spawned()


def test_groups_that_do_not_fit_in_memory_together_are_measured_one_after_the_other(monkeypatch):
    two, three = (StepProbe("tiny", 2),), (StepProbe("tiny", 3),)
    monkeypatch.setattr(steps, "open_device", lambda label: SimpleNamespace(memory_bytes=3 * steps.PROCESS_BYTES))
    told = []
    steps.measure_probes([two, three, two], ["fp32"], ["cpu"], 1, [], told.append)
    assert ["2" if "batch 2" in line else "3" for line in told] == list("2222233333")


def test_steps_that_are_killed_are_named_once_and_the_others_go_on():
    told = []

    def kill(line):
        told.append(line)
        if len(told) == 2:  # before the second turn there is only the process of the first
            (process,) = _spawned()
            process.kill()

    doomed, other = (StepProbe("tiny", 2),), (StepProbe("tiny", 3),)
    found = steps.measure_probes([doomed, other], ["fp32"], ["cpu"], 1, [], kill)
    assert [row.size for row in found.rows] == [2, 3] and len(found.rows[1].samples_s) >= steps.ROUNDS
    assert len(found.skipped) == 1 and "tiny at batch 2 on cpu: the system killed the process" in found.skipped[0]


def _spawned(pid: int | None = None) -> list[psutil.Process]:
    return [one for one in psutil.Process(pid).children() if "spawn_main" in " ".join(one.cmdline())]


def test_a_precision_that_is_emulated_is_left_out():
    peaks = [Peak("cpu", "fp32", 2, 100.0), Peak("cpu", "bf16", 2, 3.0)]
    found = steps.measure_probes([(StepProbe("tiny", 2),)], ["bf16"], ["cpu"], 1, peaks)
    assert found.rows == [] and found.skipped == ["steps in bf16 on cpu: matrix products are no faster than in fp32"]


# --- recommend-device -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", ["-3", "0", "abc", "150X", "1e99", "1T", ""])
def test_numbers_that_are_none_are_refused(params):
    done = invoke("recommend-device", "--params", params)
    assert done.exit_code == 2 and "--params must be" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "choose one model"),
        (["--params", "1M", "--preset", "tiny"], "choose one model"),
        (["--preset", "gigantic"], "unknown preset"),
        (["--preset", "tiny", "--precision", "fp8"], "--precision must be one of"),
        (["--preset", "tiny", "--memory", "8X"], "--memory must be a memory size"),
        (["--preset", "tiny", "--memory", "8"], "did you mean 8G?"),
        (["--preset", "tiny", "--batch-size", "1"], "--batch-size must be 2 or more"),
        (["--preset", "tiny", "--devices", "tpu"], "unknown device 'tpu'"),
        (["--preset", "tiny", "--measure", "--results", "x.json"], "pass only one of them"),
    ],
)
def test_questions_that_make_no_sense_are_refused(arguments, words):
    done = invoke("recommend-device", *arguments)
    assert done.exit_code == 2 and words in done.stderr


def test_the_answer_as_data():
    done = invoke("recommend-device", "--params", "150M", "--json")
    document = json.loads(done.stdout)
    assert done.exit_code == 0 and document["schema"] == "clipctl.recommend-device/1"
    assert document["device"] == "cpu" and document["confidence"] in ("high", "medium", "low")
    (candidate,) = document["candidates"]
    assert {"device", "fits", "memory_bytes", "step_s", "basis"} <= candidate.keys()
    split = candidate["memory_split"]
    assert sum(split.values()) == pytest.approx(candidate["memory_bytes"], rel=0.01)
    assert split["weights_bytes"] == pytest.approx(4 * document["parameters"], rel=0.5)
    assert [band["rule_of_thumb"] for band in document["bands"]] == ["CPU", "CPU", "test both", "GPU"]


def test_what_fits_nowhere_ends_with_3_and_says_so():
    done = invoke("recommend-device", "--preset", "huge", "--memory", "8G")
    assert done.exit_code == 3 and "nothing fits" in done.stdout and "simulated" in done.stdout


def test_a_machine_that_is_not_here_is_called_simulated():
    done = invoke("recommend-device", "--preset", "small", "--memory", "16G", "--devices", "cpu", "mps", "--json")
    document = json.loads(done.stdout)
    assert [one["simulated"] for one in document["candidates"]] == [True, True]
    assert any("simulated: this machine has no mps" in line for line in document["assumptions"])
    assert document["candidates"][1]["basis"] == "prior" and document["confidence"] == "low"
    assert document["candidates"][1]["available_bytes"] == pytest.approx(16 * 2**30 * 2 / 3, rel=0.01)


def test_bench_results_from_elsewhere_are_flagged(saved, tmp_path):
    result = replace(load_result(saved[0]), machine=Machine("Another CPU", 8, 16, "Darwin arm64", "2.12.0"))
    save_result(result, tmp_path / "elsewhere.json")
    done = invoke("recommend-device", "--params", "10M", "--results", tmp_path / "elsewhere.json")
    assert (
        done.exit_code == 0
        and "was measured on a different machine or version: cpu Another CPU instead of" in done.stderr
    )


def test_a_saved_benchmark_forecasts_like_the_one_that_was_kept():
    probe = StepProbe("tiny", 8)
    measured = replace(row("step", 8, 0.25), operation="tiny", workload=probe.workload.to_dict())
    profile = profile_of(BenchResult(Machine.here(), [measured]))
    assert CostModel(profile).step_s(Setting("cpu", "fp32", 2), probe.workload).value == 0.25


@pytest.mark.parametrize("parameters", [100_000, 5_000_000, 50_000_000, 150_000_000, 10**9, 3 * 10**9])
def test_there_is_a_model_of_any_size(parameters):
    assert cost.parameters(model_of_size(parameters)) == pytest.approx(parameters, rel=0.1)


def test_what_was_measured_for_a_question_answers_it():
    done = invoke("recommend-device", "--preset", "tiny", "--batch-size", "2", "--measure", "--json")
    assert done.exit_code == 0, done.output
    (candidate,) = json.loads(done.stdout)["candidates"]
    assert (candidate["basis"], candidate["memory_basis"]) == ("measured", "measured")


def test_a_wrong_result_is_warned_of():
    result = replace(row("matmul", gflops=1.0), error=0.3)
    bench = measure._Bench(measure.BenchRequest(), [], lambda line: None, 0.0)
    assert any("differs from the CPU's result by 30%" in words for words in bench._warnings([result], 0.0))


def test_a_size_is_judged_by_one_that_takes_long_enough_to_tell(monkeypatch):
    """On a device that takes 20 µs to start, a small size says nothing of a large one."""

    class Pretended:
        def __init__(self, run, wait):
            self.elements = run.args[0].numel()

        def sample(self):
            return 20e-6 + 1e-10 * self.elements

    monkeypatch.setattr(measure, "Stopwatch", Pretended)
    add = next(one for one in operations.OPERATIONS if one.name == "add")
    price_s = measure._price_s(add, 10**7, open_device("cpu"), "fp32")
    assert price_s * measure._amount(add, 10**7) == pytest.approx(1.02e-3)


@pytest.mark.parametrize(
    ("looks", "sizes", "skipped"),
    [
        ([1.0, 1e-12], [10**6], []),  # dear in a busy moment, cheap when it was looked at again; no third look
        ([1.0, 2.0, 1.0], [], ["add 1,000,000 on cpu fp32 ×2: a call would take about 3e+06 s"]),
        ([RuntimeError("not known here\nand more")], [], ["add 1,000,000 on cpu fp32 ×2: not known here"]),
    ],
)
def test_a_busy_moment_leaves_no_case_out(monkeypatch, looks, sizes, skipped):
    def price_s(*_):
        if isinstance(found := looks.pop(0), Exception):
            raise found
        return found

    monkeypatch.setattr(measure, "_price_s", price_s)
    request = measure.BenchRequest(sizes=(10**6,), dtypes=("fp32",), threads=(2,))
    bench = measure._Bench(request, [open_device("cpu")], lambda line: None, 0.0)
    add = operations.OPERATIONS[0]
    for _ in range(3):
        bench._price([add])
    assert [case.size for case in bench._cases(add)] == sizes and bench.skipped == skipped and not looks


def test_the_rule_of_thumb_by_size():
    assert [(name, rule) for name, _, _, rule in BANDS] == [
        ("Tiny", "CPU"),
        ("Small", "CPU"),
        ("Medium", "test both"),
        ("Large", "GPU"),
    ]


def test_from_kept_results_it_answers_without_torch(saved):
    code = "import sys; from clipctl.cli.app import app\n"
    code += "try: app()\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code, "recommend-device", "--params", "150M"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr.strip() == "False", done.stderr


STEPS = """
from clipctl.bench.steps import StepProbe, measure_probes
from clipctl.hardware.processes import interrupts_raised

if __name__ == "__main__":
    groups = [(StepProbe("tiny", batch_size),) for batch_size in (2, 3)]
    with interrupts_raised():
        measure_probes(groups, ["fp32"], ["cpu"], 1, [], lambda line: print(line, flush=True))
"""


@pytest.mark.parametrize("turns", [1, 2, 4])
@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_ctrl_c_ends_all_processes_without_a_word(turns, seconds, tmp_path):
    """While the first starts, while the second does and the first waits, while both are at it."""
    (tmp_path / "steps.py").write_text(STEPS)
    bench = launch("steps", cwd=tmp_path)
    for _ in range(turns):
        assert "measuring steps of tiny" in bench.stdout.readline()
    time.sleep(seconds)
    os.killpg(bench.pid, signal.SIGINT)
    said = bench.communicate(timeout=30)[1]
    assert said.count("Traceback") == 1 and said.rstrip().endswith("KeyboardInterrupt")  # of the script itself
    assert "leaked" not in said and _group_is_gone(bench.pid)


def test_processes_end_with_the_one_that_started_them(tmp_path):
    (tmp_path / "steps.py").write_text(STEPS)
    bench = launch("steps", cwd=tmp_path)
    for _ in range(3):
        bench.stdout.readline()
    bench.kill()
    bench.wait()
    assert _group_is_gone(bench.pid)


def _group_is_gone(group: int) -> bool:
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    "arguments", [["bench", "--suites", "step"], ["recommend-device", "--preset", "tiny", "--measure"]]
)
def test_ctrl_c_says_interrupted(arguments):
    done = launch("clipctl", *arguments)
    while not _spawned(done.pid):
        assert done.poll() is None, done.stderr.read()
        time.sleep(0.01)
    os.killpg(done.pid, signal.SIGINT)
    said = done.communicate(timeout=30)[1]
    assert done.returncode == 130 and said.rstrip().splitlines()[-1] == "error: interrupted" and "Traceback" not in said


# --- the verdict ----------------------------------------------------------------------------------------------


def timed(suite, dtype, threads, seconds, device="cpu"):
    found = row(suite, gflops=1.0)
    settings = {"suite": suite, "dtype": dtype, "threads": threads, "device": device}
    return replace(found, **settings, median_s=seconds, samples_s=[seconds])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [timed("step", "fp32", 2, 2.0), timed("step", "bf16", 2, 1.0), timed("matmul", "fp32", 2, 1.0)],
            "train in bf16 on 2 threads: training steps are 2.0 × as fast as in fp32 on the CPU",
        ),
        (
            [timed("matmul", "fp32", 2, 1.0), timed("matmul", "fp32", 1, 1.05), timed("matmul", "bf16", 2, 0.99)],
            "train in fp32 on 1 thread: matrix products are not clearly faster elsewhere",
        ),
        (
            [timed("step", "fp32", 2, 2.0), timed("step", "fp16", 2, 0.2, "mps")],
            "train in fp16 on mps: training steps are 10.0 × as fast as in fp32 on the CPU",
        ),
        ([timed("elementwise", "fp32", 2, 1.0)], None),
    ],
)
def test_the_verdict_is_what_was_measured(rows, words):
    verdict = verdict_of(BenchResult(Machine.here(), rows))
    assert (verdict and verdict.words) == words


def test_a_verdict_from_a_busy_machine_says_so():
    result = BenchResult(Machine.here(), [timed("step", "fp32", 2, 2.0)], warnings=["other programs were busy"])
    verdict = verdict_of(result)
    assert verdict is not None and verdict.words.endswith("the machine was not quiet, so measure again")


def test_the_time_left_is_told_while_measuring():
    said, now_s = [], iter(range(100, 200))
    countdown = Countdown(said.append, lambda: float(next(now_s)))
    countdown.expect(4, 0.5)
    for _ in range(4):
        countdown.tick(0.5)
    assert said[0] == "measuring: 1 of 4 timings"
    assert said[-1].startswith("measuring: 4 of 4 timings, about ") and said[-1].endswith(" s left")
