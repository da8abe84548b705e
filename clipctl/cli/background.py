"""clipctl train --detach: runs the same command again, as a process that belongs to no terminal."""

import subprocess
import sys
import time
from pathlib import Path

import typer

from clipctl.cli import output
from clipctl.errors import RunError
from clipctl.runs.rundir import RunDir, check_name, new_name
from clipctl.runs.store import find_unfinished

START_TIMEOUT_S = 300.0


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
    log_bytes = run.log_file.stat().st_size if run.log_file.exists() else 0
    process = launch(run, ["train", which_run, *other_arguments(sys.argv[2:], resume)])
    wait_until_running(run, process, log_bytes)
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


def launch(run: RunDir, arguments: list[str]) -> "subprocess.Popen[bytes]":
    """Start it in its own session, so that closing the terminal does not signal it."""
    with run.log_file.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "clipctl", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            close_fds=True,
        )


def wait_until_running(run: RunDir, process: "subprocess.Popen[bytes]", log_bytes: int) -> None:
    """Wait until the process reports that it is running; if it exits instead, show its own error."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        status = run.status()
        if status is not None and status.pid == process.pid:
            return
        if process.poll() is not None:
            words = run.log_file.read_bytes()[log_bytes:].decode(errors="replace")
            sys.stderr.write(words[max(0, words.find("error: ")) :])
            run.remove_if_stillborn()
            if process.returncode < 0:
                raise RunError(
                    f"process {process.pid} was killed by signal {-process.returncode} before training began"
                )
            raise typer.Exit(process.returncode)
        time.sleep(0.05)
    hint = f"it is still running in the background: see {run.log_file}, or stop it with clipctl stop {run.handle}"
    raise RunError(f"process {process.pid} has not started training after {START_TIMEOUT_S:g} s", hint)
