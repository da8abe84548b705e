"""clipctl doctor: every check once on a machine that is right and once on one that is wrong."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from typer.testing import CliRunner

from clipctl.cli.app import app
from clipctl.cli.commands import doctor
from clipctl.doctor import checkup, libraries
from clipctl.doctor.finding import Finding, Problem, examine
from clipctl.hardware import cpu, devices, disk, memory, sensors
from clipctl.hardware.profile import load_profile, update_profile

ROOT = Path(__file__).parent.parent
TORCH_LIB = Path(torch.__file__).resolve().parent / "lib"
SYSTEM_LIB = Path("/usr/lib")


@pytest.fixture(autouse=True)
def calm(monkeypatch, tmp_path):
    """A machine with nothing to complain about, wherever the tests run."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_DUPLICATE_LIB_OK", "PYTORCH_ENABLE_MPS_FALLBACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(libraries, "import_failure", lambda: None)
    monkeypatch.setattr(libraries, "has_nvidia_driver", lambda: False)
    monkeypatch.setattr(checkup, "LOAD_S", 0.01)
    monkeypatch.setattr(cpu, "CPUFREQ", tmp_path / "cpufreq")
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    monkeypatch.setattr(sensors, "OtherLoad", lambda: SimpleNamespace(cores=lambda: 0.0))


def look(check):
    return examine("it", check)


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# --- findings -------------------------------------------------------------------------------------------------


def test_the_worst_problem_is_the_verdict_and_all_are_told():
    problems = [Problem("warn", "late", "hurry"), Problem("bad", "lost", "turn back"), Problem("warn", "wet")]
    assert look(lambda: ("a walk", problems)) == Finding("it", "bad", "a walk; late; lost; wet", "hurry; turn back")
    assert look(lambda: ("a walk", [])) == Finding("it", "ok", "a walk", None)


def test_a_check_that_raises_is_a_warning():
    found = look(lambda: 1 / 0)
    assert found.verdict == "warn" and found.value == "–; could not be read: division by zero"


# --- Python and libraries -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.13.0+cpu", (2, 13)), ("2.10.0a0+git1", (2, 10)), ("6", (6,)), ("6.0.3", (6, 0, 3)), ("unknown", ())],
)
def test_versions_are_compared_by_their_numbers(text, numbers):
    assert libraries.release(text) == numbers


def test_this_python_is_right():
    assert look(libraries.check_python).verdict == "ok"


def test_an_old_python_is_bad(monkeypatch):
    monkeypatch.setattr(libraries.platform, "python_version", lambda: "3.10.14")
    found = look(libraries.check_python)
    assert found.verdict == "bad" and "older than 3.11" in found.value and "3.11" in found.way_out


def test_a_32_bit_python_is_bad(monkeypatch):
    monkeypatch.setattr(libraries, "sys", SimpleNamespace(maxsize=2**31 - 1, platform="win32"))
    assert look(libraries.check_python).verdict == "bad"


@pytest.mark.parametrize(("machine", "verdict"), [("x86_64", "bad"), ("arm64", "ok")])
def test_a_translated_python_is_bad(monkeypatch, machine, verdict):
    monkeypatch.setattr(libraries, "sys", SimpleNamespace(maxsize=sys.maxsize, platform="darwin"))
    monkeypatch.setattr(libraries.platform, "machine", lambda: machine)
    monkeypatch.setattr(cpu, "sysctl", {"sysctl.proc_translated": "1"}.get)
    found = look(libraries.check_python)
    assert found.verdict == verdict and ("Rosetta" in found.value) == (verdict == "bad")


def test_this_torch_is_right():
    found = look(libraries.check_torch)
    assert found.verdict == "ok" and torch.__version__.split("+")[0] in found.value


def test_the_tested_torch_is_the_constrained_one():
    assert f"\ntorch=={libraries.TESTED_TORCH}." in (ROOT / "constraints.txt").read_text()


def set_versions(monkeypatch, **versions):
    """Other versions than those installed; None for what is not there."""
    real = libraries.installed
    monkeypatch.setattr(libraries, "installed", lambda name: versions[name] if name in versions else real(name))


