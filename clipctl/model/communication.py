"""What several processes send each other in a step, and how long that takes. Arithmetic only, no torch.

W processes share a batch of B pairs with embeddings of E numbers; P parameters are trained. In each step
- embeddings are gathered: every process gets the rows of all others,
- gradients of the loss at the embeddings are summed,
- gradients are summed; if the model is split, weights are gathered for the forward and the backward pass, and
  each process gets its part of the sum,
- and a few numbers are exchanged, which costs latency only.
In a ring, an all-gather of n bytes sends (W-1)/W · n per process, an all-reduce twice that.
"""

from dataclasses import dataclass

from clipctl.model.cost import parameters
from clipctl.model.workload import Workload

FLOAT_BYTES, KEY_BYTES = 4, 16
# Whether to stop; the place of the rows, embeddings, keys, slopes, loss, gradients; and what is due after the step.
EXCHANGES = 8


@dataclass(frozen=True)
class Network:
    """The link between any two processes: `WITHIN` on one machine, through gloo; often 1 Gbit/s between machines."""

    bytes_per_s: float
    latency_s: float


WITHIN = Network(bytes_per_s=1.5e9, latency_s=220e-6)  # measured: docs/log.md
BETWEEN = Network(bytes_per_s=125e6, latency_s=200e-6)


@dataclass(frozen=True)
class Traffic:
    """What one process sends in a step."""

    embedding_bytes: float
    slope_bytes: float
    gradient_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.embedding_bytes + self.slope_bytes + self.gradient_bytes


def traffic(workload: Workload, batch_size: int, ranks: int) -> Traffic:
    """`batch_size` is that of all processes together."""
    others = (ranks - 1) / ranks
    embeddings = batch_size * 2 * workload.model.embed_dim * FLOAT_BYTES
    trained = parameters(workload.model) * workload.trained_share
    return Traffic(
        embedding_bytes=others * (embeddings + batch_size * KEY_BYTES),
        slope_bytes=2 * others * embeddings,
        gradient_bytes=(2 if workload.shards == 1 else 3) * others * trained * FLOAT_BYTES,
    )


def communication_s(workload: Workload, batch_size: int, ranks: int, network: Network, compute_s: float = 0.0) -> float:
    """How much longer a step takes because of it: bytes by bandwidth, and a round through all for each exchange.

    `workload` is one process's part. `compute_s` is what a step of it takes alone, if other hardware sends meanwhile:
    then gradients that are sent during the last backward pass cost nothing. Whether those of a split model overlap was
    not measured, so they count in full.
    """
    if ranks == 1:
        return 0.0
    sent = traffic(workload, batch_size, ranks)
    gradient_s = sent.gradient_bytes / network.bytes_per_s
    hidden_s = min(gradient_s, workload.last_backward_share * compute_s) if workload.shards == 1 else 0.0
    return sent.total_bytes / network.bytes_per_s - hidden_s + EXCHANGES * (ranks - 1) * network.latency_s
