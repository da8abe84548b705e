"""The program: clipctl, or python -m clipctl."""

import os
import signal
from contextlib import suppress
from types import FrameType


def main() -> None:
    # Until a command knows better, both signals end the program on the spot. Python's own way, an exception wherever
    # it happens to be, is lost when it happens to be inside an import that forgives.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    from clipctl.cli.app import app

    app()


def _leave(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, b"error: interrupted\n" if number == signal.SIGINT else b"error: terminated\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
