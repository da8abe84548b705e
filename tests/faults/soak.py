"""The long version of the fault tests, with a table at the end: make soak

python -m tests.faults.soak [--kills 100] [--in-save 20] [--truncations 50] [--flips 200] [--mutations 10000]
                            [--rounds 100] [--ranks 20] [--guided 20] [--seed 0]

Where atheris is installed, it looks for files that reach new code, for so many seconds for each reader.
"""

import argparse
import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from clipctl.errors import CheckpointError
from clipctl.runs.checkpoint import read_checkpoint
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from clipctl.training import attempt
from clipctl.training.session import resume_run
from clipctl.training.state import read_tensors
from tests.distributed import test_training as together
from tests.faults.crowd import crowd
from tests.faults.fuzz import LIMIT_BYTES, READERS
from tests.faults.test_damage import FILES, flip_a_bit, truncate
from tests.faults.trainer import SETTINGS, digest, finish, start_anew, wait_until

# Long enough to be hit in the middle: 120 steps, a checkpoint after every fourth and every epoch of three.
LAST_STEP = 120
RUN = [*SETTINGS, "--set=train.epochs=40", "--set=save.every=4s", "--name=run"]
KILLS_PER_RUN = 5
LANES = 2  # runs at a time
SIGNALS = [signal.SIGKILL, signal.SIGKILL, signal.SIGHUP, signal.SIGTERM]
OTHERS = {
    "failing operation of a save or prune, every one": "tests/faults/test_operations.py",
    "random retention history, 1000 and 100 on a disk": "tests/faults/test_retention.py",
    "full, read-only, vanished or odd place": "tests/faults/test_places.py",
    "hostile file": "tests/faults/test_hostile.py",
    "run, dataset or cache from elsewhere": "tests/faults/test_foreign.py",
    "small file that costs a lot": "tests/faults/test_budgets.py",
    "signal, dead or hung worker, sleep, jumping clock": "tests/faults/test_processes.py",
    "loss or gradient that is not finite": "tests/faults/test_nonfinite.py",
}


class Table:
    """Faults, tries, survived."""

    def __init__(self) -> None:
        self._rows: dict[str, list[int]] = {}

    def add(self, fault: str, *, tries: int, survived: int, detail: str = "") -> None:
        row = self._rows.setdefault(fault, [0, 0])
        row[0] += tries
        row[1] += survived
        if survived < tries:
            say(f"NOT SURVIVED: {fault}: {detail}")

    def __str__(self) -> str:
        lines = [f"{'fault':<60} {'tries':>6} {'survived':>9}"]
        return "\n".join(
            [*lines, *(f"{fault:<60} {tries:>6} {good:>9}" for fault, (tries, good) in self._rows.items())]
        )

    @property
    def is_clean(self) -> bool:
        return all(tries == survived for tries, survived in self._rows.values())


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


# --- kills ----------------------------------------------------------------------------------------------------


def kill_and_resume(root: Path, chance: random.Random, *, in_save: bool, wanted: int) -> tuple[int, RunDir, str]:
    """One run, killed up to `wanted` times and resumed each time, then left to finish. Returns kills and complaint."""
    run, hits = RunDir(root / "run"), 0
    process = start_anew(root, *RUN)
    while hits < wanted:
        wait_for_the_moment(run, chance, process, in_save=in_save)
        if process.poll() is not None:
            break
        # Most are killed; some are told to end, as by a terminal that closes, and killed if that is what it takes.
        number = signal.SIGKILL if in_save else chance.choice(SIGNALS)
        os.killpg(process.pid, number)
        process.communicate()
        hits += not in_save or bool(partial_saves(run))
        begun = run.config_file.exists()  # otherwise there is nothing yet to go on with
        process = start_anew(root, *(["--resume", "run"] if begun else RUN), workers=chance.choice([0, 0, 1]))
    code, _, stderr = finish(process)
    return hits, run, "" if code == 0 else f"exit {code}: {stderr[-500:]}"