def test_an_old_torch_is_bad(monkeypatch):
    set_versions(monkeypatch, torch="2.9.1+cpu")
    found = look(libraries.check_torch)
    assert found.verdict == "bad" and "CVE-2026-24747" in found.value and found.way_out == 'pip install "torch>=2.10"'


def test_a_missing_torch_is_bad(monkeypatch):
    set_versions(monkeypatch, torch=None)
    assert look(libraries.check_torch).value == "–; torch is not installed"


def test_a_torch_for_the_cpu_beside_an_nvidia_driver_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(libraries, "NVIDIA_DRIVER", tmp_path)
    monkeypatch.setattr(libraries, "import_failure", lambda: None)
    monkeypatch.setattr(libraries, "_build", lambda: "CPU only")
    found = look(libraries.check_torch)
    assert found.verdict == "warn" and "CUDA build" in found.way_out


def test_a_torch_that_cannot_be_imported_is_bad_and_spoils_nothing_else(monkeypatch, tmp_path):
    monkeypatch.setattr(libraries, "import_failure", lambda: "OSError: libcudart.so.13 is missing")
    verdicts = {one.name: one for one in checkup.checkup(tmp_path)}
    assert verdicts["torch"].verdict == "bad" and "libcudart" in verdicts["torch"].value
    assert verdicts["accelerator"].verdict == "warn" and "torch cannot be imported" in verdicts["accelerator"].value
    assert "torch uses –" in verdicts["processor"].value and verdicts["numpy"].verdict == "ok"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ImportError('no libcudart')", "ImportError: no libcudart"),
        ("import os, sys; print('OMP: Error #15', file=sys.stderr, flush=True); os.abort()", "OMP: Error #15"),
        ("pass", None),
    ],
)
def test_importing_torch_is_tried_where_it_may_end_the_process(monkeypatch, tmp_path, code, words):
    monkeypatch.undo()
    (tmp_path / "torch.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    failure = libraries.import_failure.__wrapped__()
    assert failure is None if words is None else words in failure


def test_numpy(monkeypatch):
    assert look(libraries.check_numpy).verdict == "ok"
    set_versions(monkeypatch, numpy="1.25.0")
    assert look(libraries.check_numpy).value == "1.25.0; numpy 1.25.0 is older than 1.26"
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert "cannot be imported" in look(libraries.check_numpy).value
    set_versions(monkeypatch, numpy=None)
    assert look(libraries.check_numpy).verdict == "bad"


def test_the_libraries_are_those_of_pyproject():
    stated = re.search(r"^dependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert set(libraries.requirements().items()) == set(re.findall(r'"([\w-]+)>=([\d.]+)"', stated[1]))
    assert look(libraries.check_libraries).verdict == "ok"


def test_a_missing_and_an_old_library_are_bad(monkeypatch):
    set_versions(monkeypatch, pillow=None, rich="12.0")
    found = look(libraries.check_libraries)
    assert found.verdict == "bad" and "pillow is not installed; rich 12.0 is older than" in found.value
    assert "pillow –" in found.value


def test_a_checkout_that_was_never_installed_is_a_warning(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert look(libraries.check_libraries).verdict == "warn" and look(libraries.check_torch).verdict == "ok"


# --- conflicts ------------------------------------------------------------------------------------------------


def test_these_libraries_agree():
    assert look(libraries.check_conflicts).verdict == "ok"


@pytest.mark.parametrize(
    ("runtimes", "trouble"),
    [
        ([], False),
        ([TORCH_LIB / "libgomp.so.1"], False),
        ([TORCH_LIB / "libgomp.so.1", SYSTEM_LIB / "libgomp-24e2ab19.so.1.0.0"], False),
        ([TORCH_LIB / "libiomp5md.dll", TORCH_LIB / "libomp140.x86_64.dll"], False),
        ([TORCH_LIB / "libgomp.so.1", SYSTEM_LIB / "libiomp5.so"], True),
        ([TORCH_LIB / "libiomp5.so", SYSTEM_LIB / "libgomp.so.1"], True),
        ([TORCH_LIB / "libomp.so", SYSTEM_LIB / "libomp.so"], True),
    ],
)
def test_openmp_runtimes_that_fight_are_a_warning(monkeypatch, runtimes, trouble):
    others = [SimpleNamespace(path=path) for path in ("[heap]", "/lib/libc.so.6", "/lib/libompstub.so")]
    maps = [SimpleNamespace(path=str(path)) for path in runtimes] * 2 + others
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_maps=lambda: maps))
    found = look(libraries.check_conflicts)
    assert found.verdict == ("warn" if trouble else "ok")
    assert all(path.name in found.value for path in runtimes) or not trouble


def test_a_system_that_does_not_tell_gets_a_dash(monkeypatch):
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace())
    assert look(libraries.check_conflicts).value == "OpenMP runtime: –"


