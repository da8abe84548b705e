"""The checkpoints of one run: saving, finding, deleting old ones.

`best` and `last` are derived from the manifests, never stored, so nothing can point to a deleted checkpoint.
"""

import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from clipctl.errors import CheckpointError, NewerCheckpointError, RunError
from clipctl.files import delete, discard, replaced, sha256_of, sync_file
from clipctl.runs import retention
from clipctl.runs.checkpoint import (
    DIRECTORY_NAME,
    MANIFEST,
    SCHEMA,
    Checkpoint,
    FileSum,
    Manifest,
    read_checkpoint,
)
from clipctl.runs.rundir import BASE, RunDir

# ours: the manifest can be read. unreadable: it cannot. incomplete: a save or deletion in progress or interrupted.
# newer: from a newer clipctl. strange: from another run or step, a link, or inaccessible. The last two are never
# touched.
Kind = Literal["ours", "unreadable", "incomplete", "newer", "strange"]


@dataclass(frozen=True)
class Entry:
    """A directory among a run's checkpoints, intact or not."""

    path: Path
    kind: Kind
    checkpoint: Checkpoint | None = None
    problems: tuple[str, ...] = ()
    is_best: bool = False
    is_last: bool = False

    @property
    def size_bytes(self) -> int:
        """Its size on disk, intact or not."""
        try:
            return sum(path.lstat().st_size for path in self.path.iterdir())
        except OSError:  # a live run has just deleted it
            return 0

    @property
    def step(self) -> int:
        """From the directory's name, which even a damaged one still has."""
        digits = re.search(r"\d+", self.path.name)
        return int(digits[0]) if digits else 0


def write_checkpoint(
    target: Path,
    write_files: Callable[[Path], None],
    *,
    run_id: str,
    step: int = 0,
    epoch: int = 0,
    metrics: Mapping[str, float | None] | None = None,
    beginnings: Sequence[tuple[int, int]] = ((1, 0),),
) -> Checkpoint:
    """A new directory that `write_files` fills; it appears complete, with its manifest, or not at all."""
    with replaced(target) as partial:
        partial.mkdir()
        write_files(partial)
        finite = {key: value for key, value in (metrics or {}).items() if value is not None and math.isfinite(value)}
        manifest = Manifest(
            schema=SCHEMA,
            run_id=run_id,
            beginnings=[list(pair) for pair in beginnings],
            step=step,
            epoch=epoch,
            saved_s=round(time.time(), 3),
            metrics=finite,
            files=_sums(partial),
        )
        (partial / MANIFEST).write_bytes(manifest.to_json())
    return Checkpoint(target, manifest)


