"""Before training on an accelerator: does it compute what the CPU computes?

Accelerators have returned wrong numbers without saying so: gradients of one layer, a forgotten bias, a weight that
never moves, products that go wrong past a length and only after a step of another shape. With any of these, training
learns nothing. So a step with the real shapes is made on both sides and compared, number by number, from the same
weights and batch.
"""

import hashlib
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from clipctl.errors import DeviceError
from clipctl.hardware import memory
from clipctl.hardware.devices import Device, is_out_of_memory, open_device
from clipctl.hardware.profile import load_profile, torch_version, update_profile
from clipctl.model.forecast import with_margin
from clipctl.model.workload import Setting, Workload
from clipctl.training.optim import make_optimizer
from clipctl.training.plan import TrainPlan
from clipctl.training.state import LossScale, TrainState, fresh_state
from clipctl.training.step import train_step
from clipctl.training.trial import trial_batch

CPU_STEP_LIMIT_S = 30.0  # where a step takes longer on the CPU, a part of it stands for all
LR = 1e-3
# Relative to the norm of what is compared. Rounding stays below 1e-4; the mildest fault seen was far above 1e-2.
TOLERANCE = {"fp32": 1e-2, "bf16": 0.2, "fp16": 0.1}
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.02}
UPDATE_TOLERANCE = 0.02  # of the learning rate
GRADIENT_FLOOR = 1e-3  # of a typical gradient: below that, two correct devices differ by rounding alone


@dataclass(frozen=True)
class Verification:
    """The result of the comparison."""

    device: str
    passed: bool
    words: str
    seconds: float
    system: str = field(default_factory=platform.platform)  # a later one may compute otherwise

    @property
    def state(self) -> str:
        return "passed" if self.passed else "failed"


def verify_device(plan: TrainPlan) -> Verification | None:
    """Compare the plan's device with the CPU, or recall that it agreed before; None if the CPU is the device."""
    if not plan.placement.device.is_accelerator:
        return None
    if words := known_fault(plan.placement.device, plan.forecast.workload):
        return Verification(plan.placement.device.label, False, words, 0.0)
    key = _key(plan)
    if (known := load_profile().checked.get(key)) and known.get("passed"):
        return Verification(plan.placement.device.label, True, f"{known['words']}, as verified before", 0.0)
    started = time.perf_counter()
    passed, words = _try_to_compare(plan)
    plan.placement.device.release()
    verdict = Verification(plan.placement.device.label, passed, words, round(time.perf_counter() - started, 2))
    update_profile(lambda profile: replace(profile, checked={**profile.checked, key: asdict(verdict)}))
    return verdict


def _try_to_compare(plan: TrainPlan) -> tuple[bool, str]:
    try:
        return True, _compare(plan)
    except _Difference as difference:
        return False, str(difference)
    except RuntimeError as error:
        if not is_out_of_memory(error):  # such as a kernel that the device lacks
            return False, f"a training step fails: {str(error).strip().splitlines()[0]}"
        batch_size = plan.config.train.batch_size
        hint = f"try --batch-size {max(2, batch_size // 2)}, or --device cpu"
        raise DeviceError(f"{plan.placement.device.kind} is out of memory at batch size {batch_size}", hint) from error


def device_error(verdict: Verification) -> DeviceError:
    hint = "train with --device cpu, or pass --allow-unverified-device to train anyway; the run is marked"
    return DeviceError(f"{verdict.device} does not give the same results as the CPU: {verdict.words}", hint)


def known_fault(device: Device, workload: Workload) -> str | None:
    """What is known to go wrong silently, in words; in a weight's gradient the length is pairs × tokens."""
    if device.product_limit is None or workload.longest_product < device.product_limit:
        return None
    tokens = workload.longest_product // workload.kept_pairs
    return (
        f"{workload.kept_pairs} pairs at once × {tokens} tokens make products of length {workload.longest_product:,}, "
        f"which {device.name} gets wrong with torch {torch_version()} (pytorch issue 193487); torch 2.14 gets them "
        f"right, or pass --micro-batch {(device.product_limit - 1) // tokens} for the same result"
    )


def _key(plan: TrainPlan) -> str:
    """Everything that could change the result: torch, system, chip, precision and shapes."""
    facts = {
        "torch": torch_version(),
        "system": platform.platform(),
        "device": [plan.placement.device.label, plan.placement.device.name],
        "precision": plan.placement.precision.value,
        "workload": plan.forecast.workload.to_dict(),
        "compile": plan.config.runtime.compile,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


# --- the comparison -------------------------------------------------------------------------------------------


class _Difference(Exception):
    """What differs, and by how much."""


@dataclass(frozen=True)
class _StepTaken:
    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]  # afterwards


