"""The terminal while a program owns all of it: keys come one by one, and it is left as it was found."""

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
    """Read keys without waiting for Enter, where the system and the input allow it."""
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
    """Let signals end the program through its `finally` blocks, which give the terminal back."""

    def leave(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second one must not disturb the giving back
        raise SystemExit(ExitCode.INTERRUPTED if number == signal.SIGINT else 128 + number)

    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, leave) for number in numbers}
    if hasattr(signal, "SIGTSTP"):  # put to sleep, it would leave its screen behind
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def next_key(timeout_s: float) -> str | None:
    """The next key, if one comes in time; an empty text when the input has ended."""
    ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else None
