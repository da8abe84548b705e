"""The checkpoints of one run: saving, finding, retiring.

`best` and `last` are derived from the manifests, never stored: nothing can point to what is gone.
"""

import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from clipctl.errors import CheckpointError
from clipctl.runs import retention
from clipctl.runs.checkpoints import (
    DIRECTORY_NAME,
    MANIFEST,
    SCHEMA,
    Checkpoint,
    FileSum,
    Manifest,
    read_checkpoint,
    sha256,
)
from clipctl.runs.files import delete, discard, replaced, sync_file
from clipctl.runs.rundir import RunDir


@dataclass(frozen=True)
class Entry:
    """A directory among a run's checkpoints, whole or not."""

    path: Path
    checkpoint: Checkpoint | None  # None: the manifest cannot be read
    problems: tuple[str, ...]
    is_incomplete: bool = False  # a save or a deletion that is going on or was interrupted
    is_best: bool = False
    is_last: bool = False

    @property
    def step(self) -> int:
        """By the directory's name, which a damaged one still has."""
        digits = re.search(r"\d+", self.path.name)
        return int(digits[0]) if digits else 0


class CheckpointStore:
    def __init__(self, run: RunDir, *, keep_last: int = 2, keep_best: int = 1) -> None:
        self._directory = run.checkpoints_dir
        self._run_id = run.run_id
        self._keep_last, self._keep_best = keep_last, keep_best

    def save(
        self,
        write_files: Callable[[Path], None],
        *,
        step: int,
        epoch: int,
        metrics: dict[str, float | None],
        attempt: int = 1,
        attempt_step: int = 0,
    ) -> Checkpoint:
        """Let `write_files` fill a directory that then appears whole; after that, retire old ones."""
        target = self._free_name(step)
        with replaced(target) as partial:
            partial.mkdir(parents=True)
            write_files(partial)
            manifest = Manifest(
                schema=SCHEMA,
                run_id=self._run_id,
                attempt=attempt,
                attempt_step=attempt_step,
                step=step,
                epoch=epoch,
                saved_s=round(time.time(), 3),
                metrics={
                    key: value if value is None or math.isfinite(value) else None for key, value in metrics.items()
                },
                files=_sums(partial),
            )
            text = json.dumps(manifest.to_dict(), indent=2) + "\n"
            (partial / MANIFEST).write_text(text, encoding="utf-8")
        self._retire()
        return Checkpoint(target, manifest)

    def all(self) -> list[Checkpoint]:
        """Every checkpoint of this run with a readable manifest, by step."""
        found = [entry.checkpoint for entry in self._entries() if entry.checkpoint]
        own = [checkpoint for checkpoint in found if checkpoint.manifest.run_id == self._run_id]
        return sorted(own, key=lambda checkpoint: (checkpoint.step, checkpoint.manifest.attempt, checkpoint.again))

    def course(self) -> list[Checkpoint]:
        """Those on the way to where the run is now, by step."""
        return retention.course(self.all())

    def newest_valid(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint whose every byte is right, and what was wrong with the newer ones."""
        skipped: list[str] = []
        for checkpoint in reversed(self.course()):
            problems = checkpoint.problems()
            if not problems:
                return checkpoint, skipped
            skipped.append(f"{checkpoint.path.name}: {'; '.join(problems)}")
        return None, skipped

    def last(self) -> Checkpoint | None:
        return next(reversed(self.course()), None)

    def best(self) -> Checkpoint | None:
        return next(reversed(retention.ranked(self.all())), None)

    def inventory(self) -> list[Entry]:
        """All that lies there, by step; of the damaged ones what can be seen without reading the files."""
        best, last = self.best(), self.last()
        entries = []
        for entry in self._entries():
            problems = entry.problems + tuple(entry.checkpoint.gross_problems() if entry.checkpoint else ())
            is_best, is_last = (entry.checkpoint is not None and entry.checkpoint == one for one in (best, last))
            entries.append(Entry(entry.path, entry.checkpoint, problems, entry.is_incomplete, is_best, is_last))
        return sorted(entries, key=lambda entry: (entry.step, entry.path.name))

    def sweep(self) -> None:
        """Remove what an interrupted save or deletion left behind. For the owner of the run's lock."""
        for path in self._directory.glob(".step-*"):
            delete(path)

    def _retire(self) -> None:
        """Delete all but the last and the best ones. One that is not whole does not count as either."""
        everything = self.all()
        whole = [checkpoint for checkpoint in everything if not checkpoint.gross_problems()]
        keep = retention.kept(whole, last=self._keep_last, best=self._keep_best)
        for checkpoint in everything:
            if checkpoint not in keep:
                discard(checkpoint.path)

    def _free_name(self, step: int) -> Path:
        """Never the name of one that is there: the old one goes only after the new one has come."""
        name = f"step-{step:08d}"
        candidates = (self._directory / (f"{name}.{number}" if number else name) for number in itertools.count())
        return next(path for path in candidates if not os.path.lexists(path))

    def _entries(self) -> list[Entry]:
        if not self._directory.is_dir():
            return []
        entries = []
        for path in self._directory.iterdir():
            if path.name.startswith(".step-"):
                entries.append(Entry(path, None, ("it was not finished",), is_incomplete=True))
            elif DIRECTORY_NAME.fullmatch(path.name):
                entries.append(self._entry(path))
        return entries

    def _entry(self, path: Path) -> Entry:
        if path.is_symlink():
            return Entry(path, None, ("it is a symbolic link",))
        try:
            checkpoint = read_checkpoint(path)
        except CheckpointError as error:
            return Entry(path, None, (str(error),))
        run_id = checkpoint.manifest.run_id
        return Entry(path, checkpoint, () if run_id == self._run_id else (f"it belongs to another run, {run_id}",))


def _sums(directory: Path) -> dict[str, FileSum]:
    """Size and sha256 of every file. The disk is given the files to write while the processor hashes them."""
    paths = sorted(directory.iterdir())
    with ThreadPoolExecutor() as pool:
        syncs = [pool.submit(sync_file, path) for path in paths]
        sums = dict(zip(paths, pool.map(sha256, paths), strict=True))
        for sync in syncs:
            sync.result()
    return {path.name: FileSum(path.stat().st_size, digest) for path, digest in sums.items()}
