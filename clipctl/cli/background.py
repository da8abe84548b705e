"""clipctl train --detach: the same command again, as a process that belongs to no terminal."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import typer

from clipctl.cli import render
from clipctl.errors import RunError
from clipctl.runs.rundir import RunDir, check_name, new_name
from clipctl.runs.store import parse_reference

START_TIMEOUT_S = 300.0


def start(root: Path, preset: str, name: str | None, resume: str | None, *, as_json: bool) -> None:
    """Start the training in the background, wait until it runs, say how to watch and stop it."""
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--detach", "--json")]
    if resume is not None:
        named, which = parse_reference(root, resume)
        run = RunDir.find(root, named) if named else RunDir.newest_unfinished(root)
        arguments += ["--resume", f"{run.path}@{which}" if which else str(run.path)]  # the last one given counts
    else:
        name = check_name(name) if name else new_name(preset)
        run = RunDir.create(root, preset, name)
        run.release()
        arguments += ["--name", name]
    process = launch(run, arguments)
    wait_until_running(run, process)
    if as_json:
        document = {"run": str(run.path), "pid": process.pid, "log": str(run.log_file), "state": "running"}
        render.print_json("train-detached", document)
        return
    for label, words in (
        ("started", f"{run.path} in the background, process {process.pid}"),
        ("watch", f"clipctl monitor {run.handle}"),
        ("stop", f"clipctl stop {run.handle}"),
        ("log", str(run.log_file)),
    ):
        render.data().print(render.plain(f"{label:<8} {words}"), soft_wrap=True)


def launch(run: RunDir, arguments: list[str]) -> "subprocess.Popen[bytes]":
    """In a session of its own: closing the terminal sends it nothing."""
    with run.log_file.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "clipctl", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            close_fds=True,
        )


def wait_until_running(run: RunDir, process: "subprocess.Popen[bytes]") -> None:
    """Until it says so itself; if it ends instead, its own words are the error."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        status = run.status()
        if status is not None and status.pid == process.pid:
            return
        if process.poll() is not None:
            words = run.log_file.read_text(encoding="utf-8", errors="replace")
            sys.stderr.write(words[words.rfind("error: ") :] if "error: " in words else words)
            if not RunDir.is_run(run.path):
                shutil.rmtree(run.path)
            raise typer.Exit(process.returncode)
        time.sleep(0.05)
    raise RunError(f"process {process.pid} has not begun to train after {START_TIMEOUT_S:g} s", f"see {run.log_file}")