def _compare(plan: TrainPlan) -> str:
    """Raises _Difference; returns what was compared."""
    workload = _affordable(plan)
    sides = _Sides(plan, workload)
    precision = str(plan.placement.precision.value)
    sides.device_step(_other_shape(workload), "fp32")
    on_device, on_cpu = sides.device_step(workload, "fp32"), sides.cpu_step(workload)
    largest = _compare_steps(on_device, on_cpu, "fp32")
    _compare_updates(on_device, sides.cpu_update(on_device.gradients), sides.start)
    _probe_length(plan.placement.device, workload)
    again = sides.device_step(workload, "fp32")
    _compare_steps(again, on_device, "fp32", noun="differs from itself when repeated")
    if precision != "fp32":
        _compare_steps(sides.device_step(workload, precision), on_cpu, precision)
    exactly = all(torch.equal(again.gradients[name], one) for name, one in on_device.gradients.items())
    whole = plan.forecast.workload
    blocks = "" if workload.model == whole.model else " in two blocks of each tower"
    pairs = "" if workload.batch_size == whole.batch_size else f" for {workload.batch_size} pairs"
    repeat = "bit-identical" if exactly else "equal up to rounding"
    return (
        f"the gradients of {len(on_cpu.gradients)} parameters{blocks}{pairs} match the CPU's within {largest:.0e}, "
        f"and are {repeat} when repeated"
    )


def _affordable(plan: TrainPlan) -> Workload:
    """How much of the plan's step is compared: all, two of its micro-batches and the rest, or two blocks of these."""
    whole = plan.forecast.workload
    few_pairs = min(whole.batch_size, 2 * whole.kept_pairs + whole.batch_size % whole.kept_pairs)
    few = replace(whole, batch_size=few_pairs)
    return next((one for one in (whole, few) if _is_affordable(plan, one)), few.cut())


def _is_affordable(plan: TrainPlan, workload: Workload) -> bool:
    """Whether the CPU can run it beside the device, in time and in memory."""
    cpu_setting = Setting("cpu", "fp32", int(plan.placement.threads.value))
    step_s = plan.forecast.cost_model.step_s(cpu_setting, workload)
    _, need = plan.forecast.cost_model.memory(cpu_setting, workload)
    fits = 2 * with_margin(need.value) <= memory.available_bytes()
    return fits and step_s is not None and step_s.value <= CPU_STEP_LIMIT_S


