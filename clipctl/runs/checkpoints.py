"""Checkpoints: directories that are whole or absent, verified by a manifest of sizes and sha256 sums. No torch.

    checkpoints/step-00000120/{manifest.json, model.safetensors, optimizer.safetensors, state.json}

`best` and `last` are derived from the manifests, never stored: nothing can point to what is gone.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from clipctl.errors import CheckpointError
from clipctl.runs.files import sync_directory, sync_file

SCHEMA = 1
MANIFEST = "manifest.json"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"

_STEP_DIRECTORY = re.compile(r"step-(\d{8,})")
_HASH_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileSum:
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint directory holds. Written last, so that its presence says that the rest is there."""

    schema: int
    run_id: str
    step: int
    epoch: int
    metrics: dict[str, float | None]  # on the held-out pairs; `score` and `val_loss` decide which one is best
    files: dict[str, FileSum]


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.manifest.files.values())

    def problems(self) -> list[str]:
        """What differs between the files and the manifest; empty means every byte is as it was written."""
        found = []
        for name, expected in self.manifest.files.items():
            path = self.path / name
            if not path.is_file():
                found.append(f"{name} is missing")
            elif (size := path.stat().st_size) != expected.size_bytes:
                found.append(f"{name} has {size} bytes, expected {expected.size_bytes}")
            elif sha256(path) != expected.sha256:
                found.append(f"{name} has another sha256 than when it was written")
        return found

    def verified(self) -> "Checkpoint":
        """This checkpoint, after every byte was checked."""
        if problems := self.problems():
            raise CheckpointError(f"checkpoint {self.path} is damaged: {'; '.join(problems)}")
        return self


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, directory: Path, run_id: str, *, keep_last: int = 2, keep_best: int = 1) -> None:
        self._directory = directory
        self._run_id = run_id
        self._keep_last, self._keep_best = keep_last, keep_best

    def save(
        self,
        write_files: Callable[[Path], None],
        *,
        step: int,
        epoch: int,
        metrics: dict[str, float | None],
    ) -> Checkpoint:
        """Let `write_files` fill a temporary directory, then make it appear under its name, then retire old ones."""
        target = self._directory / f"step-{step:08d}"
        partial = self._directory / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            write_files(partial)
            files = {path.name: FileSum(path.stat().st_size, sha256(path)) for path in sorted(partial.iterdir())}
            manifest = Manifest(
                schema=SCHEMA, run_id=self._run_id, step=step, epoch=epoch, metrics=metrics, files=files
            )
            (partial / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")
            for path in partial.iterdir():
                sync_file(path)
            sync_directory(partial)
            if target.exists():
                self._remove(target)
            os.rename(partial, target)
            sync_directory(self._directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self._retire()
        return Checkpoint(target, manifest)

    def all(self) -> list[Checkpoint]:
        """Every checkpoint with a readable manifest, by step."""
        if not self._directory.is_dir():
            return []
        found = []
        for path in self._directory.iterdir():
            if _STEP_DIRECTORY.fullmatch(path.name):
                try:
                    found.append(read_checkpoint(path))
                except CheckpointError:
                    continue
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def newest_valid(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint whose every byte is right, and what was wrong with the newer ones."""
        skipped: list[str] = []
        for checkpoint in reversed(self.all()):
            problems = checkpoint.problems()
            if not problems:
                return checkpoint, skipped
            skipped.append(f"{checkpoint.path.name}: {'; '.join(problems)}")
        return None, skipped

    def sweep(self) -> None:
        """Remove what an interrupted save or deletion left behind."""
        for path in self._directory.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)

    def last(self) -> Checkpoint | None:
        return max(self.all(), key=lambda checkpoint: checkpoint.step, default=None)

    def best(self) -> Checkpoint | None:
        return max(self._scored(), key=_merit, default=None)

    def _scored(self) -> list[Checkpoint]:
        return [checkpoint for checkpoint in self.all() if checkpoint.manifest.metrics.get("score") is not None]

    def _retire(self) -> None:
        """Delete all but the last and the best ones."""
        everything = self.all()
        keep = {checkpoint.step for checkpoint in everything[-self._keep_last :]}
        keep |= {checkpoint.step for checkpoint in sorted(self._scored(), key=_merit)[-self._keep_best :]}
        for checkpoint in everything:
            if checkpoint.step not in keep:
                self._remove(checkpoint.path)

    @staticmethod
    def _remove(path: Path) -> None:
        """Through a rename, so that a kill in the middle leaves no half checkpoint under a valid name."""
        doomed = path.with_name(f".{path.name}.deleted")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def merit(metrics: dict[str, float | None]) -> tuple[float, float]:
    """Sorts evaluations: the higher score (mean of both recalls at 1); among equals the lower loss."""
    score, val_loss = metrics.get("score"), metrics.get("val_loss")
    loss_is_known = val_loss is not None and math.isfinite(val_loss)
    return (-1.0 if score is None else score), (-val_loss if loss_is_known and val_loss is not None else -math.inf)


def _merit(checkpoint: Checkpoint) -> tuple[float, float, int]:
    return *merit(checkpoint.manifest.metrics), checkpoint.step


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a directory, by its manifest; its files are not read yet (see `verified`)."""
    try:
        document = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        schema = document["schema"]
        if schema > SCHEMA:
            raise CheckpointError(
                f"{path} has checkpoint schema {schema}, this clipctl reads up to {SCHEMA}", "upgrade clipctl"
            )
        document["files"] = {name: FileSum(**values) for name, values in document["files"].items()}
        if any(Path(name).name != name for name in document["files"]):
            raise CheckpointError(f"{path / MANIFEST} names files outside of its directory")
        return Checkpoint(path, Manifest(**document))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from None


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
