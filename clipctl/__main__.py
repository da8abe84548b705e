"""The program: clipctl, or python -m clipctl."""

import io
import os
import signal
import sys
from contextlib import suppress
from types import FrameType


def main() -> None:
    # Until a command knows better, both signals end the program on the spot. Python's own way, an exception wherever
    # it happens to be, is lost when it happens to be inside an import that forgives.
    # Of several processes only the first says so. The others often wait for it in there, where no handler is run.
    is_first = os.environ.get("RANK", "0") == "0"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave if is_first else signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a dash that a terminal does not know must not end a command
    # Threads spin while they wait for each other, by default for a millisecond: next to a busy program that costs a
    # third of the speed or more (docs/log.md). Spinning less costs nothing. Read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    from clipctl.cli.app import app

    try:
        app(prog_name="clipctl")  # also if called as python -m clipctl
    except SystemExit as end:
        if "RANK" in os.environ and "torch" in sys.modules:
            _leave_group(end.code)
        raise


def _leave_group(code: str | int | None) -> None:
    """Exit one of several processes once everything is done: threads of a process group may abort an interpreter that
    is shutting down."""
    from clipctl.training.distributed import leave

    leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _leave(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, b"error: interrupted\n" if number == signal.SIGINT else b"error: terminated\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
