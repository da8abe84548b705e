"""The checkpoints of one run: saving, finding, retiring.

`best` and `last` are derived from the manifests, never stored: nothing can point to what is gone.
"""

import itertools
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from clipctl.errors import CheckpointError, NewerCheckpointError, RunError
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

# ours: the manifest can be read. unreadable: it cannot. incomplete: a save or deletion that is going on or was
# interrupted. newer: of a later clipctl. strange: of another run, or a link. The last two are never touched.
Kind = Literal["ours", "unreadable", "incomplete", "newer", "strange"]


@dataclass(frozen=True)
class Entry:
    """A directory among a run's checkpoints, whole or not."""

    path: Path
    kind: Kind
    checkpoint: Checkpoint | None = None
    problems: tuple[str, ...] = ()
    is_best: bool = False
    is_last: bool = False

    @property
    def size_bytes(self) -> int:
        """What it takes on the disk, whole or not."""
        return sum(path.lstat().st_size for path in self.path.iterdir()) if self.path.is_dir() else 0

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

    # --- writing ----------------------------------------------------------------------------------------------

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
            partial.mkdir()
            write_files(partial)
            manifest = Manifest(
                schema=SCHEMA,
                run_id=self._run_id,
                attempt=attempt,
                attempt_step=attempt_step,
                step=step,
                epoch=epoch,
                saved_s=round(time.time(), 3),
                metrics={key: value for key, value in metrics.items() if value is not None and math.isfinite(value)},
                files=_sums(partial),
            )
            (partial / MANIFEST).write_bytes(manifest.to_json())
        with suppress(OSError):  # what could not be deleted now is tried again after the next save
            self._retire()
        return Checkpoint(target, manifest)

    def sweep(self) -> None:
        """Remove what an interrupted save or deletion left behind. For the owner of the run's lock."""
        for path in self._directory.glob(".step-*"):
            delete(path)

    def prune(self, entries: Sequence[Entry]) -> None:
        """Delete what `prunable` found. For the owner of the run's lock."""
        for entry in entries:
            if entry.kind == "incomplete":
                delete(entry.path)
            else:
                discard(entry.path)

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

    # --- reading ----------------------------------------------------------------------------------------------

    def all(self) -> list[Checkpoint]:
        """Every checkpoint of this run with a readable manifest, by step."""
        found = [entry.checkpoint for entry in self._entries() if entry.kind == "ours" and entry.checkpoint]
        return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.manifest.attempt, checkpoint.again))

    def last(self) -> Checkpoint | None:
        return next(reversed(retention.course(self.all())), None)

    def best(self) -> Checkpoint | None:
        return next(reversed(retention.ranked(self.all())), None)

    def at(self, step: int) -> Checkpoint:
        """The one of a step; the newest, if it was saved more than once."""
        checkpoints = self.all()
        matches = [checkpoint for checkpoint in checkpoints if checkpoint.step == step]
        if not matches:
            steps = ", ".join(str(checkpoint.step) for checkpoint in checkpoints) or "none"
            raise CheckpointError(f"the run has no checkpoint of step {step}", f"there are: {steps}")
        return matches[-1]

    def verified(self, checkpoint: Checkpoint) -> Checkpoint:
        """The same checkpoint after every byte was checked; if it is damaged, the error names one that is not."""
        if problems := checkpoint.problems():
            newest, _ = self.newest_valid()
            hint = f"the newest whole one is that of step {newest.step}" if newest else "no other one is whole"
            raise CheckpointError(f"checkpoint {checkpoint.path} is damaged: {'; '.join(problems)}", hint)
        return checkpoint

    def newest_valid(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint whose every byte is right, and what was wrong with the newer ones."""
        entries = self._entries()
        chosen, skipped = None, []
        for checkpoint in reversed(retention.course(self.all())):
            problems = checkpoint.problems()
            if not problems:
                chosen = checkpoint
                break
            skipped.append(f"{checkpoint.path.name}: {'; '.join(problems)}")
        for entry in entries:
            if entry.kind == "unreadable" and (chosen is None or entry.step > chosen.step):
                skipped.append(f"{entry.path.name}: {'; '.join(entry.problems)}")
        return chosen, skipped

    def inventory(self) -> list[Entry]:
        """All that lies there, by step; of the damaged ones what can be seen without reading the files."""
        entries = self._entries()
        own = [entry.checkpoint for entry in entries if entry.kind == "ours" and entry.checkpoint]
        best, last = retention.ranked(own)[-1:], retention.course(own)[-1:]
        marked = [
            replace(
                entry,
                problems=entry.problems + tuple(entry.checkpoint.gross_problems() if entry.checkpoint else ()),
                is_best=entry.checkpoint in best,
                is_last=entry.checkpoint in last,
            )
            for entry in entries
        ]
        return sorted(marked, key=lambda entry: (entry.step, entry.path.name))

    def prunable(self) -> list[Entry]:
        """What can go: all but the last, the best and the newest whole ones, and what is not this run's."""
        checkpoints = self.all()
        whole = [checkpoint for checkpoint in checkpoints if not checkpoint.gross_problems()]
        keep = retention.kept(whole, last=self._keep_last, best=self._keep_best)
        keep += retention.kept(checkpoints, last=1, best=1)
        newest, _ = self.newest_valid()
        return [
            entry
            for entry in self.inventory()
            if entry.kind not in ("newer", "strange")
            and (entry.checkpoint is None or entry.checkpoint not in [*keep, newest])
        ]

    def _entries(self) -> list[Entry]:
        if not self._directory.is_dir():
            return []
        paths = list(self._directory.iterdir())
        unfinished = [Entry(path, "incomplete") for path in paths if path.name.startswith(".step-")]
        return unfinished + [self._entry(path) for path in paths if DIRECTORY_NAME.fullmatch(path.name)]

    def _entry(self, path: Path) -> Entry:
        if path.is_symlink():
            return Entry(path, "strange", None, ("it is a symbolic link",))
        try:
            checkpoint = read_checkpoint(path)
        except NewerCheckpointError as error:
            return Entry(path, "newer", None, (str(error),))
        except CheckpointError as error:
            return Entry(path, "unreadable", None, (str(error),))
        if checkpoint.manifest.run_id != self._run_id:
            return Entry(path, "strange", checkpoint, (f"it belongs to another run, {checkpoint.manifest.run_id}",))
        return Entry(path, "ours", checkpoint)


def find_checkpoint(root: Path, text: str) -> Checkpoint:
    """The checkpoint that RUN@best, RUN@last, RUN@STEP, RUN (its last) or a directory names."""
    path = Path(text)
    if DIRECTORY_NAME.fullmatch(path.name) or (path / MANIFEST).exists():
        return read_checkpoint(path)
    named, _, which = text.rpartition("@") if re.search(r"@(best|last|\d+)$", text) else (text, "", "last")
    if path.exists() and not RunDir.is_run(path):
        hint = "name one as RUN@best, RUN@last, RUN@STEP, or by its step-… directory"
        raise RunError(f"{text} is neither a checkpoint nor a run", hint)
    store = CheckpointStore(run := RunDir.find(root, named))
    if which.isdigit():
        return store.at(int(which))
    checkpoint = store.best() if which == "best" else store.last()
    if checkpoint is None:
        lack = "checkpoint with a score" if which == "best" else "checkpoint"
        raise CheckpointError(f"{run.path} has no {lack} yet")
    return checkpoint


def _sums(directory: Path) -> dict[str, FileSum]:
    """Size and sha256 of every file. The disk is given the files to write while the processor hashes them."""
    paths = sorted(directory.iterdir())
    with ThreadPoolExecutor() as pool:
        syncs = [pool.submit(sync_file, path) for path in paths]
        sums = dict(zip(paths, pool.map(sha256, paths), strict=True))
        for sync in syncs:
            sync.result()
    return {path.name: FileSum(path.stat().st_size, digest) for path, digest in sums.items()}
