import shutil

import pytest

from clipctl.runs.rundir import RunDir
from tests.faults.trainer import SETTINGS, digest, finish, start_anew


@pytest.fixture(scope="session")
def unbroken_run(tmp_path_factory):
    """A run that nothing happened to. The processes that are compared with it order their sets in another way."""
    root = tmp_path_factory.mktemp("unbroken")
    code, _, stderr = finish(start_anew(root, *SETTINGS, "--name", "run"))
    assert code == 0, stderr
    return RunDir(root / "run")


@pytest.fixture(scope="session")
def unbroken(unbroken_run):
    return digest(unbroken_run)


@pytest.fixture
def finished(unbroken_run, tmp_path):
    """A copy of it to do things to."""
    return RunDir(shutil.copytree(unbroken_run.path, tmp_path / "run"))
