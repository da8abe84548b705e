"""On what a run was made: enough to explain a difference between two runs later."""

import platform
import sys
from importlib.metadata import version
from typing import Any

import torch

import clipctl
from clipctl.model.forecast import Setting
from clipctl.training.plan import TrainPlan

_PACKAGES = ("torch", "numpy", "pillow", "safetensors")


def setting_of(environment: dict[str, Any]) -> Setting | None:
    """Under what a run was begun; None where its environment.json does not say."""
    try:
        return Setting(
            environment["device"]["label"], environment["precision"]["value"], int(environment["threads"]["value"])
        )
    except (KeyError, TypeError, ValueError):
        return None


def describe_environment(plan: TrainPlan) -> dict[str, Any]:
    return {
        "clipctl": clipctl.__version__,
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
        "platform": platform.platform(),
        "device": {
            "kind": plan.device.kind,
            "label": plan.device.label,
            "name": plan.device.name,
            "reason": plan.device.reason,
            "verified": plan.verified,
        },
        "precision": {"value": plan.precision.value, "reason": plan.precision.reason},
        "threads": {
            "value": plan.threads.value,
            "reason": plan.threads.reason,
            "interop": torch.get_num_interop_threads(),
        },
        "decided_s": plan.decided_s,
        "workers": {"value": plan.workers.value, "reason": plan.workers.reason},
        "loss_floor": plan.loss_floor,
        "notes": list(plan.notes),
        "command": sys.argv,
    }
