"""F06: damage to the newest checkpoint is found before a tensor reaches the model, and an older one is used."""

import random
import shutil

import pytest
import torch

from clipctl.errors import CheckpointError
from clipctl.runs.checkpoint import MANIFEST, MODEL, OPTIMIZER, STATE, read_checkpoint
from clipctl.runs.rundir import RunDir
from clipctl.runs.store import CheckpointStore
from clipctl.training import attempt
from clipctl.training.plan import make_plan
from clipctl.training.state import read_tensors
from tests.conftest import train

FILES = (MANIFEST, MODEL, OPTIMIZER, STATE)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    from clipctl.config.layers import Layer, resolve
    from tests.conftest import MICRO

    run = RunDir.create(tmp_path_factory.mktemp("original"), "tiny", "run")
    plan = make_plan(resolve([Layer("test", {**MICRO, "save.every": "1e"})]))
    train(plan, run)
    return run, plan


@pytest.fixture
def run(original, tmp_path):
    return RunDir(shutil.copytree(original[0].path, tmp_path / "run"))


def assert_caught(run, plan):
    """The newest is passed over by name, and loading it by force changes nothing in the model."""
    chosen, skipped = CheckpointStore(run).newest_valid()
    assert chosen is not None and chosen.step == 3 and "step-00000006" in skipped[0]
    state = attempt.make_state(plan)
    before = [parameter.detach().clone() for parameter in state.model.parameters()]
    with pytest.raises(CheckpointError):
        read_tensors(state, read_checkpoint(run.checkpoints_dir / "step-00000006"))
    assert all(torch.equal(old, new) for old, new in zip(before, state.model.parameters(), strict=True))
    assert not state.optimizer.state and state.step == 0


def flip_a_bit(path, chance):
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def truncate(path, chance):
    with path.open("r+b") as file:
        file.truncate(chance.randrange(path.stat().st_size))


@pytest.mark.parametrize("damage", [flip_a_bit, truncate])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("seed", range(5))
def test_random_damage(run, original, damage, name, seed):
    damage(run.checkpoints_dir / "step-00000006" / name, random.Random(f"{name} {seed}"))
    assert_caught(run, original[1])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: path.rename(path.with_name("elsewhere")) and path.symlink_to("elsewhere"),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    ],
    ids=["missing", "empty", "directory", "symlink", "longer"],
)
def test_whole_files(run, original, name, damage):
    damage(run.checkpoints_dir / "step-00000006" / name)
    assert_caught(run, original[1])


def test_a_file_of_another_checkpoint(run, original):
    shutil.copy(
        run.checkpoints_dir / "step-00000003" / MODEL,
        run.checkpoints_dir / "step-00000006" / MODEL,
    )
    assert_caught(run, original[1])


def test_every_bit_of_a_manifest_counts(run):
    """Not by chance: all of them, so that no flip can turn a score into another."""
    path = run.checkpoints_dir / "step-00000006" / MANIFEST
    content = path.read_bytes()
    for position in range(len(content)):
        for bit in range(8):
            path.write_bytes(content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :])
            with pytest.raises(CheckpointError):
                read_checkpoint(path.parent)


def test_weights_of_another_model_are_refused_by_name(run, original):
    import dataclasses

    plan = original[1]
    other = dataclasses.replace(plan.config.model, embed_dim=8)
    state = attempt.make_state(dataclasses.replace(plan, config=dataclasses.replace(plan.config, model=other)))
    with pytest.raises(CheckpointError, match=r"image\.projection.* is .*, expected .*"):
        read_tensors(state, read_checkpoint(run.checkpoints_dir / "step-00000006"))
