"""The run directory: its name, its files, and who may write to it. The only place that names the files."""

import difflib
import functools
import json
import os
import re
import secrets
import shlex
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
from filelock import FileLock, Timeout

from clipctl.errors import RunError
from clipctl.files import (
    discard,
    open_plain,
    open_to_append,
    overwrite,
    parse_json,
    read_bounded,
    read_json,
    replaced,
    write_json,
)
from clipctl.runs.retrieval import MOST_THUMBNAILS, SIDE_PX, Retrieval

DEFAULT_ROOT = Path("runs")
BASE = "base"  # directory of the model that a run started from
_NAME = re.compile(r"[\w][\w.@+=-]*", re.UNICODE)
_MADE_NAME = re.compile(r"\d{8}-\d{6}-.*-([0-9a-f]{4})", re.DOTALL)
_MAX_NAME_BYTES = 200
_HEADER_LIMIT_BYTES = 10_000
_JSON_LIMIT_BYTES = 1_000_000
_STATUS_LIMIT_BYTES = 10_000
_RETRIEVAL_BYTES = 4096  # room for longer ones later
_PLANNING = ".planning-"  # followed by the process's number
SHOWN_NAMES = 5  # of runs, in a message
LOCK_WAIT_S = 0.2  # somebody may be looking whether it is held

