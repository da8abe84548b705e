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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
from filelock import FileLock, Timeout

from clipctl.errors import RunError
from clipctl.files import open_plain, read_bounded, replaced, write_json

DEFAULT_ROOT = Path("runs")
BASE = "base"  # directory of the model that a run started from
_NAME = re.compile(r"[\w][\w.@+=-]*", re.UNICODE)
_MAX_NAME_BYTES = 200
_HEADER_LIMIT_BYTES = 10_000
_JSON_LIMIT_BYTES = 1_000_000

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


class RunDir:
    """One run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(self.path / "run.lock")

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def handle(self) -> str:
        """What to type to refer to this run."""
        return shlex.quote(self.name if self.path.parent == DEFAULT_ROOT else str(self.path))

    @property
    def run_id(self) -> str:
        """The name the run was started under; its directory may have been renamed since."""
        try:
            with open_plain(self.metrics_file) as file:
                return str(json.loads(file.read(_HEADER_LIMIT_BYTES).partition(b"\n")[0])["run_id"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return self.name

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
    def status_file(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

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
        path = root / (check_name(name) if name else new_name(preset))
        if path.exists() and not cls._is_stillborn(path):
            raise RunError(f"run already exists: {path}", "choose another --name, or leave out --name")
        try:
            path.mkdir(parents=True, exist_ok=True)
            run = cls(path)
            run.acquire()
            run.checkpoints_dir.mkdir(exist_ok=True)
        except OSError as error:
            if root.exists() and not root.is_dir():
                raise RunError(f"{root} is a file, not a directory for runs", "pass another --runs-dir") from None
            raise RunError(
                f"cannot create a run in {root}: {error.strerror or error}",
                "pass --runs-dir DIRECTORY or set CLIPCTL_RUNS to a place you can write to",
            ) from None
        return run

    @staticmethod
    def _is_stillborn(path: Path) -> bool:
        """True for what is left of a run that was killed before it wrote anything."""
        if not path.is_dir() or any((path / "checkpoints").glob("*")):
            return False
        return {one.name for one in path.iterdir() if one.name[0] != "."} <= {"run.lock", "checkpoints", "train.log"}

    def remove_if_stillborn(self) -> None:
        """Remove what `create` made, if the run never wrote anything. Nothing else is touched."""
        if self._is_stillborn(self.path):
            for file in (self.log_file, self.path / "run.lock"):
                file.unlink(missing_ok=True)
            for directory in (self.checkpoints_dir, self.path):
                with suppress(OSError):
                    directory.rmdir()

    @staticmethod
    def is_run(path: Path) -> bool:
        return (path / "config.yaml").is_file()

    @classmethod
    def find(cls, root: Path, text: str) -> "RunDir":
        """The run that `text` names: a directory, a name, or a unique beginning or end of a name."""
        if cls.is_run(Path(text)):
            return cls(Path(text))
        names = [run.name for run in cls.all(root)]
        matches = [text] if text in names else [name for name in names if name.startswith(text) or name.endswith(text)]
        if len(matches) == 1:
            return cls(root / matches[0])
        if matches:
            raise RunError(f"{text!r} matches several runs: {', '.join(matches)}", "type more of the name")
        near = difflib.get_close_matches(text, names, n=3, cutoff=0.4)
        raise RunError(f"there is no run {text!r} in {root}", f"did you mean {' or '.join(near)}?" if near else None)

    @classmethod
    def all(cls, root: Path) -> "list[RunDir]":
        """Every run in a directory, sorted by name, which starts with the time."""
        return [cls(path.parent) for path in sorted(root.glob("*/config.yaml"))]

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
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            owner = self.status()
            who = f" by process {owner.pid} on {owner.host}" if owner else ""
            raise RunError(f"{self.path} is in use{who}", f"watch it with: clipctl monitor {self.handle}") from None

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

    def write_status(self, state: State, *, attempt: int, step: int, total_steps: int, progress: int = 0) -> None:
        """Replace run.json. Called about once a second, so it is atomic but not synced to disk.

        A full disk costs a heartbeat, not the training.
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
        )
        with suppress(OSError), replaced(self.status_file, durable=False) as partial:
            partial.write_text(json.dumps(asdict(status)) + "\n", encoding="utf-8")

    def read_config(self) -> str:
        """The text of its settings; empty if there is none."""
        try:
            return read_bounded(self.config_file, _JSON_LIMIT_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def read_environment(self) -> dict[str, Any]:
        """What the run was made with, as far as known."""
        try:
            document = json.loads(read_bounded(self.environment_file, _JSON_LIMIT_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}

    def status(self) -> RunStatus | None:
        try:
            document = json.loads(read_bounded(self.status_file, _JSON_LIMIT_BYTES))
            kinds: dict[str, Any] = {"state": str, "host": str, "process_created_s": float, "heartbeat_s": float}
            kinds["process_since_boot_s"] = float
            values = {field.name: document[field.name] for field in fields(RunStatus)}
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        right = all(isinstance(value, kinds.get(name, int)) for name, value in values.items())
        return RunStatus(**values) if right and values["pid"] > 0 and values["state"] in get_args(State) else None


@functools.cache
def _created_s(pid: int) -> tuple[float, float]:
    """When a process was created: since 1970, and since boot."""
    created_s = psutil.Process(pid).create_time()
    return created_s, created_s - psutil.boot_time()


def runs_root(given: Path | str | None) -> Path:
    """`--runs-dir` (which also reads CLIPCTL_RUNS), else ./runs."""
    return Path(given or os.environ.get("CLIPCTL_RUNS") or DEFAULT_ROOT)


def new_name(preset: str) -> str:
    """Sorts by time; four random digits make a handle to type."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{preset}-{secrets.token_hex(2)}"


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name) or len(name.encode()) > _MAX_NAME_BYTES:
        raise RunError(
            f"{name!r} is not a valid run name",
            "use letters, digits, dots, dashes and underscores, but no slashes; at most 200 bytes",
        )
    return name
