"""Errors that a user can act on, and the exit code of each."""

import errno
from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    FAILURE = 1
    USAGE = 2  # usage, configuration or data
    CHECK = 3  # a check failed: damaged checkpoint, nothing fits
    DEVICE = 4  # device unavailable or out of memory
    HUNG_UP = 129  # SIGHUP: the terminal was closed
    INTERRUPTED = 130  # Ctrl-C
    TERMINATED = 143  # SIGTERM


class ClipctlError(Exception):
    """What went wrong (naming the thing and its value) and, if there is one, a hint that says what to do."""

    exit_code = ExitCode.FAILURE
    is_raised_in_all = False  # of the processes that work together: the first one says it

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def problems(self) -> Sequence["ClipctlError"]:
        """The errors to print one by one; usually just this one."""
        return (self,)


class ConfigError(ClipctlError):
    exit_code = ExitCode.USAGE


class ConfigErrors(ConfigError):
    """Several mistakes in one configuration, reported together."""

    def __init__(self, problems: Sequence[ConfigError]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self._problems = tuple(problems)

    @property
    def problems(self) -> Sequence[ClipctlError]:
        return self._problems


class DataError(ClipctlError):
    exit_code = ExitCode.USAGE


def unreadable(path: object, error: OSError) -> DataError:
    """The error for a file or directory that the system does not let us read."""
    hints = {
        errno.EACCES: "you lack permission: if the files are yours, chmod -R u+rX grants it",
        errno.ENAMETOOLONG: "pass a path, or shorten the name",
        errno.ENOENT: "check the path",
        errno.EISDIR: "a file belongs there: rename or remove the directory",
        errno.ENOTDIR: "a part of the path is a file, not a directory",
        errno.ELOOP: "remove the symbolic link",
    }
    hint = hints.get(error.errno or 0, "check that the disk or network drive is connected, then try again")
    return DataError(f"{str(path)[:200]} cannot be read: {error.strerror or error}", hint)


class RunError(ClipctlError):
    """A run directory that already exists, does not exist, or cannot be used."""

    exit_code = ExitCode.USAGE


class CheckpointError(ClipctlError):
    """A checkpoint that is damaged, incomplete, or has a newer schema."""

    exit_code = ExitCode.CHECK


class NewerCheckpointError(CheckpointError):
    """Written by a newer clipctl: not damaged, but not ours to read or delete."""


class StoreError(ClipctlError):
    """An index of embeddings that is damaged, or was made with another model."""

    exit_code = ExitCode.CHECK


class SaveError(ClipctlError):
    """A checkpoint could not be saved: the disk is full, or the directory is gone."""


class TrainingError(ClipctlError):
    """The training itself cannot continue."""


class DeviceError(ClipctlError):
    exit_code = ExitCode.DEVICE


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it unwinds what is being done as Ctrl-C does."""


class Stopped(ClipctlError):
    """The training was stopped by a signal, after saving everything. The user asked for it, so it is not shown as an
    error."""

    def __init__(self, message: str, hint: str | None, exit_code: ExitCode) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code
