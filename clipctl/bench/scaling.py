"""How well training scales to several machines like this one: time per step, efficiency, hours and money. No torch.

The batch is shared among the machines: each computes its part in the time that was measured or forecast here. What they
send each other takes the time that `model.communication` works out; gradients are sent during the backward pass.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from clipctl.bench.recommend import Question
from clipctl.hardware.profile import Profile
from clipctl.model.communication import Network, communication_s, traffic
from clipctl.model.forecast import CostModel, Estimate
from clipctl.model.workload import Setting, Workload

PAIRS_EACH = 2  # that every machine needs of a batch


@dataclass(frozen=True)
class Scale:
    """What a given number of machines would achieve."""

    nodes: int
    pairs: int  # of a batch, on each
    step_s: Estimate
    communication_s: float  # of a step, beside computing
    sent_bytes: float  # by each, in a step
    efficiency: float  # how much of its time a machine computes, compared with one alone
    epoch_s: float
    price: float | None  # of an epoch, all machines together

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "step_s": self.step_s.value}


def node_counts(most: int) -> list[int]:
    """1, 2, 4, … up to the number asked for."""
    counts = [2**power for power in range(most.bit_length()) if 2**power < most]
    return [*counts, most]


def scale(
    question: Question,
    profile: Profile,
    setting: Setting,
    nodes: Sequence[int],
    network: Network,
    price_per_hour: float | None = None,
) -> list[Scale]:
    """One line for each number of nodes that has a pair for each of them; none if nothing was measured."""
    model, whole, found = CostModel(profile), question.workload, list[Scale]()
    alone = model.step_s(setting, whole)
    for count in nodes:
        compute = model.step_s(setting, part_of(question, count))
        if alone is None or compute is None or question.batch_size < PAIRS_EACH * count:
            continue
        found.append(scale_of(question, count, alone, compute, network, price_per_hour))
    return found


def part_of(question: Question, nodes: int) -> Workload:
    """Of one of several machines."""
    return replace(question.workload, batch_size=-(-question.batch_size // nodes))


def scale_of(
    question: Question,
    nodes: int,
    alone: Estimate,
    compute: Estimate,
    network: Network,
    price_per_hour: float | None = None,
) -> Scale:
    """What machines achieve whose part of a step takes them so long, and of which one `alone` computes all of it."""
    part = part_of(question, nodes)
    waiting_s = communication_s(part, question.batch_size, nodes, network, compute.value)
    step_s = compute.shifted(waiting_s)
    epoch_s = step_s.value * question.steps_per_epoch
    return Scale(
        nodes=nodes,
        pairs=part.batch_size,
        step_s=step_s,
        communication_s=waiting_s,
        sent_bytes=traffic(question.workload, question.batch_size, nodes).total_bytes,
        efficiency=alone.value / (nodes * step_s.value),
        epoch_s=epoch_s,
        price=None if price_per_hour is None else nodes * price_per_hour * epoch_s / 3600,
    )
