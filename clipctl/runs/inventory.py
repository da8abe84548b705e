"""Checkpoints of one run or of many: found by what the user types, checked, described as plain documents. No torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clipctl.config.layers import Layer, resolve, to_layer
from clipctl.errors import CheckpointError, ConfigError, RunError
from clipctl.runs.checkpoint import STATE, Checkpoint
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore, Entry, find_checkpoint
from clipctl.runs.tensors import read_header

SETTINGS_LIMIT_BYTES = 200_000
MAX_DEPTH = 5  # of settings in settings


def find_runs(root: Path, names: list[str] | None) -> list[RunDir]:
    if not names and not root.is_dir():
        raise RunError(f"there is no directory {root}", "pass --runs-dir DIRECTORY, or name a run by its directory")
    return [RunDir.find(root, name) for name in names] if names else RunDir.all(root)


def find_entries(root: Path, texts: list[str]) -> Iterator[tuple[str, Entry]]:
    """The checkpoints that the texts name, each text a run or a single checkpoint; without any, those of all runs."""
    if not texts:
        texts = [str(run.path) for run in find_runs(root, None)]
    for text in texts:
        run = find_run(root, text)
        if run is not None:
            entries = (entry for entry in CheckpointStore(run).inventory() if entry.kind != "incomplete")
            yield from ((run.name, entry) for entry in entries)
        else:
            yield find_entry(find_checkpoint(root, text))


def find_entry(checkpoint: Checkpoint) -> tuple[str, Entry]:
    """A checkpoint as its run lists it, or by itself if it is outside any run."""
    run = RunDir(checkpoint.path.absolute().parents[1])
    for entry in CheckpointStore(run).inventory() if RunDir.is_run(run.path) else ():
        if entry.path.name == checkpoint.path.name:
            return run.name, entry
    return checkpoint.manifest.run_id, Entry(checkpoint.path, "ours", checkpoint)


def find_run(root: Path, text: str) -> RunDir | None:
    try:
        return RunDir.find(root, text)
    except RunError:
        return None


def all_problems(entry: Entry, *, deep: bool) -> Iterator[str]:
    """What is wrong with a checkpoint, found by reading all of it."""
    if entry.checkpoint is None or entry.kind == "strange":
        yield from entry.problems
        return
    problems = entry.checkpoint.problems()
    yield from problems
    if deep and not problems:
        from clipctl.runs.values import nonfinite_counts

        for name in tensor_files(entry.checkpoint):
            for tensor, count in nonfinite_counts(entry.checkpoint.path / name).items():
                yield f"{tensor} in {name} has {count} non-finite numbers"


def tensor_files(checkpoint: Checkpoint) -> list[str]:
    return [name for name in checkpoint.manifest.files if name.endswith(".safetensors")]


# --- documents ------------------------------------------------------------------------------------------------


def entry_document(run: str, entry: Entry) -> dict[str, Any]:
    manifest = entry.checkpoint.manifest if entry.checkpoint else None
    return {
        "path": str(entry.path),
        "run": run,
        "step": entry.step,
        "epoch": manifest.epoch if manifest else None,
        "score": manifest.metrics.get("score") if manifest else None,
        "size_bytes": entry.size_bytes,
        "saved_s": manifest.saved_s if manifest else None,
        "best": entry.is_best,
        "last": entry.is_last,
        "incomplete": entry.kind == "incomplete",
        "damaged": entry.kind in ("ours", "unreadable") and bool(entry.problems),
        "valid": entry.kind == "ours" and not entry.problems,
        "problems": list(entry.problems),
    }


def checkpoint_document(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything about a checkpoint that is known without loading a tensor; every byte of it is checked first."""
    manifest = checkpoint.verified().manifest
    return {
        "path": str(checkpoint.path),
        "run": manifest.run_id,
        "attempt": manifest.attempt,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "saved_s": manifest.saved_s,
        "size_bytes": checkpoint.size_bytes,
        "metrics": manifest.metrics,
        "config": _settings(checkpoint),
        "tensors": {
            name: {
                tensor: {"dtype": info.dtype, "shape": list(info.shape)}
                for tensor, info in read_header(checkpoint.path / name).items()
            }
            for name in tensor_files(checkpoint)
        },
    }


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """By dotted key. They come from a YAML file once, and are no larger than such a file may be."""
    config = checkpoint.read_state().get("config", {})
    size_bytes = len(json.dumps(config))
    if size_bytes > SETTINGS_LIMIT_BYTES:
        problem = f"{checkpoint.path / STATE} cannot be read: its settings have {size_bytes:,} bytes"
        raise CheckpointError(problem, f"the limit is {SETTINGS_LIMIT_BYTES:,}")
    return flat(config)


def changed_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Settings that differ from those of the preset; all of them if this clipctl does not know it."""
    try:
        preset = to_layer(resolve([Layer("checkpoint", {"preset": config["preset"]})])).values
    except (KeyError, ConfigError):
        return config
    usual = {key: list(value) if isinstance(value, tuple) else value for key, value in preset.items()}
    return {key: value for key, value in config.items() if key not in usual or usual[key] != value}


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, list[Any]]:
    """Keys whose values differ; None stands for an absent key."""
    pairs = {key: [before.get(key), after.get(key)] for key in sorted(before.keys() | after.keys())}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def flat(document: Any, prefix: str = "", depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Nested settings by dotted key."""
    if not isinstance(document, dict) or not depth:
        return {prefix[:-1]: document}
    parts = (flat(inner, f"{prefix}{name}.", depth - 1) for name, inner in document.items())
    return {key: value for part in parts for key, value in part.items()}
