"""F24 to F29: runs, data and caches from elsewhere, terminals that close, programs that are busy beside us."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from clipctl.cli.output import plain
from clipctl.config.layers import Layer, load_yaml, resolve
from clipctl.data.formats.rows import Hints
from clipctl.data.index.store import open_index
from clipctl.errors import ConfigError, DataError, RunError
from clipctl.hardware.profile import AttentionTimes, Machine, Profile, Rates, StepSample, load_profile, update_profile
from clipctl.hardware.shelf import Shelf
from clipctl.model.cost import workload_of
from clipctl.model.forecast import CostModel
from clipctl.monitor.runs import stop_run
from clipctl.runs.checkpoint import MODEL, OPTIMIZER, STATE
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from clipctl.training import choice
from tests.faults.crowd import crowd
from tests.faults.test_hostile import measure, vouch
from tests.faults.trainer import SETTINGS, digest, finish, start, wait_for_epochs, wait_until
from tests.launcher import launch

LIMIT_S, LIMIT_BYTES = 2.0, 200e6
LONG = "--set=train.epochs=2000"


def command(*words):
    """Exit code, output and errors of a command in a process of its own."""
    return finish(launch("clipctl", *map(str, words)))


def settle(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


# --- signals go to the holder of the lock, and to nobody else (S1) ------------------------------------------------


@pytest.fixture
def bystander():
    """A process of the user that has nothing to do with us."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    assert process.poll() is None, "it was signalled"
    process.kill()
    process.wait()


def forge_status(run, pid, /, **changes):
    process = psutil.Process(pid)
    status = {
        "state": "running",
        "attempt": 1,
        "step": 3,
        "total_steps": 24,
        "pid": pid,
        "process_created_s": process.create_time(),
        "process_since_boot_s": process.create_time() - psutil.boot_time(),
        "progress": 3,
        "host": os.uname().nodename,
        "heartbeat_s": time.time(),
        **changes,
    }
    run.status_file.write_text(json.dumps(status))


def test_stop_signals_nobody_who_does_not_hold_the_lock(finished, bystander):
    forge_status(finished, bystander.pid)
    code, _, stderr = command("stop", finished.path)
    assert code == 2 and f"process {bystander.pid}, which its run.json names, does not hold its lock" in stderr


def test_stop_signals_nobody_if_somebody_else_holds_the_lock(finished, bystander):
    forge_status(finished, bystander.pid)
    with finished.locked(), pytest.raises(RunError, match="does not hold its lock"):
        stop_run(RunDir(finished.path), 1)
    with pytest.raises(RunError, match="is not running"):
        stop_run(finished, 1)


def test_the_holder_is_known(tmp_path):
    process = start(tmp_path, *SETTINGS, LONG, "--name", "run")
    run = RunDir(tmp_path / "run")
    wait_for_epochs(run, 1)
    assert run.is_held_by(process.pid) and not run.is_held_by(os.getpid())
    code, stdout, stderr = command("stop", run.path)
    assert code == 0 and "stopped at step" in stdout + stderr
    assert finish(process)[0] == 143 and not run.is_held_by(process.pid)


# --- what a run directory may hold (S4, S5, S6, S14) --------------------------------------------------------------

DEEP_MERGE = "a: &a {x: 1}\n" + "\n".join(f"b{i}: &b{i} {{<<: [*a, *a]}}" for i in range(3))
LAUGHS = "data:\n  source:\n  - &a0 [x]\n" + "".join(
    f"  - &a{level + 1} [{', '.join([f'*a{level}'] * 9)}]\n" for level in range(12)
)
YAML_BOMBS = {
    "aliases under a known key": LAUGHS,  # 9¹² lists, if they were written out
    "nested merges": DEEP_MERGE,
    "a list without end": "data: {source: [" + "a," * 30_000 + "a]}",
    "very many keys": "\n".join(f"k{i}: 1" for i in range(4_000)),
    "a very long key": "k" * 90_000 + ": 1",
    "a very long value": "optim: {lr: " + "9" * 90_000 + "}",
    "brackets": "[" * 90_000,
    "too large": "# " + "x" * 200_000,
}


