"""F07: files made to harm. They cost little, run nothing, and are answered in words."""

import ast
import json
import os
import pickle
import struct
import subprocess
import sys

import pytest

from clipctl.errors import CheckpointError
from clipctl.files import sha256_of
from clipctl.runs.checkpoint import MANIFEST, MODEL, OPTIMIZER, STATE
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from clipctl.runs.tensors import read_header
from tests.test_runs import rewrite_manifest

LIMIT_S, LIMIT_BYTES = 2.0, 200e6
HANG_S = 60


def safetensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(first, last, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, last]}


class Exploit:
    def __reduce__(self):
        return os.system, ("touch exploited",)


HOSTILE = {
    "pickle": pickle.dumps(Exploit()),
    "zip": b"PK\x03\x04" + bytes(100),
    "empty": b"",
    "seven bytes": bytes(7),
    "header of 2^63": safetensors(b"{}", length=2**63),
    "header of 2^64-1": safetensors(b"{}", length=2**64 - 1),
    "header past the end": safetensors(b"{}", length=3),
    "no JSON": safetensors(b"{x"),
    "a list": safetensors(b"[]"),
    "deep nesting": safetensors(b"[" * 1_000_000),
    "overlapping": safetensors({"a": tensor(0, 4), "b": tensor(2, 6)}, bytes(6)),
    "the same bytes twice": safetensors({"a": tensor(0, 4), "b": tensor(0, 4)}, bytes(4)),
    "a gap": safetensors({"a": tensor(0, 4), "b": tensor(8, 12)}, bytes(12)),
    "past the end": safetensors({"a": tensor(0, 4)}, b""),
    "bytes left over": safetensors({"a": tensor(0, 4)}, bytes(8)),
    "backwards": safetensors({"a": tensor(4, 0, (0,))}, bytes(4)),
    "negative": safetensors({"a": tensor(-4, 0)}, b""),
    "shape of another size": safetensors({"a": tensor(0, 4, (1000, 1000, 1000))}, bytes(4)),
    "shape past all numbers": safetensors({"a": tensor(0, 4, (2**62, 2**62, 2**62))}, bytes(4)),
    "shape of text": safetensors({"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}}, bytes(4)),
    "no offsets": safetensors({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
    "true for one": safetensors({"a": tensor(0, 4, (True,))}, bytes(4)),
    "unknown type": safetensors({"a": tensor(0, 4, (1,), "F999")}, bytes(4)),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_headers_that_lie_are_refused(tmp_path, content):
    (tmp_path / "file.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"file\.safetensors is not a safetensors file"):
        read_header(tmp_path / "file.safetensors")


@pytest.mark.parametrize("length", [640, 896, 1152, 1408])
def test_an_honest_header_may_begin_like_a_pickle(tmp_path, length):
    """Its length is written first, and 640 is 80 02 in hexadecimal."""
    header = json.dumps({"a": tensor(0, 4)}).encode()
    (tmp_path / "file").write_bytes(safetensors(header.ljust(length), bytes(4)))
    assert read_header(tmp_path / "file")["a"].shape == (1,)


@pytest.fixture
def checkpoint(tmp_path):
    """One whose manifest is right about whatever its files are."""
    run = RunDir.create(tmp_path, "tiny", "run")
    run.write_config("preset: tiny\n")

    def write(directory):
        for name in (MODEL, OPTIMIZER):
            (directory / name).write_bytes(safetensors({"a": tensor(0, 4)}, bytes(4)))
        (directory / STATE).write_text("{}")

    saved = CheckpointStore(run).save(write, step=1, epoch=1, metrics={})
    run.release()
    return saved


def vouch(checkpoint, name):
    """Make the manifest agree with a file, as whoever made the file would."""
    files = json.loads((checkpoint.path / MANIFEST).read_text())["files"]
    path = checkpoint.path / name
    rewrite_manifest(checkpoint, files={**files, name: {"size_bytes": path.stat().st_size, "sha256": sha256_of(path)}})


# In a process of its own, because a child begins with the memory of its parent, and pytest's is large.
MEASURE = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
output = process.stdout.read()
_, status, usage = os.wait4(process.pid, 0)
process.returncode = os.waitstatus_to_exitcode(status)
memory_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(repr((process.returncode, output, usage.ru_utime + usage.ru_stime, memory_bytes)))
"""


def measure(directory, *command):
    """A command's exit code, output, seconds of computing, which do not depend on what runs beside it, and largest
    memory in bytes. One that waits for something fails."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, sys.executable, *command],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    return ast.literal_eval(done.stdout)


def run_limited(directory, *words):
    return measure(directory, "-m", "clipctl", "checkpoint", *words)


def assert_refused(checkpoint, command, *complaints):
    code, output, seconds, memory_bytes = run_limited(checkpoint.path.parent, command, str(checkpoint.path))
    assert code == 3 and "Traceback" not in output, output
    assert all(complaint in output for complaint in complaints), output
    assert seconds < LIMIT_S and memory_bytes < LIMIT_BYTES
    assert not list(checkpoint.path.parents[2].rglob("exploited"))


@pytest.mark.parametrize("command", ["verify", "show", "diff"])
@pytest.mark.parametrize("kind", ["pickle", "header of 2^63", "overlapping", "deep nesting"])
def test_hostile_tensors_under_an_honest_manifest(checkpoint, kind, command):
    (checkpoint.path / MODEL).write_bytes(HOSTILE[kind])
    vouch(checkpoint, MODEL)
    if command == "diff":
        code, output, _, _ = run_limited(checkpoint.path.parent, "diff", *[str(checkpoint.path)] * 2)
        assert code == 3 and "not a safetensors file" in output and "Traceback" not in output
    else:
        assert_refused(checkpoint, command, "model.safetensors is not a safetensors file")


@pytest.mark.parametrize("command", ["verify", "show"])
def test_a_file_of_a_terabyte_that_is_not_there(checkpoint, command):
    with (checkpoint.path / MODEL).open("r+b") as file:
        file.truncate(2**40)  # sparse: it takes no room
    files = json.loads((checkpoint.path / MANIFEST).read_text())["files"]
    files[MODEL]["size_bytes"] = 2**40
    rewrite_manifest(checkpoint, files=files)
    assert_refused(checkpoint, command, "its tensors end at")


@pytest.mark.parametrize("command", ["verify", "show"])
@pytest.mark.parametrize("name", [MANIFEST, MODEL, STATE])
def test_links_are_not_followed(checkpoint, tmp_path, command, name):
    secret = tmp_path / "secret"
    (checkpoint.path / name).rename(secret)
    (checkpoint.path / name).symlink_to(secret)
    assert_refused(checkpoint, command, f"{name} is a symbolic link")


@pytest.mark.parametrize("name", [MANIFEST, MODEL])
@pytest.mark.parametrize("command", ["verify", "show"])
def test_pipes_are_not_waited_for(checkpoint, command, name):
    (checkpoint.path / name).unlink()
    os.mkfifo(checkpoint.path / name)
    assert_refused(checkpoint, command, name)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "a/b", "manifest.json"])
def test_names_that_lead_elsewhere(checkpoint, tmp_path, name):
    (tmp_path / "secret").write_text("secret")
    rewrite_manifest(checkpoint, files={name: {"size_bytes": 6, "sha256": "0" * 64}})
    assert_refused(checkpoint, "verify", "names files outside its directory")


@pytest.mark.parametrize("text", ["[" * 1_000_000, '{"a":' * 100_000, "[" + "0," * 20_000_000 + "0]", "nonsense", "[]"])
def test_a_state_that_is_none(checkpoint, text):
    (checkpoint.path / STATE).write_text(text)
    vouch(checkpoint, STATE)
    assert_refused(checkpoint, "show", "state.json cannot be read")


@pytest.mark.parametrize("text", ["[" * 1_000_000, "0" * 900_000, "[" + "[]," * 300_000 + "[]]"])
def test_a_manifest_that_is_none(checkpoint, text):
    (checkpoint.path / MANIFEST).write_text(text)
    assert_refused(checkpoint, "verify", "manifest.json cannot be read")


def test_escapes_in_names_are_not_printed(checkpoint):
    content = safetensors({"\x1b]0;owned\x07[red]x": tensor(0, 4)}, bytes(4))
    (checkpoint.path / MODEL).write_bytes(content)
    vouch(checkpoint, MODEL)
    code, output, _, _ = run_limited(checkpoint.path.parent, "show", str(checkpoint.path), "--tensors")
    assert code == 0 and "\x1b" not in output and "[red]x" in output


def test_the_limits_would_be_noticed(tmp_path):
    """The measurement itself: what takes more than the limits is seen to."""
    code, _, seconds, memory_bytes = measure(
        tmp_path, "-c", "x = bytearray(300_000_000)\nimport time\nwhile time.process_time() < 2.1: pass"
    )
    assert code == 0 and seconds > LIMIT_S and memory_bytes > LIMIT_BYTES
