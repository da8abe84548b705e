"""Processes that do a part of the work, and what Ctrl-C means to them."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_STOPS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back while processes start; this one gets them when the block ends.

    A child inherits the mask: a signal to the whole group (Ctrl-C in a terminal) does not reach it.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # it releases both signals when it starts, so start it first
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Helpers(ProcessPoolExecutor):
    """Fresh processes that end with this one, and at Ctrl-C at once and without a word, also while they start: the
    program that started them says what there is to say."""

    def __init__(self, count: int = 1, begin: Callable[..., None] | None = None, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        super().__init__(count, context, initializer=_begin, initargs=(begin, arguments))

    def submit(self, work: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        with signals_held(), _handlers_held():  # the first submission starts the processes
            return super().submit(work, *arguments, **named)


@contextmanager
def interrupts_raised() -> Iterator[None]:
    """Let SIGINT unwind the block instead of ending the program on the spot, so that helpers are ended in order."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _handlers_held() -> Iterator[None]:
    """A mask is one thread's: through another thread a signal's handler would still run, in the middle of a start."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in _STOPS}
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
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if begin:
        begin(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
