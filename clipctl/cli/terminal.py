"""Full-screen use of the terminal: reads single keys, and restores the terminal afterwards."""

import importlib.util
import os
import re
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

from clipctl.errors import ExitCode


def reads_keys() -> bool:
    """Whether keys can be read one by one: the input is a terminal, and the system can do it."""
    return importlib.util.find_spec("termios") is not None and sys.stdin.isatty()


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


ASK_BACKGROUND = "\x1b]11;?\x1b\\"  # a terminal that knows its background colour answers on its input
_ANSWER = re.compile(rb"\x1b\]11;rgba?:([0-9a-fA-F]+)/([0-9a-fA-F]+)/([0-9a-fA-F]+)[^\x07\x1b]*(?:\x07|\x1b\\)")
_SEQUENCE = re.compile(rb"\x1b(?:\[[0-9;?]*[A-Za-z~]|O[A-Za-z])")
_NAMED = {
    prefix + letter: name
    for prefix in (b"\x1b[", b"\x1bO")
    for letter, name in ((b"A", "up"), (b"B", "down"), (b"C", "right"), (b"D", "left"))
}


def looks_light(environment: Mapping[str, str]) -> bool:
    """Whether an environment variable, which some terminals set, says that the background is light."""
    last = environment.get("COLORFGBG", "").rpartition(";")[2]
    return last.isdigit() and int(last) in (7, 15)


class Keys:
    """Keys by name as they are pressed, and what the terminal reports about itself in between."""

    def __init__(self) -> None:
        self._waiting = b""

    def next(self, timeout_s: float) -> str | None:
        """A key, `left`, `right`, `up`, `down`, `esc`, `light` or `dark`; None if none arrives in time, an empty string
        at the end of the input."""
        if not self._waiting:
            ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
            if not ready:
                return None
            self._waiting = os.read(sys.stdin.fileno(), 256)
            if not self._waiting:
                return ""
        name, self._waiting = first_key(self._waiting)
        return name


def first_key(received: bytes) -> tuple[str | None, bytes]:
    """The first key of the input, None if it means nothing; and the rest of the input."""
    if answer := _ANSWER.match(received):
        red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in answer.groups())
        name = "light" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "dark"
        return name, received[answer.end() :]
    if sequence := _SEQUENCE.match(received):
        return _NAMED.get(sequence[0]), received[sequence.end() :]
    if received.startswith(b"\x1b]"):  # an answer to something else, or a part of one
        return None, b""
    return "esc" if received[:1] == b"\x1b" else received[:1].decode(errors="replace"), received[1:]
