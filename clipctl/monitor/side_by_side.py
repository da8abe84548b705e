"""Runs side by side: which settings differ, and with what results. No torch, no rich."""

import time
from collections.abc import Sequence
from typing import Any

from clipctl import files
from clipctl.config import layers
from clipctl.monitor.watch import RunWatcher
from clipctl.runs.rundir import RunDir


def compare_runs(runs: Sequence[RunDir]) -> dict[str, Any]:
    """What `runs compare --json` prints; values of a setting are in the order of the runs."""
    configs = [_settings(run) for run in runs]
    values = {key: [config.get(key) for config in configs] for key in configs[0]}
    return {
        "runs": [_result(run) for run in runs],
        "settings": {key: mine for key, mine in values.items() if any(one != mine[0] for one in mine)},
    }


def _settings(run: RunDir) -> dict[str, Any]:
    saved = layers.load_yaml(run.config_file, follows_links=False)
    return dict(layers.to_layer(layers.resolve([saved])).values)


def _result(run: RunDir) -> dict[str, Any]:
    found = RunWatcher(run).look(time.monotonic()).to_dict()
    keys = ("run", "path", "state", "step", "total_steps", "loss", "val_loss", "score", "best_score", "best_step")
    return {
        **{key: found[key] for key in keys},
        "images_per_s": found["images_per_s"],
        "seconds": found["elapsed_s"],
        "size_bytes": files.size_on_disk(run.path),
    }
