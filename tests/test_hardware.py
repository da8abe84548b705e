import subprocess
import sys
import time

import psutil
import pytest
import torch

from clipctl.errors import ConfigError, DeviceError
from clipctl.hardware import cpu, memory, sensors
from clipctl.hardware.devices import open_device


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_a_containers_quota_is_read(tmp_path, files, cores):
    assert cpu.cgroup_quota_cores(write(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "1000\n", "memory.current": "400\n"}, 600),
        ({"memory.max": "max\n", "memory.current": "400\n"}, None),
        ({"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "1"}, None),
        ({}, None),
    ],
)
def test_a_containers_memory_limit_is_read(tmp_path, files, free):
    assert memory.cgroup_free_bytes(write(tmp_path, files)) == free


def test_threads_stay_within_the_affinity(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0}, raising=False)
    assert cpu.thread_candidates() == [1]


def test_cached_pictures_need_no_workers():
    assert cpu.choose_workers(None, on_accelerator=False, cached=True)[0] == 0
    assert cpu.choose_workers(None, on_accelerator=True, cached=False)[0] >= 1
    assert cpu.choose_workers(3, on_accelerator=False, cached=True)[0] == 3


def test_sensors_read_plain_numbers_or_none():
    row = sensors.SystemSensors(with_children=True).read(1.0)
    assert len(row["cpu_per_core"]) >= 1 and row["rss_bytes"] > 0 and row["available_bytes"] > 0
    assert row["temperature_c"] is None or 0 < row["temperature_c"] < 150


def test_what_loader_workers_use_is_the_trainers_own():
    """Otherwise they would be taken for another program."""
    working = (
        "import sys, time; sys.stdin.read(1); end = time.process_time() + 30\nwhile time.process_time() < end: pass"
    )
    child = subprocess.Popen([sys.executable, "-c", working], stdin=subprocess.PIPE)
    alone, together = (sensors.SystemSensors(with_children=which) for which in (False, True))
    try:
        assert child.stdin is not None
        child.stdin.write(b"x")
        child.stdin.flush()
        deadline = time.monotonic() + 30
        while psutil.Process(child.pid).cpu_times().user < 1.0:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        used = together.read(1.0)["process_cpu"]
        assert used > alone.read(1.0)["process_cpu"] + 0.1
        assert used <= psutil.cpu_count() + 0.5
    finally:
        child.kill()
        child.wait()
    time.sleep(0.2)
    together.read(1.0)
    time.sleep(0.2)
    assert together.read(1.0)["process_cpu"] < 0.5, "it has ended"


def test_a_discharging_battery_tells_the_power(tmp_path):
    write(tmp_path, {"BAT0/status": "Discharging\n", "BAT0/power_now": "8350000\n"})
    assert sensors.battery_power_w(tmp_path) == 8.35
    write(tmp_path, {"BAT0/status": "Charging\n"})
    assert sensors.battery_power_w(tmp_path) is None


def test_cpu_can_be_asked_for():
    device = open_device("cpu")
    assert device.image == device.text == torch.device("cpu") and device.memory_bytes > 0
    assert not device.is_accelerator and device.peak_bytes() is None


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has an Apple GPU")
def test_a_missing_device_says_what_there_is():
    with pytest.raises(DeviceError, match="mps is not available") as caught:
        open_device("mps")
    assert "cpu" in (caught.value.hint or "")


def test_an_unknown_device_is_a_mistake():
    with pytest.raises(ConfigError, match="unknown device 'gpu'"):
        open_device("gpu")
