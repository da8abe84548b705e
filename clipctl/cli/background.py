"""clipctl train --detach: runs the same command again, as a process that belongs to no terminal."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil
import typer

from clipctl.cli import output
from clipctl.errors import ExitCode, RunError, Stopped
from clipctl.files import open_plain, open_to_append
from clipctl.hardware.processes import heard_signals
from clipctl.runs.rundir import RunDir, check_name, new_name
from clipctl.runs.store import find_unfinished

START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 20.0
WORDS_LIMIT_BYTES = 100_000


def start(root: Path, preset: str, name: str | None, resume: str | None, *, as_json: bool) -> None:
    """Start the training in the background, wait until it runs, and say how to watch and stop it."""
    if resume is not None:
        run, which = find_unfinished(root, resume)
        which_run = f"--resume={run.path}@{which}" if which else f"--resume={run.path}"
    else:
        name = check_name(name) if name else new_name(preset)
        run = RunDir.create(root, preset, name)
        run.release()
        which_run = f"--name={name}"
    log, log_bytes = open_log(run)
    try:
        process = launch(log, ["train", which_run, *other_arguments(sys.argv[2:], resume)])
    finally:
        os.close(log)
    with leaving_by_exception():
        try:
            wait_until_running(run, process, log_bytes)
        except KeyboardInterrupt:
            raise end(run, process) from None
    if as_json:
        document = {"run": str(run.path), "pid": process.pid, "log": str(run.log_file), "state": "running"}
        output.print_json("train-detached", document)
        return
    for label, words in (
        ("started", f"{run.path} in the background, process {process.pid}"),
        ("watch", f"clipctl monitor {run.handle}"),
        ("stop", f"clipctl stop {run.handle}"),
        ("log", str(run.log_file)),
    ):
        output.data().print(output.plain(f"{label:<8} {words}"), soft_wrap=True)


def other_arguments(arguments: list[str], resume: str | None) -> list[str]:
    """The arguments after `train`, without those that this process replaces."""
    kept: list[str] = []
    skips_value = False
    for argument in arguments:
        if skips_value and argument == resume:
            skips_value = False
        elif argument == "--resume":
            skips_value = True
        elif argument not in ("--detach", "--json") and not argument.startswith("--resume="):
            kept.append(argument)
    return kept


def open_log(run: RunDir) -> tuple[int, int]:
    """The log to append to, and its size. The trainer inherits its lock and holds it for as long as it lives: of two
    that start at once, the second is refused before it has started a trainer."""
    try:
        log = open_to_append(run.log_file)
    except OSError as error:
        raise RunError(f"cannot write to {run.log_file}: {error.strerror or error}") from None
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(log)
            hint = f"watch it with: clipctl monitor {run.handle}"
            raise RunError(f"{run.path} is in use: a run was started there in the background", hint) from None
    return log, os.fstat(log).st_size


def launch(log: int, arguments: list[str]) -> "subprocess.Popen[bytes]":
    """Start it in its own session, so that it survives the terminal closing."""
    deaf = [signal.signal(signal.SIGHUP, signal.SIG_IGN)] if hasattr(signal, "SIGHUP") else []
    try:
        return subprocess.Popen(  # inherits what is ignored
            [sys.executable, "-m", "clipctl", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            close_fds=True,
        )
    finally:
        for handler in deaf:
            signal.signal(signal.SIGHUP, handler)


@contextmanager
def leaving_by_exception() -> Iterator[None]:
    """Let every signal that asks this process to exit raise KeyboardInterrupt."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, leave) for number in heard_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_until_running(run: RunDir, process: "subprocess.Popen[bytes]", log_bytes: int) -> None:
    """Wait until the process reports that it is running; if it exits instead, show its own error."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        status = run.status()
        if status is not None and is_within(status.pid, process.pid):
            return
        if process.poll() is not None:
            words = read_words(run, log_bytes)
            sys.stderr.write(words[max(0, words.find("error: ")) :])
            run.remove_if_stillborn()
            if process.returncode < 0:
                raise RunError(
                    f"process {process.pid} was killed by signal {-process.returncode} before training began"
                )
            raise typer.Exit(process.returncode)
        time.sleep(0.05)
    hint = f"it is still running in the background: see {run.log_file}, or end it with kill {process.pid}"
    raise RunError(f"process {process.pid} has not started training after {START_TIMEOUT_S:g} s", hint)


def is_within(pid: int, ancestor: int) -> bool:
    """Whether a process is that one or a descendant of it, as each process under --nproc is."""
    try:
        return pid == ancestor or ancestor in (parent.pid for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def read_words(run: RunDir, log_bytes: int) -> str:
    """What the trainer has logged."""
    with open_plain(run.log_file) as log:
        log.seek(log_bytes)
        return log.read(WORDS_LIMIT_BYTES).decode(errors="replace")


def end(run: RunDir, process: "subprocess.Popen[bytes]") -> Stopped:
    """End the trainer, because this process was told to exit before training was known to run; reports what is left."""
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    run.remove_if_stillborn()
    if not run.path.exists():
        words, hint = "nothing was started", None
    else:
        words, hint = f"{run.path} is not running", run.way_on
    return Stopped(f"stopped: {words}", hint, ExitCode.INTERRUPTED)
