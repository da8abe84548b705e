"""clipctl runs rm | rename | compare. None of them needs torch."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from clipctl.cli import options, output
from clipctl.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from clipctl.runs.rundir import RunDir


def rm(
    runs: options.RunsToRemove,
    yes: options.Yes = False,
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Delete runs with all their checkpoints. Dry run unless --yes is given."""
    from clipctl import files
    from clipctl.cli.views import units
    from clipctl.runs.rundir import runs_root

    found = find_each(runs_root(runs_dir), runs)
    with ExitStack() as locks:
        for run in found:  # all of them, before the first is gone
            locks.enter_context(run.locked())
        sizes_bytes = [files.size_on_disk(run.path) for run in found]
        for run in found if yes else ():
            run.remove()
    if json:
        rows = [
            {"run": run.name, "path": str(run.path), "size_bytes": size_bytes}
            for run, size_bytes in zip(found, sizes_bytes, strict=True)
        ]
        output.print_json("runs-rm", {"deleted": yes, "freed_bytes": sum(sizes_bytes), "runs": rows})
        return
    for run, size_bytes in zip(found, sizes_bytes, strict=True):
        words = f"{'deleted' if yes else 'would delete'}  {run.name}  {units.size(size_bytes)}"
        output.data().print(output.plain(words), soft_wrap=True)
    freed = units.size(sum(sizes_bytes))
    output.prose().print(f"{freed} freed" if yes else f"{freed} would be freed; pass --yes to delete")


def rename(
    run: options.RunToExport,
    new: options.NewName,
    runs_dir: options.RunsDir = None,
) -> None:
    """Give a run another name. Its checkpoints, metrics and settings stay as they are."""
    from clipctl.runs.rundir import RunDir, runs_root

    found = RunDir.find(runs_root(runs_dir), run)
    renamed = found.rename(new)
    output.data().print(output.plain(f"{found.name} is now {renamed.name}"), soft_wrap=True)


def compare(
    runs: options.RunsToCompare,
    runs_dir: options.RunsDir = None,
    json: options.Json = False,
) -> None:
    """Compare runs: the settings that differ, loss, R@1, speed, time and size."""
    from clipctl.cli.views.runs import comparison_table
    from clipctl.monitor.side_by_side import compare_runs
    from clipctl.runs.rundir import runs_root

    found = find_each(runs_root(runs_dir), runs)
    if len(found) < 2:
        raise ConfigError("there is nothing to compare with: name two runs or more", "clipctl runs lists all")
    document = compare_runs(found)
    if json:
        output.print_json("runs-compare", document)
    else:
        output.data().print(comparison_table(document), soft_wrap=True)


def find_each(root: "Path", names: list[str]) -> "list[RunDir]":
    """The named runs, each once."""
    from clipctl.runs.rundir import RunDir

    found = {run.path.absolute(): run for run in (RunDir.find(root, name) for name in names)}
    return list(found.values())


COMMANDS: dict[str, Callable[..., None]] = {"rm": rm, "rename": rename, "compare": compare}