State = Literal["running", "finished", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The state of a run, as last reported by its process. `pid` is valid only with the process's creation time."""

    state: State
    attempt: int
    step: int
    total_steps: int
    pid: int
    process_created_s: float  # since 1970, by a clock that can be set
    process_since_boot_s: float  # the same, since boot
    progress: int  # grows with every batch that was trained on or evaluated
    host: str
    heartbeat_s: float  # since the epoch
    lost_rows: int = 0  # of metrics that could not be written


def short_name(name: str) -> str:
    """The four digits of a name that clipctl made, the whole of any other."""
    made = _MADE_NAME.fullmatch(name)
    return made[1] if made else name


class RunDir:
    """One run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(self.lock_file)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def handle(self) -> str:
        """What to type to refer to this run: the four digits of a name that clipctl made, if they are unique."""
        root = self.path.parent
        if root.absolute() != runs_root(None).absolute():
            return shlex.quote(str(self.path))
        made = _MADE_NAME.fullmatch(self.name)
        if made and _matches(made[1], [run.name for run in RunDir.all(root)]) == [self.name]:
            return made[1]
        return shlex.quote(self.name)

    @property
    def way_on(self) -> str:
        """How to continue a run that was stopped."""
        return f"To continue: clipctl train --resume {self.handle}"

    @property
    def run_id(self) -> str:
        """The name the run was started under; its directory may have been renamed since."""
        return self._recorded_id() or self.name

    def _recorded_id(self) -> str | None:
        try:
            with open_plain(self.metrics_file) as file:
                return str(parse_json(file.read(_HEADER_LIMIT_BYTES).partition(b"\n")[0])["run_id"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def environment_file(self) -> Path:
        return self.path / "environment.json"

    @property
    def tokenizer_file(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def lock_file(self) -> Path:
        return self.path / "run.lock"

    @property
    def status_file(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def retrieval_file(self) -> Path:
        return self.path / "retrieval.json"

    @property
    def thumbnails_file(self) -> Path:
        return self.path / "thumbnails.bin"

    @property
    def log_file(self) -> Path:
        return self.path / "train.log"

    @property
    def base_dir(self) -> Path:
        return self.path / BASE

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @classmethod
    def create(cls, root: Path, preset: str, name: str | None = None) -> "RunDir":
        """A new directory, locked by this process until `release` or until it exits."""
        path = cls.check_free(root, name if name else new_name(preset))
        try:
            path.mkdir(parents=True, exist_ok=True)
            run = cls(path)
            run.acquire()
            if not cls._is_stillborn(path):  # it came to life while we waited for the lock
                run.release()
                raise _taken(path)
            run.checkpoints_dir.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot_create(root, error) from None
        return run

    @classmethod
    def check_free(cls, root: Path, name: str) -> Path:
        """Where a new run of this name would be; raises if there is one."""
        path = root / check_name(name)
        if path.exists() and not cls._is_stillborn(path):
            raise _taken(path)
        return path

    @staticmethod
    def _is_stillborn(path: Path) -> bool:
        """True for the remains of a run that was killed before it wrote anything."""
        if not path.is_dir() or any((path / "checkpoints").glob("*")):
            return False
        return {one.name for one in path.iterdir() if one.name[0] != "."} <= {"run.lock", "checkpoints", "train.log"}

    def remove_if_stillborn(self) -> None:
        """Remove what `create` made, if the run never wrote anything and nobody holds it. Nothing else is touched."""
        with suppress(RunError), self.locked():
            if self._is_stillborn(self.path):
                for file in (self.log_file, self.lock_file):
                    file.unlink(missing_ok=True)
                for directory in (self.checkpoints_dir, self.path):
                    with suppress(OSError):
                        directory.rmdir()

    def remove(self) -> None:
        """Delete the run, unless a process holds it. The targets of links in it stay."""
        with self._at_rest():
            discard(self.path)

    def rename(self, name: str) -> "RunDir":
        """Rename the run, unless a process holds it. Its id stays the name it was started under, by which its
        checkpoints know it."""
        renamed = RunDir(self.path.with_name(check_name(name)))
        with self._at_rest():
            if self._recorded_id() is None and any(self.checkpoints_dir.glob("step-*")):
                hint = f"{self.metrics_file} is missing or damaged, and only it links the checkpoints to this run"
                raise RunError(f"{self.path} cannot be renamed: it would lose its checkpoints", hint)
            if os.path.lexists(renamed.path):
                raise RunError(f"run already exists: {renamed.path}", "choose another name")
            os.rename(self.path, renamed.path)
        return renamed

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Nobody else can hold the run while this lasts; raises if somebody does."""
        if self.path.is_symlink():
            raise RunError(
                f"{self.path} is a symbolic link", "name the directory that it points to, or remove the link"
            )
        with self.locked():
            yield

    @staticmethod
    def is_run(path: Path) -> bool:
        return os.path.isfile(path / "config.yaml")  # False for names that no file can have, too

    @classmethod
    def find(cls, root: Path, text: str) -> "RunDir":
        """The run that `text` names: a directory, a name, or a unique beginning or end of a name."""
        if cls.is_run(Path(text)):
            return cls(Path(text))
        runs = cls.all(root)
        names = [run.name for run in runs]
        matches = _matches(text, names)
        if len(matches) == 1:
            return cls(root / matches[0])
        if matches:
            raise RunError(f"{text!r} matches several runs: {_some(matches)}", "type more of the name")
        if not names:
            raise RunError(f"there is no run {text!r}: no runs in {root}", "start one: clipctl train")
        near = difflib.get_close_matches(text, names, n=1, cutoff=0.4)
        guess = f"did you mean {near[0]}? " if near else ""
        newest = [run.name for run in sorted(runs, key=RunDir.changed_s, reverse=True)]
        raise RunError(f"there is no run {text!r} in {root}", f"{guess}runs there, newest first: {_some(newest)}")

    @classmethod
    def is_named(cls, root: Path, text: str) -> bool:
        """Whether this is exactly the name of a run. Then it is the run, not a directory of that name in the current
        one, such as the one that it was trained on: that is ./NAME."""
        return Path(text).name == text and cls.is_run(root / text)

    @classmethod
    def all(cls, root: Path) -> "list[RunDir]":
        """Every run in a directory, sorted by name, which starts with the time if clipctl made it."""
        found = sorted(root.glob("*/config.yaml"))
        return [cls(path.parent) for path in found if path.parent.name[0] != "."]  # those are being deleted

    def changed_s(self) -> float:
        """When a file in it was last added, removed or replaced, since the epoch."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return 0.0

    @classmethod
    def newest_unfinished(cls, root: Path) -> "RunDir":
        """The unfinished run with the most recent heartbeat."""
        waiting = [
            (status.heartbeat_s if status else 0.0, run)
            for run in cls.all(root)
            if (status := run.status()) is None or status.state != "finished"
        ]
        if not waiting:
            raise RunError(f"there is no unfinished run in {root}", "name one: clipctl train --resume RUN")
        return max(waiting, key=lambda entry: entry[0])[1]

    def acquire(self) -> None:
        """Own the run until `release`, or until this process ends."""
        for path in (self.lock_file, self.checkpoints_dir, self.base_dir):
            if path.is_symlink():  # what is written there would end up elsewhere
                raise RunError(f"{path} is a symbolic link, so the run cannot be written to", f"remove it: rm {path}")
        try:
            self._lock.acquire(timeout=LOCK_WAIT_S, poll_interval=LOCK_WAIT_S / 4)
        except Timeout:
            owner = self.status()
            who = f" by process {owner.pid} on {owner.host}" if owner else ""
            raise RunError(
                f"{self.path} is in use{who}",
                f"watch it: clipctl monitor {self.handle}; or stop it first: clipctl stop {self.handle}",
            ) from None
        except IsADirectoryError:
            raise RunError(f"{self.lock_file} is a directory", f"remove it: rm -r {self.lock_file}") from None

    def is_held_by(self, pid: int) -> bool:
        """Whether a process on this computer owns the run: the lock is held, and that process has its file open. What
        run.json says of the owner may have been copied, or forged."""
        try:
            if not self.lock_file.is_file() or self._lock.is_locked:
                return False
            with FileLock(self.lock_file, timeout=0):
                return False
        except Timeout:
            pass
        except OSError:
            return False
        try:
            opened = psutil.Process(pid).open_files()
        except psutil.Error:
            return False
        return any(_is_same(file.path, self.lock_file) for file in opened)

    def release(self) -> None:
        self._lock.release()

    @contextmanager
    def locked(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def write_config(self, text: str) -> None:
        with replaced(self.config_file) as partial:
            partial.write_text(text, encoding="utf-8")

    def write_environment(self, document: dict[str, Any]) -> None:
        write_json(self.environment_file, document)

    def write_tokenizer(self, document: dict[str, Any]) -> None:
        write_json(self.tokenizer_file, document)

    def write_status(
        self, state: State, *, attempt: int, step: int, total_steps: int, progress: int = 0, lost_rows: int = 0
    ) -> None:
        """Replace run.json. Called about once a second, so it is atomic but not synced to disk.

        On a full disk there is no room for a new file, but the old one can be overwritten.
        """
        status = RunStatus(
            state=state,
            attempt=attempt,
            step=step,
            total_steps=total_steps,
            pid=os.getpid(),
            process_created_s=_created_s(os.getpid())[0],
            process_since_boot_s=_created_s(os.getpid())[1],
            progress=progress,
            host=socket.gethostname(),
            heartbeat_s=time.time(),
            lost_rows=lost_rows,
        )
        text = json.dumps(asdict(status)) + "\n"
        try:
            with replaced(self.status_file, durable=False) as partial:
                partial.write_text(text, encoding="utf-8")
        except OSError:
            with suppress(OSError):
                overwrite(self.status_file, text.encode(), _STATUS_LIMIT_BYTES)

    def write_retrieval(self, retrieval: Retrieval) -> None:
        """Write over the previous one, at every evaluation: a new file each time would take longer than all the rest.
        If the disk is full, the old one stays."""
        content = (json.dumps(retrieval.to_dict()) + "\n").encode()
        with suppress(OSError):
            if self.retrieval_file.exists() and self.retrieval_file.stat().st_size >= len(content):
                overwrite(self.retrieval_file, content, _JSON_LIMIT_BYTES)
                return
            with replaced(self.retrieval_file, durable=False) as partial:
                partial.write_bytes(content.ljust(_RETRIEVAL_BYTES))

    def write_thumbnails(self, pictures: bytes) -> None:
        with suppress(OSError), replaced(self.thumbnails_file, durable=False) as partial:
            partial.write_bytes(pictures)

    def retrieval(self) -> Retrieval | None:
        """What the latest evaluation retrieved; None if that was not recorded, as in older runs."""
        try:
            return Retrieval.from_dict(read_json(self.retrieval_file, _JSON_LIMIT_BYTES))
        except (OSError, ValueError):
            return None

    def thumbnails(self, pictures: Iterable[int]) -> dict[int, bytes]:
        """Red, green and blue of SIDE_PX × SIDE_PX pixels of held-out pictures, row by row; those that there are."""
        size_bytes, found = SIDE_PX * SIDE_PX * 3, dict[int, bytes]()
        with suppress(OSError), open_plain(self.thumbnails_file) as file:
            for picture in pictures:
                if 0 <= picture < MOST_THUMBNAILS:
                    file.seek(picture * size_bytes)
                    found[picture] = file.read(size_bytes)
        return {picture: pixels for picture, pixels in found.items() if len(pixels) == size_bytes}

    def read_config(self) -> str:
        """The text of its config.yaml; empty if there is none."""
        try:
            return read_bounded(self.config_file, _JSON_LIMIT_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def read_environment(self) -> dict[str, Any]:
        """The environment the run was made in, as far as it is known."""
        try:
            document = read_json(self.environment_file, _JSON_LIMIT_BYTES)
        except (OSError, ValueError):
            return {}
        return document if isinstance(document, dict) else {}

    def status(self) -> RunStatus | None:
        try:
            document = read_json(self.status_file, _JSON_LIMIT_BYTES)
            status = RunStatus(**{one.name: document[one.name] for one in fields(RunStatus) if one.name in document})
        except (OSError, ValueError, TypeError, KeyError):
            return None
        counts = (status.attempt, status.step, status.total_steps, status.progress, status.lost_rows)
        times_s = (status.process_created_s, status.process_since_boot_s, status.heartbeat_s)
        is_right = (
            status.state in get_args(State)
            and isinstance(status.host, str)
            and all(type(count) is int and 0 <= count < 2**50 for count in counts)
            and all(type(time_s) in (int, float) and abs(time_s) < 1e12 for time_s in times_s)
            and type(status.pid) is int
            and 0 < status.pid < 2**31
        )
        return status if is_right else None


@functools.cache
def _created_s(pid: int) -> tuple[float, float]:
    """When a process was created: since 1970, and since boot."""
    created_s = psutil.Process(pid).create_time()
    return created_s, created_s - psutil.boot_time()


def _is_same(path: str, other: Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


@contextmanager
def planning(root: Path) -> Iterator[None]:
    """Let watchers know, while this lasts, that a run is being planned. Leaves nothing behind."""
    path, is_new = root / f"{_PLANNING}{os.getpid()}", not root.exists()
    with suppress(OSError):
        if is_new:
            root.mkdir()
        os.close(open_to_append(path))
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        if is_new:
            with suppress(OSError):  # it is not empty: others use it by now
                root.rmdir()


def planned_since_s(root: Path) -> float | None:
    """When the newest planning began, since the epoch; None if no process is planning."""
    found = []
    for path in root.glob(f"{_PLANNING}*"):
        with suppress(OSError, ValueError, psutil.Error):
            began_s = path.stat().st_mtime
            pid = int(path.name.removeprefix(_PLANNING))
            if psutil.Process(pid).create_time() <= began_s + 2:  # otherwise another process has that number by now
                found.append(began_s)
    return max(found, default=None)


def runs_root(given: Path | str | None) -> Path:
    """`--runs-dir` (which also reads CLIPCTL_RUNS), else ./runs."""
    return Path(given or os.environ.get("CLIPCTL_RUNS") or DEFAULT_ROOT)


def _matches(text: str, names: Sequence[str]) -> list[str]:
    """The run of that name, or else those whose name begins or ends with it."""
    return [text] if text in names else [name for name in names if name.startswith(text) or name.endswith(text)]


def _some(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def new_name(preset: str) -> str:
    """Sorts by time; four random digits make a handle to type."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{preset}-{secrets.token_hex(2)}"


def cannot_create(root: Path, error: OSError) -> RunError:
    """Why there can be no run in a directory."""
    if root.is_file():
        return RunError(f"{root} is a file, not a directory for runs", "pass another --runs-dir")
    return RunError(
        f"cannot create a run in {root}: {error.strerror or error}",
        "pass --runs-dir DIRECTORY or set CLIPCTL_RUNS to a place you can write to",
    )


def _taken(path: Path) -> RunError:
    go_on = f"to continue it: clipctl train --resume {path.name}"
    return RunError(f"run already exists: {path}", f"choose another --name, or leave out --name; {go_on}")


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name) or len(name.encode()) > _MAX_NAME_BYTES:
        raise RunError(
            f"{name!r} is not a valid run name",
            "use letters, digits, dots, dashes and underscores, but no slashes; at most 200 bytes",
        )
    return name