def wait_for_the_moment(run: RunDir, chance: random.Random, process: subprocess.Popen[str], *, in_save: bool) -> None:
    """Inside a save, or any at all, the start included."""
    if in_save:
        skip = chance.randrange(6)  # so that it is not always the first save after a start
        for _ in range(skip):
            wait_until(lambda: process.poll() is not None or bool(partial_saves(run)))
            wait_until(lambda: process.poll() is not None or not partial_saves(run))
        wait_until(lambda: process.poll() is not None or bool(partial_saves(run)))
        time.sleep(chance.uniform(0, 0.008))
    else:
        time.sleep(chance.uniform(0.1, 5.0))


def partial_saves(run: RunDir) -> list[Path]:
    return list(run.checkpoints_dir.glob(".step-*.partial"))


def soak_kills(table: Table, base: Path, chance: random.Random, kills: int, *, in_save: bool) -> None:
    fault = "SIGKILL inside a save" if in_save else "SIGKILL, SIGHUP or SIGTERM at a random moment"
    left, number = kills, 0

    def episode(seed: float, wanted: int, directory: Path) -> tuple[int, bool, str]:
        directory.mkdir()
        hits, run, complaint = kill_and_resume(directory, random.Random(seed), in_save=in_save, wanted=wanted)
        same = not complaint and digest(run, LAST_STEP) == EXPECTED[0]
        clean = not list(run.checkpoints_dir.glob(".*"))
        shutil.rmtree(directory)
        return hits, same and clean, complaint or ("" if same else "other weights") or "something was left behind"

    with ThreadPoolExecutor(LANES) as pool:
        while left > 0:
            shares = [min(KILLS_PER_RUN, left), min(KILLS_PER_RUN, left - min(KILLS_PER_RUN, left))]
            workloads = [
                pool.submit(episode, chance.random(), share, base / f"{in_save}-{number}-{lane}")
                for lane, share in enumerate(shares)
                if share
            ]
            number += 1
            for workload in workloads:
                hits, survived, detail = workload.result()
                table.add(fault, tries=hits, survived=hits if survived else 0, detail=detail)
                left -= hits
            say(f"{fault}: {kills - left} of {kills}")


def soak_ranks(table: Table, base: Path, chance: random.Random, kills: int) -> None:
    """Two processes that train together, one of them killed at a random moment; then resumed to the same bits."""
    expected = None
    for number in range(kills):
        words = ["--nproc", "2", *(["--shard"] if number % 4 == 3 else [])]
        root = base / f"ranks-{number}"
        if expected is None:
            assert together.run_to_end(base, "--name", "unbroken", *words, settings=together.LONG).returncode == 0
            expected = together.weights(RunDir(base / "unbroken"))
        run, victim = RunDir(root / "run"), chance.randrange(2)
        process = together.start(root, "--name", "run", *words, settings=together.LONG)
        together.wait_for_step(run, 1, process)
        time.sleep(chance.uniform(0, 3))
        ranks = together.ranks_of(process)
        if victim in ranks:
            ranks[victim].kill()
        killed_s = time.monotonic()
        output, _ = process.communicate(timeout=2 * together.GONE_S)
        gone_s = time.monotonic() - killed_s
        done = together.run_to_end(root, "--resume", "run", "--nproc", "2", settings={})
        found = together.weights(run)
        if "--shard" in words:  # sums in another order
            same = together.apart(found, expected) <= 1e-3
        else:
            same = all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        survived = done.returncode == 0 and same and gone_s < together.GONE_S
        table.add("SIGKILL of one of two processes", tries=1, survived=int(survived), detail=output + done.stderr)
        say(f"SIGKILL of one of two processes: {number + 1} of {kills}, gone after {gone_s:.1f} s")
        shutil.rmtree(root)


EXPECTED: list[object] = []  # the digest of the unbroken run


# --- damage ---------------------------------------------------------------------------------------------------