def test_a_torch_for_another_numpy_is_bad(monkeypatch):
    class Tensor:
        def numpy(self):
            raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch, "zeros", lambda count: Tensor())
    found = look(libraries.check_conflicts)
    assert found.verdict == "bad" and "built for a different numpy" in found.value


def test_a_hidden_duplicate_is_a_warning(monkeypatch):
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "TRUE")
    assert look(libraries.check_conflicts).way_out == "unset KMP_DUPLICATE_LIB_OK"


@pytest.mark.parametrize(("built_for", "verdict"), [("2.12.0", "warn"), ("2.13.0", "ok")])
def test_a_torchvision_for_another_torch_is_a_warning(monkeypatch, built_for, verdict):
    set_versions(monkeypatch, torch="2.13.0+cpu", torchvision="0.27.0", torchaudio=None)
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy", f"torch=={built_for}"])
    found = look(libraries.check_conflicts)
    assert found.verdict == verdict and ("built for torch 2.12.0" in found.value) == (verdict == "warn")


# --- processor ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpuinfo", "machine", "used", "verdict", "words"),
    [
        ("flags\t\t: fpu avx avx2 amx_tile\n", "x86_64", "AVX2", "ok", "avx2 amx_tile; torch uses AVX2"),
        ("flags\t\t: fpu sse4_2 avx\n", "x86_64", "DEFAULT", "warn", "no AVX2"),
        ("flags\t\t: fpu avx avx2\n", "AMD64", "DEFAULT", "warn", "torch does not use AVX2"),
        ("Features\t: fp asimd bf16 i8mm sve\n", "aarch64", "SVE256", "ok", "asimd bf16 i8mm sve"),
        (None, "AMD64", "AVX512", "ok", ": –; torch uses AVX512"),
        (None, "AMD64", "DEFAULT", "warn", "no AVX2"),
    ],
)
def test_processors(monkeypatch, tmp_path, cpuinfo, machine, used, verdict, words):
    if cpuinfo:
        (tmp_path / "cpuinfo").write_text("processor\t: 0\n" + cpuinfo)
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(cpu, "sys", SimpleNamespace(platform="linux"))
    monkeypatch.setattr(cpu, "name", lambda: "a chip")
    monkeypatch.setattr(checkup.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: used)
    found = look(checkup.check_processor)
    assert found.verdict == verdict and words in found.value


def test_apples_processor(monkeypatch):
    monkeypatch.setattr(cpu, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(cpu, "sysctl", {"hw.optional.neon": "1", "hw.optional.arm.FEAT_BF16": "0"}.get)
    assert cpu.instruction_sets() == ["neon"]


@pytest.mark.parametrize(("asked", "verdict"), [("1", "warn"), ("1,1", "warn"), ("4", "ok"), ("", "ok")])
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_threads_limited_by_the_environment_are_a_warning(monkeypatch, name, asked, verdict):
    monkeypatch.setattr(cpu, "usable_cores", lambda: 4)
    monkeypatch.setenv(name, asked)
    found = look(checkup.check_cores)
    assert found.verdict == verdict and found.value.startswith("4 usable: ")


def test_affinity_and_quota_are_told(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3}, raising=False)
    monkeypatch.setattr(cpu, "CGROUP_ROOT", write(tmp_path, {"cpu.max": "150000 100000\n"}))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    value = look(checkup.check_cores).value
    assert value.startswith("1 usable: – physical") and "affinity allows 2, the container's quota is 1.5" in value


