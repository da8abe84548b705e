"""A checkpoint: a directory that is complete or absent, verified by a manifest of sizes and sha256 sums. No torch.

checkpoints/step-00000120/{manifest.json, model.safetensors, optimizer.safetensors, state.json}

A model for use only, such as an imported one, has no optimizer.
"""

import hashlib
import json
import re
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from clipctl.errors import CheckpointError, NewerCheckpointError
from clipctl.files import parse_json, read_bounded, sha256_of
from clipctl.runs.tensors import read_header

SCHEMA = 1
MANIFEST = "manifest.json"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
NEEDED = (MODEL, STATE)

DIRECTORY_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")  # .1: the same step, saved again
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MANIFEST_LIMIT_BYTES = 1_000_000
_STATE_LIMIT_BYTES = 16_000_000  # a large tokenizer, or the names of very many bad pictures
_STATE_LIMIT_VALUES = 600_000


@dataclass(frozen=True)
class FileSum:
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint directory holds. Written last, so its presence means that the rest is complete."""

    schema: int
    run_id: str
    beginnings: list[list[int]]  # the attempts that led here: number and first step of each
    step: int
    epoch: int
    saved_s: float  # since 1970, for display only; nothing is ordered by it
    metrics: dict[str, float]  # on the held-out pairs; `score` and `val_loss` decide which checkpoint is best
    files: dict[str, FileSum]

    def to_json(self) -> bytes:
        """Includes its own sha256: the manifest vouches for the files, and this for the manifest."""
        values = asdict(self)
        digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
        return (json.dumps({**values, "sha256": digest}, indent=2) + "\n").encode()

    @property
    def attempt(self) -> int:
        """1 for the first attempt; each resume starts the next."""
        return self.beginnings[-1][0]

    def _check_types(self) -> None:
        pairs = self.beginnings if isinstance(self.beginnings, list) else []
        if not pairs or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise ValueError("its list of attempts is invalid")
        sizes = (file.size_bytes for file in self.files.values())
        numbers = (self.step, self.epoch, *sizes, *(number for pair in pairs for number in pair))
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("its numbers are invalid")
        values = self.metrics.values() if isinstance(self.metrics, dict) else [None]
        if not all(type(value) in (int, float) and abs(value) < 1e300 for value in (self.saved_s, *values)):
            raise ValueError("its metrics are invalid")
        if not all(isinstance(key, str) and key.isprintable() for key in (self.run_id, *self.metrics)):
            raise ValueError("its names are invalid")

    @classmethod
    def from_json(cls, text: bytes) -> "Manifest":
        """Parse exactly what `to_json` wrote. Raises ValueError for anything else."""
        document = parse_json(text)
        if not isinstance(document, dict) or not isinstance(schema := document.get("schema"), int):
            raise ValueError("it is not a manifest")
        if schema > SCHEMA:
            raise NewerCheckpointError(f"it has checkpoint schema {schema}; this clipctl reads up to {SCHEMA}")
        values = {key: value for key, value in document.items() if key != "sha256"}
        try:
            files = {str(name): FileSum(**file) for name, file in values["files"].items()}
            manifest = cls(**{**values, "files": files})
        except (TypeError, KeyError, AttributeError):
            raise ValueError("it has missing or unknown fields") from None
        if not all(_FILE_NAME.fullmatch(name) and name != MANIFEST for name in files):
            raise ValueError("it names files outside its directory")
        manifest._check_types()
        if manifest.to_json() != text:
            raise ValueError("it was changed after it was written: its sha256 does not match")
        return manifest


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    manifest: Manifest
    is_verified: bool = field(default=False, compare=False)  # every byte was checked already

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def again(self) -> int:
        """How many times this step was saved before, according to the directory's name."""
        match = DIRECTORY_NAME.fullmatch(self.path.name)
        return int(match[2] or 0) if match else 0

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.manifest.files.values())

    def gross_problems(self) -> list[str]:
        """What can be seen without reading the files: missing files, wrong sizes. Raises OSError if the system refuses
        access, which says nothing about the checkpoint."""
        return self._unlisted() + [problem for name in self.manifest.files for problem in self._gross_problems(name)]

    def problems(self) -> list[str]:
        """How the files differ from the manifest; empty means that every byte is as written."""
        with ThreadPoolExecutor() as pool:  # hashing releases the GIL
            found = pool.map(self._file_problems, self.manifest.files)
            return self._unlisted() + [problem for problems in found for problem in problems]

    def verified(self) -> "Checkpoint":
        """This checkpoint, after every byte was checked; once is enough."""
        if not self.is_verified and (problems := self.problems()):
            raise CheckpointError(f"checkpoint {self.path} is damaged: {'; '.join(problems)}")
        return replace(self, is_verified=True)

    def file(self, name: str) -> Path:
        """The path of a file that the manifest lists."""
        if name not in self.manifest.files:
            raise CheckpointError(f"{MANIFEST} of checkpoint {self.path} does not list {name}")
        return self.path / name

    def read_state(self) -> dict[str, Any]:
        """state.json: the step, the evaluations, the config, the tokenizer."""
        try:
            content = read_bounded(self.file(STATE), _STATE_LIMIT_BYTES)
            if content.count(b",") > _STATE_LIMIT_VALUES:
                raise ValueError(f"it has more than {_STATE_LIMIT_VALUES:,} values")
            document = parse_json(content)
            if not isinstance(document, dict):
                raise ValueError("it is not a JSON object")
            return document
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path / STATE} cannot be read: {error}") from None

    def _unlisted(self) -> list[str]:
        return [f"{MANIFEST} does not list {name}" for name in NEEDED if name not in self.manifest.files]

    def _gross_problems(self, name: str) -> Iterator[str]:
        try:
            status = (self.path / name).lstat()
        except (FileNotFoundError, NotADirectoryError):
            yield f"{name} is missing"
            return
        expected = self.manifest.files[name].size_bytes
        if stat.S_ISLNK(status.st_mode):
            yield f"{name} is a symbolic link"
        elif not stat.S_ISREG(status.st_mode):
            yield f"{name} is not a regular file"
        elif status.st_size != expected:
            yield f"{name} has {status.st_size} bytes, expected {expected}"

    def _file_problems(self, name: str) -> list[str]:
        """Cheap checks first: a hostile file is not worth hashing."""
        path = self.path / name
        try:
            if found := list(self._gross_problems(name)):
                return found
            if path.suffix == ".safetensors":
                read_header(path)
            if sha256_of(path) != self.manifest.files[name].sha256:
                return [f"{name} has changed: its sha256 does not match"]
        except CheckpointError as error:
            return [str(error)]
        except OSError as error:
            return [f"{name} cannot be read: {error.strerror or error}"]
        return []


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a directory, from its manifest; its files are not read yet (see `verified`)."""
    try:
        return Checkpoint(path, Manifest.from_json(read_bounded(path / MANIFEST, _MANIFEST_LIMIT_BYTES)))
    except NewerCheckpointError as error:
        raise NewerCheckpointError(f"{path} cannot be read: {error}", "upgrade clipctl") from None
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error
