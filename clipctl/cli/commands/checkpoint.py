"""clipctl checkpoint list | show | verify | prune | diff. Only diff needs torch."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from clipctl.cli import options, output
from clipctl.cli.views import checkpoints, units
from clipctl.errors import CheckpointError, ExitCode, RunError
from clipctl.runs.checkpoint import MODEL
from clipctl.runs.rundir import RunDir, runs_root
from clipctl.runs.store import CheckpointStore, Entry, find_checkpoint
from clipctl.runs.tensors import read_header

if TYPE_CHECKING:
    from clipctl.runs.checkpoint import Checkpoint


def list_(runs: options.Runs = None, runs_dir: options.RunsDir = None, json: options.Json = False) -> None:
    """List checkpoints: step, score, size, age, and which are best, last, damaged or incomplete."""
    root = runs_root(runs_dir)
    stores = {run.name: CheckpointStore(run) for run in find_runs(root, runs)}
    found = [entry_document(name, entry) for name, store in stores.items() for entry in store.inventory()]
    if json:
        output.print_json("checkpoint-list", {"checkpoints": found})
    elif found:
        output.data().print(checkpoints.checkpoint_lines(found), soft_wrap=True)
    else:
        output.prose().print(f"no checkpoints in {root}", markup=False)


def show(checkpoint: options.Checkpoint, runs_dir: options.RunsDir = None, json: options.Json = False) -> None:
    """Show what a checkpoint holds: metrics, settings, and every tensor's name, shape and type."""
    found = find_checkpoint(runs_root(runs_dir), checkpoint)
    document = checkpoint_document(found)
    if json:
        output.print_json("checkpoint-show", document)
    else:
        for part in checkpoints.checkpoint_view(document):
            output.data().print(part)


def verify(
    what: options.Checkpoints = None,
    deep: options.Deep = False,
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Check every byte against its sha256; exit 3 if anything is damaged."""
    root, documents = runs_root(runs_dir), []
    for name, entry in find_entries(root, what or []):
        problems = tuple(all_problems(entry, deep=deep))
        if problems and not entry.path.exists():
            continue  # a live run has deleted it meanwhile
        documents.append(entry_document(name, replace(entry, problems=problems)))
        if not json:
            output.data().print(checkpoints.verdict_line(documents[-1]), soft_wrap=True)
    if json:
        output.print_json("checkpoint-verify", {"checkpoints": documents})
    elif not documents:
        output.prose().print(f"no checkpoints in {root}", markup=False)
    if any(document["problems"] for document in documents):
        raise typer.Exit(ExitCode.CHECK)


def prune(
    runs: options.Runs = None,
    yes: options.Yes = False,
    keep_last: options.KeepLastOf = 1,
    keep_best: options.KeepBestOf = 1,
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Delete all but the last, the best and the newest intact checkpoint. Dry run unless --yes is given."""
    documents = []
    for run in find_runs(runs_root(runs_dir), runs):
        try:
            with run.locked():  # a live run prunes its own checkpoints
                store = CheckpointStore(run, keep_last=keep_last, keep_best=keep_best)
                for entry in store.prunable():
                    document = entry_document(run.name, entry)
                    if yes:
                        store.prune(entry)
                    documents.append(document)
        except RunError as error:
            if runs:
                raise
            output.prose().print(f"skipped: {error}", style="yellow", markup=False, soft_wrap=True)
    freed_bytes = sum(document["size_bytes"] for document in documents)
    if json:
        report = {"deleted": yes, "freed_bytes": freed_bytes, "checkpoints": documents}
        output.print_json("checkpoint-prune", report)
        return
    for document in documents:
        output.data().print(checkpoints.pruned_line(document, deleted=yes), soft_wrap=True)
    if not documents:
        output.prose().print("there is nothing to delete", markup=False)
    elif not yes:
        output.prose().print(f"{units.size(freed_bytes)} would be freed; pass --yes to delete")


def diff(
    checkpoint: options.Checkpoint,
    other: options.OtherCheckpoint,
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Compare two checkpoints: settings, metrics, and how much each tensor has changed."""
    root = runs_root(runs_dir)
    pair = [find_checkpoint(root, text).verified() for text in (checkpoint, other)]

    from clipctl.model.difference import tensor_changes

    files = [one.file(MODEL) for one in pair]
    states = [one.read_state() for one in pair]
    document = {
        "checkpoints": [str(one.path) for one in pair],
        "config": changes(*(flat(state.get("config", {})) for state in states)),
        "metrics": changes(*(one.manifest.metrics for one in pair)),
        "tensors": [asdict(change) for change in tensor_changes(*files)],
    }
    if json:
        output.print_json("checkpoint-diff", document)
    else:
        for part in checkpoints.difference_view(document):
            output.data().print(part)


COMMANDS: dict[str, Callable[..., None]] = {"list": list_, "show": show, "verify": verify, "prune": prune, "diff": diff}

# --- finding and checking -------------------------------------------------------------------------------------


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


def find_entry(checkpoint: "Checkpoint") -> tuple[str, Entry]:
    """A checkpoint as its run lists it; one outside any run on its own."""
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


def tensor_files(checkpoint: "Checkpoint") -> list[str]:
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


def checkpoint_document(checkpoint: "Checkpoint") -> dict[str, Any]:
    """Everything about a checkpoint that is known without loading a tensor."""
    manifest = checkpoint.manifest
    if problems := checkpoint.gross_problems():
        raise CheckpointError(f"checkpoint {checkpoint.path} is damaged: {'; '.join(problems)}")
    return {
        "path": str(checkpoint.path),
        "run": manifest.run_id,
        "attempt": manifest.attempt,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "saved_s": manifest.saved_s,
        "size_bytes": checkpoint.size_bytes,
        "metrics": manifest.metrics,
        "config": flat(checkpoint.read_state().get("config", {})),
        "tensors": {
            name: {
                tensor: {"dtype": info.dtype, "shape": list(info.shape)}
                for tensor, info in read_header(checkpoint.path / name).items()
            }
            for name in tensor_files(checkpoint)
        },
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, list[Any]]:
    """Keys whose values differ; None if absent."""
    pairs = {key: [before.get(key), after.get(key)] for key in sorted(before.keys() | after.keys())}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def flat(document: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key."""
    if not isinstance(document, dict):
        return {prefix[:-1]: document}
    return {key: value for name, inner in document.items() for key, value in flat(inner, f"{prefix}{name}.").items()}