def soak_damage(table: Table, original: RunDir, base: Path, chance: random.Random, fault: str, tries: int) -> None:
    """Damage one place in the newest checkpoint; it must be refused with the model untouched, and passed over."""
    damage = {"truncation": truncate, "flipped bit": flip_a_bit}[fault]
    run = RunDir(base / "run")
    plan = resume_run(original).plan
    state = attempt.make_state(plan)
    before = [parameter.detach().clone() for parameter in state.model.parameters()]
    for _ in range(tries):
        shutil.rmtree(run.path, ignore_errors=True)
        shutil.copytree(original.path, run.path)
        last = CheckpointStore(run).last()
        assert last is not None and last.step == LAST_STEP
        name = chance.choice(FILES)
        damage(last.path / name, chance)
        caught = False
        try:
            read_tensors(state, read_checkpoint(last.path))
        except CheckpointError:
            caught = all(torch.equal(old, new) for old, new in zip(before, state.model.parameters(), strict=True))
        resumption = resume_run(run)
        passed_over = resumption.step < LAST_STEP and any(last.path.name in note for note in resumption.notes)
        table.add(fault, tries=1, survived=int(caught and passed_over), detail=f"{name}, {resumption.notes}")


# --- the rest -------------------------------------------------------------------------------------------------


def run_suite(table: Table, fault: str, file: str) -> None:
    """A file of the short tests; each test is a try."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", file], capture_output=True, text=True)
    words = done.stdout.splitlines()[-1].replace(",", "").split()
    counts = {word: int(number) for number, word in itertools.pairwise(words) if number.isdigit()}
    passed, failed = counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)
    table.add(f"{fault} (tests)", tries=passed + failed, survived=passed, detail=done.stdout[-2000:])
    if not passed:
        table.add(f"{fault} (tests)", tries=1, survived=0, detail=done.stdout[-2000:] + done.stderr[-2000:])


def soak_readers(table: Table, mutations: int, seed: int, guided_s: int) -> None:
    """Every reader in a process of its own, so that its memory is its own."""
    for kind in READERS:
        fault = f"mutated file: {kind}"
        command = [sys.executable, "-m", "tests.faults.fuzz", kind]
        done = subprocess.run([*command, f"--count={mutations}", f"--seed={seed}"], capture_output=True, text=True)
        if done.returncode:
            table.add(fault, tries=mutations, survived=0, detail=done.stderr[-2000:])
            continue
        found = json.loads(done.stdout)
        is_small = found["memory_bytes"] < LIMIT_BYTES
        survived = mutations - len(found["findings"]) if is_small else 0
        table.add(fault, tries=mutations, survived=survived, detail=str(found)[:2000])
        say(f"{fault}: slowest {found['slowest_s']:.2f} s, {found['memory_bytes'] / 1e6:.0f} MB")
        if guided_s:
            done = subprocess.run([*command, f"--atheris={guided_s}"], capture_output=True, text=True)
            table.add(f"{fault}, guided", tries=1, survived=int(done.returncode == 0), detail=done.stderr[-2000:])


def main() -> None:
    parser = argparse.ArgumentParser()
    counts = {
        "kills": 100,
        "in-save": 20,
        "truncations": 50,
        "flips": 200,
        "mutations": 10_000,
        "rounds": 100,
        "ranks": 20,
    }
    for name, count in {**counts, "guided": 20 if importlib.util.find_spec("atheris") else 0, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    asked = parser.parse_args()
    chance, table = random.Random(asked.seed), Table()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        code, _, stderr = finish(start_anew(base, *RUN))
        assert code == 0, stderr
        original = RunDir((base / "run").rename(base / "original"))
        EXPECTED.append(digest(original, LAST_STEP))
        soak_kills(table, base, chance, asked.kills - asked.in_save, in_save=False)
        soak_kills(table, base, chance, asked.in_save, in_save=True)
        soak_ranks(table, base, chance, asked.ranks)
        soak_damage(table, original, base, chance, "truncation", asked.truncations)
        soak_damage(table, original, base, chance, "flipped bit", asked.flips)
    soak_readers(table, asked.mutations, asked.seed, asked.guided)
    commands, problems = crowd(asked.rounds, asked.seed)
    survived = max(0, commands - len(problems))
    table.add(
        "six commands at once, data changing", tries=commands, survived=survived, detail="; ".join(problems)[:3000]
    )
    for fault, file in OTHERS.items():
        run_suite(table, fault, file)
        say(f"{fault}: done")
    sys.stdout.write(f"{table}\nseed {asked.seed}, {(time.monotonic() - started) / 60:.0f} minutes\n")
    sys.exit(0 if table.is_clean else 1)


if __name__ == "__main__":
    main()
