"""Ctrl-C and SIGTERM: the first asks the loop to finish its step and save, a second Ctrl-C leaves at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequested(Exception):
    """Raised where the loop can stop without losing anything."""


class StopSwitch:
    """Remembers the first signal that asked to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def request(self, number: int, frame: FrameType | None = None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: whatever is going on is not worth waiting for
        self.signal = self.signal or signal.Signals(number)

    def check(self) -> None:
        if self.signal is not None:
            raise StopRequested


@contextmanager
def stop_signals() -> Iterator[StopSwitch]:
    """A switch that SIGINT and SIGTERM flip until the block ends. Only the main thread can be asked that way."""
    switch = StopSwitch()
    if threading.current_thread() is not threading.main_thread():
        yield switch
        return
    before = {number: signal.signal(number, switch.request) for number in STOP_SIGNALS}
    try:
        yield switch
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