class CheckpointStore:
    def __init__(self, run: RunDir, *, keep_last: int = 2, keep_best: int = 1) -> None:
        self._directory, self._base = run.checkpoints_dir, run.base_dir
        self._run_id = run.run_id
        self._keep_last, self._keep_best = keep_last, keep_best

    # --- writing ----------------------------------------------------------------------------------------------

    def save(
        self,
        write_files: Callable[[Path], None],
        *,
        step: int,
        epoch: int,
        metrics: Mapping[str, float | None],
        beginnings: Sequence[tuple[int, int]] = ((1, 0),),
    ) -> Checkpoint:
        """Let `write_files` fill a directory, which then appears complete; after that, delete old checkpoints."""
        checkpoint = write_checkpoint(
            self._free_name(step),
            write_files,
            run_id=self._run_id,
            step=step,
            epoch=epoch,
            metrics=metrics,
            beginnings=beginnings,
        )
        with suppress(OSError):  # anything that cannot be deleted now is tried again after the next save
            self._retire()
        return checkpoint

    def sweep(self) -> None:
        """Remove what an interrupted save or deletion left behind. Requires the run's lock."""
        for path in self._directory.glob(".step-*"):
            delete(path)

    def prune(self, entry: Entry) -> None:
        """Delete what `prunable` found. Requires the run's lock."""
        if entry.kind == "incomplete":
            delete(entry.path)
        else:
            discard(entry.path)

    def make_room(self) -> Checkpoint | None:
        """Delete the oldest checkpoint that can be spared, and return it: not the newest intact one, nor the best."""
        checkpoints = self.all()
        whole = [one for one in checkpoints if not one.gross_problems()]
        needed = retention.kept(whole, last=1, best=min(1, self._keep_best))
        spared = next((one for one in checkpoints if one not in needed), None) if needed else None
        if spared is not None:
            discard(spared.path)
        return spared

    def _retire(self) -> None:
        checkpoints = self.all()
        keep = self._kept(checkpoints)
        for checkpoint in checkpoints:
            if checkpoint not in keep:
                discard(checkpoint.path)

    def _kept(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        """The last and the best checkpoints. A damaged one counts as neither."""
        whole = [checkpoint for checkpoint in checkpoints if not checkpoint.gross_problems()]
        return retention.kept(whole, last=self._keep_last, best=self._keep_best)

    def _free_name(self, step: int) -> Path:
        """A free name that sorts after those that are taken: the old checkpoint is deleted once the new one exists."""
        name = f"step-{step:08d}"
        matches = (DIRECTORY_NAME.fullmatch(path.name) for path in self._directory.glob(f"{name}*"))
        numbers = [int(match[2] or 0) for match in matches if match]
        return self._directory / (f"{name}.{max(numbers) + 1}" if numbers else name)

    # --- reading ----------------------------------------------------------------------------------------------

    def all(self) -> list[Checkpoint]:
        """Every checkpoint of this run with a readable manifest, by step."""
        found = [entry.checkpoint for entry in self._entries() if entry.kind == "ours" and entry.checkpoint]
        return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.manifest.attempt, checkpoint.again))

    def last(self) -> Checkpoint | None:
        return next(reversed(retention.course(self.all())), None)

    def best(self) -> Checkpoint | None:
        return next(reversed(retention.ranked(self.all())), None)

    def named(self, which: str) -> Checkpoint:
        """`best`, `last`, the one of a step (the newest, if that step was saved more than once), or `base`: the model
        that the run started from."""
        if which == BASE:
            if not (self._base / MANIFEST).exists():
                raise CheckpointError(f"{self._base.parent} was trained from scratch, so it has no base")
            return read_checkpoint(self._base)
        if which in ("best", "last"):
            checkpoint = self.best() if which == "best" else self.last()
            if checkpoint is None:
                lack = "checkpoint with a score" if which == "best" else "checkpoint"
                raise CheckpointError(f"{self._directory.parent} has no {lack} yet")
            return checkpoint
        checkpoints = self.all()
        matches = [checkpoint for checkpoint in checkpoints if checkpoint.step == int(which)]
        if not matches:
            steps = ", ".join(str(checkpoint.step) for checkpoint in checkpoints) or "none"
            raise CheckpointError(f"the run has no checkpoint of step {which}", f"available steps: {steps}")
        return matches[-1]

    def verified(self, checkpoint: Checkpoint) -> Checkpoint:
        """The same checkpoint, after checking every byte; if it is damaged, the error names one that is not."""
        if problems := checkpoint.problems():
            newest, _ = self.newest_valid()
            hint = f"the newest intact one is step {newest.step}" if newest else "no other checkpoint is intact"
            raise CheckpointError(f"checkpoint {checkpoint.path} is damaged: {'; '.join(problems)}", hint)
        return replace(checkpoint, is_verified=True)

    def newest_valid(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that passes every check, and what is wrong with the newer ones."""
        entries = self._entries()
        chosen, skipped = None, []
        for checkpoint in reversed(retention.course(self.all())):
            problems = checkpoint.problems()
            if not problems:
                chosen = replace(checkpoint, is_verified=True)
                break
            skipped.append(f"{checkpoint.path.name}: {'; '.join(problems)}")
        for entry in entries:
            if entry.kind == "unreadable" and (chosen is None or entry.step > chosen.step):
                skipped.append(f"{entry.path.name}: {'; '.join(entry.problems)}")
        return chosen, skipped

    def inventory(self) -> list[Entry]:
        """Everything in the directory, by step, with the problems that can be seen without reading the files."""
        entries = self._entries()
        own = [entry.checkpoint for entry in entries if entry.kind == "ours" and entry.checkpoint]
        best, last = retention.ranked(own)[-1:], retention.course(own)[-1:]
        marked = [
            replace(
                entry,
                problems=(*entry.problems, *_gross_problems(entry)),
                is_best=entry.checkpoint in best,
                is_last=entry.checkpoint in last,
            )
            for entry in entries
            if entry.path.is_dir()  # a live run may have deleted it meanwhile
        ]
        return sorted(marked, key=lambda entry: (entry.step, entry.path.name))

    def prunable(self) -> list[Entry]:
        """What can be deleted: all but the last, the best and the newest intact ones, and what is not this run's."""
        checkpoints = self.all()
        keep = self._kept(checkpoints) + retention.kept(checkpoints, last=1, best=1)
        newest, _ = self.newest_valid()
        return [
            entry
            for entry in self.inventory()
            if entry.kind not in ("newer", "strange")
            and (entry.checkpoint is None or entry.checkpoint not in [*keep, newest])
        ]

    def _entries(self) -> list[Entry]:
        if self._directory.is_symlink():
            raise CheckpointError(f"{self._directory} is a symbolic link, so it may hold anything", "remove the link")
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
            # A system error says nothing about the checkpoint itself, which may be fine tomorrow.
            passing = isinstance(error.__cause__, OSError) and error.__cause__.errno is not None
            return Entry(path, "strange" if passing else "unreadable", None, (str(error),))
        if checkpoint.manifest.run_id != self._run_id:
            return Entry(path, "strange", checkpoint, (f"it belongs to another run, {checkpoint.manifest.run_id}",))
        if checkpoint.step != Entry(path, "ours").step:
            return Entry(path, "strange", checkpoint, (f"its {MANIFEST} says step {checkpoint.step}",))
        return Entry(path, "ours", checkpoint)


def parse_reference(root: Path, text: str) -> tuple[str, str | None]:
    """Split RUN@best, RUN@last or RUN@STEP into the run and which one; None for RUN alone, which may contain an @."""
    match = re.fullmatch(r"(.*)@(best|last|base|\d{1,18})", text, re.DOTALL)
    if match is None or RunDir.is_run(Path(text)) or RunDir.is_run(root / text):
        return text, None
    return match[1], match[2]


def find_unfinished(root: Path, text: str) -> tuple[RunDir, str | None]:
    """What `--resume` refers to: a run and which of its checkpoints; the newest unfinished run if not given."""
    named, which = parse_reference(root, text)
    return (RunDir.find(root, named) if named else RunDir.newest_unfinished(root)), which


def _gross_problems(entry: Entry) -> list[str]:
    try:
        return entry.checkpoint.gross_problems() if entry.checkpoint else []
    except OSError as error:
        return [f"it cannot be read: {error.strerror or error}"]


def find_checkpoint(root: Path, text: str, default: str = "last") -> Checkpoint:
    """The checkpoint that RUN@best, RUN@last, RUN@STEP, RUN (its last, or `default`) or a directory names."""
    path = Path(text)
    if DIRECTORY_NAME.fullmatch(path.name) or os.path.exists(path / MANIFEST):
        return read_checkpoint(path)
    if os.path.exists(path) and not RunDir.is_run(path) and not RunDir.is_named(root, text):
        hint = "name one as RUN@best, RUN@last, RUN@STEP, or by its step-… directory"
        raise RunError(f"{text} is neither a checkpoint nor a run", hint)
    named, which = parse_reference(root, text)
    return CheckpointStore(RunDir.find(root, named)).named(which or default)


def _sums(directory: Path) -> dict[str, FileSum]:
    """Size and sha256 of every file. The disk writes the files while the CPU hashes them."""
    paths = sorted(directory.iterdir())
    with ThreadPoolExecutor() as pool:
        syncs = [pool.submit(sync_file, path) for path in paths]
        sums = dict(zip(paths, pool.map(sha256_of, paths), strict=True))
        for sync in syncs:
            sync.result()
    return {path.name: FileSum(path.stat().st_size, digest) for path, digest in sums.items()}
