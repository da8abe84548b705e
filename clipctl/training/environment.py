"""What a run was made on: enough to explain a difference between two runs later."""

import platform
import sys
from importlib.metadata import version
from typing import Any

import torch

import clipctl
from clipctl.hardware.memory import limited_bytes
from clipctl.model.workload import Setting
from clipctl.training.distributed import launcher
from clipctl.training.plan import TrainPlan

_PACKAGES = ("torch", "numpy", "pillow", "safetensors")


def setting_of(environment: dict[str, Any]) -> Setting | None:
    """The setting that a run began under; None if its environment.json does not say."""
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
            "kind": plan.placement.device.kind,
            "label": plan.placement.device.label,
            "name": plan.placement.device.name,
            "reason": plan.placement.device.reason,
            "verified": plan.placement.verified,
        },
        "precision": {"value": plan.placement.precision.value, "reason": plan.placement.precision.reason},
        "threads": {
            "value": plan.placement.threads.value,
            "reason": plan.placement.threads.reason,
            "interop": torch.get_num_interop_threads(),
        },
        "memory_bytes": limited_bytes(),
        "decided_s": plan.placement.decided_s,
        "workers": {"value": plan.placement.workers.value, "reason": plan.placement.workers.reason},
        "steps_per_epoch": plan.schedule.steps_per_epoch,
        "planned_step_s": plan.forecast.step_s.to_dict() if plan.forecast.step_s else None,
        "loss_floor": plan.data.loss_floor,
        "seen_captions": plan.data.seen_captions,
        "notes": list(plan.notes),
        "command": sys.argv,
        "ranks": plan.placement.ranks,
        "launcher": launcher(),
    }
