"""clipctl checkpoint list | show | verify | prune | diff. Only diff needs torch."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer

from clipctl.cli import options, output
from clipctl.errors import ExitCode, RunError


def list_(runs: options.Runs = None, runs_dir: options.RunsDir = None, json: options.Json = False) -> None:
    """List checkpoints: step, score, size, age, and which are best, last, damaged or incomplete."""
    from clipctl.cli.views.checkpoint import checkpoint_lines
    from clipctl.runs.inventory import entry_document, find_runs
    from clipctl.runs.rundir import runs_root
    from clipctl.runs.store import CheckpointStore

    root = runs_root(runs_dir)
    stores = {run.name: CheckpointStore(run) for run in find_runs(root, runs)}
    found = [entry_document(name, entry) for name, store in stores.items() for entry in store.inventory()]
    if json:
        output.print_json("checkpoint-list", {"checkpoints": found, "checked": "sizes"})
    elif found:
        output.data().print(checkpoint_lines(found), soft_wrap=True)
        output.prose().print("sizes were checked; clipctl checkpoint verify reads every byte", style="dim")
    else:
        output.prose().print(f"no checkpoints in {root}", markup=False)


def show(
    checkpoint: options.Checkpoint,
    tensors: options.Tensors = False,
    all: options.Everything = False,
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Show what an intact checkpoint holds: metrics, and the settings that differ from its preset."""
    from clipctl.cli.views.checkpoint import checkpoint_view
    from clipctl.runs.inventory import checkpoint_document
    from clipctl.runs.rundir import runs_root
    from clipctl.runs.store import find_checkpoint

    found = find_checkpoint(runs_root(runs_dir), checkpoint)
    document = checkpoint_document(found)
    if json:
        output.print_json("checkpoint-show", document)
    else:
        for part in checkpoint_view(document, all_settings=all, tensors=tensors or all):
            output.data().print(part)


def verify(
    what: options.Checkpoints = None,
    deep: options.Deep = False,
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Check every byte of checkpoints and indexes against its sha256; exit 3 if anything is damaged."""
    from clipctl.cli.views.checkpoint import verdict_line
    from clipctl.runs.inventory import all_problems, entry_document, find_entries
    from clipctl.runs.rundir import runs_root

    root, documents, indexes = runs_root(runs_dir), [], verify_indexes(what or [], quiet=json)
    names = [text for text in what or () if text not in [index["path"] for index in indexes]]
    for name, entry in find_entries(root, names) if names or not what else ():
        problems = tuple(all_problems(entry, deep=deep))
        if problems and not entry.path.exists():
            continue  # a live run has deleted it meanwhile
        documents.append(entry_document(name, replace(entry, problems=problems)))
        if not json:
            output.data().print(verdict_line(documents[-1]), soft_wrap=True)
    if json:
        output.print_json("checkpoint-verify", {"checkpoints": documents, "indexes": indexes})
    elif not documents and not indexes:
        output.prose().print(f"no checkpoints in {root}", markup=False)
    if any(document["problems"] for document in (*documents, *indexes)):
        raise typer.Exit(ExitCode.CHECK)


def verify_indexes(texts: list[str], *, quiet: bool) -> list[dict[str, Any]]:
    """Check the arguments that name an index of embeddings."""
    from clipctl import files
    from clipctl.cli.views.checkpoint import index_line

    documents = list[dict[str, Any]]()
    for text in texts:
        path = Path(text)
        if not path.is_dir():
            continue  # a run by its name: no need to import numpy
        from clipctl.inference.embedding_store import is_store, problems_of

        if is_store(path):
            problems, size_bytes = problems_of(path), files.size_on_disk(path)
            documents.append({"path": text, "size_bytes": size_bytes, "valid": not problems, "problems": problems})
            if not quiet:
                output.data().print(index_line(documents[-1]), soft_wrap=True)
    return documents


def prune(
    runs: options.Runs = None,
    yes: options.Yes = False,
    keep_last: options.KeepLastOf = 1,
    keep_best: options.KeepBestOf = 1,
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Delete old checkpoints; keep the newest, the best and the newest intact one. Dry run unless --yes is given."""
    from clipctl.cli.views import units
    from clipctl.cli.views.checkpoint import pruned_line
    from clipctl.runs.inventory import entry_document, find_runs
    from clipctl.runs.rundir import runs_root
    from clipctl.runs.store import CheckpointStore

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
        output.data().print(pruned_line(document, deleted=yes), soft_wrap=True)
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
    from clipctl.cli.views.checkpoint import difference_view
    from clipctl.runs.checkpoint import MODEL
    from clipctl.runs.inventory import changes, flat
    from clipctl.runs.rundir import runs_root
    from clipctl.runs.store import find_checkpoint

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
        for part in difference_view(document):
            output.data().print(part)


COMMANDS: dict[str, Callable[..., None]] = {"list": list_, "show": show, "verify": verify, "prune": prune, "diff": diff}