def _other_shape(workload: Workload) -> Workload:
    return replace(workload, batch_size=max(2, workload.batch_size // 2), text_tokens=max(3, workload.text_tokens - 1))


class _Sides:
    """The same model on both sides, brought back to the same weights before every step."""

    def __init__(self, plan: TrainPlan, workload: Workload) -> None:
        self.config = replace(plan.config, model=workload.model)
        threads = int(plan.placement.threads.value)
        self.cpu = self._state(open_device("cpu"), threads)
        self.device = self._state(plan.placement.device, threads)
        self.start = {name: one.detach().clone() for name, one in self.cpu.model.named_parameters()}
        noise = torch.Generator().manual_seed(0)
        for name, parameter in self.start.items():
            if parameter.ndim == 1:  # biases start at zero, where nobody would miss them
                self.start[name] = parameter + 0.1 * torch.randn(parameter.shape, generator=noise)

    def _state(self, device: Device, threads: int) -> TrainState:
        config = self.config
        if not device.is_accelerator:  # what the other side is compared with
            config = replace(config, runtime=replace(config.runtime, compile=False))
        state = fresh_state(config, device, "fp32", threads)
        state.grad_clip = None  # clipping would divide a gradient's error away
        return state

    def device_step(self, workload: Workload, precision: str) -> _StepTaken:
        return self._step(self.device, workload, precision)

    def cpu_step(self, workload: Workload) -> _StepTaken:
        return self._step(self.cpu, workload, "fp32")

    def _step(self, state: TrainState, workload: Workload, precision: str) -> _StepTaken:
        self._reset(state)
        state.precision = precision
        state.loss_scale = LossScale(state.device.image) if precision == "fp16" else None
        loss = float(train_step(state, trial_batch(workload), lr=LR).loss)
        parameters = dict(state.model.named_parameters())
        gradients = {name: one.grad.detach().cpu().clone() for name, one in parameters.items() if one.grad is not None}
        return _StepTaken(loss, gradients, {name: one.detach().cpu().clone() for name, one in parameters.items()})

    def cpu_update(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights that the CPU's optimizer reaches from the start with the device's gradients."""
        self._reset(self.cpu)
        for name, parameter in self.cpu.model.named_parameters():
            parameter.grad = gradients[name].clone() if name in gradients else None
        for group in self.cpu.optimizer.param_groups:
            group["lr"] = LR
        self.cpu.optimizer.step()
        self.cpu.model.clamp_scale()
        return {name: one.detach().clone() for name, one in self.cpu.model.named_parameters()}

    @torch.no_grad()
    def _reset(self, state: TrainState) -> None:
        for name, parameter in state.model.named_parameters():
            parameter.copy_(self.start[name])
        state.optimizer = make_optimizer(state.model, self.config.optim)


def _compare_steps(mine: _StepTaken, reference: _StepTaken, precision: str, noun: str = "differs") -> float:
    """Loss and every gradient; returns the largest relative difference."""
    if not abs(mine.loss - reference.loss) <= LOSS_TOLERANCE[precision] * abs(reference.loss):
        worst = max(_gradient_errors(mine, reference), default=None)
        where = f"; furthest off is the gradient of {worst[1]}, by {worst[0]:.0%}" if worst else ""
        raise _Difference(f"the loss {noun} ({mine.loss:.5f}, not {reference.loss:.5f}){where}{_known_issue('loss')}")
    missing = reference.gradients.keys() - mine.gradients.keys()
    if missing:
        raise _Difference(f"{sorted(missing)[0]} gets no gradient")
    error, name = max(_gradient_errors(mine, reference))
    if not error <= TOLERANCE[precision]:
        raise _Difference(f"the gradient of {name} {noun} by {error:.1%} in {precision}{_known_issue(name)}")
    return error


def _gradient_errors(mine: _StepTaken, reference: _StepTaken) -> Iterator[tuple[float, str]]:
    """Relative to each gradient's norm, or to a share of what a gradient of that size usually has."""
    count = sum(one.numel() for one in reference.gradients.values())
    typical = sum(float(one.square().sum()) for one in reference.gradients.values()) / count
    for name, expected in reference.gradients.items():
        floor = GRADIENT_FLOOR * (typical * expected.numel()) ** 0.5
        found = mine.gradients.get(name)
        error = float((found - expected).norm()) / (float(expected.norm()) + floor) if found is not None else 0.0
        yield (error if error == error else float("inf")), name


def _compare_updates(mine: _StepTaken, expected: dict[str, Tensor], start: dict[str, Tensor]) -> None:
    for name, target in expected.items():
        if not torch.equal(target, start[name]) and torch.equal(mine.weights[name], start[name]):
            raise _Difference(f"{name} has a gradient but does not move{_known_issue('update')}")
        rounding = 1e-6 * float(target.abs().max())
        error = float((mine.weights[name] - target).abs().max())
        if not error <= UPDATE_TOLERANCE * LR + rounding:
            raise _Difference(f"the update of {name} is off by {error / LR:.1%} of the rate{_known_issue('update')}")


def _probe_length(device: Device, workload: Workload) -> None:
    """A product as long as a weight's gradient sums over, with all its weight in the tail; shorter ones before it."""
    length = workload.longest_product
    noise = torch.Generator().manual_seed(1)
    for rows in (max(1, length // 3), length):
        left, right = (torch.randn(rows, 48, generator=noise) for _ in range(2))
        left[: rows // 2] *= 0.01
        expected = left.T @ right
        found = (left.to(device.image).T @ right.to(device.image)).cpu()
        error = float((found - expected).norm() / expected.norm())
        if not error <= TOLERANCE["fp32"]:
            raise _Difference(f"a product of length {rows:,} is off by {error:.1%}{_known_issue('length')}")


# What is known of such differences on Apple's GPU, by what they show in; pytorch issue numbers.
_KNOWN_ISSUES = {
    "length": "193487, 195163",
    "update": "118115, 192212",
    "norm": "183825",
    "attention": "181133, 163597",
    "bias": "188438",
    "loss": "181133, 188438",
}


def _known_issue(symptom: str) -> str:
    if not torch.backends.mps.is_available():
        return ""
    number = next((numbers for part, numbers in _KNOWN_ISSUES.items() if part in symptom), None)
    return f" (see pytorch issue {number})" if number else ""