@pytest.mark.parametrize("text", YAML_BOMBS.values(), ids=YAML_BOMBS)
def test_yaml_that_would_grow(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    started = time.process_time()
    with pytest.raises(ConfigError) as error:
        resolve([load_yaml(tmp_path / "config.yaml")])
    assert time.process_time() - started < LIMIT_S
    assert all(len(str(problem)) < 400 for problem in error.value.problems) and len(error.value.problems) <= 20


def test_yaml_values_are_texts_that_their_setting_reads(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("train: {epochs: 010}\noptim: {lr: 1e-3, warmup_steps: }\ndata: {flip: no, source: [2024-01-02]}\n")
    config = resolve([load_yaml(file)])
    assert (config.train.epochs, config.optim.lr, config.optim.warmup_steps) == (10, 1e-3, None)
    assert config.data.flip is False and config.data.source[0].endswith("2024-01-02")
    file.write_text("train: {epochs: 1:30}")
    with pytest.raises(ConfigError, match=r"train.epochs must be .*, got '1:30'"):
        resolve([load_yaml(file)])


def replace_by(path, kind):
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a directory"])
@pytest.mark.parametrize("name", ["config.yaml", "run.json", "metrics.jsonl", "environment.json", "tokenizer.json"])
def test_files_of_a_run_that_are_no_files(finished, name, kind):
    replace_by(finished.path / name, kind)
    for words in (["monitor", "--once", finished.path], ["runs", "--runs-dir", finished.path.parent]):
        code, output, seconds, memory_bytes = measure(finished.path.parent, "-m", "clipctl", *map(str, words))
        assert code in (0, 2) and "Traceback" not in output and "bug in clipctl" not in output, output
        assert seconds < LIMIT_S and memory_bytes < LIMIT_BYTES


@pytest.mark.parametrize("words", [["train", "--resume"], ["checkpoint", "prune", "--yes"], ["runs", "rm", "--yes"]])
def test_a_lock_that_is_a_directory(finished, words):
    finished.lock_file.unlink(missing_ok=True)
    finished.lock_file.mkdir()
    code, _, stderr = command(*words, finished.path)
    assert code == 2 and "run.lock is a directory" in stderr and "hint: remove it: rm -r " in stderr


@pytest.mark.parametrize("words", [["train", "--resume"], ["checkpoint", "show"], ["monitor", "--once"], ["report"]])
def test_a_name_that_no_file_can_have(tmp_path, words):
    code, _, stderr = command(*words, "x" * 300, "--runs-dir", tmp_path)
    assert code == 2 and "there is no run 'xxx" in stderr and "hint: " in stderr


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.lock", "config.yaml", "checkpoints"])
def test_resuming_writes_to_no_link(finished, tmp_path, name):
    """A victim that the link names is neither changed nor read as if it were the run's own."""
    victim, link = tmp_path / "victim", finished.path / name
    if link.exists():
        link.rename(victim)
    else:
        victim.write_text("mine")
    content = victim.read_bytes() if victim.is_file() else sorted(path.name for path in victim.iterdir())
    link.symlink_to(victim)
    code, _, stderr = command("train", "--resume", finished.path, "--epochs", 9)
    assert code in (2, 3) and "symbolic link" in stderr and "Traceback" not in stderr, stderr
    assert content == (victim.read_bytes() if victim.is_file() else sorted(path.name for path in victim.iterdir()))


def test_a_log_that_is_a_link_is_not_written_to(finished, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    finished.log_file.symlink_to(victim)
    code, _, stderr = command("train", "--resume", finished.path, "--epochs", 9, "--detach")
    assert code == 2 and "train.log is a symbolic link" in stderr
    assert victim.read_text() == "mine"


def test_pruning_follows_no_link_to_checkpoints(finished, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    finished.checkpoints_dir.rename(elsewhere)
    finished.checkpoints_dir.symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    for words in (["prune", finished.path, "--yes"], ["list", finished.path], ["verify", finished.path]):
        code, stdout, stderr = command("checkpoint", *words)
        assert code in (2, 3) and "symbolic link" in stdout + stderr, (words, stdout, stderr)
    assert sorted(elsewhere.rglob("*")) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"total_steps": 10**400},
        {"step": -1},
        {"heartbeat_s": float("inf")},
        {"pid": 2**70},
        {"process_created_s": "x"},
        {"state": []},
        {"host": {}},
    ],
    ids=str,
)
def test_a_status_that_cannot_be(finished, changes):
    forge_status(finished, os.getpid(), **changes)
    assert finished.status() is None
    code, _, stderr = command("monitor", "--once", finished.path)
    assert code == 0 and "bug in clipctl" not in stderr


def test_names_that_turn_the_line_are_printed_as_codes():
    assert plain("a\u202eb\u2028c\u200bd\x1b[1m\ufeff").plain == "a\\u202eb\\u2028c\\u200bd\\x1b[1m\\ufeff"
    assert plain("grün שלום – 猫").plain == "grün שלום – 猫"


def test_a_sparse_metrics_file_is_passed_over(finished):
    rows = finished.metrics_file.read_bytes()
    with finished.metrics_file.open("ab") as file:
        file.truncate(10 * 2**30)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + rows.splitlines()[-1] + b"\n")
    code, output, seconds, memory_bytes = measure(finished.path, "-m", "clipctl", "monitor", "--once", finished.path)
    assert code == 0 and seconds < LIMIT_S and memory_bytes < LIMIT_BYTES, output


