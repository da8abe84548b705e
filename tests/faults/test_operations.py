"""F04 and F23: whichever operation of a save or a prune fails or is the last one, whole checkpoints are left."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def outcomes(tmp_path, action, kind):
    command = [sys.executable, "-m", "tests.faults.faulty", str(tmp_path), action, kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["error", "kill"])
def test_a_save_that_fails_anywhere(tmp_path, kind):
    results = outcomes(tmp_path, "save", kind)
    assert len(results) > 20 and results[-1]["valid"] == [1, 3, 4]  # 1 is the best; 2 has gone
    for result in results:
        assert {1, 3} <= set(result["valid"]) <= {1, 2, 3, 4}, result
        assert not result["damaged"], result
        assert result["names"] == [f"step-{step:08d}" for step in result["valid"]], result


@pytest.mark.parametrize("kind", ["error", "kill"])
def test_a_prune_that_fails_anywhere(tmp_path, kind):
    results = outcomes(tmp_path, "prune", kind)
    assert len(results) > 5 and results[-1]["valid"] == [1, 3]
    for result in results:
        assert {1, 3} <= set(result["valid"]) <= {1, 2, 3} and not result["damaged"], result
