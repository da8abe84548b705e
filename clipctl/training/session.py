"""A training run from start to finish: settings → plan → checks → run directory → loop.

The command line only displays what happens here; a Python program that calls it gets the same checks:

    session = prepare([Layer("my program", {"data.source": "photos", "train.epochs": 20})])
    summary = session.train()
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clipctl.config import layers
from clipctl.config.layers import Layer
from clipctl.config.sections import TrainConfig
from clipctl.data import tokenizers
from clipctl.errors import CheckpointError, ConfigError, DataError, DeviceError, NewerCheckpointError
from clipctl.hardware import disk
from clipctl.hardware.devices import is_out_of_memory
from clipctl.interop.models import Found
from clipctl.model.weights import identify, load_model
from clipctl.progress import Tell, silent
from clipctl.runs.checkpoint import MANIFEST, Checkpoint, read_checkpoint
from clipctl.runs.rundir import RunDir, cannot_create, runs_root
from clipctl.runs.store import CheckpointStore, find_unfinished
from clipctl.training.attempt import TrainSummary, attempt_run
from clipctl.training.comparison import compare_environments, compare_lengths, compare_settings
from clipctl.training.distributed import World
from clipctl.training.environment import setting_of
from clipctl.training.journal import Watcher
from clipctl.training.plan import TrainPlan, make_plan
from clipctl.training.preflight import device_error, verify_device
from clipctl.training.recipe import plan_by_recipe
from clipctl.training.stopping import stop_signals
from clipctl.training.tuning import base_layer, open_base


@dataclass(frozen=True)
class Session:
    """A run that is ready to begin: what was decided, and where it will be written. Nothing is written yet."""

    plan: TrainPlan
    root: Path  # for a new run
    name: str | None = None
    run: RunDir | None = None  # one to continue, locked by this process
    checkpoint: Checkpoint | None = None  # where it continues; None: from the beginning
    notes: tuple[str, ...] = ()  # what differs from an unbroken run
    is_checked: bool = False
    world: World | None = None  # the processes that train together

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def is_finished(self) -> bool:
        return self.run is not None and self.step >= self.plan.schedule.total_steps

    def checked(self, *, allow_unverified_device: bool = False, tell: Tell = silent) -> "Session":
        """The session after checking memory, disk and device; raises if any of them will not do. If an accelerator
        gives other results than the CPU, `auto` falls back to the CPU, unless the run has begun already."""
        if self.is_checked:
            return self
        if self.run is None:
            self._check_place()
        self._check_room(self.plan)
        plan = _verified(self.plan, allow_unverified=allow_unverified_device, may_change=self.run is None, tell=tell)
        self._check_room(plan)  # it may be for another device now
        return replace(self, plan=plan, is_checked=True)

    def _check_place(self) -> None:
        try:
            disk.try_to_write(self.root)
        except OSError as error:
            raise cannot_create(self.root, error) from None

    def _check_room(self, plan: TrainPlan) -> None:
        # A run that has a checkpoint needs room for one more.
        place, copies = (self.run.path, 1) if self.run and self.checkpoint else (self.root, 2)
        if problem := plan.memory_problem() or plan.disk_problem(disk.free_bytes(place), copies):
            raise problem

    def opened(self) -> "Session":
        """The session with its run directory, which is created now if the run is new."""
        if self.run is not None:
            return self
        base, preset = self.plan.base, self.plan.config.preset
        word = re.sub(r"[^\w.-]+", "-", base.identity.name)[:40].strip("-.") if base else preset
        return replace(self, run=RunDir.create(self.root, word or preset, self.name))

    def train(self, watcher: Watcher | None = None) -> TrainSummary:
        """Carry out the plan. Ctrl-C and SIGTERM finish the step, save and raise Stopped."""
        session = self.checked().opened()
        assert session.run is not None
        try:
            with stop_signals() as stop:
                return attempt_run(session.plan, session.run, session.checkpoint, watcher, stop, session.world)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise _out_of_memory(session.plan) from error
        finally:
            session.close()

    def close(self) -> None:
        """Release the run directory; that of a run refused before it began is removed."""
        if self.run is not None and (self.world is None or self.world.is_first):
            self.run.release()
            self.run.remove_if_stillborn()


def prepare(
    asked: Sequence[Layer],
    root: Path | str | None = None,
    *,
    name: str | None = None,
    tell: Tell = silent,
    spent_s: float = 0.0,
    ranks: int = 1,
) -> Session:
    """A new run as asked for, later layers over earlier ones, all over a recipe for what was left open. `spent_s`: how
    long the user has been waiting already, which counts if the run has a time limit. `ranks`: how many processes are to
    train together."""
    config = layers.resolve(asked)
    if name is not None:  # said before the data are read and the machine is timed
        RunDir.check_free(runs_root(root), name)
    base = open_base(runs_root(root), config, asked, tell)
    if base is not None:
        asked = [base_layer(base), *asked]
        config = layers.resolve(asked)
    is_plain = config.recipe == "plain" and config.train.time is None
    if is_plain:
        plan = make_plan(config, base=base, tell=tell, ranks=ranks)
    else:
        plan = plan_by_recipe(asked, tell, spent_s, base, ranks)
    return Session(plan, runs_root(root), name)


def train(
    data: str | Sequence[str] = "synthetic",
    settings: Mapping[str, Any] | None = None,
    *,
    runs_dir: Path | str | None = None,
    name: str | None = None,
    watcher: Watcher | None = None,
) -> TrainSummary:
    """Train as `clipctl train DATA --set key=value` would, with the same checks.

    `settings` are dotted keys, such as {"preset": "small", "train.epochs": 5}; docs/configuration.md lists them.
    """
    asked = Layer("settings", {"data.source": data, **(settings or {})})
    return prepare([asked], runs_dir, name=name).train(watcher)


def resume(
    root: Path,
    text: str,
    asked: Sequence[Layer] = (),
    *,
    allow_change: bool = False,
    tell: Tell = silent,
    ranks: int = 1,
) -> Session:
    """Continue the run that RUN, RUN@best or RUN@STEP names, or the newest unfinished one."""
    run, which = find_unfinished(root, text)
    run.acquire()
    try:
        return resume_run(run, asked, which=which, allow_change=allow_change, tell=tell, ranks=ranks)
    except BaseException:
        run.release()
        raise


def resume_run(
    run: RunDir,
    asked: Sequence[Layer] = (),
    *,
    which: str | None = None,
    allow_change: bool = False,
    tell: Tell = silent,
    ranks: int = 1,
) -> Session:
    """Verify the checkpoint and compare settings, data and machine, before anything is touched. `which` is best, last
    or a step; None: the newest intact one."""
    if layers.TIME in layers.lengths(asked):
        raise ConfigError(
            "--time cannot be changed on resume: the run keeps its number of steps", "use --epochs or --steps"
        )
    root = run.path.parent
    saved = layers.load_yaml(run.config_file, follows_links=False)
    config = layers.resolve([saved, *asked])
    notes: list[str] = []
    checkpoint = _choose(CheckpointStore(run), which, notes)
    if checkpoint is None:
        # Nothing is lost if it is planned anew.
        plan = make_plan(config, base=base_of(run, config), tell=tell, ranks=ranks)
        notes += compare_settings(layers.resolve([saved]), config, asked, allow_change=allow_change)
        return Session(plan, root, run=run, notes=tuple(notes))
    facts = checkpoint.read_state()
    try:
        before = layers.from_dict(facts["config"], str(checkpoint.path))
        fingerprint = facts["data_fingerprint"]
        saved_tokenizer = tokenizers.from_dict(facts["tokenizer"])
    except (KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{checkpoint.path} does not record the settings it was made with") from None
    notes += compare_settings(before, config, asked, allow_change=allow_change)
    is_same = config.data.tokenizer == before.data.tokenizer and config.model.text == before.model.text
    environment = run.read_environment()
    tokenizer = saved_tokenizer if is_same else None
    base = base_of(run, config)
    plan = make_plan(config, before=setting_of(environment), tokenizer=tokenizer, tell=tell, base=base, ranks=ranks)
    if fingerprint != plan.data.fingerprint and not allow_change:
        raise other_data(run, before, config)
    notes += [*compare_lengths(checkpoint, before, plan), *compare_environments(environment, plan)]
    return Session(plan, root, run=run, checkpoint=checkpoint, notes=tuple(notes))


def other_data(run: RunDir, before: TrainConfig, now: TrainConfig) -> DataError:
    """The error if the data are not those that the run was trained on: others were named, or they have changed."""
    trained_on, given = (" + ".join(config.data.source) for config in (before, now))
    anew = f"clipctl train {shlex.join(now.data.source)} --from {run.handle} starts a new run from its model"
    if given != trained_on:
        return DataError(
            f"the run was trained on {trained_on} and was given {given}: pictures or captions differ",
            f"leave out {given} to continue, or pass --allow-change to continue with it; {anew}",
        )
    return DataError(
        f"{given} has changed since the run was stopped: pictures or captions differ",
        f"restore the old data, or pass --allow-change to continue with the new; {anew}",
    )


def base_of(run: RunDir, config: TrainConfig) -> Found | None:
    """The model that a run started from: its own copy, or, if it was killed before it had one, where it was found."""
    if config.tune.base is None:
        return None
    if (run.base_dir / MANIFEST).exists():
        checkpoint = read_checkpoint(run.base_dir)
        return Found(load_model(checkpoint), identify(checkpoint), config.tune.revision)
    return open_base(run.path.parent, config, ())


# --- checks ---------------------------------------------------------------------------------------------------


def _verified(plan: TrainPlan, *, allow_unverified: bool, may_change: bool, tell: Tell) -> TrainPlan:
    """The plan, saying whether its device computes what the CPU does. A wrong device that was asked for is an error."""
    verdict = verify_device(plan)
    if verdict is None:
        return plan
    if verdict.passed:
        tell(f"preflight    {verdict.words} ({verdict.seconds:.1f} s)")
        return replace(plan, placement=replace(plan.placement, verified=verdict.state))
    falls_back = may_change and plan.config.runtime.device == "auto"
    if not allow_unverified and not falls_back:
        raise device_error(verdict)
    tell(f"warning: {device_error(verdict)}")
    if allow_unverified:
        return replace(plan, placement=replace(plan.placement, verified=verdict.state))
    tell("warning: training on the CPU instead")
    on_cpu = replace(plan.config, runtime=replace(plan.config.runtime, device="cpu"))
    return make_plan(on_cpu, base=plan.base, ranks=plan.placement.ranks)


def _out_of_memory(plan: TrainPlan) -> DeviceError:
    """The error when smaller micro-batches did not help: memory ran out outside a step, or with a single pair."""
    micro_batch = plan.config.train.micro_batch or plan.config.train.batch_size
    hint = f"try --micro-batch {micro_batch // 2}" if micro_batch > 1 else "choose a smaller --preset"
    return DeviceError(f"{plan.placement.device.kind} is out of memory", hint)


def _choose(store: CheckpointStore, which: str | None, notes: list[str]) -> Checkpoint | None:
    if which is not None:
        return store.verified(store.named(which))
    entries = store.inventory()
    for entry in entries:
        if entry.kind == "newer":
            raise NewerCheckpointError("; ".join(entry.problems), "upgrade clipctl, or name an older one: RUN@STEP")
    checkpoint, skipped = store.newest_valid()
    strange = [f"{entry.path.name}: {'; '.join(entry.problems)}" for entry in entries if entry.kind == "strange"]
    if checkpoint is None and strange:
        raise CheckpointError(f"none of the run's checkpoints can be used: {'; '.join([*strange, *skipped])}")
    notes += [f"skipped damaged checkpoint {problem}" for problem in skipped]
    if checkpoint is None and skipped:
        raise CheckpointError(f"no checkpoint of the run is intact: {'; '.join(skipped)}")
    if checkpoint is None:
        notes.append("the run ended before its first checkpoint, so it starts from the beginning")
    return checkpoint
