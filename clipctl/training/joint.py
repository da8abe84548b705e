"""A session of several processes: rank 0 prepares it, the others receive it, and all check that they have the same."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import clipctl
from clipctl.config import layers
from clipctl.config.layers import Layer
from clipctl.data import tokenizers
from clipctl.errors import ClipctlError, ConfigError, DataError, ExitCode, RunError, Stopped
from clipctl.model.workload import Setting
from clipctl.runs.rundir import RunDir
from clipctl.training.distributed import World, ended_by_signals, launcher, own_device, prepared, restarts, threads_each
from clipctl.training.plan import TrainPlan, make_plan
from clipctl.training.session import Session


@dataclass(frozen=True)
class Terms:
    """What rank 0 has decided, and what the others must have too."""

    asked: dict[str, str]  # on the command line and in the config file
    config: dict[str, Any]  # complete
    setting: Setting
    tokenizer: dict[str, Any]
    run: str
    deadline_s: float | None
    fingerprint: str  # of the data
    versions: tuple[str, str]  # of clipctl and torch

    @classmethod
    def of(cls, session: Session, asked: Sequence[Layer]) -> "Terms":
        plan = session.plan
        assert session.run is not None
        return cls(
            _settings(asked),
            dict(layers.to_layer(plan.config).values),
            plan.placement.setting,
            plan.data.tokenizer.to_dict(),
            str(session.run.path),
            plan.deadline_s,
            plan.data.fingerprint,
            _versions(),
        )


def share(session: Session, world: World, asked: Sequence[Layer]) -> Session:
    """On rank 0: send this session to the others, and make sure that they have the same settings and data."""
    try:
        with ended_by_signals():
            world.from_first(Terms.of(session, asked))
            return prepared(world, lambda: replace(session, world=world))
    except (ClipctlError, RuntimeError):
        session.close()
        raise


def follow(world: World, asked: Sequence[Layer]) -> Session:
    """On any other rank: the session that rank 0 shares. What was asked for here must be the same, but for the location
    of the data and the hardware, which may differ from machine to machine."""
    terms: Terms = world.from_first(None)
    plan = prepared(world, lambda: _same_plan(terms, world, asked))
    run = RunDir(Path(terms.run))
    return Session(plan, run.path.parent, run=run, is_checked=True, world=world)


PLACES = ("data.source", "data.val", "data.image_root")
# May differ, too: rank 0 decides, or each for itself.
OWN = {*PLACES, "data.tokenizer", "tune.base", "runtime.device", "runtime.threads", "runtime.workers", "runtime.cache"}


def _settings(asked: Sequence[Layer]) -> dict[str, str]:
    return {key: str(value) for layer in asked for key, value in layer.values.items() if key not in OWN}


def _same_plan(terms: Terms, world: World, asked: Sequence[Layer]) -> TrainPlan:
    """Rank 0's plan, made with what is here; raises if that is something else."""
    if terms.versions != _versions():
        theirs, ours = (" and torch ".join(versions) for versions in (terms.versions, _versions()))
        raise RunError(f"it has clipctl {ours}, rank 0 has clipctl {theirs}", "install the same on every machine")
    settings = _settings(asked)
    for key in sorted(settings.keys() | terms.asked.keys()):
        ours, theirs = (one.get(key, "not set") for one in (settings, terms.asked))
        if ours != theirs:
            words = f"{key} is {ours} there and {theirs} on rank 0"
            raise ConfigError(words, "pass the same settings on every machine")
    plan = _plan(terms, world, asked)
    if terms.fingerprint != plan.data.fingerprint:
        source = " + ".join(plan.config.data.source)
        raise DataError(f"its {source} differs from that of rank 0", "copy the same data to every machine")
    return plan


def _plan(terms: Terms, world: World, asked: Sequence[Layer]) -> TrainPlan:
    places = {key: layer.values[key] for layer in asked for key in PLACES if key in layer.values}
    config = layers.resolve([Layer("rank 0", terms.config), Layer("data", places)])
    setting = terms.setting
    device = own_device() if setting.device.startswith("cuda") else setting.device
    threads = min(setting.threads, threads_each(world.local_size))
    runtime = replace(config.runtime, device=device, precision=setting.precision, threads=threads)  # type: ignore[arg-type]
    config = replace(config, runtime=runtime)
    plan = make_plan(config, tokenizer=tokenizers.from_dict(terms.tokenizer), ranks=world.size)
    return replace(plan, deadline_s=terms.deadline_s)


def _versions() -> tuple[str, str]:
    return clipctl.__version__, torch.__version__


# --- started again --------------------------------------------------------------------------------------------


def interrupted_run(root: Path) -> RunDir | None:
    """The run that torchrun's last attempt began, if this is another attempt."""
    if restarts() == 0:
        return None
    mine = launcher()
    for run in reversed(RunDir.all(root)):
        if mine is not None and run.read_environment().get("launcher") == mine:
            status = run.status()
            if status is not None and status.state == "stopped":
                raise Stopped(f"{run.name} was stopped, saved", run.way_on, ExitCode.TERMINATED)
            return run
    return None