# --- memory and disk ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "free", "swapped", "limit", "verdict", "words"),
    [
        (8.2e9, 5e9, 0, None, "ok", "nothing swapped out"),
        (4e9, 3e9, 0, None, "warn", "less than 8 GB"),
        (16e9, 1e9, 0, None, "warn", "less than 2 GB free"),
        (16e9, 5e9, 9e9, None, "warn", "swapped"),
        (64e9, 3e9, 0, 4e9, "warn", "the container may use 3.7 GiB"),
        (64e9, 20e9, 0, 32e9, "ok", "the container may use 29.8 GiB"),
    ],
)
def test_memory(monkeypatch, total, free, swapped, limit, verdict, words):
    monkeypatch.setattr(memory, "total_bytes", lambda: total)
    monkeypatch.setattr(memory, "available_bytes", lambda: free)
    monkeypatch.setattr(memory, "cgroup_limit_bytes", lambda root: limit)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(used=swapped))
    found = look(checkup.check_memory)
    assert found.verdict == verdict and words in found.value


def test_a_containers_limit_is_read(tmp_path):
    files = {"memory.max": "1000\n", "memory.current": "400\n"}
    assert memory.cgroup_limit_bytes(write(tmp_path, files)) == 1000


@pytest.mark.parametrize(("free", "verdict"), [(50e9, "ok"), (9e9, "warn"), (0.5e9, "bad")])
def test_room_for_runs(monkeypatch, tmp_path, free, verdict):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    found = look(lambda: checkup.check_disk(tmp_path / "runs"))
    assert found.verdict == verdict and str(tmp_path / "runs") in found.value
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written_are_bad(monkeypatch, tmp_path):
    assert look(checkup.check_application_dir).verdict == "ok"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path / "file" / "home"))
    found = look(checkup.check_application_dir)
    assert found.verdict == "bad" and "CLIPCTL_HOME" in found.way_out
    assert "--runs-dir" in look(lambda: checkup.check_disk(tmp_path / "file")).way_out


# --- accelerator ----------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """One GPU, as far as anybody can tell."""
    device = devices.Device("mps", torch.device("cpu"), torch.device("cpu"), "Apple M9 GPU", 8 * 2**30)
    monkeypatch.setattr(devices, "labels", lambda: ["cpu", "mps"])
    monkeypatch.setattr(devices, "open_device", lambda label: device)
    set_metal(monkeypatch, is_built=True, is_available=True)


def set_metal(monkeypatch, *, is_built, is_available):
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: is_built)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: is_available)


def test_a_machine_without_an_accelerator_is_right(monkeypatch):
    monkeypatch.setattr(devices, "labels", lambda: ["cpu"])
    set_metal(monkeypatch, is_built=False, is_available=False)
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")  # means nothing here
    assert look(checkup.check_accelerator) == Finding("it", "ok", "none: the CPU will be used", None)
    assert look(checkup.check_preflight).value == "not needed: there is no accelerator"


def test_an_accelerator_is_named(gpu):
    assert look(checkup.check_accelerator) == Finding("it", "ok", "mps: Apple M9 GPU, 8.0 GiB free", None)


def test_a_fallback_that_hides_missing_kernels_is_a_warning(gpu, monkeypatch):
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    assert look(checkup.check_accelerator).way_out == "unset PYTORCH_ENABLE_MPS_FALLBACK"


