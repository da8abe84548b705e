"""The program: clipctl, or python -m clipctl. Signals have their exit codes from the first moment on."""

import signal
import sys
from types import FrameType


def main() -> None:
    signal.signal(signal.SIGTERM, _terminated)
    try:
        from clipctl.cli.app import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)


def _terminated(number: int, frame: FrameType | None) -> None:
    sys.exit(143)


if __name__ == "__main__":
    main()
