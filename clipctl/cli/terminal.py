"""Full-screen use of the terminal: reads single keys, and restores the terminal afterwards."""

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from clipctl.errors import ExitCode


@contextmanager
def single_keys() -> Iterator[None]:
    """Read keys without waiting for Enter, if the system and the input allow it."""
    try:
        import termios
        import tty
    except ImportError:  # Windows
        yield
        return
    try:
        before = termios.tcgetattr(sys.stdin.fileno())
    except (OSError, ValueError, termios.error):
        yield
        return
    try:
        tty.setcbreak(sys.stdin.fileno())
        yield
    finally:
        with suppress(termios.error):  # the terminal itself may be gone
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)


@contextmanager
def ends_by_exception() -> Iterator[None]:
    """Let signals end the program through its `finally` blocks, which restore the terminal."""

    def leave(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second signal must not interrupt the restoring
        raise SystemExit(ExitCode.INTERRUPTED if number == signal.SIGINT else 128 + number)

    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, leave) for number in numbers}
    if hasattr(signal, "SIGTSTP"):  # when suspended, it would leave its screen behind
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def next_key(timeout_s: float) -> str | None:
    """The next key; None if none comes in time, an empty string at the end of the input."""
    ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else None