# --- two at once, and one that is interrupted (S7) ----------------------------------------------------------------


def detach(root, name="twice"):
    words = ["clipctl", "train", "--runs-dir", str(root), *SETTINGS, LONG, "--name", name, "--detach"]
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def trainers(root):
    """Live trainers of a directory."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(root) in words and "train" in words and "--detach" not in words and process.status() != "zombie":
            found.append(process)
    return found


def test_one_of_two_detached_trainers_wins(tmp_path):
    ends = [finish(process) for process in [detach(tmp_path), detach(tmp_path)]]
    codes = sorted(code for code, _, _ in ends)
    assert codes == [0, 2], ends
    loser = next(stderr for code, _, stderr in ends if code == 2)
    assert "in use" in loser or "already exists" in loser
    assert len(trainers(tmp_path)) == 1
    run = RunDir(tmp_path / "twice")
    wait_for_epochs(run, 1)
    # Neither the end of the terminal nor SIGHUP itself ends it.
    trainer = trainers(tmp_path)[0]
    trainer.send_signal(signal.SIGHUP)
    step = run.status().step
    wait_until(lambda: run.status().step > step + 3, 0.05)
    assert command("stop", run.path)[0] == 0
    settle(lambda: not trainers(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_start_leaves_no_trainer_that_nobody_knows(tmp_path, number):
    process = detach(tmp_path)
    settle(lambda: trainers(tmp_path), 60)
    process.send_signal(number)
    code, stdout, stderr = finish(process)
    if code == 0:  # it was running already, and that was said
        assert "in the background" in stdout
        assert command("stop", tmp_path / "twice")[0] == 0
    else:
        assert code == 130 and stderr.startswith("stopped: ")
        assert ("nothing was started" in stderr) == (not (tmp_path / "twice").exists())
    settle(lambda: not trainers(tmp_path))


def test_a_name_in_use_is_left_alone(tmp_path):
    process = start(tmp_path, *SETTINGS, LONG, "--name", "twice")
    run = RunDir(tmp_path / "twice")
    wait_for_epochs(run, 1)
    code, _, stderr = finish(detach(tmp_path))
    assert code == 2 and "already exists" in stderr
    run.remove_if_stillborn()
    assert run.path.exists() and process.poll() is None
    os.killpg(process.pid, signal.SIGTERM)
    assert finish(process)[0] == 143


def test_a_stillborn_run_is_removed_only_by_its_holder(tmp_path):
    run = RunDir.create(tmp_path, "tiny", "run")
    RunDir(run.path).remove_if_stillborn()
    assert run.path.exists()
    run.release()
    RunDir(run.path).remove_if_stillborn()
    assert not run.path.exists()


# --- the end (S11, W3) --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_closed_terminal_saves(tmp_path, unbroken, workers):
    process = start(tmp_path, *SETTINGS, "--name", "run", workers=workers)
    run = RunDir(tmp_path / "run")
    wait_for_epochs(run, 2)
    os.killpg(process.pid, signal.SIGHUP)
    code, _, stderr = finish(process)
    assert code == 129 and ", saved. To continue: " in stderr, stderr
    assert run.status().state == "stopped"
    last = CheckpointStore(run).last()
    assert last.step == run.status().step
    assert finish(start(tmp_path, "--resume", "run"))[0] == 0
    assert digest(run) == unbroken


def test_a_real_terminal_that_is_closed(tmp_path):
    """Not only is there a signal: nothing can be written to it any more."""
    master, slave = os.openpty()
    words = ["clipctl", "train", "--runs-dir", str(tmp_path), *SETTINGS, LONG, "--name", "run"]
    code = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    code += f"os.execv(sys.executable, [sys.executable, '-m', *{words!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    run = RunDir(tmp_path / "run")
    wait_for_epochs(run, 1)
    os.close(master)
    process.wait(30)
    status = run.status()
    assert status.state == "stopped" and CheckpointStore(run).last().step == status.step


def test_nohup_is_respected(tmp_path):
    process = subprocess.Popen(
        ["nohup", sys.executable, "-m", "clipctl", "train", "--runs-dir", tmp_path, *SETTINGS, LONG, "--name", "run"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    run = RunDir(tmp_path / "run")
    wait_for_epochs(run, 1)
    os.kill(process.pid, signal.SIGHUP)
    step = run.status().step
    wait_until(lambda: run.status().step > step + 3, 0.05)
    assert command("stop", run.path)[0] == 0
    assert process.wait(30) == 143


def test_a_second_interrupt_is_a_stop_and_no_failure(tmp_path):
    process = start(tmp_path, *SETTINGS, LONG, "--set=model.image.depth=12", "--name", "run", workers=1)
    run = RunDir(tmp_path / "run")
    wait_for_epochs(run, 1)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.02)
    assert finish(process)[0] == 130
    assert run.status().state == "stopped"


# --- caches (S2, S9, S10, S12) ------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CLIPCTL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def table(tmp_path):
    """Three pictures and their captions."""

    def write(words=("cat", "dog", "bird")):
        for number in range(len(words)):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
        lines = [f"{number}.png,a {word}" for number, word in enumerate(words)]
        (tmp_path / "data.csv").write_text("\n".join(["image,caption", *lines]) + "\n")
        return str(tmp_path / "data.csv")

    return write


def captions(index):
    return [caption for picture in range(len(index)) for caption in index.captions(picture)]


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def overwrite(path):
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [cut, overwrite, Path.unlink])
@pytest.mark.parametrize("name", ["captions.bin", "caption_end.npy", "caption_row.npy", "first.npy", "size.npy"])
def test_a_damaged_index_is_built_again(home, table, name, damage):
    data = table()
    index = open_index(data, Hints())
    damage(index.path / name)
    again = open_index(data, Hints())
    assert captions(again) == ["a cat", "a dog", "a bird"]
    assert again.facts.fingerprint == index.facts.fingerprint


def test_an_index_whose_files_were_only_touched_is_kept(home, table):
    data = table()
    open_index(data, Hints())
    os.utime(Path(data).with_name("0.png"))
    second = open_index(data, Hints())
    assert open_index(data, Hints()).path == second.path and second.is_current()


def test_an_index_in_use_is_not_swept(home, table):
    used = open_index(table(), Hints())
    for words in ("red green blue", "one two three", "a b c"):
        newest = open_index(table(words.split()), Hints())
    used_path = used.path
    assert captions(used) == ["a cat", "a dog", "a bird"] and used_path.exists()
    del used
    open_index(table(["x", "y", "z"]), Hints())
    assert not used_path.exists() and newest.path.exists()


def test_a_full_application_directory_is_not_the_datas_fault(home, table, monkeypatch):
    def full(self, key):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Shelf, "use", full)
    assert captions(open_index(table(), Hints())) == ["a cat", "a dog", "a bird"]
    monkeypatch.setattr("tempfile.TemporaryDirectory", lambda **_: full(None, None))
    with pytest.raises(RunError, match=r"cannot be written to .*No space left") as error:
        open_index(table(), Hints())
    assert "CLIPCTL_HOME" in error.value.hint


def profile(*rates):
    machine = Machine("cpu", 2, 24, "Linux", "2.13.0")
    return Profile(machine).with_rates([Rates("cpu", "fp32", threads, gflops) for threads, gflops in rates])


def test_a_rate_that_cannot_be_is_measured_again(home, micro, monkeypatch):
    """W4: two threads that reach next to nothing where one reaches a hundred: another program was busy."""
    update_profile(lambda kept: kept.with_rates([Rates("cpu", "fp32", 1, 103.0), Rates("cpu", "fp32", 2, 0.044)]))
    assert load_profile().exact_rate("cpu", "fp32", 2) is None
    found = iter([0.044, 0.05, 180.0])
    monkeypatch.setattr(
        choice, "probe_rates", lambda device, precision, threads: Rates("cpu", precision, threads, next(found))
    )
    decider = choice._Decider(micro, None, 10, None, 1)
    decider._probe([choice.Setting("cpu", "fp32", 2)])
    assert decider.profile.exact_rate("cpu", "fp32", 2).gflops == 180.0
    assert load_profile().exact_rate("cpu", "fp32", 2).gflops == 180.0


def test_what_was_measured_beside_busy_programs_is_not_kept(home, micro, monkeypatch):
    """W4."""
    monkeypatch.setattr(choice, "probe_rates", lambda device, precision, threads: Rates("cpu", precision, threads, 9.0))
    monkeypatch.setattr(choice.OtherLoad, "cores", lambda self: 1.5)
    monkeypatch.setattr(choice, "update_profile", lambda change: pytest.fail("kept"))
    decider = choice._Decider(micro, None, 10, None, 1)
    decider.profile = profile()
    decider._probe([choice.Setting("cpu", "fp32", 2)])
    assert decider.profile.exact_rate("cpu", "fp32", 2).gflops == 9.0 and decider.busy_cores == 1.5


def test_measurements_are_forgotten_after_a_while():
    now_s = time.time()
    step = StepSample("cpu", "fp32", 1, {}, 0.1, 0.0, None, now_s)
    times = AttentionTimes("cpu", "fp32", 1, {}, 0.1, 0.1)
    fresh = replace(profile((1, 103.0)).with_attention([times]), steps=(step,))
    assert Profile.parse(fresh.to_dict()) == fresh
    old = {
        name: tuple(replace(one, saved_s=now_s - 31 * 86400) for one in getattr(fresh, name))
        for name in ("rates", "steps", "attention")
    }
    assert Profile.parse(replace(fresh, **old).to_dict()) == Profile(fresh.machine)


def test_more_threads_than_cores_are_not_faster():
    """W10: 99 threads on two cores are not forecast to be fifty times as fast as two."""
    small = resolve([Layer("test", {"preset": "small", "model.text.vocab_size": 100})])
    work = workload_of(small, 30)
    sample = StepSample("cpu", "fp32", 2, work.to_dict(), 5.0, 0.0, None, 1.0)
    for kept in (profile((1, 50.0), (2, 100.0)), replace(profile((2, 100.0)), steps=(sample,))):
        model = CostModel(kept)
        two, many = (model.step_s(choice.Setting("cpu", "fp32", threads), work).value for threads in (2, 99))
        assert many > 0.5 * two


# --- budgets for decoding (S3; S8 is in test_budgets.py) ------------------------------------------------------------


def tar_header(name=b"a.jpg", size=b"00000000010\0", kind=b"0"):
    block = bytearray(512)
    block[:100] = name.ljust(100, b"\0")
    block[100:108], block[124:136], block[156:157] = b"0000644\0", size, kind
    block[257:263], block[148:156] = b"ustar\0", b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def binary(number):
    return (number % 2**96).to_bytes(12, "big")


PAX = b"20 size=-1000000000\n"
HOSTILE_TAR = {
    "a negative size": tar_header(size=binary(-512)),
    "a size of 2^70": tar_header(size=b"\x80" + (2**70).to_bytes(11, "big")),
    "a list of properties of 3 GB": tar_header(size=b"\x80" + (3 * 2**30).to_bytes(11, "big"), kind=b"x"),
    "a name of 3 GB": tar_header(size=b"\x80" + (3 * 2**30).to_bytes(11, "big"), kind=b"L"),
    "a negative size in a list": tar_header(size=b"%011o\0" % len(PAX), kind=b"x")
    + PAX.ljust(512, b"\0")
    + tar_header(),
    "a list that is none": tar_header(size=b"00000000024\0", kind=b"x") + b"9999999999 path=x".ljust(512, b"\0"),
    "past the end": tar_header(size=b"77777777777\0"),
    "a map that never ends": tar_header(kind=b"S")[:482] + b"\1" + bytes(29),
}


@pytest.mark.parametrize("content", HOSTILE_TAR.values(), ids=HOSTILE_TAR)
def test_tar_headers_that_lie(home, tmp_path, content):
    path = tmp_path / "shard.tar"
    with path.open("wb") as file:
        file.write(content + bytes(1024))
        file.truncate(4 * 2**30)  # so that there is as much as a header may claim
    started = time.process_time()
    with pytest.raises(DataError, match=r"is not a tar file|cut off or damaged|has no captions"):
        open_index(str(path), Hints())
    assert time.process_time() - started < LIMIT_S


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_files_are_read_as_python_reads_them(tmp_path, format):
    from clipctl.data.formats.tar import members

    long = "ü" * 90 if format != tarfile.USTAR_FORMAT else "x"
    names = [f"{number}.jpg" for number in range(9)] + ["d/" * 60 + "y.txt", f"{long}.png"]
    with tarfile.open(tmp_path / "a.tar", "w", format=format) as tar:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = 300 * number
            if number == 3:
                info.type, info.size, info.linkname = tarfile.SYMTYPE, 0, "0.jpg"
            if number == 5:
                info.type, info.size = tarfile.DIRTYPE, 0
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    with tarfile.open(tmp_path / "a.tar") as tar:
        theirs = [(one.name, one.isreg(), one.isdir(), one.offset_data, one.size) for one in tar]
    with (tmp_path / "a.tar").open("rb") as file:
        assert [tuple(one) for one in members(file)] == theirs


@pytest.mark.parametrize("name", ["data.csv", "data.jsonl", "data.token"])
def test_a_line_without_end_is_not_read(home, tmp_path, name):
    head = {
        "data.csv": "image,caption\n",
        "data.jsonl": '{"image": "a.jpg", "text": "a"}\n',
        "data.token": "a.jpg#0\tx\n",
    }
    with (tmp_path / name).open("wb") as file:
        file.write(head[name].encode())
        for _ in range(50):
            file.write(b"x" * 10_000_000)
    words = ["-m", "clipctl", "data", "inspect", str(tmp_path / name)]
    code, output, seconds, memory_bytes = measure(tmp_path, *words)
    assert code == 2 and "line 2 has more than 8,000,000 characters" in output, output
    assert seconds < LIMIT_S + 2 and memory_bytes < LIMIT_BYTES + 100e6  # torch itself takes some


# --- checkpoints whose sums are right (S13) -----------------------------------------------------------------------


def last_of(run):
    return CheckpointStore(run).last()


def forge_state(run, **changes):
    last = last_of(run)
    state = json.loads((last.path / STATE).read_text())
    (last.path / STATE).write_text(json.dumps({**state, **changes}))
    vouch(last, STATE)


FORGED_STATES = {
    "epochs of text": {"evaluated_epochs": "8"},
    "negative epochs": {"evaluated_epochs": -3},
    "endless epochs": {"evaluated_epochs": 10**60},
    "a list for an evaluation": {"evaluation": [1, 2]},
    "text in an evaluation": {"evaluation": dict.fromkeys(("val_loss", "i2t_r1", "i2t_r5", "i2t_r10"), "x")},
    "a window of text": {"epoch_window": {"steps": "x"}},
    "a window of something else": {"epoch_window": {"stops": 3}},
    "bad pictures of numbers": {"bad_pictures": {"a": 3}},
    "bad pictures in a list": {"bad_pictures": ["a"]},
    "a micro-batch of text": {"micro_batch": "many"},
    "no settings": {"config": None},
    "settings of text": {"config": "tiny"},
    "another tokenizer": {"tokenizer": {"kind": "characters", "alphabet": 7, "context": 20}},
    "a tokenizer without end": {"tokenizer": {"kind": "characters", "alphabet": "abc", "context": 10**12}},
    "words of numbers": {"tokenizer": {"kind": "words", "pieces": [1, 2], "context": 20}},
    "a list for a tokenizer": {"tokenizer": []},
}


def test_a_model_that_does_not_say_how_many_tokens_it_knows(finished):
    """Found by mutation."""
    config = json.loads((last_of(finished).path / STATE).read_text())["config"]
    config["model"]["text"]["vocab_size"] = None
    forge_state(finished, config=config)
    code, _, stderr = command("eval", f"{finished.path}@last")
    assert code == 3 and "does not say how many tokens its model knows" in stderr


@pytest.mark.parametrize("changes", FORGED_STATES.values(), ids=FORGED_STATES)
def test_states_that_cannot_be(finished, changes):
    forge_state(finished, **changes)
    for words in (["train", "--resume", finished.path, "--epochs", 9], ["checkpoint", "show", finished.path]):
        code, _, stderr = command(*words)
        assert code in (0, 2, 3) and "bug in clipctl" not in stderr, stderr
        assert code or words[0] == "checkpoint"


def forge_tensors(run, name, change):
    last = last_of(run)
    tensors = load_file(last.path / name)
    save_file(change(tensors), last.path / name, metadata={"format": "pt"})
    vouch(last, name)


def first_weight(tensors, value):
    name = next(name for name in sorted(tensors) if tensors[name].dtype == np.float32 and tensors[name].ndim == 2)
    return {**tensors, name: value(tensors[name])}


def of_nan(tensor):
    return np.full_like(tensor, np.nan)


FORGED_TENSORS = {
    "weights that are not finite": (MODEL, lambda t: first_weight(t, of_nan)),
    "weights in whole numbers": (MODEL, lambda t: first_weight(t, lambda one: one.astype(np.int8))),
    "moments that are not finite": (OPTIMIZER, lambda t: first_weight(t, of_nan)),
    "moments in whole numbers": (OPTIMIZER, lambda t: first_weight(t, lambda one: one.astype(np.int32))),
    "a short random state": (OPTIMIZER, lambda t: {**t, "rng.cpu": t["rng.cpu"][:100]}),
    "a random state of zeros": (OPTIMIZER, lambda t: {**t, "rng.cpu": np.full_like(t["rng.cpu"], 255)}),
    "a random state of floats": (OPTIMIZER, lambda t: {**t, "rng.cpu": t["rng.cpu"].astype(np.float32)}),
    "a tensor nobody knows": (OPTIMIZER, lambda t: {**t, "rng.other": t["rng.cpu"]}),
}


@pytest.mark.parametrize(("name", "change"), FORGED_TENSORS.values(), ids=FORGED_TENSORS)
def test_tensors_that_cannot_be(finished, name, change):
    forge_tensors(finished, name, change)
    code, _, stderr = command("train", "--resume", f"{finished.path}@last", "--epochs", 9)
    assert code == 3 and "bug in clipctl" not in stderr, stderr
    if name == MODEL:
        code, _, stderr = command("eval", f"{finished.path}@last")
        assert code == 3 and "bug in clipctl" not in stderr, stderr


# --- twenty forged runs under every command -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def forged(unbroken_run, tmp_path_factory):
    """Twenty copies of a run, each with one thing that is not as it should be; and what they point to."""
    root, rng = tmp_path_factory.mktemp("forged"), np.random.default_rng(0)
    victim = tmp_path_factory.mktemp("victim")
    (victim / "file").write_text("mine")
    (victim / "step-00000003").mkdir()
    kinds = [
        *(
            (name, kind)
            for name in ("config.yaml", "run.json", "metrics.jsonl")
            for kind in ("a pipe", "a link", "noise")
        ),
        *(
            ("environment.json", "a device"),
            ("tokenizer.json", "a link"),
            ("train.log", "a link"),
            ("run.lock", "a link"),
        ),
        *(("checkpoints", "a link"), ("checkpoints", "a file"), ("checkpoints/step-00000003", "a link")),
        *(("run.json", "a pid"), ("metrics.jsonl", "holes"), ("config.yaml", "aliases"), ("base", "a link")),
    ]
    runs = []
    for number, (name, kind) in enumerate(kinds):
        run = RunDir(root / f"forged-{number}")
        shutil.copytree(unbroken_run.path, run.path)
        path = run.path / name
        if kind != "a pid":
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        match kind:
            case "a pipe":
                os.mkfifo(path)
            case "a device":
                path.symlink_to("/dev/zero")
            case "a link":
                path.symlink_to(victim if name in ("checkpoints", "base") or "step" in name else victim / "file")
            case "noise" | "a file":
                path.write_bytes(rng.bytes(5000))
            case "holes":
                path.touch()
                os.truncate(path, 2**34)
            case "aliases":
                path.write_text("data: {source: &a [x], val: *a}")
        runs.append(run)
    assert len(runs) == 20
    return runs, victim


FORGED_COMMANDS = [
    *(["stop"], ["monitor", "--once"], ["checkpoint", "list"], ["checkpoint", "show"], ["checkpoint", "verify"]),
    *(["checkpoint", "prune", "--yes"], ["train", "--epochs", "9", "--resume"], ["runs", "--runs-dir"]),
]


@pytest.mark.parametrize("words", FORGED_COMMANDS, ids=" ".join)
def test_forged_runs_hurt_nobody(forged, bystander, words):
    runs, victim = forged
    for run in runs:
        if run.path.name == "forged-16":
            forge_status(run, bystander.pid)
        code, _, stderr = command(*words, run.path.parent if words[0] == "runs" else run.path)
        assert code in (0, 1, 2, 3), (run.path.name, code, stderr)
        assert "bug in clipctl" not in stderr and "Traceback" not in stderr, (run.path.name, stderr)
        assert code == 0 or "error: " in stderr or words[0] == "checkpoint"
        assert (victim / "file").read_text() == "mine" and list((victim / "step-00000003").iterdir()) == []
        assert sorted(path.name for path in victim.iterdir()) == ["file", "step-00000003"]


def test_several_commands_at_once():
    """A few rounds of what `make soak` does a hundred times."""
    count, problems = crowd(3, seed=0)
    assert count == 18 and not problems, problems


# --- the rest -----------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_not_shown_as_if_it_were_whole(finished):
    """W12."""
    overwrite(last_of(finished).path / MODEL)
    code, _, stderr = command("checkpoint", "list", finished.path)
    assert code == 0 and "sizes were checked; clipctl checkpoint verify reads every byte" in stderr
    code, _, stderr = command("checkpoint", "show", finished.path)
    assert code == 3 and "model.safetensors has changed: its sha256 does not match" in stderr


@pytest.fixture
def photos(tmp_path):
    """Class folders, a fifth of the pictures broken."""
    rng = np.random.default_rng(0)
    for number in range(40):
        folder = tmp_path / "photos" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        if number % 5 == 0:
            (folder / f"{number}.png").write_bytes(b"no picture")
    return tmp_path / "photos"


def test_how_many_pictures_may_be_bad_is_a_setting(photos, tmp_path):
    """W5: the same verdict by `data inspect` and by `train`, before anything is written, and a way to allow more."""
    code, stdout, _ = command("data", "inspect", photos, "--deep")
    assert code == 3 and "not ready: 8 of 40 pictures cannot be used" in stdout and "--max-bad 20%" in stdout
    settings = [one for one in SETTINGS if "data.source" not in one and "epochs" not in one]
    words = ["train", photos, *settings, "--epochs", 2, "--runs-dir", tmp_path / "runs", "--name", "run"]
    code, _, stderr = command(*words)
    assert (
        code == 2 and "pictures cannot be used, more than 5%" in stderr and "to train without them: --max-bad" in stderr
    )
    code, _, stderr = command(*words[:-1], "again", "--max-bad", "25%")
    assert code == 0, stderr


def test_an_ascii_locale_is_no_error(tmp_path):
    """W11: names that the system cannot encode, from the disk or from a table."""
    folder = tmp_path / "grün"
    for number in range(40):
        path = folder / "classes" / ("Kätzchen", "Hündchen")[number % 2] / f"kätzchen {number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    lines = [f"kätzchen {number}.png,ein Kätzchen – {number}" for number in range(4)]
    (folder / "data.csv").write_text("\n".join(["image,caption", *lines]), encoding="utf-8")
    environment = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for name in ("data.csv", "classes"):
        words = [sys.executable, "-m", "clipctl", "data", "inspect", str(folder / name)]
        done = subprocess.run(words, env=environment, capture_output=True)
        assert done.returncode == 2 and b"bug in clipctl" not in done.stderr, done.stderr.decode()
        assert b"this locale (ascii) cannot represent file names" in done.stderr and b"PYTHONUTF8=1" in done.stderr


def test_the_state_is_true_on_a_full_disk(tmp_path, monkeypatch):
    """S12: there is no room for a new run.json, but the old one can be written over."""
    import clipctl.runs.rundir as module

    run = RunDir.create(tmp_path, "tiny", "run")
    run.write_status("running", attempt=1, step=3, total_steps=24)

    def full(path, **_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "replaced", full)
    run.write_status("stopped", attempt=1, step=20, total_steps=24, lost_rows=7)
    status = run.status()
    assert (status.state, status.step, status.lost_rows) == ("stopped", 20, 7)
    (run.path / "config.yaml").write_text("preset: tiny\n")
    code, stdout, _ = command("monitor", "--once", run.path, "--json")
    assert code == 0 and "7 rows of metrics could not be written" in stdout
