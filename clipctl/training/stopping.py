"""Ctrl-C, SIGTERM and SIGHUP: the first asks the loop to finish its step and save, a second Ctrl-C quits at once."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from clipctl.hardware.processes import heard_signals

LEAVING_S = 3.0  # that leaving at once may take


class StopRequested(Exception):
    """Raised where the loop can stop without losing anything."""


class StopSwitch:
    """Remembers the first signal that asked to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._leaves_s: float | None = None  # since when it leaves at once

    def request(self, number: int, frame: FrameType | None = None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
        elif number == signal.SIGINT and self._leaves_s is None:
            self._leaves_s = time.monotonic()
            raise KeyboardInterrupt  # asked twice: whatever is going on is not worth waiting for
        elif number == signal.SIGINT and self._leaves_s is not None and time.monotonic() - self._leaves_s > LEAVING_S:
            os._exit(128 + number)

    def join(self, number: int) -> None:
        """Stop because another process was asked to, unless this one was."""
        if self.signal is None:
            self.signal = signal.Signals(number)

    def check(self) -> None:
        if self.signal is not None:
            raise StopRequested


@contextmanager
def stop_signals() -> Iterator[StopSwitch]:
    """A switch that the stop signals flip until the block ends. Only the main thread can be asked that way."""
    switch = StopSwitch()
    if threading.current_thread() is not threading.main_thread():
        yield switch
        return
    before = {number: signal.signal(number, switch.request) for number in heard_signals()}
    try:
        yield switch
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
