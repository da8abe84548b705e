"""Fail, or die, at the n-th operation of a save or a prune, for every n. Run as a program of its own, without torch,
so that it can fork:

    python -m tests.faults.faulty DIRECTORY save|prune error|kill

prints for every n what is left: the checkpoints that verify, and whether the operation got through.
"""

import builtins
import errno
import json
import os
import shutil
import sys
from pathlib import Path

from clipctl.errors import CheckpointError
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore

OPERATIONS = ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir", "scandir", "stat")


class Fault:
    """Counts every operation on files, and lets the n-th one fail."""

    def __init__(self, number, kind):
        self.count, self.number, self.kind = 0, number, kind

    def install(self):
        for name in OPERATIONS:
            setattr(os, name, self.wrap(getattr(os, name)))
        builtins.open = self.wrap(builtins.open)
        import io

        io.open = builtins.open

    def wrap(self, operation):
        def faulty(*arguments, **options):
            self.count += 1
            if self.count == self.number:
                if self.kind == "kill":
                    os.kill(os.getpid(), 9)
                raise OSError(errno.EIO, "injected")
            return operation(*arguments, **options)

        return faulty


def write_files(directory):
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        with open(directory / name, "wb") as file:
            file.write((2).to_bytes(8, "little") + b"{}")  # no tensors


def save(store, step):
    store.save(write_files, step=step, epoch=step, metrics={"score": 1 / step})


def prepare(path):
    """Step 1 is the best, 2 and 3 are the last."""
    shutil.rmtree(path, ignore_errors=True)
    run = RunDir.create(path.parent, "tiny", path.name)
    for step in (1, 2, 3):
        save(CheckpointStore(run), step)
    run.release()
    return run


def attempt(run, action, number, kind):
    """In a child: the fault is gone with it. True if it got through without meeting the fault."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store = CheckpointStore(run, keep_last=1 if action == "prune" else 2)
            doomed = store.prunable() if action == "prune" else []
            fault = Fault(number, kind)
            fault.install()
            if action == "save":
                save(store, 4)
            else:
                for entry in doomed:
                    store.prune(entry)
            code = 0 if fault.count < number else 2  # 2: it met the fault and got through all the same
        except (OSError, CheckpointError):
            pass
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0


def remains(run):
    """After the next start: what verifies, what does not, what is left over."""
    store = CheckpointStore(run)
    store.sweep()
    found = store.all()
    return {
        "valid": [checkpoint.step for checkpoint in found if not checkpoint.problems()],
        "damaged": [checkpoint.step for checkpoint in found if checkpoint.problems()],
        "names": sorted(path.name for path in run.checkpoints_dir.iterdir()),
    }


def main():
    directory, action, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    results, done, number = [], False, 0
    while not done:
        number += 1
        run = prepare(directory / "run")
        done = attempt(run, action, number, kind)
        results.append({"number": number, "done": done, **remains(run)})
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
