"""Helper processes, and what Ctrl-C does to them."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any, NoReturn, ParamSpec, TypeVar

from clipctl.errors import Terminated

P = ParamSpec("P")
T = TypeVar("T")
# Ctrl-C, `clipctl stop` and the system's end, a terminal that was closed.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


def heard_signals() -> list[signal.Signals]:
    """The stop signals that this process was not told to ignore: a process started by `nohup` or --detach outlives its
    terminal."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def signals_held() -> Iterator[None]:
    """Block stop signals while processes start; this process receives them when the block ends.

    A child inherits the mask: a signal to the whole group (Ctrl-C in a terminal) does not reach it.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # starting it unblocks some of them, so do that first
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Helpers(ProcessPoolExecutor):
    """Fresh processes that exit with this one. On Ctrl-C they exit at once and silently, even while starting: the main
    process reports it."""

    def __init__(self, count: int = 1, begin: Callable[..., None] | None = None, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        super().__init__(count, context, initializer=_begin, initargs=(begin, arguments))

    def submit(self, work: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        with signals_held(), _handlers_held():  # the first submission starts the processes
            return super().submit(work, *arguments, **named)


@contextmanager
def interrupts_raised() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM unwind the block instead of ending the program on the spot, so that helpers are shut down
    cleanly and work is kept."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: _raise_terminated}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


@contextmanager
def _handlers_held() -> Iterator[None]:
    """Defer signal handlers too: a mask covers one thread, so via another thread a handler could still run while a
    process is being started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in heard_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in came:
            signal.raise_signal(each)


def _begin(begin: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if begin:
        begin(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