@pytest.mark.parametrize(("version", "words"), [("13.7.4", "too old for Metal"), ("15.1", "offers no Metal GPU")])
def test_metal_that_is_built_and_not_there_is_a_warning(monkeypatch, version, words):
    monkeypatch.setattr(devices, "labels", lambda: ["cpu"])
    set_metal(monkeypatch, is_built=True, is_available=False)
    monkeypatch.setattr(checkup.platform, "mac_ver", lambda: (version, ("", "", ""), "arm64"))
    found = look(checkup.check_accelerator)
    assert found.verdict == "warn" and f"macOS {version}" in found.value and words in found.value


@pytest.mark.parametrize(("hidden", "way_out"), [(None, "update the driver"), ("", "unset CUDA_VISIBLE_DEVICES")])
def test_a_driver_that_torch_finds_no_gpu_with_is_a_warning(monkeypatch, hidden, way_out):
    monkeypatch.setattr(devices, "labels", lambda: ["cpu"])
    monkeypatch.setattr(libraries, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    found = look(checkup.check_accelerator)
    assert found.verdict == "warn" and way_out in found.way_out


@pytest.mark.parametrize(
    ("passed", "verdict", "words"),
    [
        ([], "ok", "not run yet"),
        ([True], "ok", "1 of 1 passed"),
        ([True, False], "bad", "1 of 2 passed; mps does not give the same results as the CPU: the loss differs"),
    ],
)
def test_preflight(gpu, passed, verdict, words):
    made = {
        str(number): {"device": "mps", "passed": one, "words": "the loss differs"} for number, one in enumerate(passed)
    }
    assert update_profile(lambda profile: replace(profile, checked=made))
    found = look(checkup.check_preflight)
    assert found.verdict == verdict and words in found.value
    assert (found.way_out is None) == (verdict == "ok")


# --- power, load, bench ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plugged", "verdict", "words"),
    [
        (True, "ok", "adapter connected, battery at 80%"),
        (False, "warn", "adapter not connected"),
        (None, "ok", "adapter –"),
    ],
)
def test_a_battery(monkeypatch, plugged, verdict, words):
    battery = SimpleNamespace(power_plugged=plugged, percent=80.4)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    found = look(checkup.check_power)
    assert found.verdict == verdict and words in found.value


def test_what_the_system_does_not_tell_is_a_dash(monkeypatch):
    monkeypatch.delattr(psutil, "sensors_battery")
    monkeypatch.setattr(sensors, "temperature_c", lambda: None)
    assert look(checkup.check_power).value == "battery –; temperature –; CPU governor –"


@pytest.mark.parametrize(
    ("files", "verdict", "name"),
    [
        ({"scaling_governor": "schedutil\n"}, "ok", "schedutil"),
        ({"scaling_governor": "powersave\n", "scaling_driver": "acpi-cpufreq\n"}, "warn", "powersave"),
        ({"scaling_governor": "powersave\n", "scaling_driver": "intel_pstate\n"}, "ok", "powersave"),
        (
            {"scaling_governor": "powersave\n", "energy_performance_preference": "balance_performance\n"},
            "ok",
            "powersave (balance_performance)",
        ),
        (
            {"scaling_governor": "powersave\n", "energy_performance_preference": "power\n"},
            "warn",
            "powersave (power)",
        ),
    ],
)
def test_governors(tmp_path, files, verdict, name):
    write(tmp_path / "cpufreq", files)
    found = look(checkup.check_power)
    assert found.verdict == verdict and f"CPU governor {name}" in found.value


class Program:
    """As much of a process as the check looks at."""

    def __init__(self, pid, name, percent):
        self.pid, self.name, self.percent = pid, lambda: name, percent

    def cpu_percent(self):
        if self.percent is None:
            raise psutil.AccessDenied(self.pid)
        return self.percent


@pytest.mark.parametrize(("cores", "verdict"), [(0.1, "ok"), (1.9, "warn")])
def test_load_names_the_busiest_program(monkeypatch, cores, verdict):
    programs = [Program(1, "init", None), Program(2, "browser", 150.0), Program(3, "shell", 2.0)]
    mine = Program(os.getpid(), "clipctl", 900.0)
    monkeypatch.setattr(psutil, "process_iter", lambda: iter([*programs, mine]))
    monkeypatch.setattr(sensors, "OtherLoad", lambda: SimpleNamespace(cores=lambda: cores))
    found = look(checkup.check_load)
    assert found.verdict == verdict and ("most by browser (150% of a core)" in found.value) == (verdict == "warn")


@pytest.mark.parametrize(("days", "words"), [(0, "run today"), (1.2, "run yesterday"), (40.5, "run 40 days ago")])
def test_bench_tells_its_age(days, words):
    assert "not run yet" in look(checkup.check_bench).value
    saved_s = time.time() - days * 86400
    assert update_profile(lambda profile: replace(profile, benched_s=saved_s))
    found = look(checkup.check_bench)
    assert found.verdict == "ok" and words in found.value and load_profile().machine.torch in found.value


# --- the command ----------------------------------------------------------------------------------------------


def invoke(*arguments, **environment):
    return CliRunner().invoke(app, ["doctor", *arguments], env=environment)


@pytest.fixture
def three(monkeypatch):
    """One finding of each verdict."""
    findings = [
        Finding("Python", "ok", "3.11.7", None),
        Finding("disk", "warn", "5.0 GiB free for runs in /home/alice/models/runs on alicebox", "make room " * 20),
        Finding("load", "bad", "by `alice`, /data/alice/x and /home/alicebob; " + "very " * 30 + "busy", None),
    ]
    monkeypatch.setattr(checkup, "checkup", lambda runs_dir: findings)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/alice"))
    monkeypatch.setattr(doctor.getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(doctor.platform, "node", lambda: "alicebox.example.org")
    return findings


def test_the_real_command(monkeypatch, tmp_path):
    monkeypatch.undo()  # really this machine
    done = invoke("--runs-dir", str(tmp_path / "runs"))
    assert done.exit_code in (0, 3), done.output
    assert re.search(r"^\d+ ok, \d+ warnings?, \d+ bad$", done.stdout, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_json_is_one_document(three):
    done = invoke("--json")
    document = json.loads(done.stdout)
    assert done.exit_code == 3 and document["schema"] == "clipctl.doctor/1"
    assert document["counts"] == {"ok": 1, "warn": 1, "bad": 1}
    assert document["checks"][0] == {"name": "Python", "verdict": "ok", "value": "3.11.7", "way_out": None}
    assert document["paste"].startswith("```\nclipctl ") and document["paste"].endswith("\n```")


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_table_fits_the_terminal(three, columns):
    lines = invoke(COLUMNS=str(columns)).stdout.splitlines()
    assert max(len(line) for line in lines) <= columns
    assert lines[0] == "ok    Python  3.11.7" and lines[-1] == "1 ok, 1 warning, 1 bad"
    assert any(line.startswith(" " * 14 + "hint: make room") for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_nothing_bad_ends_with_0(three):
    del three[2]
    assert invoke().exit_code == 0


def test_the_block_for_an_issue_comes_alone_and_if_asked_for(three):
    assert "```" not in invoke().stdout
    assert invoke("--issue").stdout == f"{doctor.paste(three)}\n"


def test_the_block_for_an_issue_tells_nobodys_name(three):
    text = " ".join(doctor.paste(three).split())
    assert "~/models/runs on HOST" in text and "by 'USER', /data/USER/x and /home/alicebob;" in text
    assert "/home/alice/" not in text and "alicebox" not in text and text.count("```") == 2


def test_a_user_who_lives_in_the_root_keeps_the_paths(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    assert doctor.anonymous("/data/runs") == "/data/runs"


def test_a_check_that_raises_does_not_end_the_command(monkeypatch):
    def fall(*_):
        raise RuntimeError("sensor on fire")

    for name in ("check_memory", "check_power", "check_load", "check_processor"):
        monkeypatch.setattr(checkup, name, fall)
    done = invoke("--json")
    checks = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    assert checks["memory"]["verdict"] == "warn" and "sensor on fire" in checks["memory"]["value"]


def test_the_checks_are_loaded_without_torch():
    code = "import sys; import clipctl.doctor.checkup, clipctl.cli.commands.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
